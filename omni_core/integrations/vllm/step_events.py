# SPDX-License-Identifier: Apache-2.0
"""The adapter: one scheduler output becomes immutable `StepEvents`, so that the core never sees a scheduler object.

Facts of vLLM 0.32 it rests on (`v1/core/sched/output.py`):

- a new request brings its whole block table, one list per KV-cache group;
- a running request brings the blocks to append, or `None`;
- a request in `resumed_req_ids` was preempted and brings its whole new table instead;
- a preempted request is not finished: its blocks may go to others, and it may come back as resumed. Nothing has to be
  said about it, because whoever gets its blocks brings the news;
- an aborted request is reported among the finished ones and cannot be told from them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from omni_core.prefix_cache.events import BlockCopy, RequestEvent, RequestEventKind, StepEvents


class NewRequest(Protocol):
    """A request scheduled for the first time."""

    @property
    def req_id(self) -> str: ...

    @property
    def prompt_token_ids(self) -> Sequence[int] | None: ...

    @property
    def block_ids(self) -> Sequence[Sequence[int]]: ...

    @property
    def num_computed_tokens(self) -> int: ...


class CachedRequests(Protocol):
    """The requests scheduled before, in parallel lists."""

    @property
    def req_ids(self) -> Sequence[str]: ...

    @property
    def resumed_req_ids(self) -> Collection[str]: ...

    @property
    def new_block_ids(self) -> Sequence[Sequence[Sequence[int]] | None]: ...

    @property
    def num_computed_tokens(self) -> Sequence[int]: ...


class KvBlockCopy(Protocol):
    """A copy of one KV block onto another."""

    @property
    def src_block_id(self) -> int: ...

    @property
    def dst_block_id(self) -> int: ...


class SchedulerOutput(Protocol):
    """What the adapter reads of vLLM's `SchedulerOutput`."""

    @property
    def scheduled_new_reqs(self) -> Sequence[NewRequest]: ...

    @property
    def scheduled_cached_reqs(self) -> CachedRequests: ...

    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]: ...

    @property
    def total_num_scheduled_tokens(self) -> int: ...

    @property
    def finished_req_ids(self) -> Collection[str]: ...

    @property
    def kv_cache_block_copies(self) -> Sequence[KvBlockCopy] | None: ...


def step_events(scheduler_output: SchedulerOutput, group_index: int = 0) -> StepEvents:
    """The news of one step. Pure; reads only the fields of the protocols above.

    Args:
        scheduler_output: vLLM's, or anything of its shape.
        group_index: the KV-cache group whose blocks the cache mirrors.

    Returns:
        Finished requests first: an id may be used again in the step that reports its end.
    """
    requests = [RequestEvent(RequestEventKind.FINISHED, req_id) for req_id in sorted(scheduler_output.finished_req_ids)]
    scheduled = scheduler_output.num_scheduled_tokens
    requests.extend(
        RequestEvent(
            RequestEventKind.STARTED,
            new.req_id,
            block_ids=tuple(new.block_ids[group_index]),
            num_computed_tokens=new.num_computed_tokens,
            num_scheduled_tokens=scheduled.get(new.req_id, 0),
        )
        for new in scheduler_output.scheduled_new_reqs
    )
    cached = scheduler_output.scheduled_cached_reqs
    resumed = cached.resumed_req_ids
    for req_id, new_blocks, computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        if req_id in resumed:
            requests.append(
                RequestEvent(
                    RequestEventKind.RESUMED,
                    req_id,
                    block_ids=() if new_blocks is None else tuple(new_blocks[group_index]),
                    num_computed_tokens=computed,
                    num_scheduled_tokens=scheduled.get(req_id, 0),
                )
            )
        elif new_blocks is not None and new_blocks[group_index]:
            requests.append(RequestEvent(RequestEventKind.EXTENDED, req_id, block_ids=tuple(new_blocks[group_index])))
    copies = tuple(
        BlockCopy(copy.src_block_id, copy.dst_block_id) for copy in scheduler_output.kv_cache_block_copies or ()
    )
    return StepEvents(requests=tuple(requests), block_copies=copies)
