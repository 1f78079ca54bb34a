# SPDX-License-Identifier: Apache-2.0
"""Writes the table of settings in docs/settings.md from the schema.

    python scripts/render_settings.py

`tests/docs` compares the page with the schema.
"""

import json
from pathlib import Path

from marked_block import with_block

from omni_core.settings.setting import Place, Setting
from omni_core.settings.stage_settings import SCHEMA

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"


def table() -> str:
    """The Markdown table of every setting."""
    lines = ["| Setting | Default | Must be | Given by | Meaning |", "|---|---|---|---|---|", *map(_line, SCHEMA)]
    return "\n".join(lines)


def rendered(page: str) -> str:
    """The page with the table as it should be."""
    return with_block(page, "settings", table())


def _line(one: Setting) -> str:
    default = json.dumps(one.kind.plain(one.default))
    given_by = {
        Place.FLAG_ONLY: "flag only",
        Place.ANYWHERE: f"flag, `{one.variable}`, file",
        Place.TOOLS: f"`{one.variable}`, file",
    }[one.place]
    return f"| `{one.name}` | `{default}` | {one.kind.rule} | {given_by} | {one.meaning} |"


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
