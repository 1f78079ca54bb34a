# SPDX-License-Identifier: Apache-2.0
"""What to change when a stage does not fit: for each setting alone, the largest value with which it would. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

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
    get: Callable[[StageSizes], int]
    put: Callable[[StageSizes, int], StageSizes]


def _config_knob(setting: str, how: str, least: int) -> _Knob:
    return _Knob(
        setting,
        how,
        least,
        lambda sizes: int(getattr(sizes.config, setting)),
        lambda sizes, value: replace(sizes, config=replace(sizes.config, **{setting: value})),
    )


_KNOBS = (
    _config_knob("num_blocks", "vLLM: --num-gpu-blocks-override, --kv-cache-memory-bytes", MIN_NUM_BLOCKS),
    _config_knob("staging_depth", "omni_core.staging_depth", MIN_STAGING_DEPTH),
    _config_knob("max_num_tokens", "vLLM: --max-num-batched-tokens", 1),
    _config_knob("max_recycled_bytes", "omni_core.max_recycled_bytes", 0),
    _config_knob("device_staging_bytes", "omni_core.device_staging_bytes", 0),
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
    _Knob(
        "pretouch",
        "omni_core.pretouch: 0 is false",
        0,
        lambda sizes: int(sizes.config.pretouch),
        lambda sizes, value: replace(sizes, config=replace(sizes.config, pretouch=bool(value))),
    ),
    _config_knob("caches_per_host", "vLLM: --data-parallel-size-local", 1),
)


def remedies(sizes: StageSizes, fits: Callable[[HostPlan], bool]) -> tuple[Remedy, ...]:
    """Every setting that alone makes the stage fit, with the largest value that does; empty if it fits, or none does.

    Args:
        sizes: the stage.
        fits: whether a plan fits; more memory never fits better.
    """
    if fits(sizes.plan()):
        return ()
    found = []
    for knob in _KNOBS:
        present = knob.get(sizes)
        value = _largest(knob.least, present, lambda value, knob=knob: fits(knob.put(sizes, value).plan()))
        if value is not None:
            found.append(Remedy(knob.setting, value, present, knob.how))
    return tuple(found)


def _largest(least: int, present: int, fits: Callable[[int], bool]) -> int | None:
    """The largest number from `least` to below `present` that fits, or `None`."""
    if least >= present or not fits(least):
        return None
    low, high = least, present
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
