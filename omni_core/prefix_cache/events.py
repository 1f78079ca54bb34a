# SPDX-License-Identifier: Apache-2.0
"""What an engine tells the cache about a step: plain, immutable values, no scheduler objects."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt


class RequestEventKind(Enum):
    """What happened to a request since the last step."""

    STARTED = "started"
    """Scheduled as new; `block_ids` is its whole table, `num_computed_tokens` its prefix hit. For an id that is live it
    means the same as RESUMED: vLLM's V2 runner announces resumed requests, and async-chunk continuations, this way."""
    EXTENDED = "extended"
    """Got further blocks; `block_ids` are those appended. Never in a step that also announces its whole table."""
    RESUMED = "resumed"
    """Came back after a preemption; `block_ids` is its whole new table, `num_computed_tokens` its fresh hit."""
    REPLACED = "replaced"
    """Its content changed: a new version begins. `block_ids` is its whole table, `num_computed_tokens` the tokens whose
    KV stays. What was promised of the old version is dropped."""
    FINISHED = "finished"
    """Ended; its blocks may already belong to another request."""
    ABORTED = "aborted"
    """Ended early. Blocks whose hash the scheduler published keep their rows."""


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """One request's news."""

    kind: RequestEventKind
    req_id: str
    block_ids: tuple[int, ...] = ()
    """Block ids in the table's order; see the kind."""
    num_computed_tokens: int = 0
    """Tokens the engine skips because their KV is cached (STARTED, RESUMED, REPLACED): the next run starts there."""
    num_scheduled_tokens: int = 0
    """Rows this step will bring for the request (with `num_computed_tokens`). Sizes the output buffer; 0 if unknown."""
    num_known_tokens: int = 0
    """Prompt tokens and accepted output tokens of a resumed request; 0 if unknown. Needed only if its latest step had
    draft tokens: it says which of them were accepted."""
    block_digests: tuple[int, ...] = ()
    """For each block of `block_ids`, a 64-bit number that stands for the token prefix up to its end, 0 where it is not
    known or the block is not full; empty if none is known. A hit that names a digest finds no rows in a block that was
    told another, or none: tell the digest of every block that becomes full, here or in `filled_blocks`."""
    adapter_id: int = 0
    """The adapter that computes the request's rows, as `bump_adapter_version` names it; 0: the bare model. What the
    event says that a request enters with holds until its end. A hit finds no rows in blocks of another adapter."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The engine copies one KV block onto another before the forward of this step.

    Of a destination that enters a table in this step, only the rows inside the request's hit are kept.
    """

    source_block_id: int
    destination_block_id: int


@dataclass(frozen=True, slots=True)
class FilledBlock:
    """A block of a live request has become full, or will in this step: now its digest is known."""

    block_id: int
    digest: int
    """As in `RequestEvent.block_digests`; not 0."""


@dataclass(frozen=True, slots=True)
class StepEvents:
    """All news of one step. The order of `requests` does not matter; `block_copies` are applied in order."""

    requests: tuple[RequestEvent, ...] = ()
    block_copies: tuple[BlockCopy, ...] = ()
    filled_blocks: tuple[FilledBlock, ...] = ()


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Where a step's rows belong: batch order, one entry per real row, padding rows left out.

    The arrays are read during `save_outputs` only and copied where they are kept.
    """

    req_ids: tuple[str, ...]
    """Requests in the order of the batch's rows."""
    starts: npt.NDArray[np.int64]
    """`(num_reqs + 1,)`: request `i` has rows `starts[i]` to `starts[i + 1]`."""
    positions: npt.NDArray[np.int64]
    """`(num_tokens,)`: the token position of each row in its request."""
    slots: npt.NDArray[np.int64]
    """`(num_tokens,)`: the flat KV slot of each row, `block * block_size + offset`; -1 is not stored."""
    num_draft_tokens: npt.NDArray[np.int64] | None = None
    """`(num_reqs,)`: rows at the end of each run that were computed for draft tokens; `None`: no request has any."""
