# SPDX-License-Identifier: Apache-2.0
"""What is refused of a snapshot before anything changes. Every case is a bug of the sender."""

from __future__ import annotations

from dataclasses import dataclass

from omni_core.diffusion_kv.errors import KVWorkerError
from omni_core.diffusion_kv.parallel import RankGroup
from omni_core.diffusion_kv.snapshot import KVSnapshot, RowSnapshot
from omni_core.diffusion_kv.worker.page_pool import NULL_PAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotLimits:
    """What a worker has room for."""

    num_blocks: int
    """Pages, the null page included."""
    block_size: int
    max_rows: int
    """Rows of one request."""
    max_blocks_per_row: int

    def check(self, snapshot: KVSnapshot, cfg: RankGroup) -> None:
        """Check one request's snapshot.

        Raises:
            KVWorkerError: anything in it that no scheduler may send; names the request, the row and the value.
        """
        name = f"snapshot of request {snapshot.request_id!r}"
        if not snapshot.request_id:
            raise KVWorkerError("a snapshot without a request id; pages are kept under it")
        if type(snapshot.generation) is not int or snapshot.generation < 1:
            raise KVWorkerError(f"{name}: generation={snapshot.generation!r}; it is an int from 1")
        if not snapshot.rows:
            raise KVWorkerError(f"{name} has no row")
        if len(snapshot.rows) > self.max_rows:
            raise KVWorkerError(
                f"{name} has {len(snapshot.rows)} rows and diffusion_kv_max_rows_per_request={self.max_rows}"
            )
        if cfg.size > 1 and len(snapshot.rows) != cfg.size:
            raise KVWorkerError(
                f"{name} has {len(snapshot.rows)} CFG rows for {cfg.size} CFG-parallel ranks; each rank computes one"
            )
        for index, row in enumerate(snapshot.rows):
            self._check_row(f"{name}, row {row.row_index}", index, row)
        hits = {row.cached_prefix_tokens for row in snapshot.rows}
        if len(hits) > 1:
            raise KVWorkerError(f"{name}: its rows hit {sorted(hits)} tokens; rows of one forward start at one token")
        self._check_writable_pages(name, snapshot)

    def _check_row(self, name: str, index: int, row: RowSnapshot) -> None:
        if type(row.row_index) is not int or row.row_index != index:
            raise KVWorkerError(f"{name} stands in place {index}; rows are numbered 0, 1, … in order")
        cached = row.cached_prefix_tokens
        if type(cached) is not int:
            raise KVWorkerError(f"{name}: cached_prefix_tokens={cached!r} is a {type(cached).__name__}, no plain int")
        if not 0 <= cached <= row.geometry.prefix_tokens:
            raise KVWorkerError(
                f"{name}: cached_prefix_tokens={cached} is not within its prefix of {row.geometry.prefix_tokens}"
            )
        if cached % self.block_size:
            raise KVWorkerError(
                f"{name}: cached_prefix_tokens={cached} are no whole pages of block_size={self.block_size}"
            )
        if len(row.block_ids) != 1:
            raise KVWorkerError(f"{name}: pages of {len(row.block_ids)} KV cache groups; this worker has one")
        self._check_pages(name, row.block_ids[0], row.geometry.total_tokens)

    def _check_pages(self, name: str, pages: tuple[int, ...], total_tokens: int) -> None:
        wanted = -(-total_tokens // self.block_size)
        if len(pages) != wanted:
            raise KVWorkerError(
                f"{name}: {len(pages)} pages for {total_tokens} tokens; block_size={self.block_size} makes it {wanted}"
            )
        if wanted > self.max_blocks_per_row:
            raise KVWorkerError(
                f"{name}: {wanted} pages, and a block-table row has room for max_blocks_per_row="
                f"{self.max_blocks_per_row}"
            )
        for page in pages:
            if type(page) is not int:
                raise KVWorkerError(f"{name}: page id {page!r} is a {type(page).__name__}, no plain int")
        if NULL_PAGE in pages:
            raise KVWorkerError(f"{name}: page {NULL_PAGE} is vLLM's null page and holds nobody's tokens")
        if min(pages) < 0 or max(pages) >= self.num_blocks:
            outside = next(page for page in pages if not 0 <= page < self.num_blocks)
            raise KVWorkerError(f"{name}: page id {outside} is outside the pool of num_blocks={self.num_blocks}")

    def _check_writable_pages(self, name: str, snapshot: KVSnapshot) -> None:
        """No page that a row writes may be another row's, or twice its own."""
        read_only = {
            page for row in snapshot.rows for page in row.block_ids[0][: row.cached_prefix_tokens // self.block_size]
        }
        written = [
            page for row in snapshot.rows for page in row.block_ids[0][row.cached_prefix_tokens // self.block_size :]
        ]
        twice = len(set(written)) != len(written)
        if twice or not read_only.isdisjoint(written):
            raise KVWorkerError(
                f"{name}: a page that one row writes stands "
                f"{'twice in the rows' if twice else 'among the cached pages'}; rows share cached pages alone"
            )
