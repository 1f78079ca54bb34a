# SPDX-License-Identifier: Apache-2.0
"""A step's events, checked and turned into arrays before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from omni_core.prefix_cache.errors import RequestError, RequestEventError
from omni_core.prefix_cache.events import RequestEvent, RequestEventKind, StepEvents
from omni_core.prefix_cache.slot_table import NO_ADAPTER, Digests, Slots, SlotTable, is_adapter_id

_DIGEST_BITS = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class EnteringRequest:
    """A request that starts, comes back, or begins a new version of its content; its next run starts at its hit."""

    kind: RequestEventKind
    req_id: str
    block_ids: tuple[int, ...]
    hit_slots: Slots
    """`(num_computed_tokens,)`: where the rows of its hit lie."""
    hit_digests: Digests
    """For each block of the hit, the digest the request expects there; 0 where it names none."""
    num_scheduled_tokens: int
    num_known_tokens: int
    adapter_id: int
    """As its event names it; a live request keeps the one it has."""
    own_blocks: tuple[int, ...]
    """Blocks behind its hit: their tenancies begin with this step."""

    @property
    def hit(self) -> int:
        """Tokens whose KV the engine has."""
        return len(self.hit_slots)


@dataclass(frozen=True, slots=True)
class EventDigest:
    """What a step's events come to."""

    ended: tuple[str, ...]
    fresh_blocks: Slots
    """Blocks that enter a request's table outside its hit span, copy destinations left out: new tenancies."""
    known_blocks: Slots
    known_digests: Digests
    """Blocks whose digest the events tell, and the digests."""
    private_blocks: tuple[tuple[str, int, int], ...]
    """(request, block, digest): blocks that a replaced request keeps in part."""
    copies: tuple[tuple[int, int, int], ...]
    """(source block, destination block, rows from the block's start), in order."""
    extended: tuple[tuple[str, tuple[int, ...]], ...]
    entering: tuple[EnteringRequest, ...]
    refused: tuple[RequestError, ...]
    """Requests whose event contradicts itself."""


_NO_BLOCKS: Slots = np.zeros(0, np.int64)
_NO_NEWS = EventDigest((), _NO_BLOCKS, _NO_BLOCKS, np.zeros(0, np.uint64), (), (), (), (), ())


def digest_events(events: StepEvents, table: SlotTable) -> EventDigest:
    """Check a step's events against the mirrored geometry. Changes nothing; no lock needed.

    Raises:
        SlotOutOfRangeError: a block id lies outside the KV cache.
    """
    if not (events.requests or events.block_copies or events.filled_blocks):
        return _NO_NEWS
    ended: list[str] = []
    extended: list[tuple[str, tuple[int, ...]]] = []
    entering: dict[str, RequestEvent] = {}
    refused: dict[str, RequestError] = {}
    fresh: list[int] = []
    named: list[int] = []
    known = {filled.block_id: filled.digest for filled in events.filled_blocks}
    for event in events.requests:
        named.extend(event.block_ids)
        if event.kind in (RequestEventKind.FINISHED, RequestEventKind.ABORTED):
            ended.append(event.req_id)
            continue
        kept = 0 if event.kind is RequestEventKind.EXTENDED else _blocks_of(event.num_computed_tokens, table.block_size)
        fresh.extend(event.block_ids[kept:])
        error = _contradiction(event, kept, table.block_size)
        if error is not None:
            refused[event.req_id] = error
            continue
        if event.block_digests:
            # The block the hit ends inside is the request's own to fill: nobody else says what it holds then.
            own = kept if event.kind is RequestEventKind.EXTENDED else event.num_computed_tokens // table.block_size
            known.update(zip(event.block_ids[own:], event.block_digests[own:], strict=True))
        if event.kind is RequestEventKind.EXTENDED:
            extended.append((event.req_id, event.block_ids))
        elif not _enter(event, entering):
            refused[event.req_id] = RequestEventError(event.req_id, "entered twice in one step; announce it once")
    for req_id in {req_id for req_id, _ in extended} & entering.keys():
        refused[req_id] = RequestEventError(
            req_id, "got blocks appended in the step that announces its whole block table; name all of them there"
        )
    for copy in events.block_copies:
        named.extend((copy.source_block_id, copy.destination_block_id))
    table.check_blocks(np.array([*named, *known], np.int64), "new_step_starts")
    copies = _copies(events, table.block_size)
    copied_onto = {destination for _, destination, _ in copies}
    whole = [event for event in entering.values() if event.req_id not in refused]
    return EventDigest(
        tuple(ended),
        np.array([block for block in fresh if block not in copied_onto], np.int64),
        np.array(list(known), np.int64),
        _digests(known.values()),
        tuple(block for event in whole if (block := _private_block(event, table.block_size)) is not None),
        copies,
        tuple(extended),
        tuple(_entering(event, table.block_size) for event in whole),
        tuple(refused.values()),
    )


def _enter(event: RequestEvent, entering: dict[str, RequestEvent]) -> bool:
    """Note the event; of an id with replacements only the last of these counts. Returns whether that makes sense."""
    earlier = entering.get(event.req_id)
    replaced = earlier is not None and earlier.kind is RequestEventKind.REPLACED
    if earlier is None or event.kind is RequestEventKind.REPLACED:
        entering[event.req_id] = event
    return earlier is None or replaced or event.kind is RequestEventKind.REPLACED


def _copies(events: StepEvents, block_size: int) -> tuple[tuple[int, int, int], ...]:
    """Of a block that enters a table now, only rows of the hit are copied: behind it are other tokens' rows."""
    if not events.block_copies:
        return ()
    hit_rows: dict[int, int] = {}
    for event in events.requests:
        hit = 0 if event.kind is RequestEventKind.EXTENDED else max(0, event.num_computed_tokens)
        whole, rest = divmod(hit, block_size)
        outside = event.block_ids[whole:]
        hit_rows.update(dict.fromkeys(outside, 0))
        if rest and outside:
            hit_rows[outside[0]] = rest
    return tuple(
        (
            copy.source_block_id,
            copy.destination_block_id,
            hit_rows.get(copy.destination_block_id, block_size),
        )
        for copy in events.block_copies
    )


def _contradiction(event: RequestEvent, kept_blocks: int, block_size: int) -> RequestError | None:
    count = len(event.block_ids)
    if event.kind is RequestEventKind.RESUMED and not count:
        return RequestEventError(
            event.req_id,
            f"resumed with {event.num_computed_tokens} computed tokens and no block list: where its rows lie cannot be "
            "told; announce its whole new block table",
        )
    if event.num_computed_tokens < 0 or event.num_scheduled_tokens < 0 or kept_blocks > count:
        return RequestEventError(
            event.req_id,
            f"{event.kind.value} with num_computed_tokens={event.num_computed_tokens} and num_scheduled_tokens="
            f"{event.num_scheduled_tokens}: neither may be negative, and the first needs {kept_blocks} blocks of "
            f"block_size={block_size}, but its table names {count}",
        )
    if event.adapter_id != NO_ADAPTER and not is_adapter_id(event.adapter_id):
        return RequestEventError(
            event.req_id, f"{event.kind.value} with adapter_id={event.adapter_id!r}: must be from 0 to 2**63 - 1"
        )
    if event.block_digests and len(event.block_digests) != count:
        return RequestEventError(
            event.req_id, f"{event.kind.value} with {count} blocks and {len(event.block_digests)} block_digests"
        )
    return None


def _private_block(event: RequestEvent, block_size: int) -> tuple[str, int, int] | None:
    """The block that a replaced request keeps in part, with the digest it will have.

    Its hash may stay published for what the request held before (faults.md, row 66).
    """
    kept, rest = divmod(event.num_computed_tokens, block_size)
    if event.kind is not RequestEventKind.REPLACED or not rest:
        return None
    digest = event.block_digests[kept] & _DIGEST_BITS if event.block_digests else 0
    return event.req_id, event.block_ids[kept], digest


def _entering(event: RequestEvent, block_size: int) -> EnteringRequest:
    positions = np.arange(event.num_computed_tokens, dtype=np.int64)
    blocks = np.array(event.block_ids, np.int64)
    slots = blocks[positions // block_size] * block_size + positions % block_size if len(positions) else positions
    kept = _blocks_of(event.num_computed_tokens, block_size)
    digests = event.block_digests[:kept] or (0,) * kept
    return EnteringRequest(
        event.kind,
        event.req_id,
        event.block_ids,
        slots,
        _digests(digests),
        event.num_scheduled_tokens,
        event.num_known_tokens,
        event.adapter_id,
        event.block_ids[kept:],
    )


def _digests(values: Iterable[int]) -> npt.NDArray[np.uint64]:
    return np.array([value & _DIGEST_BITS for value in values], np.uint64)


def _blocks_of(num_tokens: int, block_size: int) -> int:
    return max(0, -(-num_tokens // block_size))
