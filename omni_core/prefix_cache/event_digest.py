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
    """Blocks that enter a request's table outside its hit span, copy destinations left out: new tenancies."""
    copies: tuple[tuple[int, int, int], ...]
    """(source block, destination block, rows from the block's start), in order."""
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
            hit_blocks = max(0, -(-event.num_computed_tokens // table.block_size))
            fresh.extend(event.block_ids[hit_blocks:])
            error = _refusal(event, hit_blocks, table.block_size)
            if error is not None:
                refused.append(error)
    for copy in events.block_copies:
        named.extend((copy.source_block_id, copy.destination_block_id))
    table.check_blocks(np.array(named, np.int64), "new_step_starts")
    refused_ids = {error.req_id for error in refused}
    started = tuple(
        _started(event, table.block_size)
        for event in events.requests
        if event.kind is RequestEventKind.STARTED and event.req_id not in refused_ids
    )
    copies = _copies(events, table.block_size)
    copied_onto = {destination for _, destination, _ in copies}
    fresh_blocks = np.array([block for block in fresh if block not in copied_onto], np.int64)
    return EventDigest(tuple(ended), fresh_blocks, copies, started, tuple(refused))


def _copies(events: StepEvents, block_size: int) -> tuple[tuple[int, int, int], ...]:
    """Of a block that a hit ends inside, only the rows of the hit are copied: the others are of other tokens."""
    hit_rows = {
        event.block_ids[event.num_computed_tokens // block_size]: event.num_computed_tokens % block_size
        for event in events.requests
        if event.num_computed_tokens > 0
        and event.num_computed_tokens % block_size
        and event.num_computed_tokens // block_size < len(event.block_ids)
    }
    return tuple(
        (
            copy.source_block_id,
            copy.destination_block_id,
            hit_rows.get(copy.destination_block_id, block_size),
        )
        for copy in events.block_copies
    )


def _refusal(event: RequestEvent, hit_blocks: int, block_size: int) -> RequestError | None:
    if event.kind is not RequestEventKind.STARTED:
        blocks = f"{len(event.block_ids)} blocks" if event.block_ids else "no block list"
        return LifecycleUnsupportedError(
            event.req_id,
            f"{event.kind.value} with {blocks} and {event.num_computed_tokens} computed tokens; this version "
            f"serves no {event.kind.value} request: size the KV cache so that none is preempted, or run it again",
        )
    if event.num_computed_tokens < 0 or event.num_scheduled_tokens < 0 or hit_blocks > len(event.block_ids):
        return RequestEventError(
            event.req_id,
            f"started with num_computed_tokens={event.num_computed_tokens} and num_scheduled_tokens="
            f"{event.num_scheduled_tokens}: neither may be negative, and the first needs {hit_blocks} blocks of "
            f"block_size={block_size}, but its table names {len(event.block_ids)}",
        )
    return None


def _started(event: RequestEvent, block_size: int) -> StartedRequest:
    positions = np.arange(event.num_computed_tokens, dtype=np.int64)
    blocks = np.array(event.block_ids, np.int64)
    slots = blocks[positions // block_size] * block_size + positions % block_size if len(positions) else positions
    return StartedRequest(event.req_id, slots, event.num_scheduled_tokens)
