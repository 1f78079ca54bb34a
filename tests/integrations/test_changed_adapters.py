# SPDX-License-Identifier: Apache-2.0
"""Adapters change under a running stage: the rows of the adapter before are not served, those of others are."""

import os
from types import SimpleNamespace

import pytest
from changing_stage import OLD, Worker, adapter, computed_by
from fake_runner import FakeRunner

from omni_core.integrations.vllm.adapter_files import AdapterFiles


@pytest.fixture
def stage(changing_stage):
    return changing_stage


def test_an_adapter_that_is_loaded_again_keeps_none_of_its_rows(stage):
    stage.worker.add_lora(adapter(7))
    stage.serve("a", [1, 2], adapter=adapter(7))
    stage.serve("base", [3, 4])
    stage.worker.add_lora(adapter(7, load_inplace=True))
    assert stage.refuses("b", [1, 5], hit=4, adapter=adapter(7))
    assert computed_by(stage.serve("c", [3, 6], hit=4), OLD)
    assert stage.session.cache.stats().adapter_versions[7] == 2


def test_an_adapter_that_vllm_holds_already_is_not_loaded_again(stage):
    stage.runner.lora_config = SimpleNamespace()
    stage.worker.add_lora(adapter(7))
    stage.serve("a", [1, 2], adapter=adapter(7))
    stage.worker.add_lora(adapter(7))
    assert computed_by(stage.serve("b", [1, 5], hit=4, adapter=adapter(7)), OLD)


def test_an_adapter_that_was_removed_keeps_none_of_its_rows(stage):
    stage.serve("a", [1, 2], adapter=adapter(7))
    stage.worker.remove_lora(7)
    assert stage.refuses("b", [1, 5], hit=4, adapter=adapter(7))


def test_an_adapter_that_was_removed_may_come_back_with_other_files(stage, tmp_path):
    """Its rows were given up when it was removed; what is computed with the other files is served at once."""
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"old")
    stage.runner.lora_config = SimpleNamespace()
    stage.worker.add_lora(adapter(7, tmp_path))
    stage.worker.remove_lora(7)
    weights.write_bytes(b"newer")
    stage.serve("a", [1, 2], adapter=adapter(7, tmp_path))
    assert computed_by(stage.serve("b", [1, 3], hit=4, adapter=adapter(7, tmp_path)), OLD)
    assert stage.session.cache.stats().adapter_versions[7] == 2


@pytest.mark.parametrize("number", [0, -1, "seven", 1 << 63])
def test_what_names_no_adapter_has_vllms_own_answer_and_costs_no_rows(stage, number):
    stage.serve("a", [1, 2], adapter=adapter(7))
    assert stage.worker.remove_lora(number) is True
    assert stage.worker.add_lora(adapter(number)) is True
    assert stage.session.cache.stats().adapter_versions == {}
    assert computed_by(stage.serve("b", [1, 5], hit=4, adapter=adapter(7)), OLD)


def test_another_id_under_the_same_name_shares_no_rows(stage):
    """vLLM's hashes are of name and path, and a server gives a name that was unloaded a new id."""
    stage.serve("a", [1, 2], adapter=adapter(7))
    assert stage.refuses("b", [1, 5], hit=4, adapter=adapter(8))


def test_a_step_that_reads_other_files_than_before_serves_none_of_the_old_rows(stage, tmp_path):
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"old")
    stage.runner.lora_config = SimpleNamespace()
    in_place = adapter(7, tmp_path, load_inplace=True)
    stage.serve("a", [1, 2], adapter=in_place)
    assert computed_by(stage.serve("b", [1, 3], hit=4, adapter=in_place), OLD)
    weights.write_bytes(b"newer")
    assert stage.refuses("c", [1, 4], hit=4, adapter=in_place)


def test_other_files_than_add_lora_read_are_noticed_when_a_step_reads_them(stage, tmp_path):
    """vLLM loads an adapter between steps, its files change, and later it loads the adapter again, for want of room."""
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"old")
    stage.runner.lora_config = SimpleNamespace()
    stage.worker.add_lora(adapter(7, tmp_path))
    weights.write_bytes(b"newer")
    stage.serve("a", [1, 2], adapter=adapter(7, tmp_path))
    stage.runner.loaded_adapters.clear()
    assert stage.refuses("b", [1, 3], hit=4, adapter=adapter(7, tmp_path))


def test_what_add_lora_has_read_is_no_change_in_the_step_that_reads_it_again(stage, tmp_path):
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"old")
    stage.runner.lora_config = SimpleNamespace()
    in_place = adapter(7, tmp_path, load_inplace=True)
    stage.serve("a", [1, 2], adapter=in_place)
    weights.write_bytes(b"newer")
    stage.worker.add_lora(in_place)
    stage.serve("b", [3, 4], adapter=in_place)
    assert computed_by(stage.serve("c", [3, 5], hit=4, adapter=in_place), OLD)
    assert stage.session.cache.stats().adapter_versions[7] == 1


def test_what_is_known_of_adapters_outlives_the_kv_cache(tmp_path):
    """vLLM keeps its adapters when it makes its KV cache anew."""
    worker = Worker(FakeRunner())
    worker.add_lora(adapter(7, tmp_path))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"old")
    assert worker.omni_core_adapter_files.changed([adapter(7, tmp_path)], set()) == [7]


@pytest.mark.parametrize("load_inplace", [False, True])
def test_only_a_step_in_which_vllm_reads_files_looks_at_their_folder(stage, tmp_path, monkeypatch, load_inplace):
    looked_at = []

    def counted(path):
        looked_at.append(path)
        return scandir(path)

    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", counted)
    stage.runner.lora_config = SimpleNamespace()
    used = adapter(7, tmp_path, load_inplace=load_inplace)
    stage.worker.add_lora(used)
    at_first = len(looked_at)
    stage.serve("base", [1, 2])
    assert len(looked_at) == at_first == 1
    stage.serve("a", [3, 4], adapter=used)
    assert len(looked_at) - at_first == (1 if load_inplace else 0)


def test_files_matter_only_where_vllm_reads_them(tmp_path):
    weights = tmp_path / "adapter_model.safetensors"
    files = AdapterFiles()

    def changed_after(content, *, loaded, load_inplace=False):
        weights.write_bytes(content)
        return files.changed([adapter(7, tmp_path, load_inplace=load_inplace)] * 2, loaded)

    assert changed_after(b"1", loaded=set()) == []
    assert changed_after(b"22", loaded={7}) == []
    assert changed_after(b"333", loaded={7}, load_inplace=True) == [7]
    assert changed_after(b"333", loaded={7}, load_inplace=True) in ([], [7])
    assert changed_after(b"4444", loaded=set()) == [7]
    assert files.changed([adapter(7, tmp_path / "other")], set()) == [7]
    assert files.changed([adapter(8, "someone/adapter")], set()) == []
