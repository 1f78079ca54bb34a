# SPDX-License-Identifier: Apache-2.0
"""The settings of a stage and of the command line: the one place that declares them."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omni_core.settings.kinds import (
    ByteCount,
    Choice,
    Flag,
    LayerNumbers,
    Name,
    OptionalName,
    Options,
    Seconds,
    WholeNumber,
)
from omni_core.settings.setting import Place, Setting, declared, settings_of


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
class StageSettings:
    """One stage's settings, read when its worker is made. `docs/settings.md` is rendered from what stands here."""

    enabled: bool = field(
        default=False,
        metadata=declared(
            Flag(),
            "Whether the stage gets a cache, where the [gate](support.md#the-gate) allows one.",
            place=Place.FLAG_ONLY,
        ),
    )
    layers: tuple[int, ...] = field(
        default=(),
        metadata=declared(
            LayerNumbers(),
            "Decoder layers whose outputs are captured as keys `hidden_states.layer_N`; see [Chosen "
            "layers](chosen-layers.md). 0 is the embeddings. Staging grows by itself.",
            place=Place.FLAG_ONLY,
        ),
    )
    sink: str = field(
        default="memory",
        metadata=declared(Name(of="sink"), "Entry-point name of the [sink](sinks.md) that receives the rows."),
    )
    sink_options: Mapping[str, Any] = field(
        default_factory=dict, metadata=declared(Options(), "Keyword arguments of the sink.")
    )
    backend: str | None = field(
        default=None,
        metadata=declared(
            OptionalName(of="backend"),
            "Entry-point name of the device backend. `null` takes the one that owns the engine's device.",
        ),
    )
    staging_depth: int = field(
        default=4,
        metadata=declared(
            WholeNumber(at_least=2),
            "Steps that may be computed and not yet copied for the sink. One slot is kept for a step that has "
            "to be given up.",
        ),
    )
    staging_claim_timeout_s: float = field(
        default=30.0,
        metadata=declared(
            Seconds(),
            "Seconds the engine waits for the copies of earlier steps, and with `on_slow_sink='wait'` for the "
            "sink, before it puts deliveries off. It waits once per stall.",
        ),
    )
    join_timeout_s: float = field(
        default=60.0, metadata=declared(Seconds(), "Seconds a copy, a write or a read of the cache may take.")
    )
    on_slow_sink: OnSlowSink = field(
        default=OnSlowSink.SKIP,
        metadata=declared(
            Choice(OnSlowSink),
            "What a step does when the sink's queue is full: `skip` puts its delivery off at once; `wait` "
            "waits for the sink. See [a slow sink](sinks.md#a-sink-that-is-slow-or-stuck).",
        ),
    )
    sink_queue_bytes: int = field(
        default=256 << 20, metadata=declared(ByteCount(at_least=1), "Bytes of rows that may wait for the sink.")
    )
    shutdown_timeout_s: float = field(
        default=4.0,
        metadata=declared(Seconds(), "Seconds shutdown waits for the sink. See [shutdown](sinks.md#shutdown)."),
    )
    extra_row_bytes: int = field(
        default=256,
        metadata=declared(ByteCount(at_least=0), "Staging bytes per token for outputs beside the hidden state."),
    )
    extra_step_bytes: int = field(
        default=1 << 20,
        metadata=declared(
            ByteCount(at_least=0), "Staging bytes per step for outputs that do not grow with the tokens."
        ),
    )
    device_staging_bytes: int = field(
        default=64 << 20,
        metadata=declared(
            ByteCount(at_least=0),
            "Device memory in which rows of deferred keys wait, allocated if the model declares any. 0: they "
            "never wait.",
        ),
    )
    max_recycled_bytes: int = field(
        default=512 << 20,
        metadata=declared(ByteCount(at_least=0), "Most bytes of released output buffers kept for reuse."),
    )
    pretouch: bool = field(
        default=False,
        metadata=declared(
            Flag(),
            "Commits the memory for the hidden rows of all blocks at start, so that no step pays for it later. See "
            "[Sizing](sizing.md).",
        ),
    )
    pin_chunk_bytes: int = field(
        default=1 << 30,
        metadata=declared(
            ByteCount(at_least=0, multiple_of=mmap.PAGESIZE),
            "Most bytes that are page-locked at a time: some drivers refuse 2 GiB and more in one piece. 0: a staging "
            "page at once.",
        ),
    )
    on_error: OnError = field(
        default=OnError.ISOLATE,
        metadata=declared(
            Choice(OnError),
            "What an unexpected error of the cache does: `isolate` turns the cache of this stage off and lets "
            "generation go on; `raise` stops the engine's step.",
        ),
    )
    allow_untested_version: bool = field(
        default=False,
        metadata=declared(
            Flag(),
            "Whether a vLLM release that Omni Core was never run on is let through, if its source text has "
            "all that Omni Core rests on. See [the releases it was run on](support.md#vllm-versions).",
        ),
    )
    tap: bool = field(
        default=False,
        metadata=declared(
            Flag(), "Keeps every forward's rows in memory for verification. Grows without bound; for tests."
        ),
    )

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """`layers` of a stage that is enabled; none of another."""
        return self.layers if self.enabled else ()


@dataclass(frozen=True, slots=True)
class ToolSettings:
    """Settings of the command line, and of no stage."""

    home: str | None = field(
        default=None,
        metadata=declared(
            OptionalName(of="folder"),
            "Where `omni-core demo` keeps the model it prepares. `null`: `omni-core` in the user's cache folder.",
            place=Place.TOOLS,
        ),
    )


SCHEMA: tuple[Setting, ...] = (*settings_of(StageSettings), *settings_of(ToolSettings))
"""Every setting there is. Names are unique across the groups."""
