# SPDX-License-Identifier: Apache-2.0
"""Runs scheduled steps of an author's model through the real cache, call by call, as an engine adapter would."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from omni_core.backend import DeviceBackend
from omni_core.prefix_cache.config import HIDDEN_KEY, PrefixCacheConfig
from omni_core.prefix_cache.events import StepLayout
from omni_core.prefix_cache.manager import OmniPrefixCacheManager
from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.runtime import Runtime
from omni_core.testing.engine_schedule import ScheduledRun, SimSchedule
from omni_core.testing.fake_model import FakeOutputs
from omni_core.testing.ledger import EngineLedger
from omni_core.testing.model_check.calls import ModelCaller, SequenceRun
from omni_core.testing.model_check.memory import OutputMemory
from omni_core.testing.model_check.stage_config import ModelStageConfig
from omni_core.testing.model_check.tokens import TokenSource
from omni_core.testing.model_check.understanding import OutputRules
from omni_core.testing.scheduler_config import SchedulerConfig
from omni_core.testing.sim_scheduler import SimScheduler
from omni_core.testing.sim_step import NO_FAULTS, Forward, SavedStep, StepCounter, StepFaults

_LEAST_ROW_BYTES = 16 << 10


class ModelEngine:
    """The engine. One thread; never blocks but in the cache's own calls and in the model.

    Args:
        config: the stage.
        policy: the model's.
        caller: calls the model.
        ledger: told of every step.
        backend: of the simulated device; closed by whoever made it.
        runtime: makes the cache's threads and locks.
        first_prompt: run through the model once, before anything else, to learn the width of its hidden rows.
    """

    def __init__(
        self,
        config: ModelStageConfig,
        policy: ModelCachePolicy,
        caller: ModelCaller,
        ledger: EngineLedger,
        backend: DeviceBackend,
        runtime: Runtime,
        first_prompt: tuple[int, ...],
    ) -> None:
        scheduler = config.scheduler
        self.counter = StepCounter()
        self._scheduler_config = scheduler
        self._caller = caller
        self._ledger = ledger
        self._padding = backend.graph_padding(config.capture_sizes)
        self._memory = OutputMemory(max(config.capture_sizes, default=None))
        self._rules = OutputRules(policy)
        self._layout: StepLayout | None = None
        vocabulary = 1 + max(first_prompt) if config.vocabulary is None else config.vocabulary
        self._tokens = TokenSource(
            vocabulary, scheduler.max_draft_tokens, config.drafts_accepted, scheduler.mishaps.seed
        )
        self.scheduler = SimScheduler(scheduler, self._tokens.drafts)
        shown = caller([SequenceRun("dry run", torch.tensor(first_prompt, dtype=torch.int64), 0)])
        hidden = shown.hidden
        plenty = max(_LEAST_ROW_BYTES, 2 * shown.row_bytes)
        cache_config = PrefixCacheConfig(
            num_blocks=scheduler.num_blocks,
            block_size=scheduler.block_size,
            hidden_size=1 if hidden is None else hidden.shape[1],
            hidden_dtype=torch.float32 if hidden is None else hidden.dtype,
            max_num_tokens=scheduler.max_num_tokens,
            staging_depth=config.staging_depth,
            extra_row_bytes=plenty if config.row_bytes is None else config.row_bytes,
            device_staging_bytes=config.device_staging_bytes,
        )
        device = torch.device("cpu")
        self.cache = OmniPrefixCacheManager(cache_config, backend, self._current_layout, runtime=runtime, device=device)
        self.cache.register_policy(policy)

    def step(self, faults: Callable[[SimSchedule], StepFaults] | None) -> SavedStep | None:
        """Run one step; `None` if nothing was computed.

        Raises:
            AuthoredModelError: the model raised, or returned what no stage can take.
        """
        schedule = self.scheduler.schedule()
        broken = faults(schedule) if faults else NO_FAULTS
        for req_id in sorted(broken.abort_before_forward):
            self.scheduler.abort(req_id)
        self.counter.announcing = schedule.number
        self.cache.new_step_starts(schedule.events)
        self.counter.announced = schedule.number
        self._ledger.step_started(schedule)
        if broken.lost_forward is not None:
            self.scheduler.lose(schedule, broken.lost_forward)
            return None
        runs = tuple(run for run in schedule.runs if run.req_id not in broken.abort_before_forward)
        sampled = self._tokens.sampled(runs)
        saved = None
        if runs:
            saved = self._forward(schedule, runs, {req_id: len(tokens) for req_id, tokens in sampled.items()})
        self.scheduler.complete(schedule, sampled)
        return saved

    def _forward(self, schedule: SimSchedule, runs: tuple[ScheduledRun, ...], num_sampled: dict[str, int]) -> SavedStep:
        forward = self._caller([_sequence_run(run) for run in runs])
        num_tokens = forward.num_tokens
        num_padded = self._padding.padded(num_tokens)
        stored = self._rules.stored_keys(forward)
        shares = dict(zip((run.req_id for run in runs), self._rules.shares(forward), strict=True))
        # The ledger keeps a hidden row for every position that was computed, whether or not the cache stores it.
        hidden = torch.zeros(num_tokens, 1) if forward.hidden is None else forward.hidden
        rows = FakeOutputs(hidden, {name: forward.outputs[name] for name in sorted(stored)})
        self._ledger.forward_ran(Forward(schedule.number, runs, rows))
        placed = None if forward.hidden is None else self._memory.placed_rows(HIDDEN_KEY, forward.hidden, num_padded)
        outputs = self._memory.placed_outputs(forward.nested, stored, num_padded)
        self._layout = _layout_of(runs, self._scheduler_config)
        step_id = self.cache.save_outputs(placed, outputs, num_tokens_unpadded=num_tokens, num_tokens_padded=num_padded)
        self._layout = None
        self._memory.spoil()
        self._rules.saved(forward)
        counts = {run.req_id: num_sampled[run.req_id] for run in runs if run.drafts}
        step = SavedStep(schedule.number, step_id, runs, stored, num_padded, shares, counts)
        self._ledger.step_saved(step)
        return step

    def _current_layout(self) -> StepLayout:
        if self._layout is None:
            raise RuntimeError("the layout was asked for outside save_outputs")
        return self._layout


def _sequence_run(run: ScheduledRun) -> SequenceRun:
    token_ids = run.forward_track().token_ids[: run.stop]
    return SequenceRun(run.req_id, torch.tensor(token_ids, dtype=torch.int64), run.start)


def _layout_of(runs: tuple[ScheduledRun, ...], config: SchedulerConfig) -> StepLayout:
    positions = [np.arange(run.start, run.stop, dtype=np.int64) for run in runs]
    size = config.block_size
    slots = [
        np.asarray(run.block_ids, np.int64)[at // size] * size + at % size
        for run, at in zip(runs, positions, strict=True)
    ]
    starts = np.concatenate([[0], np.cumsum([run.num_tokens for run in runs])]).astype(np.int64)
    drafts = np.array([len(run.drafts) for run in runs], np.int64) if config.max_draft_tokens else None
    return StepLayout(
        tuple(run.req_id for run in runs), starts, np.concatenate(positions), np.concatenate(slots), drafts
    )
