# SPDX-License-Identifier: Apache-2.0
"""What stands behind the pytest fixtures: makes stages, judges them, closes them, and says what a test left behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import overload

from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.testing.fake_model import FakeModel
from omni_core.testing.leaks import LeakError, OpenArenas, ThreadKeepingRuntime
from omni_core.testing.model_check.calls import StageModel
from omni_core.testing.model_check.no_cache import NoCacheComparison
from omni_core.testing.model_check.report import ModelCheckFailedError
from omni_core.testing.model_check.stage import ModelStage
from omni_core.testing.model_check.stage_config import ModelStageConfig
from omni_core.testing.row_kinds import RowKind
from omni_core.testing.scheduler_config import SchedulerConfig
from omni_core.testing.sim_stage import SimStage
from omni_core.testing.stage_config import StageConfig

THREAD_WAIT_S = 5.0
"""How long a test's threads may take to end once everything was closed."""

Stage = ModelStage | SimStage


@dataclass(frozen=True, slots=True)
class StageVerdict:
    """What a stage delivered, all of it found right."""

    rows_delivered: int
    """Token positions delivered."""
    rows_from_hits: int
    """Of those, positions that came from the cache."""
    requests_failed: int
    """Requests that were rightly refused: they hit rows that were never computed."""
    counts: Mapping[RowKind, int]
    """Rows by kind."""
    differences: Mapping[str, float]
    """Of an author's model, by key: the largest difference between a delivered row and the same row computed alone,
    without a cache, relative to the row's largest element."""


class SimEngineFactory:
    """The fixture `sim_engine`: makes stages and closes them when the test ends. One thread.

    Every thread must be made by `runtime`, also a test's own; when the test ends, each must end, too.
    """

    def __init__(self) -> None:
        self.runtime = ThreadKeepingRuntime()
        self._stages: list[tuple[Stage, OpenArenas]] = []

    @overload
    def __call__(self, model: FakeModel, config: StageConfig | None = None) -> SimStage: ...

    @overload
    def __call__(
        self, model: StageModel, config: ModelStageConfig | None = None, *, policy: ModelCachePolicy | None = None
    ) -> ModelStage: ...

    def __call__(
        self,
        model: FakeModel | StageModel,
        config: StageConfig | ModelStageConfig | None = None,
        *,
        policy: ModelCachePolicy | None = None,
    ) -> Stage:
        """Make a running stage.

        Args:
            model: a model of yours, or a `FakeModel`, whose rows are known beforehand.
            config: `ModelStageConfig` for a model of yours, `StageConfig` for a `FakeModel`; default: roomy.
            policy: of a model of yours; default: its `omni_cache_policy`.

        Raises:
            TypeError: the configuration is the other kind's, or a `FakeModel` was given a policy.
        """
        arenas = OpenArenas()
        if isinstance(model, FakeModel):
            stage: Stage = self._fake_stage(model, config, policy, arenas)
        else:
            stage = self._model_stage(model, config, policy, arenas)
        self._stages.append((stage, arenas))
        return stage

    def close(self, *, test_passed: bool) -> None:
        """Close every stage, the newest first.

        Args:
            test_passed: whether to tell what the test forgot as well: after a failure that is no news.

        Raises:
            LeakError: names what was left behind.
        """
        left: list[str] = []
        for stage, arenas in reversed(self._stages):
            if test_passed:
                left.extend(_forgotten(stage))
            try:
                stage.close()
            except Exception as error:
                left.append(f"closing a stage raised {error!r}")
            if arenas.open_bytes:
                left.append(f"{arenas.open_bytes} bytes of pinned memory were not given back")
        self._stages.clear()
        left.extend(f"thread {name!r} has not ended" for name in self.runtime.alive(THREAD_WAIT_S))
        if left:
            raise LeakError("sim_engine: " + "; ".join(left))

    def _fake_stage(
        self,
        model: FakeModel,
        config: StageConfig | ModelStageConfig | None,
        policy: ModelCachePolicy | None,
        arenas: OpenArenas,
    ) -> SimStage:
        if policy is not None:
            raise TypeError("a FakeModel has no policy; give StageConfig(declare_keys=…, deferred_keys=…)")
        config = StageConfig(SchedulerConfig(256, 4, 256)) if config is None else config
        if not isinstance(config, StageConfig):
            raise TypeError(f"a FakeModel needs a StageConfig, not a {type(config).__name__}")
        if config.backend == "cpu_sim":
            config = replace(config, backend_options={"observer": arenas, **config.backend_options})
        return SimStage(config, model, runtime=self.runtime)

    def _model_stage(
        self,
        model: StageModel,
        config: StageConfig | ModelStageConfig | None,
        policy: ModelCachePolicy | None,
        arenas: OpenArenas,
    ) -> ModelStage:
        config = ModelStageConfig() if config is None else config
        if not isinstance(config, ModelStageConfig):
            raise TypeError(f"a model of yours needs a ModelStageConfig, not a {type(config).__name__}")
        if config.backend == "cpu_sim":
            config = replace(config, backend_options={"observer": arenas, **config.backend_options})
        return ModelStage(model, config, policy=policy, runtime=self.runtime)


class StageJudge:
    """The fixture `stage_oracle`: runs a stage to its end and judges the whole of what it delivered. One thread."""

    def __call__(self, stage: Stage, *, tolerance: float | None = None) -> StageVerdict:
        """Step until every request has ended, build what was not built, and judge.

        Args:
            stage: from `sim_engine`. Each delivery so far was judged when it was collected.
            tolerance: most that float rows of an author's model may differ by from the same rows computed alone, see
                `check_model_outputs`.

        Raises:
            OracleViolationError: a row is missing, came twice, or is not what the model computed for that prefix.
            ModelCheckFailedError: rows differ from those the model computes without a cache.
        """
        stage.run_to_end()
        differences: Mapping[str, float] = {}
        if isinstance(stage, ModelStage):
            comparison = NoCacheComparison(stage.caller, tolerance)
            comparison.take(stage.judge.delivered)
            findings = comparison.findings()
            if findings:
                raise ModelCheckFailedError("\n".join(map(str, findings)))
            differences = {key: count.largest_difference for key, count in comparison.counts.items()}
        oracle, stats = stage.oracle, stage.stats()
        return StageVerdict(
            oracle.rows_delivered,
            stats.rows_from_hits if stats else 0,
            oracle.requests_failed,
            MappingProxyType(Counter({kind: count for kind, count in oracle.counts.items() if count})),
            MappingProxyType(dict(differences)),
        )


def _forgotten(stage: Stage) -> list[str]:
    """What the test did not do with its stage, each in words."""
    if not stage.unconsumed:
        return []
    ids = ", ".join(str(step.step_id) for step in stage.unconsumed)
    return [f"step {ids} was neither built nor discarded, and holds a staging page"]
