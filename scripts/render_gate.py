# SPDX-License-Identifier: Apache-2.0
"""Writes the gate's table into docs/support.md from the rules themselves: `python scripts/render_gate.py`.

The table stands between two marks. `tests/docs` compares it with the rules.
"""

import re
import sys
from pathlib import Path

from omni_core.prefix_cache.gate import GATE_RULES

PAGE = Path(__file__).parents[1] / "docs" / "support.md"


def table() -> str:
    """One line per rule, in the order they are asked."""
    lines = ["| Rule | Answer | When | What to change |", "|---|---|---|---|"]
    lines += [
        f"| `{rule.name}` | {rule.status.value} | {_cell(rule.when)} | {_cell(rule.remedy) or 'nothing'} |"
        for rule in GATE_RULES
    ]
    return "\n".join(lines)


def rendered(page: str) -> str:
    """The page with the table as it should be.

    Raises:
        ValueError: the page does not have the two marks once.
    """
    marks = r"(<!-- generated: gate -->\n).*?(<!-- end of gate -->)"
    filled, count = re.subn(marks, lambda found: f"{found[1]}\n{table()}\n\n{found[2]}", page, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"{PAGE.name} has {count} places for the gate's table; it needs one")
    return filled


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    """Write the page."""
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
