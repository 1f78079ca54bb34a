# SPDX-License-Identifier: Apache-2.0
"""Asks a running vLLM server: the geometry of its KV cache, and of an Omni Core stage what it has really allocated.

vLLM (0.32) publishes its cache configuration as the labels of `vllm:cache_config_info` at `/metrics`, a line for each
engine (`v1/metrics/loggers.py`, `CacheConfig.metrics_info`), and answers `POST /collective_rpc` in its development
mode. With several engines (data parallel) it asks each, and gives back what the first says (`v1/engine/core_client.py`,
`call_utility_async`).
"""

from __future__ import annotations

import json
import re
import reprlib
from dataclasses import dataclass

from omni_core.cli.plan.bounded_http import ServerAddress, ask, parse_address
from omni_core.cli.plan.config_fields import MAX_COUNT
from omni_core.cli.plan.errors import NoAnswerError, PlanInputError
from omni_core.cli.plan.stage_report import LiveStage, understand_reports
from omni_core.runtime import Runtime

DEFAULT_TIMEOUT_S = 10.0
_INFO = re.compile(r"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
_LABEL = re.compile(r'(?<!\w)(\w+)="((?:[^"\\]|\\.)*)"')
_NUMBER = re.compile(r"[0-9]{1,19}")
_REPORT_CALL = json.dumps({"method": "omni_core_report"}).encode()


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """What a server tells."""

    url: str
    block_size: int
    num_blocks: int
    """Of the engine with the fewest."""
    num_engines: int
    stages: tuple[LiveStage, ...]
    """One per worker that has a cache, of the one engine that was heard; the largest first."""
    no_stages: str | None
    """Why there are none, and what to do."""

    @property
    def num_caches(self) -> int:
        """Caches of all engines, each taken to be as the one that was heard, or to have one."""
        return max(1, len(self.stages)) * self.num_engines

    @property
    def not_seen(self) -> tuple[str, ...]:
        """What the counts suppose without having seen it."""
        if self.num_engines == 1:
            return ()
        heard = f"one answered, with {_counted(len(self.stages), 'cache')}" if self.stages else "none told its caches"
        return (
            f"the server has {self.num_engines} engines, and {heard}: the others are taken to be alike and on this "
            f"host, which makes {self.num_caches} caches; give --caches-per-host if that is not so",
        )


def ask_engine(runtime: Runtime, url: str, timeout_s: float) -> RunningEngine:
    """Ask a server. Two HTTP requests, each for at most `timeout_s`.

    Raises:
        PlanInputError: it cannot be reached, or publishes no cache configuration.
    """
    address = parse_address(url)
    try:
        engines = _engines(runtime, address, timeout_s)
    except (NoAnswerError, UnicodeDecodeError) as error:
        raise PlanInputError(f"--server {url}: /metrics: {error}") from error
    stages, no_stages = _live_stages(runtime, address, timeout_s)
    return RunningEngine(
        url=url,
        block_size=engines[0][0],
        num_blocks=min(num_blocks for _, num_blocks in engines),
        num_engines=len(engines),
        stages=stages,
        no_stages=no_stages,
    )


def _engines(runtime: Runtime, address: ServerAddress, timeout_s: float) -> list[tuple[int, int]]:
    """Block size and blocks of each engine."""
    answer = ask(runtime, address, "/metrics", timeout_s)
    if answer.status != 200:
        raise NoAnswerError(f"HTTP {answer.status}; give the address that vLLM itself listens at")
    lines = _INFO.findall(answer.body.decode())
    if not lines:
        raise NoAnswerError(
            "it has no vllm:cache_config_info with num_gpu_blocks; it is not a vLLM server, or runs with "
            "--disable-log-stats"
        )
    by_engine = {labels.get("engine", str(number)): labels for number, labels in enumerate(map(_labels, lines))}
    return [(_number(labels, "block_size"), _number(labels, "num_gpu_blocks")) for labels in by_engine.values()]


def _labels(line: str) -> dict[str, str]:
    return dict(_LABEL.findall(line))


def _number(labels: dict[str, str], name: str) -> int:
    text = labels.get(name, "")
    if _NUMBER.fullmatch(text) is None or not 1 <= int(text) <= MAX_COUNT:
        raise NoAnswerError(
            f"vllm:cache_config_info comes with {name}={reprlib.repr(text)}, not a number of at least 1; ask again "
            "when the engine has started, or give --num-blocks without --server"
        )
    return int(text)


def _live_stages(
    runtime: Runtime, address: ServerAddress, timeout_s: float
) -> tuple[tuple[LiveStage, ...], str | None]:
    try:
        answer = ask(runtime, address, "/collective_rpc", timeout_s, _REPORT_CALL)
        if answer.status == 404:
            return (), "the server is not in development mode: start it with VLLM_SERVER_DEV_MODE=1 for exact figures"
        if answer.status != 200:
            return (), f"its workers do not answer omni_core_report (HTTP {answer.status}): they are not Omni Core's"
        reports = understand_reports(answer.body)
    except NoAnswerError as error:
        return (), f"POST /collective_rpc: {error}"
    if reports.stages:
        return reports.stages, None
    return (), f"no worker has a cache: {'; '.join(reports.reasons) or 'none answered'}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
