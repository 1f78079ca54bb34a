# SPDX-License-Identifier: Apache-2.0
"""One scheduler output becomes the news of one step."""

from types import SimpleNamespace

import pytest

from omni_core.integrations.vllm.step_events import step_events
from omni_core.prefix_cache.events import BlockCopy, RequestEvent, RequestEventKind, StepEvents


def scheduler_output(*, new=(), cached=(), resumed=(), finished=(), scheduled=None, copies=None, preempted=None):
    """`new`: (req_id, block_ids per group, computed). `cached`: (req_id, new block ids per group or None, computed)."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=req_id, block_ids=blocks, num_computed_tokens=computed, prompt_token_ids=[1, 2])
            for req_id, blocks, computed in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[req_id for req_id, _, _ in cached],
            new_block_ids=[blocks for _, blocks, _ in cached],
            num_computed_tokens=[computed for _, _, computed in cached],
            resumed_req_ids=set(resumed),
        ),
        num_scheduled_tokens=scheduled or {},
        total_num_scheduled_tokens=sum((scheduled or {}).values()),
        finished_req_ids=set(finished),
        kv_cache_block_copies=copies,
        preempted_req_ids=preempted,
    )


def test_a_quiet_step_has_no_news():
    assert step_events(scheduler_output(cached=[("a", None, 7)], scheduled={"a": 1})) == StepEvents()


def test_a_new_request_brings_its_whole_table_and_its_hit():
    output = scheduler_output(new=[("a", ([4, 5, 6],), 32)], scheduled={"a": 10})
    assert step_events(output).requests == (
        RequestEvent(RequestEventKind.STARTED, "a", (4, 5, 6), num_computed_tokens=32, num_scheduled_tokens=10),
    )


@pytest.mark.parametrize("nothing_new", [None, ([],)])
def test_a_running_request_is_news_only_when_it_gets_blocks(nothing_new):
    output = scheduler_output(
        cached=[("a", nothing_new, 7), ("b", ([9, 10],), 32), ("c", nothing_new, 3)],
        scheduled={"a": 1, "b": 1, "c": 1},
    )
    assert step_events(output).requests == (RequestEvent(RequestEventKind.EXTENDED, "b", (9, 10)),)


def test_a_resumed_request_brings_its_whole_new_table():
    output = scheduler_output(cached=[("a", ([7, 8],), 32)], resumed=["a"], scheduled={"a": 5})
    assert step_events(output).requests == (
        RequestEvent(RequestEventKind.RESUMED, "a", (7, 8), num_computed_tokens=32, num_scheduled_tokens=5),
    )


def test_a_request_resumed_without_a_table_is_still_reported():
    output = scheduler_output(cached=[("a", None, 0)], resumed=["a"], scheduled={"a": 5})
    assert step_events(output).requests == (
        RequestEvent(RequestEventKind.RESUMED, "a", (), num_computed_tokens=0, num_scheduled_tokens=5),
    )


def test_ends_come_first_so_that_an_id_can_be_used_again_in_the_same_step():
    output = scheduler_output(new=[("a", ([3],), 0)], scheduled={"a": 4}, finished=["b", "a"])
    kinds = [(event.kind, event.req_id) for event in step_events(output).requests]
    assert kinds == [
        (RequestEventKind.FINISHED, "a"),
        (RequestEventKind.FINISHED, "b"),
        (RequestEventKind.STARTED, "a"),
    ]


def test_a_step_without_tokens_still_reports_ends():
    assert step_events(scheduler_output(finished=["a"])).requests == (RequestEvent(RequestEventKind.FINISHED, "a"),)


def test_a_preempted_request_has_not_ended():
    assert step_events(scheduler_output(preempted={"a"})) == StepEvents()


def test_blocks_of_the_mirrored_group_are_taken():
    output = scheduler_output(new=[("a", ([1], [2, 3]), 0)], cached=[("b", ([4], [5]), 9)], scheduled={"a": 1, "b": 1})
    assert [event.block_ids for event in step_events(output, group_index=1).requests] == [(2, 3), (5,)]


def test_block_copies_keep_their_order():
    copies = [SimpleNamespace(src_block_id=1, dst_block_id=2), SimpleNamespace(src_block_id=2, dst_block_id=3)]
    assert step_events(scheduler_output(copies=copies)).block_copies == (BlockCopy(1, 2), BlockCopy(2, 3))


def test_what_the_scheduler_does_to_its_lists_later_changes_nothing():
    blocks = [4, 5]
    events = step_events(scheduler_output(new=[("a", (blocks,), 0)], scheduled={"a": 1}))
    blocks.append(6)
    assert events.requests[0].block_ids == (4, 5)
