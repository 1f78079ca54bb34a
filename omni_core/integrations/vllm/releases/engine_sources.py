# SPDX-License-Identifier: Apache-2.0
"""Reads facts out of a vLLM's source text. Imports nothing of it, so any version's wheel can be read."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from omni_core.integrations.vllm.releases.engine_contract import EngineFact, FactKind

Function = ast.FunctionDef | ast.AsyncFunctionDef


class EngineSources:
    """The source text of one vLLM. Each module is parsed once. Not for several threads."""

    def __init__(self, package_root: Path) -> None:
        """Read below a folder.

        Args:
            package_root: the `vllm` package: the folder with its `__init__.py`.
        """
        self._root = package_root
        self._modules: dict[str, ast.Module | None] = {}
        self._members: dict[tuple[str, str | None], frozenset[str]] = {}

    def lacking(self, facts: Iterable[EngineFact]) -> tuple[EngineFact, ...]:
        """Those of the facts that this source text does not have, in their order.

        Raises:
            SyntaxError: a module is no Python this interpreter can parse.
        """
        return tuple(fact for fact in facts if not self._has(fact))

    def _has(self, fact: EngineFact) -> bool:
        module = self._module(fact.module)
        if module is None:
            return False
        owner: ast.Module | ast.ClassDef | None = module
        if fact.owner is not None:
            owner = next(_defined(module, ast.ClassDef, fact.owner), None)
        if owner is None:
            return False
        match fact.kind:
            case FactKind.BASE:
                bases = owner.bases if isinstance(owner, ast.ClassDef) else ()
                return any(ast.unparse(base).split(".")[-1] == fact.name for base in bases)
            case FactKind.MEMBER:
                place = (fact.module, fact.owner)
                if place not in self._members:
                    self._members[place] = _members(owner)
                return fact.name in self._members[place]
            case FactKind.EXPORT:
                return any(fact.name in _imported(one) for one in _statements(owner))
            case FactKind.CALL:
                return any(_parameters(found)[: len(fact.detail)] == fact.detail for found in _functions(owner, fact))
            case FactKind.EXPRESSION:
                return any(fact.detail[0] in ast.unparse(found) for found in _functions(owner, fact))

    def _module(self, path: str) -> ast.Module | None:
        if path not in self._modules:
            file = self._root / path
            self._modules[path] = ast.parse(file.read_text(encoding="utf-8"), path) if file.is_file() else None
        return self._modules[path]


def _statements(owner: ast.Module | ast.ClassDef) -> Iterator[ast.stmt]:
    """The owner's own statements, those under an `if` included."""
    waiting = list(owner.body)
    while waiting:
        statement = waiting.pop(0)
        if isinstance(statement, ast.If):
            waiting[:0] = [*statement.body, *statement.orelse]
        else:
            yield statement


def _defined(owner: ast.Module | ast.ClassDef, kind: type[ast.ClassDef], name: str) -> Iterator[ast.ClassDef]:
    return (one for one in _statements(owner) if isinstance(one, kind) and one.name == name)


def _functions(owner: ast.Module | ast.ClassDef, fact: EngineFact) -> Iterator[Function]:
    return (one for one in _statements(owner) if isinstance(one, Function) and one.name == fact.name)


def _imported(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.ImportFrom):
        for alias in statement.names:
            yield alias.asname or alias.name


def _parameters(function: Function) -> tuple[str, ...]:
    arguments = function.args
    names = tuple(one.arg for one in (*arguments.posonlyargs, *arguments.args))
    return names[1:] if names[:1] in (("self",), ("cls",)) else names


def _members(owner: ast.Module | ast.ClassDef) -> frozenset[str]:
    names = set()
    for statement in _statements(owner):
        if isinstance(statement, Function | ast.ClassDef):
            names.add(statement.name)
        if isinstance(statement, Function) and isinstance(owner, ast.ClassDef):
            names.update(_attributes_set_in(statement))
        names.update(target.id for target in _targets(statement) if isinstance(target, ast.Name))
    return frozenset(names)


def _attributes_set_in(method: Function) -> Iterator[str]:
    for node in ast.walk(method):
        for target in _targets(node):
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                yield target.attr


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    for target in targets:
        yield from target.elts if isinstance(target, ast.Tuple) else (target,)
