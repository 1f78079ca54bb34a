# SPDX-License-Identifier: Apache-2.0
"""Functions and classes cut out of a package's source text and executed by themselves; the package is not imported."""

import __future__

import ast
from copy import deepcopy
from functools import cache
from pathlib import Path
from types import SimpleNamespace


def cut(package: Path, module: str, *names: str, **stand_ins: object) -> SimpleNamespace:
    """What `module` defines under `names`, executed with `stand_ins` for everything else its text refers to.

    A name is that of a function or class, or `Class.method`, which comes as a plain function. Later definitions see
    earlier ones. Decorators of classes and functions are kept, those of methods cut by name are not. Imports inside
    functions are left out: what they bring is looked up among the stand-ins. Annotations are not evaluated.
    """
    tree = _parsed(package / module)
    namespace: dict[str, object] = {"__name__": __name__, **stand_ins}
    for name in names:
        definition = deepcopy(_definition(tree, name))
        if "." in name and isinstance(definition, ast.FunctionDef):
            definition.decorator_list = []
        _execute(definition, f"{package.name}/{module}", namespace)
    return SimpleNamespace(**{short: namespace[short] for short in (name.split(".")[-1] for name in names)})


def cut_class(package: Path, module: str, name: str, *methods: str, base: type, **stand_ins: object) -> type:
    """The class `name` of `module` with no more than `methods`, over `base` and nothing else. Else as `cut`."""
    tree = _parsed(package / module)
    kept = [deepcopy(_definition(tree, f"{name}.{method}")) for method in methods]
    definition = ast.ClassDef(name, bases=[ast.Name("_base", ast.Load())], keywords=[], body=kept, decorator_list=[])
    namespace = {"__name__": __name__, "_base": base, **stand_ins}
    _execute(definition, f"{package.name}/{module}", namespace)
    made = namespace[name]
    assert isinstance(made, type)
    return made


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _execute(definition: ast.stmt, file: str, namespace: dict[str, object]) -> None:
    definition = ast.fix_missing_locations(_WithoutImports().visit(definition))
    flags = __future__.annotations.compiler_flag
    exec(compile(ast.Module([definition], []), file, "exec", flags=flags, dont_inherit=True), namespace)


def _definition(tree: ast.Module, name: str) -> ast.stmt:
    owner, _, method = name.rpartition(".")
    body = tree.body
    if owner:
        body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner)
    found = [node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == method]
    if not found:
        raise LookupError(f"{name} is not defined")
    return found[-1]


class _WithoutImports(ast.NodeTransformer):
    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        return ast.copy_location(ast.Pass(), node)

    visit_Import = visit_ImportFrom  # noqa: N815
