# SPDX-License-Identifier: Apache-2.0
"""The operator's section of `additional_config`: read once, checked in full, explained when wrong."""

import pytest

from omni_core.integrations.vllm.errors import SettingsError
from omni_core.integrations.vllm.settings import OmniSettings, OnError, OnSlowSink


def read(**section):
    return OmniSettings.from_additional_config({"omni_core": section})


@pytest.mark.parametrize("additional_config", [None, {}, {"another_plugin": {"enabled": True}}])
def test_without_a_section_the_cache_is_off(additional_config):
    assert OmniSettings.from_additional_config(additional_config) == OmniSettings(enabled=False)


def test_every_setting_is_read():
    settings = read(
        enabled=True,
        sink="safetensors",
        sink_options={"directory": "rows"},
        backend="cpu_sim",
        staging_depth=6,
        staging_claim_timeout_s=2,
        join_timeout_s=3.5,
        on_slow_sink="wait",
        sink_queue_bytes=1 << 20,
        shutdown_timeout_s=9,
        extra_row_bytes=1024,
        layers=[7, 0, 3],
        on_error="raise",
        allow_untested_version=True,
        tap=True,
    )
    assert settings == OmniSettings(
        enabled=True,
        sink="safetensors",
        sink_options={"directory": "rows"},
        backend="cpu_sim",
        staging_depth=6,
        staging_claim_timeout_s=2.0,
        join_timeout_s=3.5,
        on_slow_sink=OnSlowSink.WAIT,
        sink_queue_bytes=1 << 20,
        shutdown_timeout_s=9.0,
        extra_row_bytes=1024,
        layers=(0, 3, 7),
        on_error=OnError.RAISE,
        allow_untested_version=True,
        tap=True,
    )


@pytest.mark.parametrize(
    ("written", "meant"), [("enable", "enabled"), ("sink_option", "sink_options"), ("staging_dept", "staging_depth")]
)
def test_an_unknown_setting_names_the_nearest_known_one(written, meant):
    with pytest.raises(SettingsError, match=rf"unknown setting omni_core\.{written}; did you mean '{meant}'\?"):
        read(**{written: 1})


def test_an_unknown_setting_without_a_near_one_lists_them_all():
    with pytest.raises(SettingsError, match=r"omni_core\.zzz.*Known settings: enabled, sink, "):
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
        ("shutdown_timeout_s", 0),
        ("staging_claim_timeout_s", 0),
        ("staging_claim_timeout_s", float("inf")),
        ("join_timeout_s", float("nan")),
        ("join_timeout_s", "60"),
    ],
)
def test_a_wrong_value_names_the_setting_the_value_and_the_rule(name, value):
    with pytest.raises(SettingsError) as refusal:
        read(**{name: value})
    assert f"omni_core.{name}={value!r}: must be" in str(refusal.value)


def test_a_section_that_is_not_a_mapping_is_refused():
    with pytest.raises(SettingsError, match="is a bool; make it a mapping"):
        OmniSettings.from_additional_config({"omni_core": True})


def test_settings_cannot_be_changed():
    with pytest.raises(AttributeError):
        read(enabled=True).enabled = False


@pytest.mark.parametrize("name", ["staging_claim_timeout_s", "join_timeout_s", "shutdown_timeout_s"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), 1e10, 10**400, True, "5"])
def test_a_time_nobody_can_wait_for_is_refused(name, value):
    with pytest.raises(SettingsError, match=rf"{name}=.*at most 31536000"):
        read(**{name: value})
