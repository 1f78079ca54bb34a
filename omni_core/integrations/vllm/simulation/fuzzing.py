# SPDX-License-Identifier: Apache-2.0
"""Lets `omni-core fuzz` run its workloads on vLLM's own scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from omni_core.integrations.vllm.simulation.workload import VllmWorkload
from omni_core.runtime import Runtime
from omni_core.testing.sim_stage import CacheWrapper
from omni_core.testing.workload_report import WorkloadReport


def run_on_vllm(
    seed: int,
    *,
    runtime: Runtime,
    backend_options: Mapping[str, Any],
    wrap_cache: CacheWrapper | None = None,
) -> WorkloadReport:
    """`omni_core.testing.fuzz_cases.WorkloadRunner` on vLLM's scheduler and KV-cache manager; no model, no forward."""
    workload = VllmWorkload.draw(seed)
    stage = workload.config.stage
    stage = replace(stage, backend_options={**stage.backend_options, **backend_options})
    workload = replace(workload, config=replace(workload.config, stage=stage))
    report, _ = workload.run(runtime, wrap_cache)
    return report
