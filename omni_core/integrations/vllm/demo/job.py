# SPDX-License-Identifier: Apache-2.0
"""What the demo asks of an engine process and what it gets back: plain values that go through JSON files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any


class Phase(Enum):
    """One engine run of the demo."""

    CACHE_ON = "on"
    """Prefix caching with Omni Core; the rows go to safetensors files and are held against the tap."""
    CACHE_OFF = "off"
    """No prefix caching; the files of the first phase are compared with the rows computed here."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """A conversation, or a plain text."""

    name: str
    """The request id the client gives."""
    messages: tuple[Message, ...] = ()
    text: str | None = None


@dataclass(frozen=True, slots=True)
class DemoJob:
    """One phase, complete."""

    phase: Phase
    model: str
    """Directory of the model."""
    dtype: str
    prompts: tuple[DemoPrompt, ...]
    max_tokens: int
    rows_directory: str
    """Where the sink writes (on) or where the files to compare lie (off)."""

    def save(self, path: Path) -> None:
        """Write the job for another process."""
        path.write_text(json.dumps(asdict(self) | {"phase": self.phase.value}), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> DemoJob:
        """Read what `save` wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        values["phase"] = Phase(values["phase"])
        values["prompts"] = tuple(
            DemoPrompt(one["name"], tuple(Message(**message) for message in one["messages"]), one["text"])
            for one in values["prompts"]
        )
        return cls(**values)


@dataclass(frozen=True, slots=True)
class WaveTime:
    """How long the prefill of one wave took."""

    name: str
    num_requests: int
    prefill_s: float
    """Wall time from adding the wave's requests to the end of the step that gave the last of them its first token."""


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """What the engine says of one request."""

    name: str
    wave: str
    prompt_tokens: int
    generated_tokens: int
    skipped_tokens: int
    """Prompt tokens vLLM did not compute, by its own count (`num_cached_tokens`)."""
    computed_rows: int
    """Rows the engine computed for the request, counted by the tap: what vLLM alone would have given."""
    text: str


@dataclass(frozen=True, slots=True)
class DeliveredRequest:
    """What lies in one request's file, held against the tap of the same run."""

    name: str
    file: str | None = None
    rows: int = 0
    rows_equal_to_tap: int = 0
    problem: str | None = None
    """Why the file is missing or not that of the whole request."""


@dataclass(frozen=True, slots=True)
class ComparedRequest:
    """One request's prompt rows against the cache-off engine's."""

    name: str
    largest_difference: float | None = None
    """Row-relative; the largest over the prompt and over all rows the cache-off engine computed for the same tokens."""
    at_position: int | None = None
    control_difference: float | None = None
    """The same between rows that the cache-off engine itself computed in batches of another shape; `None`: not run."""
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """What one phase found."""

    waves: tuple[WaveTime, ...] = ()
    served: tuple[ServedRequest, ...] = ()
    delivered: tuple[DeliveredRequest, ...] = ()
    compared: tuple[ComparedRequest, ...] = ()
    stage_report: dict[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write the result for another process."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> PhaseResult:
        """Read what `save` wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            waves=tuple(WaveTime(**one) for one in values["waves"]),
            served=tuple(ServedRequest(**one) for one in values["served"]),
            delivered=tuple(DeliveredRequest(**one) for one in values["delivered"]),
            compared=tuple(ComparedRequest(**one) for one in values["compared"]),
            stage_report=values["stage_report"],
        )
