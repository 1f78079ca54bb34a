# SPDX-License-Identifier: Apache-2.0
"""A model's hook is found by its architecture's name, only with prefix caching on, and refused in words otherwise."""

import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from omni_core.diffusion_kv.config import DiffusionKVConfig
from omni_core.diffusion_kv.errors import DiffusionKVConfigError
from omni_core.diffusion_kv.hooks import RowIdentifier, installed_hooks, open_row_identifier
from omni_core.runtime import ThreadingRuntime

PAGED = {"diffusion_kv_mode": "paged_scheduler", "diffusion_kv_max_rows_per_request": 2}
CACHED = DiffusionKVConfig(**PAGED, enable_prefix_caching=True)
UNCACHED = (DiffusionKVConfig(), DiffusionKVConfig(**PAGED))

HOOK = """
class Hook:
    architecture = "toy"

    def __init__(self, pipeline):
        self.pipeline = pipeline

    def identify(self, prepared, context):
        return ()
"""


@dataclass
class ToyPipeline:
    """All that is asked of a pipeline when its hook is looked up."""

    architecture: str = "toy"


@dataclass
class Site:
    """A folder on `sys.path` that distributions of hooks are put into, as pip would put them."""

    path: Path
    modules: list[str] = field(default_factory=list)

    def add(self, distribution, *, name="toy", source=HOOK):
        module = distribution.replace("-", "_")
        (self.path / f"{module}.py").write_text(textwrap.dedent(source))
        self.modules.append(module)
        info = self.path / f"{module}-4.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 4.5\n")
        (info / "entry_points.txt").write_text(f"[omni_core.diffusion_models]\n{name} = {module}:Hook\n")

    def imported(self):
        return [module for module in self.modules if module in sys.modules]


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    made = Site(tmp_path)
    yield made
    for module in made.modules:
        sys.modules.pop(module, None)


def opened(config=CACHED, architecture="toy"):
    return open_row_identifier(config, ToyPipeline(architecture), ThreadingRuntime())


def test_a_hook_of_another_distribution_is_found_by_its_architecture(site):
    site.add("toy-hooks")
    site.add("other-hooks", name="other")
    assert isinstance(opened(), RowIdentifier)
    assert site.imported() == ["toy_hooks"]


@pytest.mark.parametrize("config", UNCACHED, ids=["dense", "paged"])
def test_without_prefix_caching_no_hook_is_imported(site, config):
    site.add("toy-hooks", source="raise RuntimeError('imported')")
    assert opened(config) is None
    assert site.imported() == []


@pytest.mark.parametrize("config", UNCACHED, ids=["dense", "paged"])
def test_without_prefix_caching_no_hook_is_needed(config):
    assert opened(config, "absent") is None


def test_listing_the_hooks_imports_none(site):
    site.add("toy-hooks")
    assert {"tiny-hunyuan", "toy"} <= {hook.name for hook in installed_hooks()}
    assert site.imported() == []


def test_an_architecture_without_a_hook_is_refused_with_both_ways_out(site):
    site.add("toy-hooks")
    with pytest.raises(
        DiffusionKVConfigError,
        match=r"enable_prefix_caching=True, .*'hunyuan-image3' has no model hook.*Set enable_prefix_caching=False, or "
        r"install .*'omni_core\.diffusion_models'; installed: .*toy \(from toy-hooks 4\.5\)",
    ):
        opened(architecture="hunyuan-image3")
    assert site.imported() == []


def test_two_hooks_of_one_architecture_are_named_and_neither_is_imported(site):
    site.add("toy-hooks")
    site.add("second-hooks")
    with pytest.raises(DiffusionKVConfigError, match=r"'toy' is registered by second-hooks 4\.5 .* and toy-hooks 4\.5"):
        opened()
    assert site.imported() == []


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import no_such_hasher", r"toy \(from toy-hooks 4\.5\) cannot be imported.*no_such_hasher"),
        ("Hook = 7", r"'toy' is 7; a callable that takes the pipeline"),
        ("def Hook(pipeline): raise OSError('no tokenizer')", r"'toy' cannot be made: OSError: no tokenizer"),
        ("def Hook(): pass", r"'toy' cannot be made: TypeError"),
        ("def Hook(pipeline): return None", r"'toy' cannot be made: AttributeError"),
        (HOOK.replace('"toy"', '"tiny"'), r"registered as 'toy' calls itself 'tiny'"),
    ],
)
def test_what_is_no_hook_is_refused_with_its_reason(site, source, says):
    site.add("toy-hooks", source=source)
    with pytest.raises(DiffusionKVConfigError, match=says):
        opened()
