# SPDX-License-Identifier: Apache-2.0
"""The rows of faults.md that concern the engine's integration, on a fake runner that adopted the real hooks."""

import fake_runner as fake
import pytest
from fake_stage import FakeStage

from omni_core.sinks.errors import UnknownRequestError

BOUND_S = 20.0
PROMPT = [11, 12, 13, 14, 15, 16, 17, 18]
LONG = [*PROMPT, 19, 20]


@pytest.fixture
def stage():
    made = FakeStage()
    yield made
    made.session.close(BOUND_S)


def rows_of(tokens):
    return [fake.row_of(tokens, position) for position in range(len(tokens))]


def delivered(stage, req_id):
    stage.session.flush(BOUND_S, still_running=())
    return stage.stored(req_id).hidden_states.tolist()


def test_fault_015_a_hit_on_a_block_of_the_same_step_is_served_in_that_step(stage):
    twins = [("a-00000001", LONG, [1, 2, 3], 0, 10), ("b-00000002", LONG, [1, 2, 4], 8, 2)]
    stage.step(fake.scheduled(new=twins))
    assert delivered(stage, "b-00000002") == rows_of(LONG)
    assert stage.session.report()["cache"]["rows_from_hits"] == 8


def test_fault_055_the_same_prompt_twice_gives_whole_outputs_twice(stage):
    stage.step(fake.scheduled(new=[("a-00000001", LONG, [1, 2, 3], 0, 10)]))
    stage.step(fake.scheduled(new=[("b-00000002", LONG, [1, 2, 4], 8, 2)], finished=["a-00000001"]))
    assert delivered(stage, "b-00000002") == delivered(stage, "a-00000001") == rows_of(LONG)


def test_fault_060_a_kv_cache_in_which_every_block_is_taken_is_stored_whole(stage):
    prompts = {f"r{number}-0000000{number}": [40 + number] * 12 for number in range(5)}
    blocks = {req_id: [3 * number + 1, 3 * number + 2, 3 * number + 3] for number, req_id in enumerate(prompts)}
    stage.step(fake.scheduled(new=[(req_id, prompt, blocks[req_id], 0, 12) for req_id, prompt in prompts.items()]))
    readers = [(f"s{req_id}", [*prompt[:8], 9], [*blocks[req_id][:2], 15], 8, 1) for req_id, prompt in prompts.items()]
    ended = list(prompts)
    for reader in readers[:4]:
        stage.step(fake.scheduled(new=[reader], finished=ended))
        ended = [reader[0]]
    for req_id, prompt in list(prompts.items())[:4]:
        assert delivered(stage, f"s{req_id}") == rows_of([*prompt[:8], 9])
    assert stage.session.report()["off_reason"] is None


@pytest.mark.parametrize("fault", ["069", "070", "071"])
def test_fault_069_070_071_equal_token_ids_share_no_rows_unless_the_engine_says_so(stage, fault):
    """A placeholder prompt, a salt, a mask: they are in the engine's block hashes, and only its hits bring rows."""
    placeholders = [0] * 8
    stage.step(fake.scheduled(new=[("a-00000001", placeholders, [1, 2], 0, 8)]))
    stage.runner.row_offset = 100.0  # what the engine computes for the second has other content
    stage.step(fake.scheduled(new=[("b-00000002", placeholders, [3, 4], 0, 8)], finished=["a-00000001"]))
    shifted = [[value + 100.0 for value in row] for row in rows_of(placeholders)]
    assert delivered(stage, "b-00000002") == shifted
    assert delivered(stage, "a-00000001") == rows_of(placeholders)
    assert stage.session.report()["cache"]["rows_from_hits"] == 0


def test_fault_076_rows_taken_once_are_not_there_as_an_empty_success(stage):
    stage.step(fake.scheduled(new=[("a-00000001", PROMPT, [1, 2], 0, 8)]))
    stage.session.flush(BOUND_S, still_running=())
    stage.session.sink.take("a-00000001")
    with pytest.raises(UnknownRequestError, match="a-00000001"):
        stage.session.sink.take("a-00000001")


def test_fault_078_a_hit_on_tokens_whose_rows_are_gone_fails_that_request_and_no_other(stage):
    stage.step(fake.scheduled(new=[("a-00000001", PROMPT, [1, 2], 0, 8)]))
    stage.session.flush(BOUND_S, still_running=())
    stage.session.cache.reset()
    late = ("b-00000002", [*PROMPT, 30], [1, 2, 3], 8, 1)
    other = ("c-00000003", [50, 51, 52], [4], 0, 3)
    stage.step(fake.scheduled(new=[late, other], finished=["a-00000001"]))
    assert delivered(stage, "c-00000003") == rows_of([50, 51, 52])
    report = stage.session.report()
    assert "no hidden rows are stored" in report["delivery"]["failures"]["b-00000002"]
    assert report["off_reason"] is None
    with pytest.raises(UnknownRequestError, match="b-00000002"):
        stage.stored("b-00000002")


def test_fault_106_107_every_hit_is_counted_however_short_the_run(stage):
    stage.step(fake.scheduled(new=[("a-00000001", PROMPT, [1, 2], 0, 8)]))
    ended = "a-00000001"
    for number in range(3):
        hit = (f"b{number}-0000000{number}", [*PROMPT, 30 + number], [1, 2, 3 + number], 8, 1)
        stage.step(fake.scheduled(new=[hit], finished=[ended]))
        ended = hit[0]
    stage.session.flush(BOUND_S, still_running=())
    assert stage.session.report()["cache"]["rows_from_hits"] == 3 * 8
