# SPDX-License-Identifier: Apache-2.0
"""Arrows point one way: every import in the shipped source is one its layer may make.

    cli, integrations, sinks, testing, telemetry -> prefix_cache, diffusion_kv
        -> backend interface, runtime, plugins <- backends/*

The checker reads the source; it imports nothing. It sees imports inside functions and under TYPE_CHECKING too.
"""

import ast
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SOURCE_ROOTS = {  # import root -> the import packages that lie in it
    ".": ("omni_core",),
    "backends/cuda": ("omni_core_cuda",),
    "backends/npu": ("omni_core_npu",),
    "backends/cpu_sim": ("omni_core_cpu_sim",),
}

BOTTOM = {"omni_core", "omni_core.runtime", "omni_core.plugins"}
CORE = {*BOTTOM, "omni_core.backend"}
LAYERS = {  # layer -> the other layers it may import; a module belongs to the longest name it starts with
    "omni_core": set(),  # the package itself: a version and a docstring
    "omni_core.runtime": {"omni_core"},
    "omni_core.plugins": {"omni_core"},
    "omni_core.settings": {"omni_core"},  # the operator's; nothing of the core knows where a value came from
    "omni_core.backend": {*BOTTOM},
    "omni_core.backend.registry": {*CORE},
    "omni_core.backend.conformance": {*CORE, "omni_core.backend.registry"},
    "omni_core.prefix_cache": {*CORE},
    "omni_core.diffusion_kv": {*CORE, "omni_core.backend.registry"},  # not prefix_cache: the other half of the package
    "omni_core.sinks": {*CORE, "omni_core.prefix_cache"},
    "omni_core.telemetry": {*CORE, "omni_core.prefix_cache"},
    "omni_core.testing": {
        *CORE,
        "omni_core.backend.registry",
        "omni_core.prefix_cache",
        "omni_core.sinks",
        "omni_core.testing.os_threads",
    },
    "omni_core.testing.os_threads": {"omni_core"},  # real threads under the testing runtimes, and nothing else
    "omni_core.pytest_plugin": {"omni_core", "omni_core.testing"},  # inside its fixtures; nothing but pytest at load
    "omni_core.integrations": {
        *CORE,
        "omni_core.backend.registry",
        "omni_core.prefix_cache",
        "omni_core.settings",
        "omni_core.sinks",
        "omni_core.diffusion_kv",
    },
    "omni_core.integrations.vllm.rpc.async_stage_client": {  # runs on the event loop of vLLM's AsyncLLM
        *CORE,
        "omni_core.integrations",
        "omni_core.sinks",
    },
    "omni_core.integrations.vllm.simulation": {  # the real scheduler in the simulated engine's place
        *CORE,
        "omni_core.prefix_cache",
        "omni_core.integrations",
        "omni_core.testing",
    },
    "omni_core.cli": {
        *CORE,
        "omni_core.settings",
        "omni_core.backend.registry",
        "omni_core.backend.conformance",
        "omni_core.prefix_cache",
        "omni_core.sinks",
        "omni_core.testing",
        "omni_core.integrations",
        "omni_core.integrations.vllm.simulation",
        "omni_core.diffusion_kv",
    },
    "omni_core_cuda": {"omni_core.backend", "omni_core.runtime"},
    "omni_core_npu": {"omni_core.backend", "omni_core.runtime"},
    "omni_core_cpu_sim": {"omni_core.backend", "omni_core.runtime"},
}
ONLY_IMPORTED_BY = {  # foreign package -> the only layers that may import it
    "vllm": {"omni_core.integrations", "omni_core.integrations.vllm.simulation"},
    "vllm_ascend": {"omni_core.integrations"},
    "vllm_omni": {"omni_core.integrations"},
    "torch_npu": {"omni_core_npu"},
    "torch.cuda": {"omni_core_cuda"},
    "torch.npu": {"omni_core_npu"},
    "torch.xpu": set(),
    "torch.accelerator": set(),
    "torch.Event": {"omni_core_cuda", "omni_core_npu"},
    "torch.Stream": {"omni_core_cuda", "omni_core_npu"},
    "stevedore": {"omni_core.plugins"},
    "threading": {"omni_core.runtime", "omni_core.testing.os_threads"},
    "_thread": set(),
    "queue": set(),
    "asyncio": {"omni_core.integrations.vllm.rpc.async_stage_client"},
    "concurrent": set(),
    "multiprocessing": set(),
    "time.monotonic": {"omni_core.runtime"},
    "time.monotonic_ns": {"omni_core.runtime"},
    "time.sleep": {"omni_core.runtime"},
}


@dataclass(frozen=True)
class Use:
    """One thing a module imports, or reaches through an imported module."""

    module: str
    target: str
    where: str


def modules_under(root, packages):
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def uses_of(module, path, shown):
    """Every import of a module, and every attribute chain such as `torch.cuda` on a name it imported."""
    tree = ast.parse(path.read_text())
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Use(module, alias.name, f"{shown}:{node.lineno}")
                first = alias.name.partition(".")[0]
                bound[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                target = f"{base}.{alias.name}"
                yield Use(module, target, f"{shown}:{node.lineno}")
                bound[alias.asname or alias.name] = target
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            chain = dotted(node)
            first, _, rest = chain.partition(".")
            if first in bound:
                yield Use(module, f"{bound[first]}.{rest}", f"{shown}:{node.lineno}")


def dotted(node):
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def starts_with(name, prefix):
    return name == prefix or name.startswith(prefix + ".")


def layer_of(name):
    return max((layer for layer in LAYERS if starts_with(name, layer)), key=len, default=None)


def violations(repository, source_roots=SOURCE_ROOTS):
    """One line per import that its layer may not make."""
    found = []
    for root, packages in source_roots.items():
        for module, path in modules_under(repository / root, packages):
            shown = path.relative_to(repository)
            layer = layer_of(module)
            if layer == "omni_core" and module != "omni_core":
                found.append(f"{shown}: {module} belongs to no layer; add one to LAYERS in {Path(__file__).name}")
            for use in uses_of(module, path, shown):
                target_layer = layer_of(use.target)
                if target_layer is not None and target_layer not in {layer, *LAYERS[layer]}:
                    allowed = ", ".join(sorted(LAYERS[layer] - {"omni_core"})) or "nothing of this project"
                    found.append(f"{use.where}: {module} uses {use.target}, but {layer} may import only {allowed}")
                for foreign, importers in ONLY_IMPORTED_BY.items():
                    if starts_with(use.target, foreign) and layer not in importers:
                        allowed = f"only {', '.join(sorted(importers))} may" if importers else "nothing here may"
                        found.append(f"{use.where}: {module} uses {use.target}; {allowed}")
    return sorted(set(found))


def test_every_import_is_one_its_layer_may_make():
    found = violations(REPOSITORY)
    assert not found, "\n" + "\n".join(found)


def test_every_layer_and_source_root_exists():
    modules = {
        module for root, packages in SOURCE_ROOTS.items() for module, _ in modules_under(REPOSITORY / root, packages)
    }
    assert {layer for layer in LAYERS if layer not in modules} == set()
    shipped = {path.parent.name for path in (REPOSITORY / "backends").glob("*/*/__init__.py")}
    assert shipped == {package for packages in SOURCE_ROOTS.values() for package in packages} - {"omni_core"}


@pytest.mark.parametrize(
    ("path", "source", "says"),
    [
        ("omni_core/prefix_cache/x.py", "import omni_core.sinks.base", "x uses omni_core.sinks.base"),
        ("omni_core/prefix_cache/x.py", "from omni_core import sinks", "x uses omni_core.sinks"),
        ("omni_core/prefix_cache/x.py", "from ..sinks import base", "x uses omni_core.sinks.base"),
        ("omni_core/prefix_cache/__init__.py", "from .. import cli", "prefix_cache uses omni_core.cli"),
        ("omni_core/prefix_cache/x.py", "from omni_core.backend.registry import f", "uses omni_core.backend.registry"),
        ("omni_core/prefix_cache/x.py", "import omni_core_cpu_sim", "uses omni_core_cpu_sim"),
        ("omni_core/testing/x.py", "from omni_core_cpu_sim import CpuSimBackend", "uses omni_core_cpu_sim"),
        ("omni_core/sinks/x.py", "import omni_core.integrations.vllm", "uses omni_core.integrations.vllm"),
        ("omni_core/cli/x.py", "import omni_core.telemetry", "uses omni_core.telemetry"),
        ("omni_core/runtime.py", "import omni_core.backend", "may import only nothing of this project"),
        ("omni_core/backend/x.py", "import omni_core.prefix_cache", "uses omni_core.prefix_cache"),
        ("backends/cuda/omni_core_cuda/x.py", "import omni_core.prefix_cache", "uses omni_core.prefix_cache"),
        ("backends/npu/omni_core_npu/x.py", "import omni_core_cuda", "uses omni_core_cuda"),
        ("omni_core/new_thing/x.py", "", "omni_core.new_thing.x belongs to no layer"),
        ("omni_core/cli/x.py", "def f():\n    import vllm.config", "x uses vllm.config; only omni_core.integrations"),
        ("omni_core/cli/x.py", "if TYPE_CHECKING:\n    from vllm import LLM", "x uses vllm.LLM"),
        ("omni_core/backend/x.py", "import torch\ntorch.cuda.is_available()", "x uses torch.cuda"),
        ("omni_core/backend/x.py", "import torch as t\nt.cuda.synchronize()", "x uses torch.cuda"),
        ("omni_core/backend/x.py", "from torch import cuda", "x uses torch.cuda"),
        ("omni_core/integrations/x.py", "import torch\ntorch.Event()", "x uses torch.Event; only"),
        ("backends/cpu_sim/omni_core_cpu_sim/x.py", "import torch_npu", "uses torch_npu; only omni_core_npu may"),
        ("omni_core/prefix_cache/x.py", "import threading", "x uses threading; only omni_core.runtime, omni"),
        ("backends/cpu_sim/omni_core_cpu_sim/x.py", "from queue import Queue", "uses queue.Queue; nothing here may"),
        ("omni_core/integrations/x.py", "from concurrent.futures import Future", "nothing here may"),
        ("omni_core/sinks/x.py", "import time\ntime.sleep(1)", "x uses time.sleep; only omni_core.runtime may"),
        ("omni_core/sinks/x.py", "from time import monotonic as now", "x uses time.monotonic"),
        ("omni_core/sinks/x.py", "from stevedore import driver", "uses stevedore.driver; only omni_core.plugins may"),
    ],
)
def test_the_checker_catches(tmp_path, path, source, says):
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(source)
    found = violations(tmp_path)
    assert found, f"{source!r} in {path} was let through"
    assert says in found[0]
    assert found[0].startswith(path)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("omni_core/runtime.py", "import threading, time\ntime.monotonic()"),
        ("omni_core/plugins.py", "from stevedore.driver import DriverManager"),
        ("omni_core/integrations/vllm/x.py", "from vllm.config import VllmConfig\nimport omni_core.backend.registry"),
        ("omni_core/prefix_cache/x.py", "from omni_core.backend import Stream\nfrom . import y\nimport vllmish"),
        ("omni_core/cli/x.py", "import time, omni_core\nfrom omni_core.testing import y\ntime.perf_counter()"),
        ("omni_core/sinks/x.py", "import torch\ntorch.cuda_like, torch.zeros(1).cuda"),
        ("backends/cuda/omni_core_cuda/x.py", "import torch\ntorch.cuda.Stream()"),
    ],
)
def test_the_checker_lets_through(tmp_path, path, source):
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(source)
    assert violations(tmp_path) == []


IMPORT_EVERYTHING = textwrap.dedent("""
    import importlib, pkgutil, sys

    ABSENT = ("vllm", "vllm_ascend", "vllm_omni", "torch_npu", "gguf", "transformers", "accelerate", "rich")
    NATIVE = ("block_hashing", "kernel_attention", "kv_manager", "paging", "row_request", "sizing")
    NEED_VLLM = ("omni_core.integrations.vllm", "omni_core.cli.demo", *(
        f"omni_core.integrations.diffusion.{name}" for name in NATIVE))

    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in ABSENT:
                raise ModuleNotFoundError(f"{name} is absent in this test", name=name)

    sys.meta_path.insert(0, Absent())
    import omni_core
    names = [module.name for module in pkgutil.walk_packages(
        omni_core.__path__, "omni_core.", onerror=lambda name: None)]
    for name in names:
        if not name.startswith(NEED_VLLM):
            importlib.import_module(name)
    print(sorted(name for name in sys.modules if name.startswith("omni_core_")))
    for name in ("omni_core_cuda", "omni_core_npu", "omni_core_cpu_sim"):
        importlib.import_module(name)
    print(len(names))
""")


def test_everything_but_the_integration_imports_without_vllm_and_core_imports_no_backend():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT_EVERYTHING], capture_output=True, text=True, cwd="/", check=False
    )
    assert done.returncode == 0, done.stderr
    backends_imported_by_core, count = done.stdout.splitlines()
    assert backends_imported_by_core == "[]"
    assert int(count) > 20
