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
    """Scheduled for the first time; `block_ids` is its whole table, `num_computed_tokens` its prefix hit."""
    EXTENDED = "extended"
    """Got further blocks; `block_ids` are those appended."""
    RESUMED = "resumed"
    """Came back after a preemption; `block_ids` is its whole new table. Not served by this version."""
    REPLACED = "replaced"
    """Its content changed. Not served by this version."""
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
    """Tokens the engine skips because their KV is cached (STARTED)."""
    num_scheduled_tokens: int = 0
    """Rows this step will bring for the request (STARTED). Sizes the output buffer; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The engine copies one KV block onto another before the forward of this step."""

    source_block_id: int
    destination_block_id: int


@dataclass(frozen=True, slots=True)
class StepEvents:
    """All news of one step. The order of `requests` does not matter; `block_copies` are applied in order."""

    requests: tuple[RequestEvent, ...] = ()
    block_copies: tuple[BlockCopy, ...] = ()


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
