# SPDX-License-Identifier: Apache-2.0
"""Writes the gate's table into docs/support.md from the rules themselves: `python scripts/render_gate.py`.

The table stands between two marks. `tests/docs` compares it with the rules.
"""

from pathlib import Path

from marked_block import with_block

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
    """The page with the table as it should be."""
    return with_block(page, "gate", table())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
