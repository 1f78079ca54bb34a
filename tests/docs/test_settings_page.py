# SPDX-License-Identifier: Apache-2.0
"""The settings page says what the schema says, and its example of a file can be read."""

import re
import tomllib

import render_settings

from omni_core.settings.resolve import resolve
from omni_core.settings.stage_settings import SCHEMA


def test_the_page_is_rendered_from_the_schema():
    page = render_settings.PAGE.read_text(encoding="utf-8")
    assert render_settings.table() in page
    assert render_settings.rendered(page) == page


def test_the_table_has_every_setting_with_its_default_and_meaning():
    lines = render_settings.table().splitlines()[2:]
    assert [line.split("`")[1] for line in lines] == [one.name for one in SCHEMA]
    assert all(one.meaning in line for one, line in zip(SCHEMA, lines, strict=True))


def test_the_example_of_a_file_is_one(tmp_path):
    (example,) = re.findall(r"```toml\n(.*?)```", render_settings.PAGE.read_text("utf-8"), re.DOTALL)
    file = tmp_path / "omni_core.toml"
    file.write_text(example)
    stage = resolve((), {}, file).stage()
    assert stage.sink_options == tomllib.loads(example)["sink_options"]
    assert (stage.sink, stage.sink_queue_bytes) == ("safetensors", 1 << 30)
