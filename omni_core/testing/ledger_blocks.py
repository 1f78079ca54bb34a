# SPDX-License-Identifier: Apache-2.0
"""The ledger's blocks: which rows lie in which, whose tenancy it is, and what a copy or new weights make of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.testing.engine_schedule import ScheduledRun
from omni_core.testing.ledger_records import LedgerBlock, StoredRow


class LedgerBlocks:
    """Every block of one engine, made when it is first named. Engine thread only."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: dict[int, LedgerBlock] = {}

    def block(self, block_id: int) -> LedgerBlock:
        """One block, in its current tenancy."""
        return self._blocks.setdefault(block_id, LedgerBlock())

    def block_at(self, run: ScheduledRun, position: int) -> LedgerBlock:
        """The block in which a run has a position."""
        return self.block(run.block_ids[position // self._block_size])

    def rows_at(self, run: ScheduledRun, position: int) -> dict[str, StoredRow]:
        """The rows stored where a run has a position, by key; may be changed."""
        return self.block_at(run, position).stored.setdefault(position % self._block_size, {})

    def num_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-num_tokens // self._block_size)

    def new_tenancies(self, block_ids: Iterable[int]) -> None:
        """These blocks are given out anew: nothing is stored in them."""
        for block_id in block_ids:
            old = self.block(block_id)
            previous = old.keys() if old.stored else old.previous_keys
            self._blocks[block_id] = LedgerBlock(old.tenancy + 1, previous_keys=previous)

    def copy(self, destination_block_id: int, source: LedgerBlock, num_rows: int) -> None:
        """A block begins a tenancy with the first rows of another."""
        self.new_tenancies([destination_block_id])
        self._blocks[destination_block_id].stored = {
            offset: {key: replace(row, copied=True) for key, row in rows.items()}
            for offset, rows in source.stored.items()
            if offset < num_rows
        }

    def weights_changed(self, adapter_id: int | None) -> None:
        """Forget every row of the old weights (`None`) or of an adapter; who holds which block stays."""
        for block in self._blocks.values():
            for offset, rows in block.stored.items():
                old = [key for key, row in rows.items() if adapter_id in (None, row.adapter_id)]
                if HIDDEN_KEY in old:
                    block.old_offsets.add(offset)
                for key in old:
                    del rows[key]
