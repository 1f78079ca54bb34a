# SPDX-License-Identifier: Apache-2.0
"""What to change when a stage does not fit: for each setting alone, or two, the largest values that do. Pure.

Settings are lowered, but for `extra_row_bytes`: it is raised, to what a row of every key needs in staging.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from operator import attrgetter

from omni_core.prefix_cache.config import PrefixCacheConfig
from omni_core.prefix_cache.sizing import StageSizes

MIN_NUM_BLOCKS = 2
"""The null block and one to use."""
MIN_STAGING_DEPTH = 2
"""What the vLLM integration needs: one page is kept for a step that has to be given up."""
_SHARES = 64
"""In so many steps two settings are lowered together."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """One setting that makes a stage fit, alone or with another."""

    setting: str
    value: int
    """The largest that fits; of `extra_row_bytes`, the least that is enough."""
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

    def largest_that_fits(self, sizes: StageSizes, fits: Callable[[StageSizes], bool]) -> int | None:
        """The largest value below the present one with which `sizes` fit, or `None`."""
        low, high = self.least, self.present(sizes)
        if low >= high or not fits(self.changed(sizes, low)):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(self.changed(sizes, middle)) else (low, middle)
        return low

    def between(self, sizes: StageSizes, share: float) -> int:
        """The value so far from the least one on the way to the present one."""
        return self.least + int((self.present(sizes) - self.least) * share)


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
        "sink_queue_bytes",
        "omni_core.sink_queue_bytes",
        1,
        lambda sizes: sizes.sink_queue_bytes,
        lambda sizes, value: replace(sizes, sink_queue_bytes=value),
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


def remedies(sizes: StageSizes, fits: Callable[[StageSizes], bool]) -> tuple[Remedy, ...]:
    """Every setting that alone makes the stage fit, with the largest value that does; empty if it fits, or none does.

    Args:
        sizes: the stage.
        fits: whether such a stage fits; more memory never fits better.
    """
    if fits(sizes):
        return ()
    raised = (_row_room(sizes),) if fits(sizes.with_row_room) else ()
    found = ((knob, knob.largest_that_fits(sizes, fits)) for knob in _KNOBS)
    lowered = (Remedy(knob.setting, value, knob.present(sizes), knob.how) for knob, value in found if value is not None)
    return (*raised, *lowered)


def remedy_pair(sizes: StageSizes, fits: Callable[[StageSizes], bool]) -> tuple[Remedy, ...]:
    """Two settings that together make the stage fit; empty if no two do.

    Room in staging for a row of every key, where it is missing, and what pays for it; or else two settings lowered by
    about the same share. What is lowered cannot be raised by one while the other stays. Meant for a stage that no
    setting alone makes fit.

    Args:
        sizes: the stage.
        fits: whether such a stage fits; more memory never fits better.
    """
    if sizes.missing_row_bytes and (paid_for := remedies(sizes.with_row_room, fits)):
        return _row_room(sizes), paid_for[0]
    movable = [knob for knob in _KNOBS if knob.least < knob.present(sizes)]
    for one, other in combinations(movable, 2):
        if fits(_both(sizes, one, other, 0.0)):
            shares = (step / _SHARES for step in range(_SHARES, -1, -1))
            share = next(share for share in shares if fits(_both(sizes, one, other, share)))
            return _raised(sizes, one, other, share, fits)
    return ()


def _row_room(sizes: StageSizes) -> Remedy:
    raised = sizes.with_row_room.config.extra_row_bytes
    return Remedy("extra_row_bytes", raised, sizes.config.extra_row_bytes, "omni_core.extra_row_bytes")


def _both(sizes: StageSizes, one: _Knob, other: _Knob, share: float) -> StageSizes:
    return other.changed(one.changed(sizes, one.between(sizes, share)), other.between(sizes, share))


def _raised(
    sizes: StageSizes, one: _Knob, other: _Knob, share: float, fits: Callable[[StageSizes], bool]
) -> tuple[Remedy, ...]:
    """Each as large as it may be while the other stays."""
    values = {one: one.between(sizes, share), other: other.between(sizes, share)}
    for knob, fixed in ((other, one), (one, other)):
        largest = knob.largest_that_fits(fixed.changed(sizes, values[fixed]), fits)
        values[knob] = values[knob] if largest is None else largest
    return tuple(Remedy(knob.setting, value, knob.present(sizes), knob.how) for knob, value in values.items())
