# SPDX-License-Identifier: Apache-2.0
"""The token counts an engine captures graphs at, from its settings.

Source: `config/vllm.py` `_set_cudagraph_sizes` and `config/compilation.py` `adjust_cudagraph_sizes_for_spec_decode` of
vLLM 0.18, 0.23 and 0.32 (0.33 has the same text as 0.32).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from omni_core.backend.graph_padding.capture_sizes import CaptureSizes, round_up

DEFAULT_CEILING_TOKENS = 512
DATA_CENTER_BLACKWELL_CEILING_TOKENS = 1024
INTERACTIVITY_TOKENS = 32


class PerformanceMode(Enum):
    """vLLM's `performance_mode`, as far as sizes depend on it."""

    BALANCED = auto()
    INTERACTIVITY = auto()
    """Every size up to 32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSettings:
    """What a user and a model set.

    Raises:
        ValueError: a count below 1.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    query_len: int = 1
    """Tokens of one request in a decode step: 1 + `num_speculative_tokens`."""
    sizes: tuple[int, ...] | None = None
    """The user's `cudagraph_capture_sizes`, in any order."""
    max_size: int | None = None
    """The user's `max_cudagraph_capture_size`."""
    performance_mode: PerformanceMode = PerformanceMode.BALANCED
    decode_tiers: Mapping[int, int] | None = None
    """Most requests of a step by query length (`decode_tiers`); `None`: `max_num_seqs` at `query_len`."""

    def __post_init__(self) -> None:
        counts = {
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "query_len": self.query_len,
            "max_size": 1 if self.max_size is None else self.max_size,
            "sizes": 1 if self.sizes is None else min(self.sizes, default=0),
        }
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"{name}: {count} must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureRules:
    """How releases differ."""

    default_steps: int
    """The default largest size, in largest decode steps."""
    ceiling_tokens: int = DEFAULT_CEILING_TOKENS
    """No default largest size exceeds it."""
    captures_largest_step: bool
    """`max_num_batched_tokens` is a size too, if it is not too large."""
    captures_decode_steps: bool
    """The token counts of decode steps are sizes too, if the user set no largest size."""


VLLM_0_18 = CaptureRules(default_steps=2, captures_largest_step=False, captures_decode_steps=False)
VLLM_0_23 = CaptureRules(default_steps=2, captures_largest_step=True, captures_decode_steps=False)
VLLM_0_32 = CaptureRules(default_steps=2, captures_largest_step=True, captures_decode_steps=True)
"""And 0.33."""
VLLM_0_32_BLACKWELL = CaptureRules(
    default_steps=2,
    ceiling_tokens=DATA_CENTER_BLACKWELL_CEILING_TOKENS,
    captures_largest_step=True,
    captures_decode_steps=True,
)
"""On data-center Blackwell devices (capability family 100)."""


def captured_sizes(settings: CaptureSettings, rules: CaptureRules) -> CaptureSizes:
    """The sizes of an engine that captures graphs.

    Raises:
        ValueError: the user set sizes and a largest size that do not agree.
    """
    largest_step = settings.max_num_batched_tokens
    if settings.sizes is not None:
        chosen = CaptureSizes(tuple(sorted({size for size in settings.sizes if size <= largest_step})))
        if settings.max_size not in (None, chosen.largest):
            raise ValueError(
                f"max_cudagraph_capture_size={settings.max_size}: the largest of cudagraph_capture_sizes up to "
                f"max_num_batched_tokens={largest_step} is {chosen.largest}"
            )
        return chosen
    default = min(settings.max_num_seqs * settings.query_len * rules.default_steps, rules.ceiling_tokens)
    wanted = default if settings.max_size is None else settings.max_size
    sizes = set(_strides(min(wanted, largest_step), settings.performance_mode))
    if rules.captures_largest_step and largest_step <= wanted:
        sizes.add(largest_step)
    if rules.captures_decode_steps and settings.max_size is None:
        sizes.update(size for size in _decode_steps(settings, default) if size <= largest_step)
    return CaptureSizes(tuple(sorted(sizes)))


def rounded_for_decodes(sizes: CaptureSizes, query_len: int, *, sequence_parallel_size: int = 1) -> CaptureSizes:
    """The sizes of the V1 runner where decodes have drafts and run as full graphs; none exceeds the largest before.

    vLLM 0.18 does so only where decodes have graphs of their own.

    Args:
        sizes: as `captured_sizes` gives them.
        query_len: of a decode step; the sizes become its multiples. 1: they stay.
        sequence_parallel_size: the tensor-parallel size where it splits a step's tokens, in vllm-ascend; the sizes
            become its multiples too.

    Raises:
        ValueError: there are sizes and none is left, or neither of the two numbers is a multiple of the other.
    """
    multiple = max(query_len, sequence_parallel_size)
    if multiple % query_len or multiple % sequence_parallel_size:
        raise ValueError(
            f"query_len={query_len} sequence_parallel_size={sequence_parallel_size}: one must be a multiple of the "
            "other; change num_speculative_tokens or turn sequence parallelism off"
        )
    if query_len == 1 or not sizes.sizes:
        return sizes
    rounded = {round_up(size, multiple) for size in sizes.sizes}
    kept = tuple(sorted(size for size in rounded if size <= sizes.largest))
    if not kept and multiple <= sizes.largest:
        kept = (multiple,)
    if not kept:
        raise ValueError(
            f"capture sizes {sizes.sizes}: none is at least {multiple}; raise max_cudagraph_capture_size or lower "
            "num_speculative_tokens"
        )
    return CaptureSizes(kept)


def _strides(largest: int, performance_mode: PerformanceMode) -> Iterable[int]:
    if performance_mode is PerformanceMode.INTERACTIVITY:
        yield from range(1, min(largest, INTERACTIVITY_TOKENS) + 1)
    yield from _grid(largest)


def _grid(largest: int) -> Iterable[int]:
    yield from (size for size in (1, 2, 4) if size <= largest)
    yield from range(8, min(largest + 1, 256), 8)
    yield from range(256, largest + 1, 16)


def _decode_steps(settings: CaptureSettings, largest: int) -> Iterable[int]:
    if settings.query_len == 1:
        if settings.max_num_seqs <= largest:
            yield settings.max_num_seqs
        return
    tiers = settings.decode_tiers or {settings.query_len: settings.max_num_seqs}
    for query_len, max_num_reqs in tiers.items():
        for num_reqs in (*_grid(max_num_reqs), max_num_reqs):
            if num_reqs * query_len <= largest:
                yield num_reqs * query_len
