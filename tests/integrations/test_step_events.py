# SPDX-License-Identifier: Apache-2.0
"""One scheduler output becomes the news of one step."""

from types import SimpleNamespace

import numpy as np
import pytest

from omni_core.integrations.vllm.step_events import num_draft_tokens, step_events
from omni_core.prefix_cache.events import BlockCopy, RequestEvent, RequestEventKind, StepEvents


def scheduler_output(
    *,
    new=(),
    cached=(),
    resumed=(),
    finished=(),
    scheduled=None,
    copies=None,
    preempted=None,
    prefill=None,
    all_tokens=None,
    drafts=None,
    adapters=(),
):
    """`new`: (req_id, block_ids per group, computed). `cached`: (req_id, new block ids per group or None, computed).

    `adapters`: ids of the adapters of new requests. `prefill`: what they bring for the second model runner.
    `all_tokens`: of requests that come back.
    """
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(
                req_id=req_id,
                block_ids=blocks,
                num_computed_tokens=computed,
                prompt_token_ids=[1, 2],
                prefill_token_ids=prefill,
                lora_request=SimpleNamespace(lora_int_id=adapters[req_id]) if req_id in adapters else None,
            )
            for req_id, blocks, computed in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[req_id for req_id, _, _ in cached],
            new_block_ids=[blocks for _, blocks, _ in cached],
            num_computed_tokens=[computed for _, _, computed in cached],
            resumed_req_ids=set(resumed),
            all_token_ids=all_tokens or {},
        ),
        num_scheduled_tokens=scheduled or {},
        total_num_scheduled_tokens=sum((scheduled or {}).values()),
        finished_req_ids=set(finished),
        kv_cache_block_copies=copies,
        preempted_req_ids=preempted,
        scheduled_spec_decode_tokens=drafts or {},
    )


def test_a_quiet_step_has_no_news():
    assert step_events(scheduler_output(cached=[("a", None, 7)], scheduled={"a": 1})) == StepEvents()


def test_a_new_request_brings_its_whole_table_and_its_hit():
    output = scheduler_output(new=[("a", ([4, 5, 6],), 32)], scheduled={"a": 10})
    assert step_events(output).requests == (
        RequestEvent(
            RequestEventKind.STARTED,
            "a",
            (4, 5, 6),
            num_computed_tokens=32,
            num_scheduled_tokens=10,
            num_known_tokens=33,
        ),
    )


@pytest.mark.parametrize("nothing_new", [None, ([],)])
def test_a_running_request_is_news_only_when_it_gets_blocks(nothing_new):
    output = scheduler_output(
        cached=[("a", nothing_new, 7), ("b", ([9, 10],), 32), ("c", nothing_new, 3)],
        scheduled={"a": 1, "b": 1, "c": 1},
    )
    assert step_events(output).requests == (RequestEvent(RequestEventKind.EXTENDED, "b", (9, 10)),)


def test_a_resumed_request_brings_its_whole_new_table_and_how_many_tokens_are_known():
    output = scheduler_output(
        cached=[("a", ([7, 8],), 32)], resumed=["a"], scheduled={"a": 5}, all_tokens={"a": list(range(37))}
    )
    assert step_events(output).requests == (
        RequestEvent(
            RequestEventKind.RESUMED,
            "a",
            (7, 8),
            num_computed_tokens=32,
            num_scheduled_tokens=5,
            num_known_tokens=37,
        ),
    )


def test_a_request_that_comes_back_among_the_new_ones_brings_its_output_tokens_too():
    output = scheduler_output(new=[("a", ([7, 8],), 32)], scheduled={"a": 5}, prefill=list(range(37)))
    (event,) = step_events(output).requests
    assert (event.kind, event.num_known_tokens) == (RequestEventKind.STARTED, 37)


@pytest.mark.parametrize("prefill", [None, [1, 2]])
def test_the_next_part_of_a_prompt_keeps_what_is_computed_and_nothing_that_was_sampled(prefill):
    output = scheduler_output(new=[("a", ([7],), 1)], scheduled={"a": 1}, prefill=prefill)
    (event,) = step_events(output).requests
    assert (event.num_computed_tokens, event.num_known_tokens) == (1, 2)


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


def test_drafts_are_counted_in_the_order_of_the_batch_placeholders_included():
    output = scheduler_output(scheduled={"a": 4, "b": 1, "c": 2}, drafts={"a": [-1, -1, -1], "c": [7]})
    counts = num_draft_tokens(output, ["c", "b", "a"])
    assert counts.dtype == np.int64
    assert counts.tolist() == [1, 0, 3]


def test_a_step_without_drafts_has_no_counts():
    assert num_draft_tokens(scheduler_output(scheduled={"a": 4}), ["a"]) is None


def test_block_copies_keep_their_order():
    copies = [SimpleNamespace(src_block_id=1, dst_block_id=2), SimpleNamespace(src_block_id=2, dst_block_id=3)]
    assert step_events(scheduler_output(copies=copies)).block_copies == (BlockCopy(1, 2), BlockCopy(2, 3))


def test_a_new_request_names_its_adapter():
    output = scheduler_output(new=[("a", ([4],), 0), ("b", ([5],), 0)], adapters={"b": 7})
    assert [event.adapter_id for event in step_events(output).requests] == [0, 7]


def test_what_the_scheduler_does_to_its_lists_later_changes_nothing():
    blocks = [4, 5]
    events = step_events(scheduler_output(new=[("a", (blocks,), 0)], scheduled={"a": 1}))
    blocks.append(6)
    assert events.requests[0].block_ids == (4, 5)
