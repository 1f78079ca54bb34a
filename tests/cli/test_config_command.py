# SPDX-License-Identifier: Apache-2.0
"""`omni-core config`: each value with its origin, each kind of mistake with its message, the schema for others."""

import json
import os
import re

import pytest

from omni_core.cli.main import main
from omni_core.settings.stage_settings import SCHEMA

ON = '{"omni_core": {"enabled": true, "layers": [3]}}'


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """No setting but the test's own."""
    for name in [name for name in os.environ if name.startswith("OMNI_CORE_")]:
        monkeypatch.delenv(name)
    return monkeypatch


def test_show_prints_every_value_with_its_origin(environment, capsys, tmp_path):
    file = tmp_path / "omni_core.toml"
    file.write_text("join_timeout_s = 7\n")
    environment.setenv("OMNI_CORE_CONFIG_FILE", str(file))
    environment.setenv("OMNI_CORE_STAGING_DEPTH", "6")
    assert main(["config", "show", "--additional-config", ON, "--set", "tap=true"]) == 0
    shown = capsys.readouterr().out.splitlines()
    lines = {line.split()[0]: line.split() for line in shown if not line.startswith(" ")}
    assert list(lines)[2:] == [one.name for one in SCHEMA]
    assert lines["enabled"] == ["enabled", "true", "flag", "omni_core.enabled"]
    assert lines["layers"] == ["layers", "[3]", "flag", "omni_core.layers"]
    assert lines["tap"] == ["tap", "true", "flag", "--set", "tap"]
    assert lines["staging_depth"] == ["staging_depth", "6", "environment", "OMNI_CORE_STAGING_DEPTH"]
    assert lines["join_timeout_s"][:3] == ["join_timeout_s", "7.0", "file"]
    assert lines["sink"] == ["sink", '"memory"', "default"]


def test_show_as_json(environment, capsys):
    environment.setenv("OMNI_CORE_ON_SLOW_SINK", "wait")
    assert main(["config", "show", "--format", "json"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert settings["on_slow_sink"] == {"value": "wait", "origin": "environment", "place": "OMNI_CORE_ON_SLOW_SINK"}
    assert settings["enabled"] == {"value": False, "origin": "default", "place": ""}


def test_show_tells_mistakes_as_validate_does(capsys):
    assert main(["config", "show", "--set", "staging_depth=1"]) == 1
    assert "--set staging_depth='1': must be an integer of at least 2" in capsys.readouterr().err


def test_validate_has_nothing_to_say_of_what_can_be_run_with(capsys):
    assert main(["config", "validate", "--additional-config", ON]) == 0
    assert capsys.readouterr().out == "valid\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--set", "tpa=1"], "unknown setting --set tpa; did you mean 'tap'?"),
        (["--set", "staging_depth"], "--set staging_depth: must be NAME=VALUE"),
        (["--set", "staging_depth=two"], "--set staging_depth='two': must be an integer of at least 2"),
        (["--set", "sink=nowhere"], "--set sink='nowhere': no sink is installed under the name 'nowhere'; installed: "),
        (["--set", 'sink_options={"dir": 1}'], "--set sink_options: sink 'memory' with the options {'dir': 1}: "),
        (
            ["--set", 'sink_options={"max_bytes": "all"}'],
            "memory sink: max_bytes='all': must be an integer of at least 1",
        ),
        (["--set", "staging_depth=" + "9" * 5000], "must be an integer of at least 2 and below 2**63"),
        (["--set", "sink_options=" + "[" * 100_000], "must be a mapping of option names"),
        (["--additional-config", "[" * 100_000], "--additional-config is not JSON: "),
        (["--additional-config", '{"omni_core": {"tap": true, "tap": false}}'], "'tap' is given twice"),
        (["--file", "~nobody-here/x"], "--file=~nobody-here/x: cannot be read: "),
        (["--set", "backend=tpu"], "--set backend='tpu': no backend is installed under the name 'tpu'; installed: "),
        (["--additional-config", "{"], "--additional-config is not JSON: "),
        (["--additional-config", '{"omni_core": 1}'], "additional_config['omni_core'] is a int; make it a mapping"),
        (["--additional-config", '"on"'], '--additional-config is not a JSON object but "on"'),
        (["--additional-config", '{"omnicore": {}}'], "no section 'omni_core', but one called 'omnicore'; rename it"),
        (["--additional-config", '{"omni_core": {"home": "x"}}'], "no stage reads home; give it as OMNI_CORE_HOME"),
        (["--set", "tap=1", "--set", "tap=0"], "--set tap is given twice"),
        (["--set", "backend=cuda"], "--set backend='cuda': "),
        (["--file", "/no/such/file"], "--file=/no/such/file: cannot be read: "),
    ],
)
def test_validate_tells_each_kind_of_mistake(arguments, told, capsys):
    assert main(["config", "validate", *arguments]) == 1
    assert told in capsys.readouterr().err


def test_validate_tells_all_mistakes_as_json(environment, capsys):
    environment.setenv("OMNI_CORE_TAPP", "1")
    environment.setenv("OMNI_CORE_ENABLED", "1")
    assert main(["config", "validate", "--format", "json"]) == 1
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["valid"] is False
    enabled, unknown = sorted(verdict["problems"])
    assert "enabled decides what vLLM compiles" in enabled
    assert "OMNI_CORE_TAPP; did you mean 'OMNI_CORE_TAP'?" in unknown


def test_schema_lists_what_there_is_to_set(capsys):
    assert main(["config", "schema"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    listed = {line.split()[0]: line.split()[1] for line in lines if not line.startswith(" ")}
    assert list(listed) == [one.name for one in SCHEMA]
    assert (listed["sink"], listed["layers"]) == ("OMNI_CORE_SINK", "-")


def test_a_pipe_is_no_file_to_wait_for(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    assert main(["config", "validate", "--file", str(tmp_path / "pipe")]) == 1
    assert "cannot be read: there is no such file, or it is none" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["sink_options = {day = 1979-05-27}", "sink_options = {most = inf}", "a = [" * 5000])
def test_a_file_that_says_what_json_cannot_is_a_mistake(text, tmp_path, capsys):
    (tmp_path / "omni_core.toml").write_text(text)
    for action in ("show", "validate"):
        assert main(["config", action, "--format", "json", "--file", str(tmp_path / "omni_core.toml")]) == 1
        assert json.loads(capsys.readouterr().out)["valid"] is False


def test_schema_of_the_flag_has_what_only_a_flag_may_say(capsys):
    assert main(["config", "schema", "--of", "flag", "--format", "json"]) == 0
    names = set(json.loads(capsys.readouterr().out)["properties"])
    assert names == {one.name for one in SCHEMA} - {"home"}


@pytest.mark.parametrize("text", ["1", " 5 ", "256 MiB", "2gib", "3B"])
def test_what_the_schema_says_of_byte_counts_is_what_is_read(text, capsys):
    assert main(["config", "schema", "--format", "json"]) == 0
    of_text = json.loads(capsys.readouterr().out)["properties"]["sink_queue_bytes"]["anyOf"][1]["pattern"]
    assert re.search(of_text, text)
    assert main(["config", "validate", "--set", f"sink_queue_bytes={text}"]) == 0
    for wrong in (f"{text}x", f"-{text}", text.replace("5", "٣") + "٣"):
        assert not re.search(of_text, wrong)
        assert main(["config", "validate", "--set", f"sink_queue_bytes={wrong}"]) == 1


def test_schema_as_json_is_a_json_schema_of_the_file(capsys):
    assert main(["config", "schema", "--format", "json"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == {one.name for one in SCHEMA} - {"enabled", "layers"}
    assert schema["properties"]["staging_depth"]["minimum"] == 2
    assert schema["properties"]["staging_depth"]["default"] == 4
    assert schema["properties"]["on_error"]["enum"] == ["isolate", "raise"]
