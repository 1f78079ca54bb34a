# SPDX-License-Identifier: Apache-2.0
"""The settings of one cache, checked when they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch

from omni_core.backend.host_pages import PAGE_BYTES
from omni_core.prefix_cache.block_pool import RowSpec
from omni_core.prefix_cache.errors import InvalidConfigError

HIDDEN_KEY = "__hidden_states__"
"""The key of the stage's last hidden states."""


class Delivery(Enum):
    """When a row counts as delivered."""

    ON_MATERIALIZE = "on_materialize"
    """When `materialize` has returned it."""
    TWO_PHASE = "two_phase"
    """When the outputs were acknowledged. Rows released without it come again with a later step of their request, or
    are reported missing if it has ended."""


@dataclass(frozen=True, slots=True)
class PrefixCacheConfig:
    """Geometry mirrored from vLLM's KV cache, and the cache's own limits.

    Host bytes: each stored key costs up to `num_blocks * block_size * row_bytes` of pageable memory, committed by the
    operating system as blocks are first written; staging costs `staging_depth * staging_arena_bytes` of pinned memory
    and as much device memory for the snapshot ring.
    """

    num_blocks: int
    """Blocks of vLLM's KV cache, the null block included."""
    block_size: int
    """Tokens per block, as the block table of the full-attention group uses it."""
    hidden_size: int
    """Width of a hidden row, in elements."""
    hidden_dtype: torch.dtype
    """dtype of a hidden row; rows are stored and delivered in it, never cast."""
    max_num_tokens: int
    """Most rows of one step, graph padding excluded (vLLM: `max_num_batched_tokens`)."""
    staging_depth: int = 4
    """Steps that may be saved and not yet consumed and written at one time."""
    extra_row_bytes: int = 256
    """Staging bytes per token beyond the hidden row, for further keys and leftovers."""
    extra_step_bytes: int = 1 << 20
    """Staging bytes per step beyond the rows, for values that do not grow with the tokens."""
    device_staging_bytes: int = 64 << 20
    """Device memory for the rows of deferred keys, allocated if the policy declares any; 0: they are never deferred."""
    staging_claim_timeout_s: float = 30.0
    """How long `save_outputs` waits for a staging slot."""
    join_timeout_s: float = 60.0
    """How long `materialize`, `flush` and the helper threads wait for a copy, a write or a read."""
    max_recycled_bytes: int = 512 << 20
    """Most bytes of released output buffers kept for reuse."""
    pin_chunk_bytes: int = 1 << 30
    """Page-lock staging pages in pieces of at most so many bytes, whole pages of memory: some drivers refuse 2 GiB and
    more in one piece. 0: each staging page at once."""
    pretouch: bool = False
    """Whether the pool's memory for hidden rows and `key_rows` is committed when the policy is registered, instead of
    as blocks are first written."""
    key_rows: Mapping[str, RowSpec] = field(default_factory=dict)
    """Further keys whose rows are known beforehand: counted in the memory check, and pre-touched. Keys not named here
    are stored all the same; a key that comes with other rows is stored as it comes."""
    delivery: Delivery = Delivery.ON_MATERIALIZE
    """When a row counts as delivered: at once, or when the consumer acknowledges it."""
    caches_per_host: int = 1
    """Caches of this size on the host, for its memory check (vLLM: `data_parallel_size_local`; one rank of each
    tensor- and pipeline-parallel group has a cache)."""
    max_partial_reports: int = 1024
    """Most ended requests kept for `take_partial_requests`; older ones are dropped first."""

    def __post_init__(self) -> None:
        """Check every setting.

        Raises:
            InvalidConfigError: names the setting, its value and the rule.
        """
        for name in ("num_blocks", "block_size", "hidden_size", "max_num_tokens", "staging_depth", "caches_per_host"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidConfigError(f"{name}={value!r}: must be an integer of at least 1")
        for name in (
            "extra_row_bytes",
            "extra_step_bytes",
            "device_staging_bytes",
            "max_recycled_bytes",
            "pin_chunk_bytes",
            "max_partial_reports",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise InvalidConfigError(f"{name}={value!r}: must be an integer of at least 0")
        for name in ("staging_claim_timeout_s", "join_timeout_s"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise InvalidConfigError(f"{name}={value!r}: must be a positive, finite number of seconds")
        if self.pin_chunk_bytes % PAGE_BYTES:
            raise InvalidConfigError(
                f"pin_chunk_bytes={self.pin_chunk_bytes!r}: must be 0 or a multiple of the page of {PAGE_BYTES} bytes"
            )
        if not isinstance(self.pretouch, bool):
            raise InvalidConfigError(f"pretouch={self.pretouch!r}: must be True or False")
        if not isinstance(self.key_rows, Mapping) or not all(
            isinstance(key, str) and isinstance(spec, RowSpec) for key, spec in self.key_rows.items()
        ):
            raise InvalidConfigError(f"key_rows={self.key_rows!r}: must be a mapping of key names to a RowSpec each")
        if HIDDEN_KEY in self.key_rows:
            raise InvalidConfigError(f"key_rows names {HIDDEN_KEY!r}: its rows are hidden_size and hidden_dtype")
        if not isinstance(self.delivery, Delivery):
            raise InvalidConfigError(f"delivery={self.delivery!r}: must be a Delivery")
        if not isinstance(self.hidden_dtype, torch.dtype):
            raise InvalidConfigError(f"hidden_dtype={self.hidden_dtype!r}: must be a torch.dtype")

    @property
    def num_slots(self) -> int:
        """Token slots of the mirrored KV cache."""
        return self.num_blocks * self.block_size

    @property
    def hidden_row_bytes(self) -> int:
        """Bytes of one hidden row."""
        return self.hidden_size * self.hidden_dtype.itemsize

    @property
    def staging_arena_bytes(self) -> int:
        """Bytes of one staging arena: every row of the largest step, and the extras."""
        return self.max_num_tokens * (self.hidden_row_bytes + self.extra_row_bytes) + self.extra_step_bytes

    def pool_bytes(self, row_bytes: int) -> int:
        """Most host bytes a stored key with rows of `row_bytes` can come to cost."""
        return self.num_slots * row_bytes
