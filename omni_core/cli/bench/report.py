# SPDX-License-Identifier: Apache-2.0
"""The figures as people read them: tables for the terminal and for Markdown, and the files of `--out`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omni_core.cli.bench.benchmarks import BY_NAME
from omni_core.cli.bench.plots import can_plot, draw
from omni_core.cli.bench.results import Row, Verdict, interval_name
from omni_core.cli.tables import render_table

NO_PLOTS = "matplotlib is not installed, so nothing was drawn: pip install 'omni-core[bench]'"
_HIDDEN_FIELDS = ("benchmark",)
_NOTHING = "-"


def render_text(document: dict[str, Any]) -> str:
    """One benchmark for a terminal."""
    parts = [f"{document['benchmark']}: CPU figures, {_machine_line(document['machine'])}"]
    for headers, cells in _tables(document["rows"]):
        parts.append(render_table(headers, cells, right_aligned=headers[1:], width=_width(headers, cells)))
    parts.append("\n".join(f"- {note}" for note in document["notes"]))
    if document["targets"]:
        headers, cells = _target_table(document["targets"])
        parts.append(render_table(headers, cells, width=_width(headers, cells)))
    return "\n\n".join(parts)


def render_markdown(document: dict[str, Any], pictures: Sequence[Path]) -> str:
    """One benchmark as a section of a page."""
    load = document["machine"]["load_average"][0]
    summary = BY_NAME[document["benchmark"]].summary.capitalize()
    parts = [f"## {document['benchmark']}", f"{summary}. Load average at its start: {load:.2f}."]
    parts.extend(_markdown_table(headers, cells, numbers_from=1) for headers, cells in _tables(document["rows"]))
    parts.extend(f"![{picture.stem}]({picture.name})" for picture in pictures)
    parts.append("\n".join(f"- {note}" for note in document["notes"]))
    if document["targets"]:
        parts.append(_markdown_table(*_target_table(document["targets"])))
    return "\n\n".join(parts)


def write_files(documents: Sequence[dict[str, Any]], folder: Path) -> list[str]:
    """Write each document as JSON, and make a page and plots of every document that lies there, also of earlier runs.

    Returns:
        What could not be done.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for document in documents:
        text = json.dumps(document, indent=2, allow_nan=False)
        _json_path(folder, document["benchmark"]).write_text(text + "\n", encoding="utf-8")
    paths = [_json_path(folder, name) for name in BY_NAME]
    there = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.is_file()]
    sections = [render_markdown(document, _draw_all(document, folder)) for document in there]
    (folder / "index.md").write_text("\n\n".join([_page_head(there), *sections]) + "\n", encoding="utf-8")
    return [] if can_plot() else [NO_PLOTS]


def _json_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _draw_all(document: dict[str, Any], folder: Path) -> list[Path]:
    if not can_plot():
        return []
    drawn = (draw(chart, document["rows"], folder) for chart in BY_NAME[document["benchmark"]].charts)
    return [path for path in drawn if path is not None]


def _page_head(documents: Sequence[dict[str, Any]]) -> str:
    targets = [target for document in documents for target in document["targets"]]
    counts = [f"{sum(target['verdict'] == verdict.value for target in targets)} {verdict.value}" for verdict in Verdict]
    facts = documents[0]["machine"] if documents else {}
    table = _markdown_table(["machine", ""], [[name, _cell(value)] for name, value in facts.items()])
    return "\n\n".join(
        [
            "# Benchmarks: figures",
            "Written by `make bench`. All figures are CPU figures, taken on the simulated backend; device figures: not "
            "measured. Brackets hold bootstrap intervals at 95 %. A target is held at the bad end of its interval.",
            f"Targets: {', '.join(counts)}.",
            table,
        ]
    )


def _tables(rows: Sequence[Row]) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Rows with the same fields make one table: its headers and cells, an interval in the cell of its figure."""
    alike: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        alike.setdefault(tuple(row), []).append(row)
    for names, members in alike.items():
        intervals = {interval_name(name) for name in names}
        headers = [name for name in names if name not in intervals and name not in _HIDDEN_FIELDS]
        yield headers, [[_figure(row, name) for name in headers] for row in members]


def _figure(row: Row, name: str) -> str:
    interval = row.get(interval_name(name))
    shown = _cell(row[name])
    return shown if interval is None else f"{shown} [{_cell(interval[0])}, {_cell(interval[1])}]"


def _target_table(targets: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    headers = ["target", "wanted", "measured", "verdict"]
    cells = []
    for target in targets:
        measured = _NOTHING if target["measured"] is None else _cell(target["measured"])
        if target["ci95"] is not None:
            measured += f" [{_cell(target['ci95'][0])}, {_cell(target['ci95'][1])}]"
        wanted = f"{target['figure']} {target['relation']} {_cell(target['value'])}"
        cells.append([target["name"], wanted, measured, target["verdict"]])
    return headers, cells


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, bool) or not isinstance(value, int):
        return ", ".join(map(_cell, value)) if isinstance(value, list) else str(value)
    return f"{value:,}"


def _machine_line(machine: dict[str, Any]) -> str:
    load = machine["load_average"][0]
    return (
        f"{machine['cpu_model']}, {machine['cores_usable']} cores, {machine['kernel']}, Python {machine['python']}, "
        f"torch {machine['torch']}, load average {load:.2f}"
    )


def _markdown_table(headers: Sequence[str], cells: Sequence[Sequence[str]], *, numbers_from: int | None = None) -> str:
    """Columns from `numbers_from` on hold numbers; by default none does."""
    text_columns = len(headers) if numbers_from is None else numbers_from
    rule = ["---:" if column >= text_columns else "---" for column in range(len(headers))]
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in (headers, rule, *cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def _width(headers: Sequence[str], cells: Sequence[Sequence[str]]) -> int:
    """Wide enough that nothing is wrapped: figures are compared down a column."""
    return sum(max(len(line[column]) for line in (headers, *cells)) + 2 for column in range(len(headers)))
