# SPDX-License-Identifier: Apache-2.0
"""What `omni-core diffuse` prints: per request what was hit, what was computed and how long it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omni_core.cli.tables import render_table
from omni_core.diffusion_kv.deploy import StageConfig
from omni_core.integrations.diffusion.results import EngineStats, FinishedRequest

MS_PER_S = 1e3
_HEADERS = ("request", "outcome", "rows", "hit", "first-step tokens", "first step ms", "end to end ms", "picture")
_LEGEND = """\
hit                leading tokens of each row whose keys and values were there already
first-step tokens  rows x (tokens - hit): what the first denoise step computed"""


@dataclass(frozen=True, slots=True)
class Drawn:
    """One request and where its picture lies."""

    finished: FinishedRequest
    path: Path | None
    """`None` if there is no picture."""


def render_text(stage: StageConfig, drawn: Sequence[Drawn], stats: EngineStats) -> str:
    """What was run, the table, what failed, and a summary line."""
    caching = "on" if stage.kv.enable_prefix_caching else "off"
    headline = f"{stage.model}, diffusion_kv_mode {stage.kv.diffusion_kv_mode}, prefix caching {caching}"
    lines = [headline, "", render_table(_HEADERS, [_cells(one) for one in drawn], right_aligned=_HEADERS[2:-1]), ""]
    lines += [_LEGEND, ""]
    for one in drawn:
        if one.finished.error is not None:
            lines.append(f"{one.finished.outcome.value}: {one.finished.error}")
    lines.append(_summary(drawn, stats))
    return "\n".join(lines)


def as_document(stage: StageConfig, drawn: Sequence[Drawn], stats: EngineStats) -> dict[str, Any]:
    """The same for JSON."""
    return {
        "ok": all(one.path is not None for one in drawn),
        "model": stage.model,
        "diffusion_kv_mode": stage.kv.diffusion_kv_mode.value,
        "enable_prefix_caching": stage.kv.enable_prefix_caching,
        "requests": [_document(one) for one in drawn],
        "stats": asdict(stats),
    }


def _cells(one: Drawn) -> tuple[str, ...]:
    finished = one.finished
    return (
        finished.request_id,
        finished.outcome.value,
        str(finished.rows),
        f"{finished.kv.cached_prefix_tokens:,}",
        f"{finished.first_step_tokens:,}",
        f"{finished.timings.first_step_s * MS_PER_S:,.0f}",
        f"{finished.timings.end_to_end_s * MS_PER_S:,.0f}",
        "-" if one.path is None else str(one.path),
    )


def _document(one: Drawn) -> dict[str, Any]:
    finished = one.finished
    return {
        "request_id": finished.request_id,
        "prompt": finished.request.prompt,
        "outcome": finished.outcome.value,
        "error": None if finished.error is None else str(finished.error),
        "picture": None if one.path is None else str(one.path),
        "rows": finished.rows,
        "first_step_tokens": finished.first_step_tokens,
        "kv": asdict(finished.kv),
        "timings": asdict(finished.timings),
    }


def _summary(drawn: Sequence[Drawn], stats: EngineStats) -> str:
    pictures = sum(one.path is not None for one in drawn)
    summary = f"{pictures} of {len(drawn)} pictures, {stats.forwards} forwards"
    if stats.kv is None:
        return f"{summary}; the model keeps its own keys and values"
    return (
        f"{summary}; {stats.kv.hit_tokens:,} of {stats.kv.queried_tokens:,} tokens hit, "
        f"{stats.kv.total_pages:,} pages, {stats.kv.evicted_pages:,} evicted"
    )
