# SPDX-License-Identifier: Apache-2.0
"""Understands what workers answer to `omni_core_report`, whatever comes: a report of another form is not guessed."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from omni_core.cli.plan.config_fields import MAX_COUNT
from omni_core.cli.plan.errors import OTHER_RELEASE, NoAnswerError, one_line
from omni_core.prefix_cache.sizing import CacheMemory
from omni_core.settings.kinds import is_whole

_BY_KEY = frozenset({"pool_bytes", "key_table_bytes"})
"""Fields of `CacheMemory` with a number per key."""


@dataclass(frozen=True, slots=True)
class LiveStage:
    """What one worker with a cache says of itself."""

    memory: CacheMemory
    device_is_host: bool
    settings: Mapping[str, Any]
    """Name → its value, and where that came from."""
    geometry: Mapping[str, Any]
    """What its sizes follow from beside the settings; empty if it does not say."""

    @property
    def reserved_bytes(self) -> int:
        """What is compared to find the largest of several."""
        return self.memory.reserved_bytes + self.memory.pinned_bytes + self.memory.device_bytes


@dataclass(frozen=True, slots=True)
class WorkerReports:
    """What the workers of one engine answered."""

    stages: tuple[LiveStage, ...]
    """One per worker that has a cache, the largest first."""
    reasons: tuple[str, ...]
    """Why the others have none, each once."""


def understand_reports(body: bytes) -> WorkerReports:
    """The reports in the body of an answer to `POST /collective_rpc`.

    Raises:
        NoAnswerError: it is none, or a worker's report has not the form of this release's.
    """
    try:
        document = json.loads(body)
    except RecursionError:
        raise NoAnswerError("its answer is nested too deeply") from None
    except ValueError as error:
        raise NoAnswerError(f"its answer is not JSON: {error}") from error
    replies = document.get("results") if isinstance(document, Mapping) else None
    if not isinstance(replies, list):
        raise NoAnswerError(f"its answer has no list of results, but {reprlib.repr(document)}")
    reports = [reply for reply in replies if isinstance(reply, Mapping)]
    stages = tuple(_stages(reports))
    return WorkerReports(
        tuple(sorted(stages, key=lambda stage: stage.reserved_bytes, reverse=True)),
        tuple(sorted({_reason(report) for report in reports})),
    )


def _stages(reports: list[Mapping[str, Any]]) -> Iterator[LiveStage]:
    for report in reports:
        memory = _part(report, "cache").get("memory")
        if memory is None:
            continue
        if not isinstance(memory, Mapping):
            raise NoAnswerError(f"a worker's cache.memory is {reprlib.repr(memory)}; {OTHER_RELEASE}")
        yield LiveStage(
            CacheMemory(**{field.name: _bytes(memory, field.name) for field in fields(CacheMemory)}),
            device_is_host=report.get("backend") == "cpu_sim",
            settings=_part(report, "settings"),
            geometry=_part(report, "geometry"),
        )


def _part(report: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = report.get(name)
    if part is None:
        return {}
    if not isinstance(part, Mapping):
        raise NoAnswerError(f"a worker's {name} is {reprlib.repr(part)}; {OTHER_RELEASE}")
    return part


def _bytes(memory: Mapping[str, Any], name: str) -> Any:
    if name not in memory:
        raise NoAnswerError(f"a worker's cache.memory has no {name}; {OTHER_RELEASE}")
    value = memory[name]
    if name not in _BY_KEY:
        return _checked(name, value)
    if not isinstance(value, Mapping):
        raise NoAnswerError(f"a worker's {name} is {reprlib.repr(value)}; {OTHER_RELEASE}")
    return {key: _checked(f"{name} of {key}", nbytes) for key, nbytes in value.items()}


def _checked(name: str, nbytes: Any) -> int:
    if not is_whole(nbytes) or not 0 <= nbytes <= MAX_COUNT:
        raise NoAnswerError(f"a worker's {name} is {reprlib.repr(nbytes)}, no number of bytes; {OTHER_RELEASE}")
    return int(nbytes)


def _reason(report: Mapping[str, Any]) -> str:
    gate = report.get("gate")
    reason = gate.get("reason") if isinstance(gate, Mapping) else None
    return "it does not say why" if reason is None else one_line(str(reason))
