# SPDX-License-Identifier: Apache-2.0
"""Sinks are found by entry point, by name; every refusal names the choices."""

import sys

import pytest

from omni_core.sinks import errors
from omni_core.sinks.memory import MemorySink
from omni_core.sinks.registry import create_sink, installed_sinks, load_sink_class


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts a distribution with one sink on `sys.path`, as pip would."""
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = []

    def add(distribution, name, source):
        module = distribution.replace("-", "_")
        modules.append(module)
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[omni_core.sinks]\n{name} = {module}:Sink\n")

    yield add
    for module in modules:
        sys.modules.pop(module, None)


def test_the_sinks_of_this_distribution_are_listed_with_their_origin():
    ours = [sink for sink in installed_sinks() if sink.distribution == "omni-core"]
    assert [sink.name for sink in ours] == ["memory", "safetensors"]


def test_a_sink_is_made_with_its_options(tmp_path):
    assert isinstance(create_sink("memory"), MemorySink)
    create_sink("safetensors", {"directory": tmp_path / "rows"}).close()
    assert (tmp_path / "rows").is_dir()


def test_a_third_party_sink_is_found(install):
    install("vendor-sink", "vendor", "from omni_core.sinks.memory import MemorySink as Sink")
    assert load_sink_class("vendor") is MemorySink


def test_unknown_name_names_the_choices():
    with pytest.raises(errors.UnknownSinkError, match=r"no sink .*'parquet'.*memory .*safetensors .*omni-core"):
        create_sink("parquet")


def test_a_name_of_two_distributions_names_both(install):
    install("vendor-sink", "memory", "raise AssertionError('must not be imported')")
    with pytest.raises(errors.DuplicateSinkError, match=r"'memory'.*omni-core.*and.*vendor-sink 1\.0"):
        create_sink("memory")


@pytest.mark.parametrize(
    ("source", "says"),
    [("import no_such_client", "no_such_client"), ("class Sink: ...", "not a subclass of StageSink")],
)
def test_what_is_no_sink_is_refused_with_its_reason(install, source, says):
    install("vendor-sink", "vendor", source)
    with pytest.raises(errors.BrokenSinkError, match=rf"(?s)vendor.*{says}"):
        create_sink("vendor")


@pytest.mark.parametrize(("options", "says"), [({}, "'directory'"), ({"directory": "x", "folder": "y"}, "'folder'")])
def test_wrong_options_are_named_and_nothing_is_made(tmp_path, monkeypatch, options, says):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.InvalidSinkOptionError, match=rf"'safetensors'.*{says}.*overwrite"):
        create_sink("safetensors", options)
    assert list(tmp_path.iterdir()) == []
