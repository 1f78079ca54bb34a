# SPDX-License-Identifier: Apache-2.0
"""Which write each slot's row belongs to: tenancies and claims (logical), stamps (physical), read pins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from omni_core.prefix_cache.errors import HostMemoryError, SlotOutOfRangeError
from omni_core.prefix_cache.lazy_tables import KeyTables, zero_table

Slots = npt.NDArray[np.int64]
WriteIds = npt.NDArray[np.int64]
Digests = npt.NDArray[np.uint64]
"""What the token prefix up to a block's end is; 0: not known."""

ABSENT = 0
"""The write id that means: no row. Real ids start at 1 and never repeat."""

NOBODY = 0
"""The life a block is private to if it is private to none. Real lives start at 1."""

NO_ADAPTER = 0
"""The adapter of blocks that the bare model fills."""

SHARED_BYTES_PER_SLOT = 17
"""Bytes of the tables that all keys share, per slot: a floor, a pin count, a mark and the writer's number."""
SHARED_BYTES_PER_BLOCK = 40
"""The same, per block: two floors, a digest, an owner and an adapter."""
KEY_BYTES_PER_SLOT = 16
"""Bytes of one key's own tables, per slot: its latest claim and its stamp."""


def is_adapter_id(value: object) -> bool:
    """Whether `value` is the id of an adapter, as a table of int64 can hold it."""
    return type(value) is int and NO_ADAPTER < value < 1 << 63


class SlotTable:
    """numpy tables over the slots of the mirrored KV cache. Every method needs the state lock, or says otherwise.

    Logical state is the engine thread's. Tenancies and writes take their ids from one counter: a block's tenancy is a
    floor, the id it began with, and a row is present only if its latest claim lies above its block's floor. Starting a
    tenancy is therefore one store per block, whatever the number of keys. A new version of the weights is a second
    floor: rows below it are absent, but the block changed no hands, so its request is not forgotten there. Physical
    state is the committer's: the stamp of a row is the id of the write that lies there, or is being put there.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_slots = num_blocks * block_size
        self.last_id = ABSENT
        """The last id given out, to a write or a tenancy."""
        self.last_write_id = ABSENT
        """The last id given out to a write."""
        self._tenancy_floor: WriteIds = zero_table(num_blocks, np.int64)
        self._digests: Digests = zero_table(num_blocks, np.uint64)
        self._private_to: npt.NDArray[np.int64] = zero_table(num_blocks, np.int64)
        self._any_digest = False
        self._row_floor: WriteIds = zero_table(self.num_slots, np.int64)
        self._any_expired = False
        self._version_floor: WriteIds = zero_table(num_blocks, np.int64)
        self._any_version = False
        self._adapters: npt.NDArray[np.int64] = zero_table(num_blocks, np.int64)
        self.any_adapter = False
        """Whether an adapter ever filled a block."""
        self._pins: npt.NDArray[np.int32] = zero_table(self.num_slots, np.int32)
        self.key_tables = KeyTables(self.num_slots)
        """Makes those of new keys."""
        self._latest: dict[str, WriteIds] = {}
        self._stamp: dict[str, WriteIds] = {}
        self._mark: npt.NDArray[np.bool_] = zero_table(self.num_slots, np.bool_)
        self.writer_numbers: npt.NDArray[np.int32] = zero_table(self.num_slots, np.int32)
        """A number per slot that means something to the one writer, during a write. Committer thread only."""
        self.shared_bytes = sum(table.nbytes for table in vars(self).values() if isinstance(table, np.ndarray))
        """Bytes of the tables that all keys share; memory is committed as slots are used."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Stored keys, in the order they were added."""
        return tuple(self._latest)

    @property
    def key_bytes(self) -> dict[str, int]:
        """Bytes of each key's own tables. State lock held."""
        return {key: latest.nbytes + self._stamp[key].nbytes for key, latest in self._latest.items()}

    def check_blocks(self, block_ids: Slots, what: str) -> None:
        """Refuse block ids outside the KV cache. No lock needed.

        Raises:
            SlotOutOfRangeError: names `what` and the first bad id.
        """
        if block_ids.size and (block_ids.min() < 0 or block_ids.max() >= self.num_blocks):
            bad = block_ids[(block_ids < 0) | (block_ids >= self.num_blocks)][0]
            raise SlotOutOfRangeError(
                f"{what}: block {bad} lies outside the KV cache of num_blocks={self.num_blocks}; "
                "build the cache with the engine's num_blocks"
            )

    def new_key_tables(self, key: str) -> tuple[WriteIds, WriteIds]:
        """Zeroed claim and stamp tables for one key. No lock needed; memory is committed as slots are used.

        Raises:
            HostMemoryError: the operating system has not so much address space; names the key and the sizes.
        """
        try:
            return self.key_tables.of_new(key)
        except MemoryError as error:
            raise HostMemoryError(
                f"key {key!r}: num_blocks={self.num_blocks} x block_size={self.block_size} x {KEY_BYTES_PER_SLOT} "
                f"bytes of tables: {error}; give the engine fewer blocks, or the model fewer outputs that are stored"
            ) from error

    def add_key(self, key: str, tables: tuple[WriteIds, WriteIds]) -> None:
        """Begin to track `key` with tables from `new_key_tables`."""
        self._latest[key], self._stamp[key] = tables
        self.key_tables.taken(key)

    # -- logical state, engine thread ---------------------------------------------------------------------------------

    def start_tenancies(self, block_ids: Slots) -> None:
        """Make every key's rows of these blocks absent, for later plans only. No row, pin or stamp changes."""
        if block_ids.size:
            self.last_id += 1
            self._tenancy_floor[block_ids] = self.last_id
            if self._any_digest:
                self._digests[block_ids] = 0
                self._private_to[block_ids] = NOBODY
            if self.any_adapter:
                self._adapters[block_ids] = NO_ADAPTER

    def start_all_tenancies(self) -> None:
        """The same for every block (`reset`)."""
        self.last_id += 1
        self._tenancy_floor[:] = self.last_id
        if self._any_digest:
            self._digests[:] = 0
            self._private_to[:] = NOBODY
        if self.any_adapter:
            self._adapters[:] = NO_ADAPTER

    def expire_version(self, adapter_id: int | None = None) -> None:
        """What was written until now is of weights that are gone: absent for later plans, in every key.

        Args:
            adapter_id: only in blocks that this adapter fills; `None`: everywhere. One numpy expression over blocks.
        """
        self._any_version = True
        if adapter_id is None:
            self._version_floor[:] = self.last_id
        else:
            self._version_floor[self._adapters == adapter_id] = self.last_id

    def set_adapter(self, block_ids: Sequence[int], adapter_id: int) -> None:
        """In their present tenancies these blocks are filled with this adapter's rows."""
        if block_ids and (adapter_id != NO_ADAPTER or self.any_adapter):
            self.any_adapter = True
            self._adapters[list(block_ids)] = adapter_id

    def of_other_adapter(self, block_ids: Slots, adapter_id: int) -> npt.NDArray[np.bool_]:
        """For each block, whether another adapter than this one fills it."""
        if adapter_id == NO_ADAPTER and not self.any_adapter:
            return np.zeros(len(block_ids), np.bool_)
        others: npt.NDArray[np.bool_] = self._adapters[block_ids] != adapter_id
        return others

    def set_digests(self, block_ids: Slots, digests: Digests) -> None:
        """From now on the present tenancies of these blocks have these digests."""
        if block_ids.size:
            self._any_digest = True
            self._digests[block_ids] = digests

    def copy_digest(self, source: int, destination: int) -> None:
        """Block `destination` has begun a tenancy that holds the whole of `source`: it stands for the same prefix."""
        if self._any_digest:
            self._digests[destination] = self._digests[source]

    def copy_adapter(self, source: int, destination: int) -> None:
        """Block `destination` has begun a tenancy with rows of `source`: they are the same adapter's."""
        if self.any_adapter:
            self._adapters[destination] = self._adapters[source]

    def make_private(self, block_id: int, digest: int, life: int) -> None:
        """Rows of the block's present tenancy are of a content its hash may not stand for.

        Until its next tenancy a hit of another life than `life` finds them only if it names `digest`.
        """
        self._any_digest = True
        self._digests[block_id] = digest
        self._private_to[block_id] = life

    def private_to(self, block_id: int) -> int:
        """The life the block is private to; `NOBODY` if any request may hit it."""
        return int(self._private_to[block_id])

    def expire(self, slots: Slots) -> None:
        """What was written at these slots until now is of content that is gone: absent for later plans, every key."""
        self._any_expired = True
        self._row_floor[slots] = self.last_id

    def withheld(self, block_ids: Slots, digests: Digests, life: int) -> npt.NDArray[np.bool_]:
        """For each block, whether a hit that expects `digests` must find no rows there, although some are stored.

        A block without a digest was never full as far as the cache was told: if it has a hash, its tenancy is hidden.

        Args:
            block_ids: blocks of a request's hit.
            digests: what the request expects there; 0 where it names none.
            life: the request's life: a block that is private to it is not withheld.
        """
        if not self._any_digest and not digests.any():
            return np.zeros(len(block_ids), np.bool_)
        held = self._digests[block_ids]
        named = digests != 0
        other = held != digests
        owners = self._private_to[block_ids]
        private = (owners != NOBODY) & (owners != life)
        withheld: npt.NDArray[np.bool_] = (named & other) | (private & (other | ~named))
        return withheld

    def next_write_id(self) -> int:
        """Give out the next write id."""
        self.last_id += 1
        self.last_write_id = self.last_id
        return self.last_id

    def claim(self, keys: Iterable[str], slots: Slots, write_id: int) -> None:
        """Write `write_id` will put rows of `keys` at `slots`; other keys' rows there stay as they are."""
        for key in keys:
            self._latest[key][slots] = write_id

    def claims(self, key: str, slots: Slots) -> WriteIds:
        """The last write that claimed each row, in whatever tenancy; 0 if none did."""
        return self._latest[key][slots]

    def present_ids(self, key: str, slots: Slots) -> WriteIds:
        """The write each row belongs to in its current tenancy, or `ABSENT`; -1 slots are absent."""
        ids = self._latest[key][slots]
        blocks = slots // self.block_size
        present = (ids > self._tenancy_floor[blocks]) & (slots >= 0)
        if self._any_expired:
            present &= ids > self._row_floor[slots]
        if self._any_version:
            present &= ids > self._version_floor[blocks]
        return np.where(present, ids, ABSENT)

    def still_held(self, slots: Slots, since: WriteIds) -> Slots:
        """The slots whose block has had no new tenancy since the id `since` of each; -1 in place of the others."""
        held = (self._tenancy_floor[slots // self.block_size] <= since) & (slots >= 0)
        return np.where(held, slots, -1)

    def pin(self, slots: Slots) -> None:
        """Count one more outstanding read on each of these slots; one named twice counts once, as in `unpin`."""
        self._pins[slots] += 1

    def unpin(self, slots: Slots) -> None:
        """Take back one `pin` of the same slots."""
        self._pins[slots] -= 1

    @property
    def pinned_slots(self) -> int:
        """Slots that an outstanding read names. Walks the table; for `stats()` only."""
        return int(np.count_nonzero(self._pins))

    def members(self, of: Slots, among: Slots) -> npt.NDArray[np.bool_]:
        """For each slot of `of`, whether it occurs in `among`. Cost is linear in both; -1 is never a member."""
        self._mark[among[among >= 0]] = True
        found = self._mark[of] & (of >= 0)
        self._mark[among[among >= 0]] = False
        return found

    def present_rows(self, adapter_id: int | None = None) -> dict[str, int]:
        """How many rows of each key are present. Walks the tables; for `reset` and new versions only.

        Without the lock, rows that are written meanwhile may be left out or counted.

        Args:
            adapter_id: only in blocks that this adapter fills; `None`: everywhere.
        """
        blocks = slice(None) if adapter_id is None else np.flatnonzero(self._adapters == adapter_id)
        floors: WriteIds = np.maximum(self._tenancy_floor[blocks], self._version_floor[blocks])[:, None]
        by_block = (self.num_blocks, self.block_size)
        if self._any_expired:
            floors = np.maximum(floors, self._row_floor.reshape(by_block)[blocks])
        latest = {key: self._latest[key].reshape(by_block) for key in self.keys}
        return {key: int(np.count_nonzero(claims[blocks] > floors)) for key, claims in latest.items()}

    # -- physical state, committer thread -----------------------------------------------------------------------------

    def any_pinned(self, slots: Slots) -> bool:
        """Whether any read names one of these slots."""
        return bool(self._pins[slots].any())

    def stamps(self, key: str, slots: Slots) -> WriteIds:
        """The write that lies at each row, landed or being landed."""
        return self._stamp[key][slots]

    def stamp(self, keys: tuple[str, ...], slots: Slots, write_id: int) -> None:
        """From now on `write_id` is what lies, or is being put, at these rows."""
        for key in keys:
            self._stamp[key][slots] = write_id
