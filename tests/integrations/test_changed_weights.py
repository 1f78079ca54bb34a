# SPDX-License-Identifier: Apache-2.0
"""Weights or adapters change under a running stage: nothing stored before is served, nothing in flight is lost."""

import logging
from types import SimpleNamespace

import fake_runner as fake
import pytest
import torch
from fake_stage import FakeStage

from omni_core.integrations.vllm.adapter_files import AdapterFiles
from omni_core.integrations.vllm.changed_weights import ChangedWeightsMixin
from omni_core.integrations.vllm.errors import RpcArgumentError
from omni_core.integrations.vllm.rpc.stage_client import bump_stage_version, reset_stage
from omni_core.integrations.vllm.rpc.worker_calls import WorkerCalls, answer
from omni_core.settings.stage_settings import OnError
from omni_core.sinks.errors import UnknownRequestError
from omni_core.sinks.rows import RequestEnd

PROMPT = [11, 12, 13, 14, 15, 16]
OLD, NEW = 0.0, 100.0
"""Added to every row by the weights."""


class VllmWorker:
    """What vLLM's worker has, as far as weights go."""

    def __init__(self, runner):
        self.model_runner = runner
        self.broken = False

    def _change(self):
        self.model_runner.row_offset = NEW
        if self.broken:
            raise RuntimeError("half of the weights are loaded")

    def reload_weights(self, *args, **kwargs):
        self._change()

    def start_weight_update(self):
        """Nothing is changed yet."""

    start_draft_weight_update = start_weight_update

    def update_weights(self, update_info):
        self._change()

    def finish_weight_update(self):
        self._change()

    def sleep(self, level=1):
        """The device's memory is given up."""

    def wake_up(self, tags=None):
        """It is back."""

    def add_lora(self, lora_request):
        self.model_runner.loaded_adapters.add(lora_request.lora_int_id)
        return True

    def remove_lora(self, lora_id):
        self.model_runner.loaded_adapters.discard(lora_id)
        return True


class Worker(ChangedWeightsMixin, VllmWorker):
    pass


class Stage(FakeStage):
    """A worker's stage and the worker; also what `LLM.collective_rpc` reaches."""

    def __init__(self, **settings):
        super().__init__(**({"on_error": OnError.ISOLATE} | settings))
        self.worker = Worker(self.runner)
        self.worker.omni_core_session = self.session
        self.calls = WorkerCalls(self.session)

    def serve(self, name, blocks, hit=0, adapter=None):
        """Run a whole request; returns its end and rows."""
        req_id = f"{name}-00000001"
        new = [(req_id, PROMPT, blocks, hit, len(PROMPT) - hit)]
        self.step(fake.scheduled(new=new, lora_request=adapter))
        self.step(fake.scheduled(finished=[req_id]))
        self.session.flush(still_running=())
        return self.stored(req_id)

    def refuses(self, *request, **options):
        """Whether the request gets no rows because those of its hit are of old weights, or of another adapter."""
        with pytest.raises(UnknownRequestError, match="the weights or the adapter changed"):
            self.serve(*request, **options)
        return True

    @property
    def version(self):
        return self.session.cache.stats().weight_version

    def collective_rpc(self, method, args=()):
        call = {"omni_core_reset": self.calls.reset, "omni_core_bump": self.calls.bump}[method]
        return [answer(call, args, {})]


@pytest.fixture
def make_stage():
    made = []

    def make(**settings):
        made.append(Stage(**settings))
        return made[-1]

    yield make
    for stage in made:
        stage.session.close()


@pytest.fixture
def stage(make_stage):
    return make_stage()


def computed_by(stored, offset):
    return torch.equal(
        stored.hidden_states, torch.tensor([fake.row_of(PROMPT, at) for at in range(len(PROMPT))]) + offset
    )


def adapter(number, path="", *, load_inplace=False):
    return SimpleNamespace(
        lora_int_id=number, lora_name=f"adapter {number}", lora_path=str(path), load_inplace=load_inplace
    )


CHANGES = {
    "reload_weights": lambda worker: worker.reload_weights(),
    "update_weights": lambda worker: (worker.start_weight_update(), worker.update_weights({})),
    "finish_weight_update": lambda worker: (worker.start_weight_update(), worker.finish_weight_update()),
    "sleep without weights": lambda worker: (worker.sleep(2), worker.wake_up()),
    "weights wake alone": lambda worker: (worker.sleep(2), worker.wake_up(["kv_cache"]), worker.wake_up(["weights"])),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_where_vllm_keeps_its_kv_cache_old_rows_are_refused_and_not_served_as_new(stage, change):
    assert computed_by(stage.serve("a", [1, 2]), OLD)
    change(stage.worker)
    assert stage.refuses("b", [1, 3], hit=4)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_where_vllm_forgets_its_hashes_the_same_blocks_serve_the_new_weights(stage, change):
    stage.serve("a", [1, 2])
    change(stage.worker)
    stage.runner.row_offset = NEW
    assert computed_by(stage.serve("b", [1, 2]), NEW)
    assert computed_by(stage.serve("c", [1, 3], hit=4), NEW)


@pytest.mark.parametrize("level", [1, 2])
def test_after_sleep_the_blocks_that_vllm_gives_out_again_hold_nothing_old(stage, level):
    """vLLM forgets its hashes before it sleeps, and the worker is not told: tenancies alone have to do it."""
    stage.serve("a", [1, 2])
    stage.worker.sleep(level)
    stage.worker.wake_up()
    stage.runner.row_offset = NEW
    assert computed_by(stage.serve("b", [2, 1]), NEW)
    assert computed_by(stage.serve("c", [2, 3], hit=4), NEW)


def test_a_sleep_that_keeps_the_weights_is_no_new_version(stage):
    stage.serve("a", [1, 2])
    stage.worker.sleep(1)
    stage.worker.wake_up()
    assert stage.version == 0
    assert computed_by(stage.serve("b", [1, 3], hit=4), OLD)


def test_an_update_of_the_draft_model_changes_no_row(stage):
    stage.worker.start_draft_weight_update()
    stage.worker.update_weights({})
    stage.worker.finish_weight_update()
    assert stage.version == 0
    stage.worker.start_weight_update()
    stage.worker.update_weights({})
    stage.worker.finish_weight_update()
    assert stage.version == 2


@pytest.mark.parametrize("name", ["reload_weights", "update_weights", "finish_weight_update"])
def test_a_change_that_fails_half_way_is_one_too(stage, name):
    stage.serve("a", [1, 2])
    stage.worker.broken = True
    with pytest.raises(RuntimeError, match="half of the weights"):
        CHANGES[name](stage.worker)
    assert stage.refuses("b", [1, 3], hit=4)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_step_in_flight_is_delivered_and_its_request_goes_on(stage, change):
    backend = stage.session.backend
    with backend.hold_copies():
        stage.step(fake.scheduled(new=[("a-00000001", PROMPT, [1, 2], 0, 4)]))
        change(stage.worker)
        stage.runner.row_offset = NEW
    stage.step(fake.scheduled(running=[("a-00000001", 4, 2, [])]))
    stage.step(fake.scheduled(finished=["a-00000001"]))
    stage.session.flush(still_running=())
    stored = stage.stored("a-00000001")
    assert (stored.end, stored.complete) == (RequestEnd.FINISHED, True)
    right = torch.tensor([fake.row_of(PROMPT, at) for at in range(6)])
    right[4:] += NEW
    assert torch.equal(stored.hidden_states, right)


def test_a_worker_without_a_cache_changes_its_weights_as_ever():
    worker = Worker(fake.FakeRunner())
    worker.reload_weights()
    worker.add_lora(adapter(1))
    worker.remove_lora(1)
    assert worker.model_runner.row_offset == NEW


def test_rows_that_were_given_up_are_said_once_with_what_to_do(stage, caplog):
    stage.serve("a", [1, 2])
    with caplog.at_level(logging.WARNING, logger="omni_core"):
        stage.worker.reload_weights()
        stage.worker.reload_weights()
    [record] = caplog.records
    assert "6 stored rows" in record.getMessage()
    assert "reset_prefix_cache()" in record.getMessage()


# -- adapters


def test_an_adapter_that_is_loaded_again_keeps_none_of_its_rows(stage):
    stage.worker.add_lora(adapter(7))
    stage.serve("a", [1, 2], adapter=adapter(7))
    stage.serve("base", [3, 4])
    stage.worker.add_lora(adapter(7, load_inplace=True))
    assert stage.refuses("b", [1, 5], hit=4, adapter=adapter(7))
    assert computed_by(stage.serve("c", [3, 6], hit=4), OLD)
    assert stage.session.cache.stats().adapter_versions[7] == 2


def test_an_adapter_that_vllm_holds_already_is_not_loaded_again(make_stage):
    stage = make_stage()
    stage.runner.lora_config = SimpleNamespace()
    stage.worker.add_lora(adapter(7))
    stage.serve("a", [1, 2], adapter=adapter(7))
    stage.worker.add_lora(adapter(7))
    assert computed_by(stage.serve("b", [1, 5], hit=4, adapter=adapter(7)), OLD)


def test_an_adapter_that_was_removed_keeps_none_of_its_rows(stage):
    stage.serve("a", [1, 2], adapter=adapter(7))
    stage.worker.remove_lora(7)
    assert stage.refuses("b", [1, 5], hit=4, adapter=adapter(7))


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


# -- an operator's own calls


def test_an_operator_tells_of_weights_that_the_worker_does_not_hear_of(stage):
    stage.serve("a", [1, 2])
    [report] = bump_stage_version(stage)
    assert (report["version"], report["rows_absent"]["__hidden_states__"]) == (1, 6)
    assert stage.refuses("b", [1, 3], hit=4)
    [report] = bump_stage_version(stage, 7)
    assert (report["adapter_id"], report["version"]) == (7, 1)
    with pytest.raises(RpcArgumentError, match="adapter_id=0"):
        bump_stage_version(stage, 0)


def test_an_operators_reset_says_what_it_cleared_and_open_requests_fail(stage, caplog):
    stage.serve("a", [1, 2])
    stage.step(fake.scheduled(new=[("b-00000001", PROMPT, [3, 4], 0, 4)]))
    with caplog.at_level(logging.INFO, logger="omni_core"):
        [report] = reset_stage(stage)
    assert report["rows_cleared"]["__hidden_states__"] == 10
    assert report["bytes_cleared"] >= 10 * 4 * fake.HIDDEN_SIZE
    assert (report["requests_forgotten"], report["steps_dropped"]) == (1, 0)
    assert len([record for record in caplog.records if "was reset" in record.getMessage()]) == 1
    stage.step(fake.scheduled(running=[("b-00000001", 4, 2, [])]))
    stage.step(fake.scheduled(finished=["b-00000001"]))
    stage.session.flush(still_running=())
    with pytest.raises(UnknownRequestError, match="it failed: the cache was reset"):
        stage.stored("b-00000001")
    assert computed_by(stage.serve("c", [1, 2]), OLD)


def test_a_reset_turns_a_cache_on_again_that_an_error_turned_off(stage):
    stage.runner.model.broken = True
    for number in range(20):
        stage.step(fake.scheduled(new=[(f"x{number}-00000001", PROMPT, [1, 2], 0, 6)]))
        stage.step(fake.scheduled(finished=[f"x{number}-00000001"]))
    assert stage.session.report()["off_reason"] is not None
    stage.runner.model.broken = False
    reset_stage(stage)
    assert stage.session.report()["off_reason"] is None
    assert computed_by(stage.serve("a", [1, 2]), OLD)
