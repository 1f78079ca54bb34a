# SPDX-License-Identifier: Apache-2.0
"""Runs scheduled steps through a stage cache, call by call, as an engine adapter would.

One step: the scheduler decides, requests may be aborted between that and the forward, the cache is told, the model
runs (or, when asked, does not), its outputs are saved, and a static output buffer is overwritten at once. Handing the
step to whoever builds outputs is the caller's part.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from omni_core.prefix_cache.events import StepEvents, StepLayout
from omni_core.testing.engine_schedule import EngineScheduler, ScheduledRun, SimSchedule
from omni_core.testing.fake_model import FakeModel, FakeRun, StaticOutputs
from omni_core.testing.sampling import sample
from omni_core.testing.scheduler_config import SchedulerConfig
from omni_core.testing.sim_request import SimRequest
from omni_core.testing.sim_step import NO_FAULTS, Forward, SavedStep, StepCounter, StepFaults, StepObserver
from omni_core.testing.stage_cache import StageCache

_I64 = npt.NDArray[np.int64]

REQUEST_ENTRIES_KEY = "sim.request_entries"
"""A tensor with one entry per request; declared in `request_keys`."""
REQUEST_LIST_KEY = "sim.request_list"
"""A list with one element per request, `None` for some."""
WHOLE_KEY = "sim.whole"
"""A tensor that belongs to the whole step."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the simulated engine runs."""

    scheduler: SchedulerConfig
    padded_num_tokens: Callable[[int], int] = field(default=lambda num_tokens: num_tokens)
    """Rows of a padded output for so many real rows, such as `GraphPadding.padded` of a backend."""
    max_num_tokens_padded: int | None = None
    """Largest value of `padded_num_tokens`; given: outputs lie in static buffers, which are overwritten after each save
    as a captured graph's are. `None`: every step gets fresh tensors."""
    shuffle_batch_seed: int | None = None
    """Shuffles the order of requests in the batch and of events in a step, which mean nothing. `None`: as scheduled."""
    leftovers: bool = False
    """Whether steps bring values without a row per token, too."""
    kernel_block_size: int | None = None
    """Given: the attention kernel's blocks, which divide the scheduler's. Slots are computed through them."""


class SimEngine:
    """The engine. One thread; never blocks but in the cache's own calls.

    Args:
        config: limits and manners.
        model: computes the rows.
        scheduler: decides the steps.
        make_cache: given the layout source, makes the cache under test.
        observers: told of every step.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: FakeModel,
        scheduler: EngineScheduler,
        make_cache: Callable[[Callable[[], StepLayout]], StageCache],
        observers: Sequence[StepObserver] = (),
    ) -> None:
        self.config = config
        self.model = model
        self.scheduler = scheduler
        self.counter = StepCounter()
        self._observers = tuple(observers)
        self._shuffler = None if config.shuffle_batch_seed is None else random.Random(config.shuffle_batch_seed)
        self._static = (
            None
            if config.max_num_tokens_padded is None
            else StaticOutputs(model.all_keys, max(config.max_num_tokens_padded, config.scheduler.max_num_tokens))
        )
        self._layout: StepLayout | None = None
        self.cache = make_cache(self._current_layout)

    def submit(self, request: SimRequest) -> None:
        """Queue a request; it is known to the cache once it is scheduled."""
        self.scheduler.add(request)

    def abort(self, req_id: str) -> bool:
        """Abort between two steps. `False`: the request is not known (any more)."""
        return self.scheduler.abort(req_id)

    def change_weights(self, adapter_id: int | None) -> None:
        """The weights (`None`), or those of an adapter, are other ones from the next step on."""
        self._bump(adapter_id)
        for observer in self._observers:
            observer.weights_changed(adapter_id)

    def step(
        self, *, emitted: frozenset[str] | None = None, faults: Callable[[SimSchedule], StepFaults] | None = None
    ) -> SavedStep | None:
        """Run one step.

        Args:
            emitted: the further keys this forward brings; `None`: all.
            faults: asked once the step is scheduled.

        Returns:
            The saved step, or `None` if nothing was computed.
        """
        schedule = self._shuffled_events(self.scheduler.schedule())
        broken = faults(schedule) if faults else NO_FAULTS
        for req_id in sorted(broken.abort_before_forward):
            self.scheduler.abort(req_id)
        self.counter.announcing = schedule.number
        self.cache.new_step_starts(schedule.events)
        self.counter.announced = schedule.number
        for observer in self._observers:
            observer.step_started(schedule)
        for adapter_id in broken.new_weights:
            self._bump(adapter_id)
        saved = self._run(schedule, broken, emitted)
        for adapter_id in broken.new_weights:
            for observer in self._observers:
                observer.weights_changed(adapter_id)
        return saved

    def _bump(self, adapter_id: int | None) -> None:
        if adapter_id is None:
            self.cache.bump_weight_version()
        else:
            self.cache.bump_adapter_version(adapter_id)

    def _run(self, schedule: SimSchedule, broken: StepFaults, emitted: frozenset[str] | None) -> SavedStep | None:
        if broken.lost_forward is not None:
            self.scheduler.lose(schedule, broken.lost_forward)
            return None
        runs = [run for run in schedule.runs if run.req_id not in broken.abort_before_forward]
        sampled = sample(self.model, runs)
        saved = self._forward(schedule, runs, emitted, {req_id: len(tokens) for req_id, tokens in sampled.items()})
        self.scheduler.complete(schedule, sampled)
        return saved

    def _shuffled_events(self, schedule: SimSchedule) -> SimSchedule:
        if self._shuffler is None:
            return schedule
        requests = list(schedule.events.requests)
        self._shuffler.shuffle(requests)
        filled = list(schedule.events.filled_blocks)
        self._shuffler.shuffle(filled)
        events = StepEvents(tuple(requests), schedule.events.block_copies, tuple(filled))
        return SimSchedule(schedule.number, events, schedule.runs)

    def _forward(
        self,
        schedule: SimSchedule,
        runs: list[ScheduledRun],
        emitted: frozenset[str] | None,
        num_sampled: Mapping[str, int],
    ) -> SavedStep | None:
        if not runs:
            return None
        if self._shuffler is not None:
            self._shuffler.shuffle(runs)
        names = frozenset(key.name for key in self.model.keys) if emitted is None else emitted
        num_tokens = sum(run.num_tokens for run in runs)
        num_tokens_padded = self.config.padded_num_tokens(num_tokens)
        outputs = self.model.forward(
            [FakeRun(run.forward_track(), run.start, run.stop) for run in runs], names, num_tokens_padded, self._static
        )
        for observer in self._observers:
            observer.forward_ran(Forward(schedule.number, tuple(runs), outputs))
        self._layout = _layout_of(runs, self.config)
        leftovers = self._leftovers(schedule.number, len(runs))
        shares = {run.req_id: _share_of(leftovers, i) for i, run in enumerate(runs)}
        step_id = self.cache.save_outputs(
            outputs.hidden,
            outputs.nested() | leftovers,
            num_tokens_unpadded=num_tokens,
            num_tokens_padded=num_tokens_padded,
        )
        self._layout = None
        if self._static is not None:
            self._static.overwrite()
            for value in leftovers.values():
                if isinstance(value, torch.Tensor):
                    value.fill_(-1)
        counts = {run.req_id: num_sampled[run.req_id] for run in runs if run.drafts}
        step = SavedStep(schedule.number, step_id, tuple(runs), names, num_tokens_padded, shares, counts)
        for observer in self._observers:
            observer.step_saved(step)
        return step

    def _leftovers(self, number: int, num_reqs: int) -> dict[str, Any]:
        if not self.config.leftovers:
            return {}
        base = 1000 * number
        # The whole value's length is never a row count, so it cannot be taken for a row per token.
        longest = self.config.max_num_tokens_padded or self.config.scheduler.max_num_tokens
        return {
            REQUEST_ENTRIES_KEY: base + torch.arange(num_reqs * 2, dtype=torch.int64).view(num_reqs, 2),
            REQUEST_LIST_KEY: [None if i % 3 == 2 else torch.full((i + 1,), base + i) for i in range(num_reqs)],
            WHOLE_KEY: torch.full((longest + 7,), float(number)),
        }

    def _current_layout(self) -> StepLayout:
        if self._layout is None:
            raise RuntimeError("the layout was asked for outside save_outputs")
        return self._layout


def _layout_of(runs: Sequence[ScheduledRun], config: EngineConfig) -> StepLayout:
    positions = [np.arange(run.start, run.stop, dtype=np.int64) for run in runs]
    slots = [_slots_of(run, where, config) for run, where in zip(runs, positions, strict=True)]
    starts = np.concatenate([[0], np.cumsum([run.num_tokens for run in runs])]).astype(np.int64)
    drafts = np.array([len(run.drafts) for run in runs], np.int64) if config.scheduler.max_draft_tokens else None
    return StepLayout(
        tuple(run.req_id for run in runs), starts, np.concatenate(positions), np.concatenate(slots), drafts
    )


def _slots_of(run: ScheduledRun, positions: _I64, config: EngineConfig) -> _I64:
    """Slots of a run's positions, through the kernel's table: a scheduler block is several blocks of the kernel."""
    size = config.scheduler.block_size
    kernel_size = config.kernel_block_size or size
    per_block = size // kernel_size
    table = (np.asarray(run.block_ids, np.int64)[:, None] * per_block + np.arange(per_block)).reshape(-1)
    slots: _I64 = table[positions // kernel_size] * kernel_size + positions % kernel_size
    return slots


def _share_of(leftovers: Mapping[str, Any], index: int) -> dict[str, Any]:
    """What the request at `index` of the batch must get; copies, because the engine overwrites its buffers."""
    shares = {name: value if name == WHOLE_KEY else value[index] for name, value in leftovers.items()}
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in shares.items()}
