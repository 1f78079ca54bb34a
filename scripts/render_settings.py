# SPDX-License-Identifier: Apache-2.0
"""Writes the table of settings in docs/settings.md from the schema.

    python scripts/render_settings.py

`tests/docs` compares the page with the schema.
"""

import json
import re
from pathlib import Path

from omni_core.settings.setting import Place, Setting
from omni_core.settings.stage_settings import SCHEMA

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
_MARKS = re.compile(r"(<!-- generated: settings -->\n).*?(<!-- end of settings -->)", re.DOTALL)


def table() -> str:
    """The Markdown table of every setting."""
    lines = ["| Setting | Default | Must be | Given by | Meaning |", "|---|---|---|---|---|", *map(_line, SCHEMA)]
    return "\n".join(lines)


def with_table(page: str) -> str:
    """The page with its block replaced."""
    written, count = _MARKS.subn(lambda found: f"{found[1]}\n{table()}\n\n{found[2]}", page)
    if count != 1:
        raise SystemExit(f"{PAGE} has {count} places for the table, marked as {_MARKS.pattern!r}; it needs one")
    return written


def _line(one: Setting) -> str:
    default = json.dumps(one.kind.plain(one.default))
    given_by = {
        Place.FLAG_ONLY: "flag only",
        Place.ANYWHERE: f"flag, `{one.variable}`, file",
        Place.TOOLS: f"`{one.variable}`, file",
    }[one.place]
    return f"| `{one.name}` | `{default}` | {one.kind.rule} | {given_by} | {one.meaning} |"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
