# SPDX-License-Identifier: Apache-2.0
"""Asks a running vLLM server: the geometry of its KV cache, and of an Omni Core stage what it has really allocated.

vLLM (0.32) publishes its cache configuration as the labels of `vllm:cache_config_info` at `/metrics`
(`v1/metrics/loggers.py`, `CacheConfig.metrics_info`), and answers `POST /collective_rpc` in its development mode.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from omni_core.cli.plan.errors import PlanInputError
from omni_core.prefix_cache.sizing import CacheMemory

_INFO = re.compile(r"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_REPORT_CALL = json.dumps({"method": "omni_core_report"}).encode()


@dataclass(frozen=True, slots=True)
class LiveStage:
    """What one worker with a cache says of itself."""

    memory: CacheMemory
    sink_queue_bytes: int | None
    """`None`: it does not say."""
    device_is_host: bool
    settings: Mapping[str, Any]
    """Name → its value, and where that came from."""
    geometry: Mapping[str, Any]
    """What its sizes follow from beside the settings; empty if it does not say."""


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """What a server tells. Several engines of one server are alike."""

    url: str
    block_size: int
    num_blocks: int
    num_engines: int
    stages: tuple[LiveStage, ...]
    """One per worker that has a cache."""
    no_stages: str | None
    """Why there are none, and what to do."""


def ask_engine(url: str, timeout_s: float) -> RunningEngine:
    """Ask a server. Two HTTP requests, each bounded.

    Raises:
        PlanInputError: it cannot be reached, or publishes no cache configuration.
    """
    base = url.rstrip("/")
    try:
        with urllib.request.urlopen(f"{base}/metrics", timeout=timeout_s) as answer:
            metrics = answer.read().decode()
    except (OSError, ValueError) as error:
        raise PlanInputError(f"--server {url}: /metrics: {error}") from error
    engines = [dict(_LABEL.findall(labels)) for labels in _INFO.findall(metrics)]
    sized = [labels for labels in engines if labels.get("num_gpu_blocks", "").isdigit()]
    if not sized:
        raise PlanInputError(
            f"--server {url}: /metrics has no vllm:cache_config_info with num_gpu_blocks; it is not a vLLM server, or "
            "runs with --disable-log-stats"
        )
    stages, no_stages = _live_stages(base, timeout_s)
    return RunningEngine(
        url=url,
        block_size=int(sized[0]["block_size"]),
        num_blocks=min(int(labels["num_gpu_blocks"]) for labels in sized),
        num_engines=len(sized),
        stages=stages,
        no_stages=no_stages,
    )


def _live_stages(base: str, timeout_s: float) -> tuple[tuple[LiveStage, ...], str | None]:
    call = urllib.request.Request(
        f"{base}/collective_rpc", data=_REPORT_CALL, headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(call, timeout=timeout_s) as answer:
            replies = json.load(answer)["results"]
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return (), "the server is not in development mode: start it with VLLM_SERVER_DEV_MODE=1 for exact figures"
        return (), f"its workers do not answer omni_core_report (HTTP {error.code}): they are not Omni Core's"
    except (OSError, ValueError, KeyError) as error:
        return (), f"POST /collective_rpc: {error!r}"
    stages = tuple(stage for reply in replies if isinstance(reply, Mapping) and (stage := _live_stage(reply)))
    if stages:
        return stages, None
    gates = {str(reply.get("gate", {}).get("reason")) for reply in replies if isinstance(reply, Mapping)}
    return (), f"no worker has a cache: {'; '.join(sorted(gates)) or 'none answered'}"


def _live_stage(report: Mapping[str, Any]) -> LiveStage | None:
    memory = report.get("cache", {}).get("memory")
    if not isinstance(memory, Mapping):
        return None
    queue = report.get("settings", {}).get("sink_queue_bytes", {})
    return LiveStage(
        CacheMemory(**{field.name: memory[field.name] for field in fields(CacheMemory)}),
        queue.get("value") if isinstance(queue, Mapping) else None,
        device_is_host=report.get("backend") == "cpu_sim",
        settings=report.get("settings", {}),
        geometry=report.get("geometry", {}),
    )
