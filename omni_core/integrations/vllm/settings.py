# SPDX-License-Identifier: Apache-2.0
"""The operator's settings: the `omni_core` section of vLLM's `additional_config`, checked when the worker is made."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from omni_core.integrations.vllm.errors import SettingsError

SECTION = "omni_core"
"""The key of our section in `additional_config`."""


MAX_TIMEOUT_S = 31_536_000
"""A year. Python's locks cannot wait for much longer, and nobody means to."""


class OnError(Enum):
    """What an unexpected error of the cache does to the engine."""

    ISOLATE = "isolate"
    """The cache of this stage is turned off with one log record; generation goes on."""
    RAISE = "raise"
    """The error stops the engine's step: for tests and for stages whose rows must never be missing."""


class OnSlowSink(Enum):
    """What a step does for which the sink's queue has no room."""

    SKIP = "skip"
    """The engine never waits for the sink: the step's rows come with a later step, or are reported missing."""
    WAIT = "wait"
    """The engine waits for the sink, at most `staging_claim_timeout_s` a step: for offline jobs that want every row."""


@dataclass(frozen=True, slots=True)
class OmniSettings:
    """One stage's settings. Every field is a key of the section; vLLM hashes the section into its compile-cache key."""

    enabled: bool = False
    """Whether the stage gets a cache, where the gate allows one."""
    sink: str = "memory"
    """Entry-point name of the sink that receives the rows."""
    sink_options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the sink."""
    backend: str | None = None
    """Entry-point name of the device backend; `None` takes the one that owns the engine's device."""
    staging_depth: int = 4
    """Steps that may be computed and not yet copied for the sink. At least 2: one slot is kept for a step that has to
    be given up."""
    staging_claim_timeout_s: float = 30.0
    """How long a step may wait for the copies of earlier steps, and for a sink it is to wait for, before its delivery
    is put off."""
    on_slow_sink: OnSlowSink = OnSlowSink.SKIP
    """What a step does for which the sink's queue has no room."""
    sink_queue_bytes: int = 256 << 20
    """Bytes of rows that may wait for the sink before there is no room for a further step."""
    shutdown_timeout_s: float = 4.0
    """How long shutdown waits for the sink. vLLM kills the process of an engine it was not told to wait for 5 s after
    SIGTERM (`shutdown` in `v1/utils.py`, 0.32)."""
    join_timeout_s: float = 60.0
    """How long a copy, a write or a read of the cache may take."""
    extra_row_bytes: int = 256
    """Staging bytes per token for outputs beside the hidden state."""
    layers: tuple[int, ...] = ()
    """Decoder layers whose outputs are captured as keys `hidden_states.layer_N`; ascending, each once."""
    on_error: OnError = OnError.ISOLATE
    """What an unexpected error of the cache does to the engine."""
    allow_untested_version: bool = False
    """Whether a vLLM release that was never run is let through if its source text has all that is rested on."""
    tap: bool = False
    """Keep every forward's rows in memory for verification. Grows without bound; for demonstrations and tests."""

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """`layers` of a stage that is enabled; none of another."""
        return self.layers if self.enabled else ()

    @classmethod
    def from_additional_config(cls, additional_config: Any) -> OmniSettings:
        """The settings in vLLM's `additional_config`; all defaults (off) if there is no `omni_core` section.

        Raises:
            SettingsError: names the setting, its value and the rule, or the nearest known name of an unknown setting.
        """
        if not isinstance(additional_config, Mapping) or SECTION not in additional_config:
            return cls()
        section = additional_config[SECTION]
        if not isinstance(section, Mapping):
            raise SettingsError(
                f"additional_config[{SECTION!r}] is a {type(section).__name__}; make it a mapping such as "
                '{"enabled": true, "sink": "memory"}'
            )
        known = [one.name for one in fields(cls)]
        for name in section:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise SettingsError(f"unknown setting {SECTION}.{name}{hint} Known settings: {', '.join(known)}")
        values = {name: _checked(name, value) for name, value in section.items()}
        return cls(**values)


def _checked(name: str, value: Any) -> Any:
    match name:
        case "enabled" | "tap" | "allow_untested_version":
            return _require(name, value, isinstance(value, bool), "true or false")
        case "sink":
            return _require(name, value, isinstance(value, str) and value != "", "the name of a sink")
        case "backend":
            ok = value is None or (isinstance(value, str) and value != "")
            return _require(name, value, ok, "the name of a backend, or null")
        case "sink_options":
            ok = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
            return dict(_require(name, value, ok, "a mapping of option names to values"))
        case "staging_depth":
            return _require(name, value, _is_int(value) and value >= 2, "an integer of at least 2")
        case "extra_row_bytes":
            return _require(name, value, _is_int(value) and value >= 0, "an integer of at least 0")
        case "sink_queue_bytes":
            return _require(name, value, _is_int(value) and value >= 1, "an integer of at least 1")
        case "on_slow_sink":
            ways = [one.value for one in OnSlowSink]
            return OnSlowSink(_require(name, value, value in ways, " or ".join(map(repr, ways))))
        case "layers":
            ok = isinstance(value, list | tuple) and all(_is_int(one) and one >= 0 for one in value)
            ok = ok and len(set(value)) == len(value)
            return tuple(sorted(_require(name, value, ok, "a list of different layer numbers of at least 0")))
        case "on_error":
            choices = [one.value for one in OnError]
            return OnError(_require(name, value, value in choices, " or ".join(map(repr, choices))))
        case _:
            ok = (_is_int(value) or isinstance(value, float)) and 0 < value <= MAX_TIMEOUT_S
            return float(_require(name, value, ok, f"a number of seconds above 0 and at most {MAX_TIMEOUT_S}"))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(name: str, value: Any, ok: bool, rule: str) -> Any:
    if not ok:
        raise SettingsError(f"{SECTION}.{name}={value!r}: must be {rule}")
    return value
