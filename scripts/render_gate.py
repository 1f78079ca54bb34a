# SPDX-License-Identifier: Apache-2.0
"""Writes the gate's tables into docs/support.md from the rules themselves: `python scripts/render_gate.py`.

Each table stands between two marks. `tests/docs` compares them with the rules.
"""

from pathlib import Path

from marked_block import with_block

from omni_core.prefix_cache.gate import GATE_RULES
from omni_core.prefix_cache.gate_platforms import PLATFORM_RUNNERS

PAGE = Path(__file__).parents[1] / "docs" / "support.md"


def table() -> str:
    """One line per rule, in the order they are asked."""
    lines = ["| Rule | Answer | When | What to change |", "|---|---|---|---|"]
    lines += [
        f"| `{rule.name}` | {rule.status.value} | {_cell(rule.when)} | {_cell(rule.remedy) or 'nothing'} |"
        for rule in GATE_RULES
    ]
    return "\n".join(lines)


def runners_table() -> str:
    """One line per model runner on each kind of device."""
    lines = ["| Device | Model runner | Worker class | Served | Checked with |", "|---|---|---|---|---|"]
    for one in PLATFORM_RUNNERS:
        served = f"no: {_cell(one.refusal)}; {_cell(one.remedy)}" if one.refusal else "yes"
        lines.append(f"| {one.device_type} | {one.runner.value} | `{one.worker}` | {served} | {_cell(one.checked)} |")
    return "\n".join(lines)


def rendered(page: str) -> str:
    """The page with the tables as they should be."""
    return with_block(with_block(page, "gate", table()), "runners", runners_table())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
