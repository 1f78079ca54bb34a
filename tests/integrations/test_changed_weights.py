# SPDX-License-Identifier: Apache-2.0
"""Weights change under a running stage: nothing stored before is served, nothing in flight is lost."""

import logging

import fake_runner as fake
import pytest
import torch
from changing_stage import NEW, OLD, PROMPT, Worker, adapter, computed_by

from omni_core.integrations.vllm.errors import RpcArgumentError
from omni_core.integrations.vllm.rpc.stage_client import bump_stage_version, reset_stage
from omni_core.sinks.errors import UnknownRequestError
from omni_core.sinks.rows import RequestEnd


@pytest.fixture
def stage(changing_stage):
    return changing_stage


CHANGES = {
    "reload_weights": lambda worker: worker.reload_weights(),
    "update_weights": lambda worker: (worker.start_weight_update(), worker.update_weights({})),
    "finish_weight_update": lambda worker: (worker.start_weight_update(), worker.finish_weight_update()),
    "reset_weights": lambda worker: worker.reset_weights(),
    "weights discarded": lambda worker: (worker.discard(("weights",)), worker.wake_up()),
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


def test_what_is_discarded_beside_the_weights_is_no_new_version(stage):
    stage.worker.discard(("kv_cache",))
    stage.worker.wake_up()
    assert stage.version == 0


def test_an_update_of_the_draft_model_changes_no_row(stage):
    stage.worker.start_draft_weight_update()
    stage.worker.update_weights({})
    stage.worker.finish_weight_update()
    assert stage.version == 0
    stage.worker.start_weight_update()
    stage.worker.update_weights({})
    stage.worker.finish_weight_update()
    assert stage.version == 2


@pytest.mark.parametrize("name", ["reload_weights", "update_weights", "finish_weight_update", "reset_weights"])
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


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_weights_change_as_ever_once_the_cache_is_closed(stage, change):
    """As when the interpreter ends: the cache is closed, and nobody told the session."""
    stage.session.cache.close()
    change(stage.worker)
    stage.worker.add_lora(adapter(7))
    assert stage.worker.remove_lora(7) is True
    assert bump_stage_version(stage) == []


def test_vllms_own_error_is_told_once_the_cache_is_closed(stage):
    stage.session.cache.close()
    stage.worker.broken = True
    with pytest.raises(RuntimeError, match="half of the weights"):
        stage.worker.reload_weights()


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
