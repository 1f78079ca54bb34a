# SPDX-License-Identifier: Apache-2.0
"""Finds the worker classes of a source tree, and loads them on a stand-in for vLLM's worker.

The real workers are not imported: some need another machine, and each changes torch for the whole process.
"""

import ast
import importlib
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from unittest import mock

ENGINES = ("vllm", "vllm_ascend", "vllm_omni")


@dataclass(frozen=True)
class WorkerClass:
    """A class that is, through its bases, a worker of vLLM or of one of its plugins."""

    module: str
    name: str


class EngineWorker:
    """The part of vLLM's worker that Omni Core's build upon; writes down what ran."""

    use_v2_model_runner = False
    warm_up = staticmethod(lambda: None)

    def __init__(self, vllm_config, runner):
        self.vllm_config = vllm_config
        self.model_runner = None
        self.ran = []
        self._runner = runner

    def init_device(self):
        self.ran.append("init_device")
        self.model_runner = self._runner

    def load_model(self):
        self.ran.append("load_model")

    def initialize_from_config(self, kv_cache_config):
        self.ran.append("initialize_from_config")

    def compile_or_warm_up_model(self):
        return self.warm_up()

    def shutdown(self):
        self.ran.append("shutdown")


def worker_classes(root, package):
    """Every worker class of the modules under `root`, whose import name is `package`; read, not imported."""
    bases = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join(filter(None, (package, *(part for part in parts if part != "__init__"))))
        bases |= _bases_by_class(ast.parse(path.read_text(encoding="utf-8")), module)
    found = {name for name, its in bases.items() if any(map(_is_engine_worker, its))}
    while more := {name for name, its in bases.items() if name not in found and not found.isdisjoint(its)}:
        found |= more
    return [WorkerClass(*name.rsplit(".", 1)) for name in sorted(found)]


def _bases_by_class(tree, module):
    known = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            known |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ClassDef):
            known[node.name] = f"{module}.{node.name}"
    return {
        f"{module}.{node.name}": [_full_name(ast.unparse(base), known) for base in node.bases]
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }


def _full_name(base, known):
    first, dot, rest = base.partition(".")
    return f"{known.get(first, first)}{dot}{rest}"


def _is_engine_worker(base):
    return base.split(".", 1)[0] in ENGINES and base.rsplit(".", 1)[-1].endswith(("Worker", "WorkerBase"))


class _EngineModule(ModuleType):
    """Any module of an engine: its workers are the stand-in, whatever else is asked of it is a mock."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return EngineWorker if _is_engine_worker(f"{self.__name__}.{name}") else mock.MagicMock(name=name)


class _EngineFinder:
    """Finds every module of every engine, installed or not."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".", 1)[0] in ENGINES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _EngineModule(spec.name)

    def exec_module(self, module):
        pass


@contextmanager
def loaded(worker):
    """The class, made on the stand-in. Afterwards no module made here can be imported."""
    with mock.patch.dict(sys.modules), mock.patch.object(sys, "meta_path", [_EngineFinder(), *sys.meta_path]):
        for name in list(sys.modules):
            if name.split(".", 1)[0] in ENGINES or name == worker.module:
                del sys.modules[name]
        yield getattr(importlib.import_module(worker.module), worker.name)
    parent, _, child = worker.module.rpartition(".")
    if parent:
        vars(sys.modules[parent]).pop(child, None)
