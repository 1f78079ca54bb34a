# SPDX-License-Identifier: Apache-2.0
"""What was looked up in a package, and what was not found there."""

import ast
from dataclasses import dataclass

from omni_core.integrations.vllm.releases.engine_sources import EngineSources


@dataclass(frozen=True)
class ContractReport:
    """One package, held against what rests on it."""

    package: str
    num_checked: int
    missing: tuple

    def __str__(self):
        found = "none is missing" if not self.missing else "missing: " + "; ".join(map(str, self.missing))
        return f"contract with {self.package}: {self.num_checked} attributes and signatures looked up, {found}"


def source_report(package, root, facts):
    """The facts looked up in the source text below a folder."""
    return ContractReport(package, len(facts), EngineSources(root).lacking(facts))


def attributes_read(folder, *bases):
    """Every name that Python files below a folder read as an attribute of one of these expressions, such as `npu`."""
    return {
        node.attr
        for path in sorted(folder.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in bases
    }
