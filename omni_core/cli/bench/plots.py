# SPDX-License-Identifier: Apache-2.0
"""Draws rows as PNG files, with matplotlib, which the extra `bench` brings."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omni_core.cli.bench.results import Row, interval_name

_SIZE_INCHES = (7.0, 4.2)
_DOTS_PER_INCH = 110


@dataclass(frozen=True, slots=True)
class Chart:
    """Figures of some rows over one of their fields."""

    name: str
    """Of the file."""
    title: str
    x: str
    """The field on the horizontal axis."""
    y: Mapping[str, str]
    """Field → what it is called in the legend. A field no row has is left out."""
    y_label: str
    where: Mapping[str, Any] = field(default_factory=dict)
    """Which rows: these fields have these values."""
    group: str | None = None
    """A field whose values get a line each, in place of one line per field."""
    logarithmic: bool = False
    """Both axes; else the values of `x` stand side by side, whatever they are."""


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(chart: Chart, rows: Sequence[Row], folder: Path) -> Path | None:
    """Draw one chart; `None` if no row fits it. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    fitting = [row for row in rows if all(row.get(name) == value for name, value in chart.where.items())]
    lines = _lines(chart, fitting)
    if not lines:
        return None
    figure = Figure(figsize=_SIZE_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = list(dict.fromkeys(point for _, points in lines for point, _, _ in points))
    for label, points in lines:
        places = [x if chart.logarithmic else names.index(x) for x, _, _ in points]
        values = [value for _, value, _ in points]
        errors = [[value - low for _, value, (low, _) in points], [high - value for _, value, (_, high) in points]]
        axes.errorbar(places, values, yerr=errors, label=label, marker="o", capsize=3)
    if chart.logarithmic:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sorted(names), [f"{name:,}" for name in sorted(names)], minor=False)
    else:
        axes.set_xticks(range(len(names)), [f"{name:,}" if isinstance(name, int) else str(name) for name in names])
        axes.set_ylim(bottom=0)
    axes.set(title=chart.title, xlabel=chart.x.replace("_", " "), ylabel=chart.y_label)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    path = folder / f"{chart.name}.png"
    # Without the version of matplotlib in it, equal figures are equal files.
    figure.savefig(path, metadata={"Software": None})
    return path


Point = tuple[Any, float, tuple[float, float]]


def _lines(chart: Chart, rows: Sequence[Row]) -> list[tuple[str, list[Point]]]:
    lines = []
    groups = [None] if chart.group is None else list(dict.fromkeys(row[chart.group] for row in rows))
    for group in groups:
        members = [row for row in rows if group is None or row[str(chart.group)] == group]
        for name, legend in chart.y.items():
            points: list[Point] = [
                (row[chart.x], row[name], tuple(row.get(interval_name(name), (row[name], row[name]))))
                for row in members
                if row.get(name) is not None
            ]
            if points:
                lines.append((legend if group is None else f"{legend}, {group}" if legend else str(group), points))
    return lines
