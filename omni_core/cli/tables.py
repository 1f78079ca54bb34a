# SPDX-License-Identifier: Apache-2.0
"""How every command prints: a text table or one JSON document, chosen by `--format`."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence
from typing import Any

TEXT = "text"
JSON = "json"
_GAP = "  "
_MIN_LAST_COLUMN = 24


def add_format_argument(parser: argparse.ArgumentParser) -> None:
    """Give a command `--format text|json`, found as `args.format`."""
    parser.add_argument(
        "--format", choices=(TEXT, JSON), default=TEXT, help="print for people (text, the default) or programs (json)"
    )


def print_json(document: Any) -> None:
    """Print `document` as one indented JSON document. Keys keep their order; anything JSON has no form for raises."""
    json.dump(document, sys.stdout, indent=2, allow_nan=False)
    print()


def print_failure(command: str, form: str, message: str) -> None:
    """Say why a command could not do its work: on stderr, and in JSON also as the document that was asked for."""
    if form == JSON:
        print_json({"ok": False, "error": message})
    print(f"omni-core {command}: {message}", file=sys.stderr)


def render_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right_aligned: Collection[str] = (),
    width: int | None = None,
) -> str:
    """Lay out a table with a rule under its headers.

    Args:
        headers: one per column.
        rows: cells in the order of `headers`.
        right_aligned: the headers of columns that hold numbers.
        width: columns of the terminal; `None` asks for it. The last column is wrapped to fit, the others never are.

    Returns:
        The lines, without a final newline and without trailing spaces.

    Raises:
        ValueError: a row has another number of cells than there are headers.
    """
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f"row {list(row)!r} has {len(row)} cells for {len(headers)} headers")
    widths = [max(len(cells[column]) for cells in (headers, *rows)) for column in range(len(headers))]
    before_last = sum(widths[:-1]) + len(_GAP) * (len(headers) - 1)
    available = (width if width is not None else shutil.get_terminal_size().columns) - before_last
    widths[-1] = min(widths[-1], max(available, _MIN_LAST_COLUMN))

    lines: list[str] = []
    for cells in (headers, ["-" * column_width for column_width in widths], *rows):
        wrapped = textwrap.wrap(cells[-1], widths[-1]) or [""]
        for number, last in enumerate(wrapped):
            shown = [*(cells[:-1] if number == 0 else [""] * (len(cells) - 1)), last]
            lines.append(
                _GAP.join(
                    cell.rjust(column_width) if header in right_aligned else cell.ljust(column_width)
                    for header, cell, column_width in zip(headers, shown, widths, strict=True)
                ).rstrip()
            )
    return "\n".join(lines)
