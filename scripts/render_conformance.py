# SPDX-License-Identifier: Apache-2.0
"""Writes the conformance suite's table into docs/writing-a-backend.md.

    PYTHONPATH=tests/support python scripts/render_conformance.py

One line per check: the property, what is required, and the broken backends that fail exactly this check. The tests of
the suite compare the table with the checks.
"""

from itertools import groupby
from pathlib import Path

from broken_backends import BROKEN
from marked_block import with_block

from omni_core.backend.conformance import CONFORMANCE_CHECKS, BackendProperty, ConformanceCheck

PAGE = Path(__file__).parents[1] / "docs" / "writing-a-backend.md"
HOW_TO = "run `PYTHONPATH=tests/support python scripts/render_conformance.py`"


def table() -> str:
    """The checks in their order, by property."""
    lines = ["| Property | Check | What is required | Fails a backend that made this mistake |", "|---|---|---|---|"]
    for tried, checks in groupby(CONFORMANCE_CHECKS, key=_property):
        shown = tried.value
        for check in checks:
            lines.append(f"| {shown} | `{check.name}` | {_cell(check.requirement)} | {_cell(_mistakes(check.name))} |")
            shown = ""
    return "\n".join(lines)


def rendered(page: str) -> str:
    """The page with the table as it should be."""
    return with_block(page, "conformance", table())


def _property(check: ConformanceCheck) -> BackendProperty:
    return check.property


def _mistakes(check_name: str) -> str:
    return " ".join(
        f"`{broken.__name__}`: {broken.__doc__}" for broken, expected in BROKEN.items() if check_name in expected
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
