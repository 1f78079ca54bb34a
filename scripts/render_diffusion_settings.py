# SPDX-License-Identifier: Apache-2.0
"""Writes the generated parts of docs/diffusion-kv-settings.md from the source.

    python scripts/render_diffusion_settings.py

`tests/docs` compares the page with the source.
"""

import ast
import inspect
import re
from dataclasses import MISSING, fields
from pathlib import Path

from marked_block import with_block

from omni_core.diffusion_kv import settings
from omni_core.diffusion_kv.refusals import REFUSALS

PAGE = Path(__file__).parents[1] / "docs" / "diffusion-kv-settings.md"


def meanings() -> dict[str, str]:
    """What stands under each setting in the source."""
    (settings_class,) = (
        node
        for node in ast.parse(inspect.getsource(settings)).body
        if isinstance(node, ast.ClassDef) and node.name == "DiffusionKVSettings"
    )
    found = {}
    for declared, documented in zip(settings_class.body, settings_class.body[1:], strict=False):
        if isinstance(declared, ast.AnnAssign) and isinstance(documented, ast.Expr):
            found[ast.unparse(declared.target)] = " ".join(ast.literal_eval(documented.value).split())
    return found


def settings_table() -> str:
    """The Markdown table of every setting."""
    meaning = meanings()
    lines = ["| Setting | Default | Meaning |", "|---|---|---|"]
    for one in fields(settings.DiffusionKVSettings):
        assert one.default is not MISSING
        default = "unset" if one.default is None else f"`{str(one.default).lower()}`"
        lines.append(f"| `{one.name}` | {default} | {meaning[one.name]} |")
    return "\n".join(lines)


def refusals_list() -> str:
    """The message of every refusal, with an ellipsis where a setting's value stands."""
    return "\n".join(f"- `{one.name}`: {re.sub(r'{s[.][^}]*}', '…', one.message)}" for one in REFUSALS)


def rendered(page: str) -> str:
    """The page with both parts as they should be."""
    return with_block(with_block(page, "settings", settings_table()), "refusals", refusals_list())


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
