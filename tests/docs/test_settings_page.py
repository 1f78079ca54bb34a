# SPDX-License-Identifier: Apache-2.0
"""The settings page says what the schema says, and its example of a file can be read."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

from omni_core.settings.resolve import resolve
from omni_core.settings.stage_settings import SCHEMA

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def renderer():
    spec = importlib.util.spec_from_file_location("render_settings", REPOSITORY / "scripts" / "render_settings.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_rendered_from_the_schema(renderer):
    page = renderer.PAGE.read_text(encoding="utf-8")
    assert renderer.table() in page
    assert renderer.with_table(page) == page


def test_the_table_has_every_setting_with_its_default_and_meaning(renderer):
    lines = renderer.table().splitlines()[2:]
    assert [line.split("`")[1] for line in lines] == [one.name for one in SCHEMA]
    assert all(one.meaning in line for one, line in zip(SCHEMA, lines, strict=True))


def test_the_example_of_a_file_is_one(renderer, tmp_path):
    (example,) = re.findall(r"```toml\n(.*?)```", renderer.PAGE.read_text("utf-8"), re.DOTALL)
    file = tmp_path / "omni_core.toml"
    file.write_text(example)
    stage = resolve((), {}, file).stage()
    assert stage.sink_options == tomllib.loads(example)["sink_options"]
    assert (stage.sink, stage.sink_queue_bytes) == ("safetensors", 1 << 30)
