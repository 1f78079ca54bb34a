# SPDX-License-Identifier: Apache-2.0
"""What a benchmark gives back: rows of figures, and the targets they are held against. Data, printed elsewhere."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

from omni_core.cli.bench.samples import Estimate

Row = dict[str, Any]
"""One line of a table. A figure with an interval has it beside it, see `interval_name`."""

MS_PER_S = 1e3


class BenchmarkError(RuntimeError):
    """A benchmark could not be measured; the message says why and what to do."""


class Relation(Enum):
    """How a figure must stand to its target."""

    AT_MOST = "<="
    AT_LEAST = ">="
    EXACTLY = "=="
    """For counts, which have no interval."""


class Verdict(Enum):
    """Whether a target is reached."""

    MET = "met"
    MISSED = "missed"
    NOT_RESOLVED = "not resolved"
    """The interval reaches over the target: more rounds, or a quieter machine, would tell."""
    NOT_MEASURED = "not measured"
    """This run has no such figure: no peer, a smaller run, or a tool that is not installed."""


_HOLDS: Mapping[Relation, Callable[[float, float], bool]] = MappingProxyType(
    {Relation.AT_MOST: operator.le, Relation.AT_LEAST: operator.ge, Relation.EXACTLY: operator.eq}
)
_WORST_FIRST = (Verdict.MISSED, Verdict.NOT_RESOLVED, Verdict.MET)


@dataclass(frozen=True, slots=True)
class Target:
    """A figure, and what it must be. Held at the bad end of the figure's interval."""

    name: str
    figure: str
    """The field of the row."""
    relation: Relation
    value: float
    where: Mapping[str, Any] = field(default_factory=dict)
    """Which row: these fields have these values. Every row that fits must reach the target."""

    def judge(self, rows: Sequence[Row]) -> TargetResult:
        """Hold the rows against the target; the worst row that fits decides."""
        fitting = [row for row in rows if self._fits(row)]
        if not fitting:
            return TargetResult(self, Verdict.NOT_MEASURED, None, None)
        judged = [self._judge_row(row) for row in fitting]
        return min(judged, key=self._rank)

    def _fits(self, row: Row) -> bool:
        return row.get(self.figure) is not None and all(row.get(name) == value for name, value in self.where.items())

    def _judge_row(self, row: Row) -> TargetResult:
        measured = float(row[self.figure])
        interval = row.get(interval_name(self.figure))
        low, high = (measured, measured) if interval is None else interval
        good, bad = (high, low) if self.relation is Relation.AT_LEAST else (low, high)
        if self._holds(bad):
            verdict = Verdict.MET
        elif self._holds(good):
            verdict = Verdict.NOT_RESOLVED
        else:
            verdict = Verdict.MISSED
        return TargetResult(self, verdict, measured, None if interval is None else (low, high))

    def _rank(self, result: TargetResult) -> tuple[int, float]:
        """Lower is worse: by verdict, then by the figure itself."""
        measured = result.measured or 0.0
        better = {
            Relation.AT_MOST: -measured,
            Relation.AT_LEAST: measured,
            Relation.EXACTLY: -abs(measured - self.value),
        }
        return (_WORST_FIRST.index(result.verdict), better[self.relation])

    def _holds(self, measured: float) -> bool:
        return _HOLDS[self.relation](measured, self.value)


@dataclass(frozen=True, slots=True)
class TargetResult:
    """A target, and what was measured for it."""

    target: Target
    verdict: Verdict
    measured: float | None
    interval: tuple[float, float] | None

    def as_document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.target.name,
            "figure": self.target.figure,
            "relation": self.target.relation.value,
            "value": self.target.value,
            "verdict": self.verdict.value,
            "measured": self.measured,
            "ci95": None if self.interval is None else list(self.interval),
        }


@dataclass(frozen=True, slots=True)
class Measured:
    """Everything one benchmark found out."""

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    """What a reader of the figures must know: what was left out, and why."""


def interval_name(figure: str) -> str:
    """The field that holds a figure's interval, `[low, high]`; the row's main ratio has `ci95` itself."""
    return "ci95" if figure == "ratio" else f"{figure}_ci95"


def with_interval(figure: str, estimate: Estimate, scale: float = 1.0) -> Row:
    """The fields of a figure and its interval.

    Args:
        figure: the field's name.
        estimate: the figure.
        scale: what it is multiplied by, from seconds to the unit of the field.
    """
    return {
        figure: estimate.value * scale,
        interval_name(figure): [estimate.low * scale, estimate.high * scale],
    }
