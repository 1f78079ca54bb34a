# SPDX-License-Identifier: Apache-2.0
"""A workload under the hazard checker, in one call: judged rows, and no access that was only lucky to be right."""

from __future__ import annotations

from dataclasses import replace

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.runtime import Runtime
from omni_core.testing.hazard_checker import HazardChecker
from omni_core.testing.sim_stage import CacheWrapper
from omni_core.testing.stage_cache import StageCache
from omni_core.testing.workload_config import WorkloadConfig
from omni_core.testing.workload_report import WorkloadReport
from omni_core.testing.workloads import run_workload


def run_watched_workload(
    seed: int,
    config: WorkloadConfig,
    runtime: Runtime,
    *,
    copy_parts: int = 2,
    wrap_cache: CacheWrapper | None = None,
) -> WorkloadReport:
    """Run one workload with simulated copies in parts, every delivery judged and every access checked.

    Args:
        seed: of the workload.
        config: of the workload; its backend must take `observer` and `copy_parts`, as cpu_sim does.
        runtime: seeded, or real threads. The calling thread is the engine.
        copy_parts: pieces each copy is made in.
        wrap_cache: put around the real cache, to break it.

    Raises:
        HazardError: names both sides of every hazard; its cause is what else went wrong.
        OracleViolationError, OmniPrefixCacheError: see `run_workload`.
    """
    checker = HazardChecker(runtime)
    options = {**config.stage.backend_options, "copy_parts": copy_parts, "observer": checker.device}
    config = replace(config, stage=replace(config.stage, backend_options=options))
    stores_hidden = HIDDEN_KEY not in config.stage.deferred_keys

    def wrap(cache: StageCache) -> StageCache:
        inner = cache if wrap_cache is None else wrap_cache(cache)
        return checker.watch_cache(inner, stores_hidden=stores_hidden)

    with checker:
        return run_workload(seed, config, runtime=checker.runtime, wrap_cache=wrap)
