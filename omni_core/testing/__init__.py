# SPDX-License-Identifier: Apache-2.0
"""A simulated engine around a real cache, and the judge of what it delivers. Needs no hardware and no engine."""

from omni_core.testing.engine_schedule import EngineScheduler, LostForward, ScheduledRun, SimSchedule
from omni_core.testing.fake_model import FakeKey, FakeModel, hidden_key
from omni_core.testing.model_check import (
    AuthoredModelError,
    ModelCheckReport,
    ModelStage,
    ModelStageConfig,
    SequenceRun,
    StageModel,
    check_model_outputs,
)
from omni_core.testing.oracle import OracleViolationError, RowKind, StageOracle
from omni_core.testing.scheduler_config import Mishaps, Preemption, SchedulerConfig
from omni_core.testing.sim_request import ImageSpan, SimRequest
from omni_core.testing.sim_stage import SimStage
from omni_core.testing.stage_config import StageConfig
from omni_core.testing.tap import PrefixDigester, RowTap
from omni_core.testing.workload_config import WorkloadConfig
from omni_core.testing.workload_report import WorkloadReport
from omni_core.testing.workloads import run_workload

__all__ = [
    "AuthoredModelError",
    "EngineScheduler",
    "FakeKey",
    "FakeModel",
    "ImageSpan",
    "LostForward",
    "Mishaps",
    "ModelCheckReport",
    "ModelStage",
    "ModelStageConfig",
    "OracleViolationError",
    "Preemption",
    "PrefixDigester",
    "RowKind",
    "RowTap",
    "ScheduledRun",
    "SchedulerConfig",
    "SequenceRun",
    "SimRequest",
    "SimSchedule",
    "SimStage",
    "StageConfig",
    "StageModel",
    "StageOracle",
    "WorkloadConfig",
    "WorkloadReport",
    "check_model_outputs",
    "hidden_key",
    "run_workload",
]
