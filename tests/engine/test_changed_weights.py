# SPDX-License-Identifier: Apache-2.0
"""Weights and adapters change under a real vLLM: no old row is served, and every row is one its own weights computed.

Each program runs once, in a process of its own. Its tap forgets everything at each change.
"""

from pathlib import Path

import pytest
from engine_program import run_engine_program

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
HIT, WHOLE = 96, 117
"""Tokens of a prompt of 110 that are cached for the second request, and rows of a whole request."""


def run(name, directory):
    modules = (HERE, HERE / "features")
    return run_engine_program(HERE / "changed_weights_run.py", name, directory / f"{name}.json", modules=modules)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return run("weights", tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    return run("adapters", tmp_path_factory.mktemp("adapters"))


def served(phase):
    """The first request computed everything, the second hit it, and every row is of this phase's weights."""
    return phase == {"cached_tokens": [0, HIT], "rows": [WHOLE] * 2, "wrong_rows": [0, 0], "refused": []}


def refused(phase):
    [reason] = phase["refused"]
    return phase["cached_tokens"] == [HIT] and "the weights or the adapter changed" in reason


def test_after_a_reload_a_hit_on_vllms_old_kv_cache_gets_no_rows(weights):
    assert served(weights["first"])
    assert refused(weights["kept KV cache"])


def test_after_reload_and_reset_prefix_cache_every_row_is_of_the_new_weights(weights):
    assert weights["reset"] is True
    assert served(weights["reloaded"])


def test_weights_that_a_function_changes_in_place_are_told_by_the_operator(weights):
    assert weights["rows absent"] == WHOLE
    assert served(weights["changed in place"])


def test_after_sleep_nothing_stale_is_served(weights):
    """vLLM on CPU gives no memory up, but its engine aborts requests and forgets its hashes as everywhere."""
    assert served(weights["slept at 1"])
    assert served(weights["slept at 2"])
    asleep = [weights["versions asleep at 1"], weights["versions asleep at 2"], weights["versions"]]
    assert asleep == [2, 3, 5], "two reloads, and one version for the wake-up after level 2"


def test_a_request_that_runs_across_a_change_is_delivered_whole_and_hit_by_its_new_rows(weights):
    assert weights["forced"] is True
    assert weights["across a change"] == {"cached_tokens": [0], "rows": [149], "wrong_rows": [0], "refused": []}
    assert weights["after it"]["cached_tokens"] == [HIT, HIT]
    assert weights["after it"]["wrong_rows"] == [0, 0]
    assert weights["hits of the new weights"] is True


def test_an_operators_reset_fails_what_runs_and_everything_after_it_is_right(weights):
    assert weights["requests forgotten"] == 1
    [reason] = weights["doomed"]["refused"]
    assert "the cache was reset" in reason
    assert served(weights["begun again"])


def test_an_adapter_loaded_in_place_keeps_none_of_its_rows_and_others_keep_theirs(adapters):
    assert served(adapters["base"])
    assert served(adapters["first"])
    assert adapters["loaded in place"] == 1
    assert refused(adapters["kept KV cache"])
    assert adapters["base again"] == [HIT]
    assert adapters["base rows again"] is True
    assert served(adapters["reloaded"])


def test_two_ids_of_one_name_share_no_rows(adapters):
    assert refused(adapters["another id"])


def test_a_step_that_reads_other_files_is_a_change_and_one_that_reads_the_same_is_none(adapters):
    assert adapters["read in steps"] == 1, "add_lora alone"
    assert refused(adapters["other files in a step"])
    assert adapters["versions"] == 2


def test_an_adapter_that_was_removed_and_comes_back_is_served_anew(adapters):
    assert served(adapters["removed"])


@pytest.mark.parametrize("name", ["weights", "adapters"])
def test_neither_cache_nor_tap_gave_up(name, request):
    seen = request.getfixturevalue(name)
    assert (seen["off_reason"], seen["tap_failure"]) == (None, None)
