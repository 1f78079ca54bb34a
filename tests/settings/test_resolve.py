# SPDX-License-Identifier: Apache-2.0
"""An operator's settings: flag over environment over file over default, checked in full, explained when wrong."""

import re

import pytest

from omni_core.settings.errors import SettingsError
from omni_core.settings.resolve import resolve, stage_settings
from omni_core.settings.setting import settings_of
from omni_core.settings.sources import Origin, from_flags
from omni_core.settings.stage_settings import SCHEMA, OnError, OnSlowSink, StageSettings


def read(environment=None, **section):
    return stage_settings({"omni_core": section}, environment or {}).stage()


@pytest.fixture
def file(tmp_path):
    """Writes a configuration file and gives the environment that names it."""

    def write(text):
        path = tmp_path / "omni_core.toml"
        path.write_text(text)
        return {"OMNI_CORE_CONFIG_FILE": str(path)}

    return write


@pytest.mark.parametrize("additional_config", [None, {}, {"another_plugin": {"enabled": True}}])
def test_without_a_section_the_cache_is_off(additional_config):
    assert stage_settings(additional_config, {}).stage() == StageSettings(enabled=False)


def test_every_setting_is_read():
    given = {
        "enabled": True,
        "sink": "safetensors",
        "sink_options": {"directory": "rows"},
        "backend": "cpu_sim",
        "staging_depth": 6,
        "staging_claim_timeout_s": 2,
        "join_timeout_s": 3.5,
        "on_slow_sink": "wait",
        "sink_queue_bytes": 1 << 20,
        "shutdown_timeout_s": 9,
        "extra_row_bytes": 1024,
        "extra_step_bytes": 2048,
        "device_staging_bytes": 0,
        "max_recycled_bytes": 4096,
        "pretouch": True,
        "pin_chunk_bytes": 8192,
        "layers": [7, 0, 3],
        "on_error": "raise",
        "allow_untested_version": True,
        "tap": True,
    }
    assert given.keys() == {one.name for one in settings_of(StageSettings)}
    understood = {"on_slow_sink": OnSlowSink.WAIT, "on_error": OnError.RAISE, "layers": (0, 3, 7)}
    assert read(**given) == StageSettings(**given | understood)


@pytest.mark.parametrize(
    ("written", "meant"), [("enable", "enabled"), ("sink_option", "sink_options"), ("staging_dept", "staging_depth")]
)
def test_an_unknown_setting_names_the_nearest_known_one(written, meant):
    with pytest.raises(SettingsError, match=rf"unknown setting omni_core\.{written}; did you mean '{meant}'\?"):
        read(**{written: 1})


def test_an_unknown_setting_without_a_near_one_lists_them_all():
    with pytest.raises(SettingsError, match=r"omni_core\.zzz.*Known settings: enabled, layers, sink, "):
        read(zzz=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enabled", "yes"),
        ("enabled", 1),
        ("tap", None),
        ("sink", ""),
        ("sink", 3),
        ("backend", ""),
        ("sink_options", ["directory"]),
        ("sink_options", {1: "x"}),
        ("staging_depth", 1),
        ("staging_depth", True),
        ("staging_depth", 2.0),
        ("extra_row_bytes", -1),
        ("layers", 3),
        ("layers", "3"),
        ("layers", [1, -1]),
        ("layers", [1, 2.0]),
        ("layers", [True]),
        ("layers", [2, 2]),
        ("layers", {"1": 2}),
        ("on_error", "ignore"),
        ("on_slow_sink", "block"),
        ("sink_queue_bytes", 0),
        ("sink_queue_bytes", 1.5),
    ],
)
def test_a_wrong_value_names_the_setting_the_value_and_the_rule(name, value):
    with pytest.raises(SettingsError) as refusal:
        read(**{name: value})
    assert f"omni_core.{name}={value!r}: must be" in str(refusal.value)


def test_a_section_that_is_not_a_mapping_is_refused():
    with pytest.raises(SettingsError, match="is a bool; make it a mapping"):
        stage_settings({"omni_core": True}, {})


def test_settings_cannot_be_changed():
    with pytest.raises(AttributeError):
        read(enabled=True).enabled = False


@pytest.mark.parametrize("name", ["staging_claim_timeout_s", "join_timeout_s", "shutdown_timeout_s"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), 1e10, 10**400, True, "5"])
def test_a_time_nobody_can_wait_for_is_refused(name, value):
    with pytest.raises(
        SettingsError, match=rf"omni_core\.{name}={re.escape(repr(value)[:50])}.*: must be .*at most 31536000"
    ):
        read(**{name: value})


# -- where values come from -------------------------------------------------------------------------------------------


def test_flag_wins_over_environment_over_file_over_default(file):
    environment = file("staging_depth = 3\njoin_timeout_s = 3\nshutdown_timeout_s = 3") | {
        "OMNI_CORE_STAGING_DEPTH": "5",
        "OMNI_CORE_JOIN_TIMEOUT_S": "5",
    }
    resolved = stage_settings({"omni_core": {"staging_depth": 7}}, environment)
    stage = resolved.stage()
    assert (stage.staging_depth, stage.join_timeout_s, stage.shutdown_timeout_s) == (7, 5.0, 3.0)
    assert stage.staging_claim_timeout_s == StageSettings().staging_claim_timeout_s
    origins = {one.setting.name: (one.origin, one.shown_as) for one in resolved.values}
    assert origins["staging_depth"] == (Origin.FLAG, "omni_core.staging_depth")
    assert origins["join_timeout_s"] == (Origin.ENVIRONMENT, "OMNI_CORE_JOIN_TIMEOUT_S")
    assert origins["shutdown_timeout_s"] == (
        Origin.FILE,
        f"{environment['OMNI_CORE_CONFIG_FILE']}: shutdown_timeout_s",
    )
    assert origins["staging_claim_timeout_s"] == (Origin.DEFAULT, "")


def test_what_is_not_left_at_its_default_is_told_with_its_place():
    resolved = stage_settings({"omni_core": {"enabled": True}}, {"OMNI_CORE_ON_ERROR": "raise"})
    assert resolved.given() == "enabled=True (omni_core.enabled), on_error='raise' (OMNI_CORE_ON_ERROR)"
    assert stage_settings(None, {}).given() == "none"
    assert resolved.plain()["on_error"] == {
        "value": "raise",
        "origin": "environment",
        "place": "OMNI_CORE_ON_ERROR",
    }


@pytest.mark.parametrize(
    ("variable", "text", "meant"),
    [
        ("SINK", "safetensors", {"sink": "safetensors"}),
        ("SINK_OPTIONS", '{"directory": "rows"}', {"sink_options": {"directory": "rows"}}),
        ("BACKEND", "cpu_sim", {"backend": "cpu_sim"}),
        ("STAGING_DEPTH", "6", {"staging_depth": 6}),
        ("JOIN_TIMEOUT_S", "2.5", {"join_timeout_s": 2.5}),
        ("SINK_QUEUE_BYTES", "3 MiB", {"sink_queue_bytes": 3 << 20}),
        ("SINK_QUEUE_BYTES", "2gib", {"sink_queue_bytes": 2 << 30}),
        ("SINK_QUEUE_BYTES", "77", {"sink_queue_bytes": 77}),
        ("ON_SLOW_SINK", "wait", {"on_slow_sink": OnSlowSink.WAIT}),
        ("ON_ERROR", "raise", {"on_error": OnError.RAISE}),
        ("TAP", "true", {"tap": True}),
        ("TAP", "0", {"tap": False}),
        ("TAP", "", {}),
    ],
)
def test_the_environment_is_text(variable, text, meant):
    assert read({f"OMNI_CORE_{variable}": text}) == StageSettings(**meant)


@pytest.mark.parametrize(
    ("variable", "text", "rule"),
    [
        ("TAP", "maybe", "true or false"),
        ("STAGING_DEPTH", "4.0", "an integer of at least 2"),
        ("STAGING_DEPTH", "1", "an integer of at least 2"),
        ("STAGING_DEPTH", "four", "an integer of at least 2"),
        ("JOIN_TIMEOUT_S", "nan", "a number of seconds above 0"),
        ("JOIN_TIMEOUT_S", "soon", "a number of seconds above 0"),
        ("SINK_QUEUE_BYTES", "3 MB", "an integer of at least 1 and below 2**63, or text such as '256 MiB'"),
        ("SINK_QUEUE_BYTES", "-1", "an integer of at least 1 and below 2**63, or text such as '256 MiB'"),
        (
            "PIN_CHUNK_BYTES",
            "5000",
            "an integer of at least 0 and a multiple of 4096 and below 2**63, or text such as '256 MiB'",
        ),
        ("SINK_OPTIONS", "directory=rows", "a mapping of option names to values"),
        ("ON_ERROR", "ignore", "'isolate' or 'raise'"),
    ],
)
def test_a_wrong_variable_names_itself_its_text_and_the_rule(variable, text, rule):
    with pytest.raises(SettingsError) as refusal:
        read({f"OMNI_CORE_{variable}": text})
    assert str(refusal.value).startswith(f"OMNI_CORE_{variable}={text!r}: must be {rule}")


def test_an_unknown_variable_names_the_nearest_known_one():
    with pytest.raises(SettingsError, match=r"OMNI_CORE_STAGING_DEPHT; did you mean 'OMNI_CORE_STAGING_DEPTH'\?"):
        read({"OMNI_CORE_STAGING_DEPHT": "4"})


def test_a_variable_in_other_letters_is_another_one():
    with pytest.raises(SettingsError, match=r"OMNI_CORE_staging_depth; did you mean 'OMNI_CORE_STAGING_DEPTH'\?"):
        read({"OMNI_CORE_staging_depth": "4", "OMNI_CORE_STAGING_DEPTH": "5"})


def test_a_section_called_almost_like_ours_is_told_and_others_are_left_alone():
    for near in ("omnicore", "omni-core", "omni_cores", "Omni_core"):
        with pytest.raises(SettingsError, match=f"one called '{near}'; rename it"):
            stage_settings({near: {"enabled": True}}, {})
    assert not stage_settings({"omni": 1, "ascend_scheduler_config": {}, "core": 2}, {}).stage().enabled


def test_variables_of_others_are_none_of_ours():
    assert read({"OMNI_COREX": "1", "VLLM_OMNI_CORE_TAP": "true", "HOME": "/"}) == StageSettings()


def test_a_file_has_settings_of_every_kind(file):
    environment = file(
        """
        sink = "safetensors"
        sink_queue_bytes = "1 MiB"
        staging_depth = 8
        join_timeout_s = 12
        tap = true
        on_slow_sink = "wait"

        [sink_options]
        directory = "rows"
        max_open_bytes = 4096
        """
    )
    assert read(environment) == StageSettings(
        sink="safetensors",
        sink_options={"directory": "rows", "max_open_bytes": 4096},
        sink_queue_bytes=1 << 20,
        staging_depth=8,
        join_timeout_s=12.0,
        tap=True,
        on_slow_sink=OnSlowSink.WAIT,
    )


def test_an_unknown_key_of_a_file_names_file_key_and_the_nearest_known_one(file):
    environment = file("stagingdepth = 4")
    with pytest.raises(SettingsError) as refusal:
        read(environment)
    path = environment["OMNI_CORE_CONFIG_FILE"]
    assert f"unknown setting {path}: stagingdepth; did you mean 'staging_depth'?" in str(refusal.value)


def test_a_wrong_value_of_a_file_names_file_key_and_rule(file):
    environment = file("staging_depth = true")
    with pytest.raises(SettingsError, match=r"omni_core\.toml: staging_depth=True: must be an integer of at least 2"):
        read(environment)


def test_a_file_that_is_not_there_or_not_toml_is_named(file, tmp_path):
    with pytest.raises(SettingsError, match=r"OMNI_CORE_CONFIG_FILE=.*nowhere\.toml: cannot be read: .*leave it out"):
        read({"OMNI_CORE_CONFIG_FILE": str(tmp_path / "nowhere.toml")})
    with pytest.raises(SettingsError, match=r"OMNI_CORE_CONFIG_FILE=.*: is not TOML: .*line 1"):
        read(file("staging_depth: 4"))


@pytest.mark.parametrize("name", ["enabled", "layers"])
def test_what_decides_the_compiled_code_is_given_where_vllm_hashes_it(file, name):
    for environment in ({f"OMNI_CORE_{name.upper()}": "true"}, file(f"{name} = true")):
        with pytest.raises(SettingsError, match=rf"{name} decides what vLLM compiles.*--additional-config"):
            read(environment)


def test_the_flags_that_vllm_hashes_into_its_compile_cache_key_stay_few():
    assert [one.name for one in SCHEMA if one.place.value == "flag"] == ["enabled", "layers"]


def test_every_mistake_of_every_source_is_told_at_once(file):
    environment = file("staging_depth = 1\ntpa = true") | {"OMNI_CORE_ON_ERROR": "ignore"}
    with pytest.raises(SettingsError) as refusal:
        read(environment, sink="", staging_depth=8)
    told = refusal.value.problems
    assert len(told) == 4
    for name in ("omni_core.sink=''", "OMNI_CORE_ON_ERROR='ignore'", "staging_depth=1", "tpa; did you mean 'tap'"):
        assert any(name in one for one in told), (name, told)


def test_flags_of_a_command_are_text_too():
    resolved = resolve(from_flags(["staging_depth=9", "layers=[3, 1]", 'sink_options={"a": "b=c"}']), {})
    assert resolved.stage() == StageSettings(staging_depth=9, layers=(1, 3), sink_options={"a": "b=c"})
    with pytest.raises(SettingsError, match="--set staging_depth: must be NAME=VALUE"):
        resolve(from_flags(["staging_depth"]), {})
