# SPDX-License-Identifier: Apache-2.0
"""KV blocks as vLLM hands them out: a free queue in LRU order, block hashes, reference counts, the null block.

Modelled after what vLLM 0.32 does with one full-attention group: a block's hash covers the whole token prefix up to
its end; a hash can be found from the moment its block is allocated, before anything was computed; several blocks may
carry one hash, the first published is found; freed blocks with a hash go to the back of the queue, others to the front.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from omni_core.testing.sim_request import TokenTrack

NULL_BLOCK_ID = 0
"""Never given to a request."""

BlockHash = bytes
"""Identity of a full block and everything before it."""

Content = Sequence[tuple[int, str, int]]
"""What stands at consecutive positions; see `TokenTrack.content`."""


@dataclass(frozen=True, slots=True)
class HashedBlock:
    """A full block of a request, ready to be published."""

    block_hash: BlockHash
    parent_hash: BlockHash
    """Hash of the block before it; of the salt for the first block."""
    content: Content

    @property
    def digest(self) -> int:
        """The hash as `RequestEvent.block_digests` has it: 64 bits, never 0."""
        return int.from_bytes(self.block_hash[:8], "little") or 1


def salt_hash(salt: str) -> BlockHash:
    """The parent of a request's first block."""
    return hashlib.blake2b(salt.encode(), digest_size=16).digest()


def extend_hashed_blocks(hashed: list[HashedBlock], track: TokenTrack, block_size: int) -> None:
    """Append every block of `track` that is full and not yet in `hashed`."""
    while (len(hashed) + 1) * block_size <= len(track.token_ids):
        start = len(hashed) * block_size
        parent = hashed[-1].block_hash if hashed else salt_hash(track.request.salt)
        content = tuple(track.content(start, start + block_size))
        block_hash = hashlib.blake2b(parent + repr(content).encode(), digest_size=16).digest()
        hashed.append(HashedBlock(block_hash, parent, content))


@dataclass(frozen=True, slots=True)
class BlockState:
    """One block, for drawing and for tests."""

    block_id: int
    references: int
    """Requests that hold it."""
    cached: bool
    """Whether it can be found under a hash."""


class SimBlockAllocator:
    """Allocates blocks and finds cached prefixes. Engine thread only.

    Args:
        num_blocks: blocks in all; block 0 is the null block and is never handed out.
        block_size: tokens per block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2 or block_size < 1:
            raise ValueError(f"num_blocks={num_blocks}, block_size={block_size}: need at least 2 blocks of 1 token")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        self._hashed: list[HashedBlock | None] = [None] * num_blocks
        self._by_hash: dict[BlockHash, dict[int, None]] = {}
        self._by_parent: dict[BlockHash, dict[int, None]] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def num_free_blocks(self) -> int:
        """Blocks no request holds, cached ones included."""
        return len(self._free)

    def is_free(self, block_id: int) -> bool:
        """Whether no request holds the block."""
        return block_id in self._free

    def is_shared(self, block_id: int) -> bool:
        """Whether more than one request holds the block."""
        return self._references[block_id] > 1

    def is_published(self, block_id: int) -> bool:
        """Whether the block can be found under a hash."""
        return self._hashed[block_id] is not None

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, hashed: Sequence[HashedBlock], max_hit_tokens: int) -> list[int]:
        """The longest run of cached blocks from the start, of at most `max_hit_tokens` tokens. Takes no reference."""
        found: list[int] = []
        for block in hashed[: max_hit_tokens // self.block_size]:
            cached = self._by_hash.get(block.block_hash)
            if not cached:
                break
            found.append(next(iter(cached)))
        return found

    def find_inside(self, parent_hash: BlockHash, wanted: Content, excluded: Collection[int]) -> tuple[int | None, int]:
        """The cached block after `parent_hash` that starts with most of `wanted`, and how many tokens they share."""
        best, best_shared = None, 0
        for block_id in self._by_parent.get(parent_hash, ()):
            hashed = self._hashed[block_id]
            if hashed is None or block_id in excluded:
                continue
            shared = 0
            for ours, theirs in zip(wanted, hashed.content, strict=False):
                if ours != theirs:
                    break
                shared += 1
            if shared > best_shared:
                best, best_shared = block_id, shared
        return best, best_shared

    def touch(self, block_ids: Iterable[int]) -> None:
        """Take a reference to blocks that are cached."""
        for block_id in block_ids:
            self._free.pop(block_id, None)
            self._references[block_id] += 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks from the front of the queue; a hash they still carry is forgotten.

        Raises:
            MemoryError: fewer are free. The scheduler asks for no more than are free, so this is its bug.
        """
        if count > len(self._free):
            raise MemoryError(f"asked for {count} blocks, {len(self._free)} of {self.num_blocks} are free")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in taken:
            self.forget_hash(block_id)
            self._references[block_id] = 1
        return taken

    def publish(self, block_id: int, hashed: HashedBlock) -> None:
        """Let a block be found under its hash, from now on, and under no other."""
        self.forget_hash(block_id)
        self._hashed[block_id] = hashed
        self._by_hash.setdefault(hashed.block_hash, {})[block_id] = None
        self._by_parent.setdefault(hashed.parent_hash, {})[block_id] = None

    def forget_hash(self, block_id: int) -> None:
        """Let a block be found no more."""
        hashed, self._hashed[block_id] = self._hashed[block_id], None
        if hashed is None:
            return
        for index, name in ((self._by_hash, hashed.block_hash), (self._by_parent, hashed.parent_hash)):
            del index[name][block_id]
            if not index[name]:
                del index[name]

    def forget_all_hashes(self) -> None:
        """Let no block be found any more. While no request holds one."""
        for block_id in range(self.num_blocks):
            self.forget_hash(block_id)

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop one reference to each block of a table, tail first, so that the tail is reused first."""
        reuse_first: list[int] = []
        for block_id in reversed(block_ids):
            self._references[block_id] -= 1
            if self._references[block_id]:
                continue
            if self._hashed[block_id] is None:
                reuse_first.append(block_id)
            else:
                self._free[block_id] = None
        for block_id in reversed(reuse_first):
            self._free[block_id] = None
            self._free.move_to_end(block_id, last=False)

    def states(self) -> tuple[BlockState, ...]:
        """Every block, in id order."""
        return tuple(
            BlockState(block_id, references, hashed is not None)
            for block_id, (references, hashed) in enumerate(zip(self._references, self._hashed, strict=True))
        )

    def free_queue(self) -> tuple[int, ...]:
        """Free blocks in the order they will be handed out."""
        return tuple(self._free)
