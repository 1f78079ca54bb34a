# SPDX-License-Identifier: Apache-2.0
"""The adapter: one scheduler output becomes immutable `StepEvents`, so that the core never sees a scheduler object.

Facts of vLLM 0.32 it rests on (`v1/core/sched/output.py` and `scheduler.py`; pinned by
`tests/engine/test_real_scheduler.py`):

- a new request brings its whole block table, one list per KV-cache group;
- a running request brings the blocks to append, or `None`;
- a request in `resumed_req_ids` was preempted and brings its whole new table instead. It was not scheduled in the step
  before, so `all_token_ids` has every token the scheduler knows of it;
- for the second model runner a request that was preempted comes back among the new ones instead, with all its tokens in
  `prefill_token_ids`;
- a session whose prompt arrives in pieces is announced as new for each piece, its table and what is computed kept;
- a request may have draft tokens in the step that announces it: placeholders, where it has one token to compute;
- a preempted request is not finished: its blocks may go to others, and it may come back as resumed. Nothing has to be
  said about it, because whoever gets its blocks brings the news;
- a request names its adapter when it is announced as new, and keeps it;
- an aborted request is reported among the finished ones and cannot be told from them;
- blocks of all KV-cache groups have ids of one pool, and block copies are told of all groups together. Copies between
  blocks of other groups are passed on: no table of the mirrored group names such a block while they hold it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from omni_core.integrations.vllm.versions import block_copies
from omni_core.prefix_cache.events import BlockCopy, RequestEvent, RequestEventKind, StepEvents


class Adapter(Protocol):
    """An adapter that computes a request's rows."""

    @property
    def lora_int_id(self) -> int: ...


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

    @property
    def prefill_token_ids(self) -> Sequence[int] | None: ...

    @property
    def lora_request(self) -> Adapter | None: ...


class CachedRequests(Protocol):
    """The requests scheduled before, in parallel lists."""

    @property
    def req_ids(self) -> Sequence[str]: ...

    @property
    def resumed_req_ids(self) -> Collection[str]: ...

    @property
    def all_token_ids(self) -> Mapping[str, Sequence[int]]: ...

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
    def preempted_req_ids(self) -> Collection[str] | None: ...

    @property
    def scheduled_spec_decode_tokens(self) -> Mapping[str, Sequence[int]]: ...

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
            num_known_tokens=_num_known_tokens(new),
            adapter_id=0 if new.lora_request is None else new.lora_request.lora_int_id,
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
                    num_known_tokens=len(cached.all_token_ids.get(req_id, ())),
                )
            )
        elif new_blocks is not None and new_blocks[group_index]:
            requests.append(RequestEvent(RequestEventKind.EXTENDED, req_id, block_ids=tuple(new_blocks[group_index])))
    copies = tuple(BlockCopy(copy.src_block_id, copy.dst_block_id) for copy in block_copies(scheduler_output))
    return StepEvents(requests=tuple(requests), block_copies=copies)


def num_draft_tokens(scheduler_output: SchedulerOutput, req_ids: Sequence[str]) -> npt.NDArray[np.int64] | None:
    """Draft tokens of each request of a step, as `StepLayout.num_draft_tokens` has them; `None`: the step has none.

    Placeholders (-1) count: the worker fills them in, and their rows are computed.

    Args:
        scheduler_output: vLLM's, or anything of its shape.
        req_ids: the batch's requests, in its order.
    """
    drafts = scheduler_output.scheduled_spec_decode_tokens
    if not drafts:
        return None
    return np.fromiter((len(drafts.get(req_id, ())) for req_id in req_ids), np.int64, len(req_ids))


def _num_known_tokens(new: NewRequest) -> int:
    """What `RequestEvent.num_known_tokens` is for a request announced as new; it matters only if the id is live.

    With output among its tokens it was preempted and comes back. Else it is the next piece of a session, which keeps
    just what is computed and throws the token sampled after that away.
    """
    known, prompt = new.prefill_token_ids, new.prompt_token_ids
    if known is not None and prompt is not None and len(known) > len(prompt):
        return len(known)
    return new.num_computed_tokens + 1
