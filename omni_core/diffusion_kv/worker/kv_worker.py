# SPDX-License-Identifier: Apache-2.0
"""Which rows of which requests this rank holds, in which pages. It never allocates or frees a page."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from omni_core.diffusion_kv.attention.owner import KVShape, RowKey
from omni_core.diffusion_kv.errors import DiffusionKVConfigError, KVWorkerError
from omni_core.diffusion_kv.parallel import OneRank, RankGroup
from omni_core.diffusion_kv.snapshot import KVSnapshot, RowSnapshot
from omni_core.diffusion_kv.worker.block_tables import BlockTables
from omni_core.diffusion_kv.worker.device_memory import DeviceMemory
from omni_core.diffusion_kv.worker.install_rules import InstallAction, install_action
from omni_core.diffusion_kv.worker.page_pool import KVPagePool
from omni_core.diffusion_kv.worker.snapshot_checks import SnapshotLimits

_ALONE = OneRank()


@dataclass(slots=True, eq=False)
class InstalledRow:
    """One row of this rank. The worker and its attention owner alone change it."""

    snapshot: RowSnapshot
    table_row: int
    """Its row of the block tables."""
    first_step_done: bool = False
    """Whether every layer kept the keys and values of `[hit, total)`."""

    @property
    def page_ids(self) -> tuple[int, ...]:
        """Its pages, in order."""
        return self.snapshot.block_ids[0]


@dataclass(slots=True, eq=False)
class _Held:
    """What is held of one request."""

    snapshot: KVSnapshot
    rows: dict[int, InstalledRow] = field(default_factory=dict)


class KVWorker:
    """Pages, block tables and who has which, on one rank. One thread calls; nothing blocks on another."""

    def __init__(
        self,
        shape: KVShape,
        num_blocks: int,
        block_size: int,
        *,
        max_rows: int,
        max_num_seqs: int,
        max_blocks_per_row: int,
        memory: DeviceMemory,
        cfg: RankGroup = _ALONE,
    ) -> None:
        """Allocate every page and table; the step path allocates none.

        Args:
            shape: keys and values of one layer on this rank.
            num_blocks: pages, vLLM's null page included; the same on every rank.
            block_size: tokens per page.
            max_rows: rows of one request, `diffusion_kv_max_rows_per_request`.
            max_num_seqs: rows held at once, the stage's native `max_num_seqs`: requests that run at once times rows.
            max_blocks_per_row: pages of the longest row.
            memory: where the tensors come from; closed with the worker.
            cfg: ranks that compute one CFG row each; this one holds the row of its rank.

        Raises:
            DiffusionKVConfigError: a number that is no positive int, or fewer than two pages.
            MemoryError: the device has not that much.
        """
        for name, value in (
            ("max_rows", max_rows),
            ("max_num_seqs", max_num_seqs),
            ("max_blocks_per_row", max_blocks_per_row),
        ):
            if type(value) is not int or value < 1:
                raise DiffusionKVConfigError(f"{name}={value!r}; it is a positive int")
        self._shape = shape
        self._memory = memory
        self._cfg = cfg
        self._pool = KVPagePool(shape, num_blocks, block_size, memory)
        self._tables = BlockTables(max_num_seqs, max_blocks_per_row, memory)
        self._limits = SnapshotLimits(
            num_blocks=num_blocks, block_size=block_size, max_rows=max_rows, max_blocks_per_row=max_blocks_per_row
        )
        self._held: dict[str, _Held] = {}
        self._cached_readers = np.zeros(num_blocks, dtype=np.int32)
        self._closed = False

    @property
    def shape(self) -> KVShape:
        """Keys and values of one layer on this rank."""
        return self._shape

    @property
    def pool(self) -> KVPagePool:
        """The pages."""
        return self._pool

    @property
    def tables(self) -> BlockTables:
        """Which pages each installed row has."""
        return self._tables

    @property
    def memory(self) -> DeviceMemory:
        """Where an attention owner's index buffers come from, while it is made."""
        return self._memory

    @property
    def cached_readers(self) -> npt.NDArray[np.int32]:
        """`[num_blocks]`: how many installed rows hit each page. Such a page is never written."""
        return self._cached_readers

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Requests that hold pages, in order of installation."""
        return tuple(self._held)

    @property
    def closed(self) -> bool:
        """Whether `close` was called: no page may be written any more."""
        return self._closed

    def install(self, snapshot: KVSnapshot) -> None:
        """Take the pages of one request, or see that they are held already.

        Of a CFG-parallel stage this rank keeps its own row of the snapshot.

        Raises:
            KVWorkerError: malformed, stale, in conflict with what is held, or no table row is free; nothing was
                changed.
        """
        self._check_open("install")
        self._limits.check(snapshot, self._cfg)
        held = self._held.get(snapshot.request_id)
        action = install_action(None if held is None else held.snapshot, snapshot)
        if held is None:
            self._take_rows(snapshot)
        elif action is InstallAction.RAISE_GENERATION:
            held.snapshot = snapshot
            for row in held.rows.values():
                row.first_step_done = False
        elif action is not InstallAction.NOTHING:
            raise _refusal(action, held.snapshot, snapshot)

    def remove(self, request_id: str, generation: int) -> None:
        """Drop what is held of a request in this generation or an earlier one.

        A late removal of an earlier generation than the held one does nothing, nor does one of a request that holds
        nothing. The pages keep their content: published ones are hit later.
        """
        held = self._held.get(request_id)
        if held is None or held.snapshot.generation > generation:
            return
        del self._held[request_id]
        for row in held.rows.values():
            self._count_readers(row.snapshot, -1)
            self._tables.give_back(row.table_row)

    def generation(self, request_id: str) -> int | None:
        """The held generation of a request; `None`: it holds nothing."""
        held = self._held.get(request_id)
        return None if held is None else held.snapshot.generation

    def row(self, key: RowKey) -> InstalledRow | None:
        """An installed row of this rank, or `None`."""
        held = self._held.get(key.request_id)
        return None if held is None else held.rows.get(key.row_index)

    def close(self) -> None:
        """Free the device memory. Idempotent; every later `install` or forward raises."""
        self._closed = True
        self._held.clear()
        self._memory.close()

    def _take_rows(self, snapshot: KVSnapshot) -> None:
        rows = snapshot.rows if self._cfg.size == 1 else (snapshot.rows[self._cfg.rank],)
        if len(rows) > self._tables.num_free_rows:
            raise KVWorkerError(
                f"request {snapshot.request_id!r} needs {len(rows)} block-table rows and {self._tables.num_free_rows} "
                f"of {self._tables.num_rows} are free; the scheduler ran more requests than max_num_seqs allows, or "
                f"did not remove ended ones: {', '.join(map(repr, self._held))}"
            )
        held = self._held[snapshot.request_id] = _Held(snapshot)
        for row in rows:
            held.rows[row.row_index] = InstalledRow(row, self._tables.take(row.block_ids[0]))
            self._count_readers(row, 1)

    def _count_readers(self, row: RowSnapshot, change: int) -> None:
        cached = row.block_ids[0][: row.cached_prefix_tokens // self._pool.block_size]
        self._cached_readers[list(cached)] += change

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise KVWorkerError(f"{what}: the worker was closed, and its pages are gone")


def _refusal(action: InstallAction, held: KVSnapshot, incoming: KVSnapshot) -> KVWorkerError:
    name = f"request {incoming.request_id!r}"
    reasons = {
        InstallAction.REFUSE_CONFLICT: (
            f"{name}: generation {incoming.generation} is installed with other rows; one reservation has one content"
        ),
        InstallAction.REFUSE_STALE: (
            f"{name}: a stale snapshot of generation {incoming.generation}; generation {held.generation} is installed"
        ),
        InstallAction.REFUSE_NOT_REMOVED: (
            f"{name}: generation {incoming.generation} has other pages than the installed generation "
            f"{held.generation}, which was not removed first"
        ),
    }
    return KVWorkerError(reasons[action])
