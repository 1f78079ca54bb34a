# SPDX-License-Identifier: Apache-2.0
"""A step's events, checked and turned into arrays before anything is changed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from omni_core.prefix_cache.errors import LifecycleUnsupportedError, RequestError, RequestEventError
from omni_core.prefix_cache.events import RequestEvent, RequestEventKind, StepEvents
from omni_core.prefix_cache.slot_table import Slots, SlotTable


@dataclass(frozen=True, slots=True)
class StartedRequest:
    """A request scheduled for the first time, with the slots of its prefix hit."""

    req_id: str
    hit_slots: Slots
    """`(num_computed_tokens,)`."""
    num_scheduled_tokens: int


@dataclass(frozen=True, slots=True)
class EventDigest:
    """What a step's events come to."""

    ended: tuple[str, ...]
    fresh_blocks: Slots
    """Blocks that enter a request's table outside its hit span: each starts a new tenancy."""
    copies: tuple[tuple[int, int], ...]
    """(source, destination) blocks, in order."""
    started: tuple[StartedRequest, ...]
    refused: tuple[RequestError, ...]
    """Requests this version does not serve, with the reason."""


def digest_events(events: StepEvents, table: SlotTable) -> EventDigest:
    """Check a step's events against the mirrored geometry. Changes nothing; no lock needed.

    Raises:
        SlotOutOfRangeError: a block id lies outside the KV cache.
    """
    ended: list[str] = []
    fresh: list[int] = []
    named: list[int] = []
    refused: list[RequestError] = []
    for event in events.requests:
        named.extend(event.block_ids)
        if event.kind in (RequestEventKind.FINISHED, RequestEventKind.ABORTED):
            ended.append(event.req_id)
        elif event.kind is RequestEventKind.EXTENDED:
            fresh.extend(event.block_ids)
        else:
            hit_blocks = -(-event.num_computed_tokens // table.block_size)
            fresh.extend(event.block_ids[hit_blocks:])
            error = _refusal(event, hit_blocks, table.block_size)
            if error is not None:
                refused.append(error)
    copies = tuple((copy.source_block_id, copy.destination_block_id) for copy in events.block_copies)
    for source, destination in copies:
        named.extend((source, destination))
        fresh.append(destination)
    table.check_blocks(np.array(named, np.int64), "new_step_starts")
    refused_ids = {error.req_id for error in refused}
    started = tuple(
        _started(event, table.block_size)
        for event in events.requests
        if event.kind is RequestEventKind.STARTED and event.req_id not in refused_ids
    )
    return EventDigest(tuple(ended), np.array(fresh, np.int64), copies, started, tuple(refused))


def _refusal(event: RequestEvent, hit_blocks: int, block_size: int) -> RequestError | None:
    if event.kind is not RequestEventKind.STARTED:
        blocks = f"{len(event.block_ids)} blocks" if event.block_ids else "no block list"
        return LifecycleUnsupportedError(
            event.req_id,
            f"{event.kind.value} with {blocks} and {event.num_computed_tokens} computed tokens; this version "
            f"serves no {event.kind.value} request: size the KV cache so that none is preempted, or run it again",
        )
    if event.num_computed_tokens < 0 or hit_blocks > len(event.block_ids):
        return RequestEventError(
            event.req_id,
            f"started with num_computed_tokens={event.num_computed_tokens}, which needs {hit_blocks} blocks of "
            f"block_size={block_size}, but its table names {len(event.block_ids)}",
        )
    return None


def _started(event: RequestEvent, block_size: int) -> StartedRequest:
    positions = np.arange(event.num_computed_tokens, dtype=np.int64)
    blocks = np.array(event.block_ids, np.int64)
    slots = blocks[positions // block_size] * block_size + positions % block_size if len(positions) else positions
    return StartedRequest(event.req_id, slots, event.num_scheduled_tokens)
