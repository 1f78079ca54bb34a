# SPDX-License-Identifier: Apache-2.0
"""What to change when a stage does not fit: for each setting alone, the largest value with which it would. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter

from omni_core.prefix_cache.config import PrefixCacheConfig
from omni_core.prefix_cache.sizing import HostPlan, StageSizes

MIN_NUM_BLOCKS = 2
"""The null block and one to use."""
MIN_STAGING_DEPTH = 2
"""What the vLLM integration needs: one page is kept for a step that has to be given up."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """One setting that alone makes a stage fit."""

    setting: str
    value: int
    """The largest that fits."""
    present: int
    how: str
    """Where an operator changes it."""

    def __str__(self) -> str:
        return f"{self.setting} {self.present} → {self.value} ({self.how})"


@dataclass(frozen=True, slots=True)
class _Knob:
    setting: str
    how: str
    least: int
    present: Callable[[StageSizes], int]
    changed: Callable[[StageSizes, int], StageSizes]

    def largest_that_fits(self, sizes: StageSizes, fits: Callable[[HostPlan], bool]) -> int | None:
        """The largest value below the present one with which `sizes` fit, or `None`."""
        low, high = self.least, self.present(sizes)
        if low >= high or not fits(self.changed(sizes, low).plan()):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(self.changed(sizes, middle).plan()) else (low, middle)
        return low


def _of_config(
    setting: str, how: str, least: int, changed: Callable[[PrefixCacheConfig, int], PrefixCacheConfig]
) -> _Knob:
    present = attrgetter(setting)
    return _Knob(
        setting,
        how,
        least,
        lambda sizes: int(present(sizes.config)),
        lambda sizes, value: replace(sizes, config=changed(sizes.config, value)),
    )


_KNOBS = (
    _of_config(
        "num_blocks",
        "vLLM: --num-gpu-blocks-override, --kv-cache-memory-bytes",
        MIN_NUM_BLOCKS,
        lambda config, value: replace(config, num_blocks=value),
    ),
    _of_config(
        "staging_depth",
        "omni_core.staging_depth",
        MIN_STAGING_DEPTH,
        lambda config, value: replace(config, staging_depth=value),
    ),
    _of_config(
        "max_num_tokens",
        "vLLM: --max-num-batched-tokens",
        1,
        lambda config, value: replace(config, max_num_tokens=value),
    ),
    _of_config(
        "max_recycled_bytes",
        "omni_core.max_recycled_bytes",
        0,
        lambda config, value: replace(config, max_recycled_bytes=value),
    ),
    _of_config(
        "device_staging_bytes",
        "omni_core.device_staging_bytes",
        0,
        lambda config, value: replace(config, device_staging_bytes=value),
    ),
    _Knob(
        "layers",
        "omni_core.layers: capture so many",
        0,
        lambda sizes: len(sizes.layer_keys),
        lambda sizes, value: replace(sizes, layer_keys=sizes.layer_keys[:value]),
    ),
    _Knob(
        "sink_bytes",
        "omni_core.sink_options: max_bytes or max_open_bytes",
        0,
        lambda sizes: sizes.sink_bytes,
        lambda sizes, value: replace(sizes, sink_bytes=value),
    ),
    _of_config(
        "pretouch",
        "omni_core.pretouch: 0 is false",
        0,
        lambda config, value: replace(config, pretouch=bool(value)),
    ),
    _of_config(
        "caches_per_host",
        "vLLM: --data-parallel-size-local",
        1,
        lambda config, value: replace(config, caches_per_host=value),
    ),
)


def remedies(sizes: StageSizes, fits: Callable[[HostPlan], bool]) -> tuple[Remedy, ...]:
    """Every setting that alone makes the stage fit, with the largest value that does; empty if it fits, or none does.

    Args:
        sizes: the stage.
        fits: whether a plan fits; more memory never fits better.
    """
    if fits(sizes.plan()):
        return ()
    found = ((knob, knob.largest_that_fits(sizes, fits)) for knob in _KNOBS)
    return tuple(
        Remedy(knob.setting, value, knob.present(sizes), knob.how) for knob, value in found if value is not None
    )
