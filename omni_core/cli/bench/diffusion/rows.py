# SPDX-License-Identifier: Apache-2.0
"""What was measured as rows, the targets they are held against, and the charts drawn of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from omni_core.cli.bench.diffusion.config import BenchMode, DiffusionBenchConfig, Workload
from omni_core.cli.bench.plots import Chart
from omni_core.cli.bench.results import MS_PER_S, Relation, Row, Target, with_interval
from omni_core.cli.bench.samples import Samples
from omni_core.integrations.diffusion.results import FinishedRequest

FIRST_STEP, END_TO_END, SCHEDULE = " first step", " end to end", " schedule"

_WARM = {"workload": Workload.SHARED.value, "mode": BenchMode.PAGED_PREFIX.value, "layout": "big", "block_size": 32}
TARGETS = (
    Target("first-step tokens of a full hit", "first_step_tokens", Relation.EXACTLY, 810, _WARM),
    Target(
        "first-step tokens without one",
        "first_step_tokens",
        Relation.EXACTLY,
        4_074,
        {**_WARM, "mode": BenchMode.PAGED.value},
    ),
    Target("first step of a full hit over one without", "first_step_over_paged", Relation.AT_MOST, 0.25, _WARM),
    Target("block hashes, schedule and publish", "schedule_publish_ms", Relation.AT_MOST, 2.0, _WARM),
)

CHARTS = (
    Chart(
        "diffusion-first-step",
        "first denoise step, shared reference (CPU)",
        "steps",
        {"first_step_ms": ""},
        "ms",
        {"workload": Workload.SHARED.value},
        group="mode",
    ),
    Chart(
        "diffusion-end-to-end",
        "end to end over paged without prefix caching, shared reference (CPU)",
        "steps",
        {"end_to_end_over_paged": ""},
        "ratio",
        {"workload": Workload.SHARED.value},
        group="mode",
    ),
)


class RunResults:
    """The measured requests of one workload and number of steps, by mode."""

    def __init__(self, config: DiffusionBenchConfig, workload: Workload, steps: int) -> None:
        self._config = config
        self._workload = workload
        self._steps = steps
        self._samples = Samples()
        self._finished: dict[BenchMode, list[FinishedRequest]] = {}

    def add(self, mode: BenchMode, round_number: int, finished: FinishedRequest) -> None:
        """Keep a request of one round."""
        times = finished.timings
        self._finished.setdefault(mode, []).append(finished)
        self._samples.add(mode.value + FIRST_STEP, round_number, times.first_step_s)
        self._samples.add(mode.value + END_TO_END, round_number, times.end_to_end_s)
        self._samples.add(mode.value + SCHEDULE, round_number, times.schedule_s + times.publish_s)

    def rows(self) -> list[Row]:
        """One row per mode."""
        return [self._row(mode, finished) for mode, finished in self._finished.items()]

    def _row(self, mode: BenchMode, finished: Sequence[FinishedRequest]) -> Row:
        samples, name = self._samples, mode.value
        return {
            "workload": self._workload.value,
            "steps": self._steps,
            "mode": name,
            "layout": self._config.layout,
            "block_size": self._config.block_size,
            "requests": len(finished),
            "first_step_tokens": _only([one.first_step_tokens for one in finished]),
            "hit_tokens": _only([one.kv.cached_prefix_tokens * one.rows for one in finished]),
            "queried_tokens": _only([one.kv.queried_tokens for one in finished]),
            "pages": _only([one.kv.pages for one in finished]),
            **with_interval("first_step_ms", samples.median_s(name + FIRST_STEP), MS_PER_S),
            **self._over_paged("first_step_over_paged", name, FIRST_STEP),
            **with_interval("end_to_end_ms", samples.median_s(name + END_TO_END), MS_PER_S),
            **self._over_paged("end_to_end_over_paged", name, END_TO_END),
            "requests_per_s": len(finished) / sum(one.timings.end_to_end_s for one in finished),
            "encoder_ms": _median_ms([one.timings.encoder_s for one in finished]),
            "hash_ms": _median_ms([one.timings.hash_s for one in finished]),
            **with_interval("schedule_publish_ms", samples.median_s(name + SCHEDULE), MS_PER_S),
        }

    def _over_paged(self, figure: str, name: str, what: str) -> Row:
        """The ratio to paging without prefix caching in the same rounds; nothing where that was not run."""
        base = BenchMode.PAGED.value + what
        if not self._samples.count(base):
            return {}
        return with_interval(figure, self._samples.paired_ratio(name + what, base))


def _only(values: Sequence[int]) -> int | float:
    """The value all requests have; their mean where they differ, which then is no whole number of tokens."""
    return values[0] if len(set(values)) == 1 else statistics.fmean(values)


def _median_ms(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * MS_PER_S
