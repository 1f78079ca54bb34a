# SPDX-License-Identifier: Apache-2.0
"""Puts an author's model under the real cache and a simulated engine, and says what is wrong with its outputs."""

from omni_core.testing.model_check.calls import (
    AuthoredModelError,
    ModelCallError,
    ModelOutputError,
    SequenceRun,
    StageModel,
)
from omni_core.testing.model_check.check import check_model_outputs
from omni_core.testing.model_check.findings import Finding, Problem, Severity
from omni_core.testing.model_check.report import KeyReport, ModelCheckFailedError, ModelCheckReport, ScenarioReport
from omni_core.testing.model_check.rows import DEFAULT_TOLERANCES
from omni_core.testing.model_check.stage import ModelStage
from omni_core.testing.model_check.stage_config import ModelStageConfig

__all__ = [
    "DEFAULT_TOLERANCES",
    "AuthoredModelError",
    "Finding",
    "KeyReport",
    "ModelCallError",
    "ModelCheckFailedError",
    "ModelCheckReport",
    "ModelOutputError",
    "ModelStage",
    "ModelStageConfig",
    "Problem",
    "ScenarioReport",
    "SequenceRun",
    "Severity",
    "StageModel",
    "check_model_outputs",
]
