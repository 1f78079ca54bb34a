# SPDX-License-Identifier: Apache-2.0
"""What is the second model runner's own: a mirrored block table, drafts told of late, dummy runs, its form of news."""

from types import SimpleNamespace

import fake_runner as fake
import numpy as np
import pytest
from fake_runner_v2 import FakeRunnerV2
from hypothesis import given
from hypothesis import strategies as st
from late_stage import LateStage

from omni_core.integrations.vllm.errors import BlockTableMismatchError, RowsBeyondTableError
from omni_core.integrations.vllm.runners.block_table_mirror import BlockTableMirror
from omni_core.integrations.vllm.runners.choice import check_staging
from omni_core.integrations.vllm.runners.v2 import V2View
from omni_core.settings.errors import SettingsError
from omni_core.settings.stage_settings import StageSettings

BOUND_S = 20.0
PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
A, B, C = "a-00000001", "b-00000002", "c-00000003"


@pytest.fixture
def stage():
    made = LateStage("V2")
    yield made
    made.session.close(BOUND_S)


def expected(tokens):
    return [fake.row_of(tokens, position) for position in range(len(tokens))]


def view_after(runner, *steps):
    """A view that followed the steps beside the runner; the last one's state is still there."""
    view = V2View(0, max_num_reqs=1, max_model_len=fake.BLOCK_SIZE, block_size=fake.BLOCK_SIZE)
    for step in steps:
        if runner.execute_model_state is not None:
            runner.sample_tokens({})
        view.step_begins(step)
        runner.execute_model(step)
    return view


def test_slots_are_those_of_the_device_in_the_batchs_own_order():
    runner = FakeRunnerV2()
    first = fake.scheduled(new=[(A, PROMPT, [7, 3, 9], 0, 10), (B, PROMPT, [7, 3, 5], 8, 2)])
    second = fake.scheduled(running=[(B, 10, 1, None), (A, 10, 1, None)])
    third = fake.scheduled(new=[(C, PROMPT, [1, 2, 4], 0, 10)], running=[(A, 11, 2, [6])], finished=[B])
    for steps in ((first,), (first, second), (first, second, third)):
        runner = FakeRunnerV2()
        arrays = view_after(runner, *steps).arrays(runner, steps[-1])
        runs = dict(zip(arrays.req_ids, zip(arrays.starts[:-1], arrays.starts[1:], strict=True), strict=True))
        assert list(runs) == runner.execute_model_state.input_batch.req_ids
        for req_id, (start, stop) in runs.items():
            positions = arrays.positions[start:stop].tolist()
            assert arrays.slots[start:stop].tolist() == runner.slots_on_device(req_id, positions), req_id
    assert arrays.req_ids == (A, C)


def test_a_request_that_was_preempted_comes_back_among_the_new_ones_with_other_blocks_and_is_whole_and_once(stage):
    stage.step(fake.scheduled(new=[(A, PROMPT, [1, 2, 3], 0, 10)]), a_00000001=21)
    stage.read()
    stage.step(fake.scheduled(running=[(A, 10, 1, None)]), a_00000001=22)
    stage.read()
    stage.step(fake.scheduled(new=[(B, PROMPT, [1, 2, 4], 8, 2)], preempted=[A]), b_00000002=50)
    stage.read()
    stage.step(
        fake.scheduled(new=[(A, PROMPT, [1, 2, 5], 8, 4)], running=[(B, 10, 1, None)], outputs={A: [21, 22]}),
        a_00000001=23,
        b_00000002=51,
    )
    stage.finish()
    assert stage.stored(A).hidden_states.tolist() == expected([*PROMPT, 21, 22])
    assert stage.stored(A).token_ids.tolist() == [*PROMPT, 21, 22]
    assert stage.stored(A).complete
    assert stage.stored(B).hidden_states.tolist() == expected([*PROMPT, 50])


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_rows_of_accepted_drafts_come_when_the_output_is_complete_and_those_of_rejected_ones_never(stage, accepted):
    drafts = [30, 31]
    sampled = [*drafts[:accepted], 35]
    stage.step(fake.scheduled(new=[(A, PROMPT, [1, 2, 3, 4], 0, 10), (B, PROMPT, [1, 2, 5], 8, 2)]), a_00000001=21)
    stage.read()
    stage.step(fake.scheduled(running=[(A, 10, 3, None), (B, 10, 1, None)], drafts={A: drafts}), a_00000001=sampled)
    stage.read()
    next_position = 11 + accepted
    stage.step(fake.scheduled(running=[(A, next_position, 1, None)], finished=[B]), a_00000001=36)
    stage.finish()
    fed = [*PROMPT, 21, *drafts[:accepted], 35]
    assert stage.stored(A).hidden_states.tolist() == expected(fed)
    assert stage.stored(A).token_ids.tolist() == fed
    assert stage.stored(A).complete


@pytest.mark.parametrize(
    ("sampled", "max_tokens", "kept"),
    [
        ([30, 31, 35], 2, 0),
        ([30, 31, 35], 3, 1),
        ([fake.EOS_TOKEN_ID, 31, 35], 40, 0),
        ([30, fake.STOP_TOKEN_ID, 35], 40, 1),
        ([30, 31, fake.EOS_TOKEN_ID], 40, 2),
    ],
)
def test_accepted_drafts_behind_the_token_that_ends_the_request_are_left_out(stage, sampled, max_tokens, kept):
    stage.step(fake.scheduled(new=[(A, PROMPT, [1, 2, 3, 4], 0, 10)], max_tokens=max_tokens), a_00000001=21)
    stage.read()
    stage.step(fake.scheduled(running=[(A, 10, 3, None)], drafts={A: sampled[:2]}), a_00000001=sampled)
    stage.read()
    stage.step(fake.scheduled(finished=[A]))
    stage.finish()
    fed = [*PROMPT, 21, *sampled[:kept]]
    assert stage.stored(A).hidden_states.tolist() == expected(fed)
    assert stage.stored(A).token_ids.tolist() == fed
    assert stage.stored(A).complete


def test_a_dummy_run_never_reaches_the_cache_though_it_goes_through_execute_model(stage):
    stage.runner.dummy_run()
    assert stage.session.cache.stats().steps_saved == 0
    assert stage.runner.model.taken == 0
    stage.step(fake.scheduled(new=[(A, PROMPT, [1, 2, 3], 0, 10)]))
    assert stage.runner.model.taken == 1


@pytest.mark.parametrize(("args", "kwargs"), [((None, True), {}), ((), {"dummy_run": True})])
def test_a_dummy_run_is_known_however_its_argument_is_given(args, kwargs):
    view = V2View(0, max_num_reqs=1, max_model_len=8, block_size=4)
    assert view.is_dummy_run(args, kwargs)
    assert not view.is_dummy_run((None, False), {})
    assert not view.is_dummy_run((None,), {"is_profile": False})


def test_a_runner_that_has_other_blocks_than_the_news_said_is_an_error_that_names_the_request():
    runner = FakeRunnerV2()
    step = fake.scheduled(new=[(A, PROMPT, [7, 3, 9], 0, 10)])
    view = view_after(runner, step)
    runner.block_tables.num_blocks.np[0] += 1
    with pytest.raises(BlockTableMismatchError, match=rf"'{A}' has 4 KV blocks in the runner's table and 3 by"):
        view.arrays(runner, step)


def test_a_runner_that_ran_other_tokens_than_were_scheduled_is_an_error():
    runner = FakeRunnerV2()
    step = fake.scheduled(new=[(A, PROMPT, [7, 3, 9], 0, 10)])
    view = view_after(runner, step)
    runner.execute_model_state.input_batch.num_tokens = 8
    with pytest.raises(BlockTableMismatchError, match="10 scheduled tokens ran 8"):
        view.arrays(runner, step)


def test_a_row_beyond_the_blocks_is_an_error():
    runner = FakeRunnerV2()
    step = fake.scheduled(new=[(A, PROMPT, [7, 3], 0, 10)])
    with pytest.raises(RowsBeyondTableError, match=rf"'{A}' has a row at position 8, but its 2 KV blocks"):
        view_after(runner, step).arrays(runner, step)


def test_adapters_are_those_of_live_requests():
    view = V2View(0, max_num_reqs=1, max_model_len=8, block_size=4)
    runner = FakeRunnerV2()
    step = fake.scheduled(new=[(A, PROMPT, [7, 3, 9], 0, 10)], lora_request="an adapter")
    view.step_begins(step)
    assert view.adapters_of_step(runner, step) == ["an adapter"]
    view.step_begins(fake.scheduled(finished=[A]))
    assert view.adapters_of_step(runner, step) == []


IDS = st.sampled_from(["r0", "r1", "r2", "r3", "r4"])
BLOCKS = st.lists(st.integers(1, 10**6), max_size=7)
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("replace"), IDS, BLOCKS),
        st.tuples(st.just("append"), IDS, BLOCKS),
        st.tuples(st.just("remove"), IDS, st.just([])),
    ),
    max_size=40,
)


@given(calls=CALLS, num_rows=st.integers(1, 3), num_columns=st.integers(1, 4))
def test_a_mirror_holds_what_a_dictionary_of_lists_holds_however_small_it_was_made(calls, num_rows, num_columns):
    mirror, model = BlockTableMirror(num_rows, num_columns), {}
    for call, req_id, blocks in calls:
        if call == "replace":
            model[req_id] = list(blocks)
            mirror.replace(req_id, blocks)
        elif call == "remove":
            model.pop(req_id, None)
            mirror.remove(req_id)
        elif req_id in model:
            model[req_id] += blocks
            mirror.append(req_id, blocks)
        else:
            with pytest.raises(KeyError):
                mirror.append(req_id, blocks)
    rows = mirror.rows_of(list(model))
    assert len(np.unique(rows)) == len(model)
    held = [mirror.rows[row, : mirror.num_blocks[row]].tolist() for row in rows]
    assert held == list(model.values())


def engine_config(*, async_scheduling, pipeline=1):
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=async_scheduling),
        parallel_config=SimpleNamespace(pipeline_parallel_size=pipeline),
    )


@pytest.mark.parametrize(
    ("config", "uses_v2_runner", "least"),
    [
        (engine_config(async_scheduling=True), False, 4),
        (engine_config(async_scheduling=False), True, 3),
        (engine_config(async_scheduling=True), True, 4),
        (engine_config(async_scheduling=True, pipeline=4), True, 7),
    ],
)
def test_staging_slots_must_be_more_than_the_steps_in_flight(config, uses_v2_runner, least):
    check_staging(StageSettings(staging_depth=least), config, uses_v2_runner=uses_v2_runner)
    with pytest.raises(SettingsError, match=f"staging_depth={least - 1}: .* set at least {least}"):
        check_staging(StageSettings(staging_depth=least - 1), config, uses_v2_runner=uses_v2_runner)


def test_an_engine_that_waits_for_its_tokens_may_have_fewer_slots():
    check_staging(StageSettings(staging_depth=2), engine_config(async_scheduling=False), uses_v2_runner=False)
