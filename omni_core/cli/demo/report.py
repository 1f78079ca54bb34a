# SPDX-License-Identifier: Apache-2.0
"""Puts both phases together: the table, the summary line, the JSON document, and the verdict with its reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni_core.cli.tables import render_table
from omni_core.integrations.vllm.demo.job import ComparedRequest, DeliveredRequest, PhaseResult, ServedRequest

BOUNDS: Mapping[str, float] = {"float32": 1e-5, "bfloat16": 2e-2}
"""dtype → largest row-relative difference of a prompt row to a cache-off run. vLLM's rows depend on the batch they are
computed in, so two cache-off runs differ as well."""

_HEADERS = ("request", "prompt", "skipped", "vLLM rows", "delivered", "= tap", "diff to off", "off/off")
_LEGEND = """\
prompt       tokens of the prompt
skipped      tokens vLLM did not compute, because their KV was cached
vLLM rows    rows vLLM alone would have given
delivered    rows in the request's file; right is prompt + generated - 1
= tap        whether each of them is, bit for bit, a row that this run computed
diff to off  largest max|a-b| / max|b| of prompt rows, b from the cache-off run;
             bound {bound:.0e}
off/off      the same between two runs with prefix caching off; - where not run"""


@dataclass(frozen=True, slots=True)
class RequestVerdict:
    """One line of the table, and what is wrong with it."""

    served: ServedRequest
    delivered: DeliveredRequest
    compared: ComparedRequest
    problems: tuple[str, ...]

    @property
    def expected_rows(self) -> int:
        """Prompt and generated tokens, less the last sampled one: it was never fed to the model."""
        return self.served.prompt_tokens + self.served.generated_tokens - 1


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The whole outcome."""

    model: str
    dtype: str
    rows_directory: Path
    requests: tuple[RequestVerdict, ...]
    on: PhaseResult
    off: PhaseResult

    @property
    def bound(self) -> float:
        """The largest difference to the cache-off run that is accepted."""
        return BOUNDS[self.dtype]

    @property
    def stage_problems(self) -> tuple[str, ...]:
        """What the stage itself says went wrong: no cache, a cache turned off on the way, errors of no one request."""
        told = self.on.stage_report
        gate: Mapping[str, str] = told.get("gate", {})
        why = "; ".join(filter(None, (gate.get("reason"), gate.get("remedy"))))
        problems = [] if gate.get("status") == "supported" else [f"the stage has no cache: {why}"]
        if told.get("off_reason"):
            problems.append(f"the cache was turned off: {told['off_reason']}")
        return (*problems, *told.get("delivery", {}).get("stage_errors", ()))

    @property
    def ok(self) -> bool:
        """Whether every row was delivered, equals the tap, and lies within the bound, and the stage had no error."""
        wrong = any(verdict.problems for verdict in self.requests)
        return bool(self.requests) and not wrong and not self.stage_problems


def make_report(model: str, dtype: str, rows_directory: Path, on: PhaseResult, off: PhaseResult) -> DemoReport:
    """Judge every request of the cache-on phase."""
    delivered = {one.name: one for one in on.delivered}
    compared = {one.name: one for one in off.compared}
    delivery: Mapping[str, Any] = on.stage_report.get("delivery", {})
    reasons: dict[str, str] = {**delivery.get("sink_errors", {}), **delivery.get("failures", {})}
    verdicts = []
    for served in on.served:
        got = delivered.get(served.name, DeliveredRequest(served.name, problem="not checked"))
        held = compared.get(served.name, ComparedRequest(served.name, problem="not compared"))
        why = tuple(reason for req_id, reason in reasons.items() if req_id.startswith(served.name + "-"))
        verdicts.append(RequestVerdict(served, got, held, (*_problems(served, got, held, BOUNDS[dtype]), *why)))
    return DemoReport(model, dtype, rows_directory, tuple(verdicts), on, off)


def _problems(
    served: ServedRequest, delivered: DeliveredRequest, compared: ComparedRequest, bound: float
) -> tuple[str, ...]:
    problems = [problem for problem in (delivered.problem, compared.problem) if problem is not None]
    expected = served.prompt_tokens + served.generated_tokens - 1
    if delivered.rows != expected:
        problems.append(f"{delivered.rows} rows delivered, {expected} expected")
    if delivered.rows_equal_to_tap != delivered.rows:
        problems.append(f"{delivered.rows - delivered.rows_equal_to_tap} rows were computed by no forward of this run")
    if served.computed_rows != expected - served.skipped_tokens:
        problems.append(
            f"vLLM computed {served.computed_rows} rows and says that it skipped {served.skipped_tokens} of {expected}"
        )
    if compared.largest_difference is not None and compared.largest_difference > bound:
        problems.append(
            f"position {compared.at_position} differs from the cache-off run by {compared.largest_difference:.1e}, "
            f"bound {bound:.0e}"
        )
    return tuple(problems)


def render_text(report: DemoReport) -> str:
    """The table, what is wrong, and the summary line."""
    cells = [_cells(verdict) for verdict in report.requests]
    lines = [
        f"{Path(report.model).name} in {report.dtype}",
        "",
        render_table(_HEADERS, cells, right_aligned=_HEADERS[1:]),
        "",
        _LEGEND.format(bound=report.bound),
        "",
        *(f"WRONG stage: {problem}" for problem in report.stage_problems),
    ]
    for verdict in report.requests:
        lines.extend(f"WRONG {verdict.served.name}: {problem}" for problem in verdict.problems)
    lines.append(_summary_line(report))
    return "\n".join(lines)


def _cells(verdict: RequestVerdict) -> tuple[str, ...]:
    served, delivered, compared = verdict.served, verdict.delivered, verdict.compared
    equal = delivered.rows > 0 and delivered.rows_equal_to_tap == delivered.rows and delivered.problem is None
    return (
        f"{served.name} {served.wave}",
        str(served.prompt_tokens),
        str(served.skipped_tokens),
        str(served.computed_rows),
        str(delivered.rows),
        "yes" if equal else f"NO ({delivered.rows_equal_to_tap})",
        _difference(compared.largest_difference),
        _difference(compared.control_difference),
    )


def _difference(value: float | None) -> str:
    if value is None:
        return "-"
    return "0" if value == 0.0 else f"{value:.1e}"


def _summary_line(report: DemoReport) -> str:
    off = {wave.name: wave.prefill_s for wave in report.off.waves}
    times = "; ".join(
        f"{wave.name} wave {off.get(wave.name, 0.0):.2f} s off, {wave.prefill_s:.2f} s on"
        for wave in report.on.waves
        if wave.num_requests
    )
    wrong = sum(bool(verdict.problems) for verdict in report.requests)
    verdict = "every row delivered and right" if report.ok else f"WRONG: {wrong} of {len(report.requests)} requests"
    return f"{verdict}; prefill: {times}; safetensors files in {report.rows_directory}"


def as_document(report: DemoReport) -> dict[str, Any]:
    """The same for programs: plain values, differences as numbers or null."""
    off = {wave.name: wave.prefill_s for wave in report.off.waves}
    return {
        "ok": report.ok,
        "model": report.model,
        "dtype": report.dtype,
        "bound": report.bound,
        "rows_directory": str(report.rows_directory),
        "waves": [
            {
                "name": wave.name,
                "requests": wave.num_requests,
                "prefill_s_cache_off": off.get(wave.name),
                "prefill_s_cache_on": wave.prefill_s,
            }
            for wave in report.on.waves
        ],
        "requests": [
            {
                "name": verdict.served.name,
                "wave": verdict.served.wave,
                "prompt_tokens": verdict.served.prompt_tokens,
                "generated_tokens": verdict.served.generated_tokens,
                "skipped_tokens": verdict.served.skipped_tokens,
                "rows_vllm_alone": verdict.served.computed_rows,
                "rows_expected": verdict.expected_rows,
                "rows_delivered": verdict.delivered.rows,
                "rows_equal_to_tap": verdict.delivered.rows_equal_to_tap,
                "largest_difference_to_cache_off": verdict.compared.largest_difference,
                "largest_difference_at_position": verdict.compared.at_position,
                "cache_off_twice_difference": verdict.compared.control_difference,
                "file": verdict.delivered.file,
                "text": verdict.served.text,
                "problems": list(verdict.problems),
            }
            for verdict in report.requests
        ],
        "stage_problems": list(report.stage_problems),
        "stage": report.on.stage_report,
    }
