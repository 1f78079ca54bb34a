# SPDX-License-Identifier: Apache-2.0
"""A simulated engine around a real cache, and the judge of what it delivers. Needs no hardware and no engine."""

from omni_core.testing.fake_model import FakeKey, FakeModel, hidden_key
from omni_core.testing.oracle import OracleViolationError, RowKind, StageOracle
from omni_core.testing.sim_request import ImageSpan, SimRequest
from omni_core.testing.sim_scheduler import LostForward, SchedulerConfig
from omni_core.testing.sim_stage import SimStage, StageConfig
from omni_core.testing.tap import PrefixDigester, RowTap
from omni_core.testing.workloads import WorkloadConfig, WorkloadReport, run_workload

__all__ = [
    "FakeKey",
    "FakeModel",
    "ImageSpan",
    "LostForward",
    "OracleViolationError",
    "PrefixDigester",
    "RowKind",
    "RowTap",
    "SchedulerConfig",
    "SimRequest",
    "SimStage",
    "StageConfig",
    "StageOracle",
    "WorkloadConfig",
    "WorkloadReport",
    "hidden_key",
    "run_workload",
]
