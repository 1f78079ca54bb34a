# SPDX-License-Identifier: Apache-2.0
"""One step's batch, copied out of a model runner: whose rows there are, at which positions, and in which slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from omni_core.integrations.vllm.errors import RowsBeyondTableError
from omni_core.prefix_cache.batch_rows import BatchRows, Integers


@dataclass(frozen=True, slots=True)
class StepArrays:
    """One step's batch: rows in batch order, padding left out. Nothing in it is the runner's own."""

    req_ids: tuple[str, ...]
    starts: npt.NDArray[np.int64]
    """`(num_reqs + 1,)`: request `i` has rows `starts[i]` to `starts[i + 1]`."""
    positions: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int64]
    """`UNKNOWN_TOKEN_ID` where the prompt was given as embeddings, and where the runner has no token on the host."""
    num_draft_tokens: npt.NDArray[np.int64] | None = None
    """`(num_reqs,)`: rows at the end of each run that were computed for draft tokens; `None`: no drafts."""

    @property
    def first_sampled_positions(self) -> npt.NDArray[np.int64]:
        """`(num_reqs,)`: where the first token sampled for each request stands: behind its run, drafts left out."""
        behind = self.positions[self.starts[1:] - 1] + 1
        return behind if self.num_draft_tokens is None else behind - self.num_draft_tokens

    def first_rows(self, counts: npt.NDArray[np.int64]) -> StepArrays:
        """Only the first `counts[i]` rows of request `i`, without drafts."""
        offsets = np.arange(self.starts[-1]) - np.repeat(self.starts[:-1], np.diff(self.starts))
        kept = offsets < np.repeat(counts, np.diff(self.starts))
        starts = np.zeros_like(self.starts)
        np.cumsum(counts, out=starts[1:])
        return StepArrays(self.req_ids, starts, self.positions[kept], self.slots[kept], self.token_ids[kept])


@dataclass(frozen=True, slots=True)
class HostBlockTable:
    """The blocks of a batch's requests, in host memory."""

    rows: npt.NDArray[np.int32]
    """`(at least num_reqs, max_blocks)`: block ids; behind a request's own blocks there is anything."""
    num_blocks: Integers
    """`(at least num_reqs,)`: how many of each row are the request's."""
    row_of_req: Integers | None
    """`(num_reqs,)`: the row of each request of the batch; `None`: they are the first, in batch order."""
    block_size: int
    """Tokens per entry."""


def slots_of(req_ids: Sequence[str], rows: BatchRows, table: HostBlockTable) -> npt.NDArray[np.int64]:
    """`(num_rows,)`: the slot of each row. Pure.

    Raises:
        RowsBeyondTableError: a request has a row beyond its blocks; names both.
    """
    in_table = rows.in_batch if table.row_of_req is None else table.row_of_req[rows.in_batch]
    blocks, offsets = np.divmod(rows.positions, table.block_size)
    beyond = blocks >= table.num_blocks[in_table]
    if np.logical_or.reduce(beyond):
        first_beyond = int(beyond.argmax())
        raise RowsBeyondTableError(
            f"request {req_ids[int(rows.in_batch[first_beyond])]!r} has a row at position "
            f"{int(rows.positions[first_beyond])}, but its {int(table.num_blocks[in_table[first_beyond]])} KV blocks "
            f"of {table.block_size} tokens end before it; report this"
        )
    slots: npt.NDArray[np.int64] = table.rows[in_table, blocks].astype(np.int64)
    slots *= table.block_size
    slots += offsets
    return slots
