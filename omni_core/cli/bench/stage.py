# SPDX-License-Identifier: Apache-2.0
"""What is measured: a stage whose cache is fed by an engine's calls. Ours here, the peer's in `peer`."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

import numpy as np
import torch

from omni_core.backend.registry import backend_for_tensor
from omni_core.cli.bench.engine_batch import BLOCK_SIZE, HIDDEN_DTYPE, EngineStep, StageShape
from omni_core.prefix_cache.batch_rows import batch_rows
from omni_core.prefix_cache.config import PrefixCacheConfig
from omni_core.prefix_cache.events import RequestEvent, RequestEventKind, StepEvents, StepLayout
from omni_core.prefix_cache.manager import OmniPrefixCacheManager
from omni_core.prefix_cache.outputs import StageCacheOutputs
from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.prefix_cache.stats import CacheStats
from omni_core.runtime import Runtime

OURS = "ours"


class Delivered(ABC):
    """Rows of a step, in the consumer's hands."""

    @abstractmethod
    def release(self) -> None:
        """Give the buffers back, where there is such a thing."""


class Stage(ABC):
    """A cache and the engine's calls into it: what is prepared, which is never timed, and what may be timed."""

    name: str
    """Whose cache it is."""

    @abstractmethod
    def prepare(self, step: EngineStep) -> None:
        """Say what the next step is, in the form this cache takes it. Engine thread."""

    def run_step(self) -> int:
        """The engine thread's part of the prepared step, `new_step_starts` and `save_outputs`; its id."""
        self.start_step()
        return self.save_step()

    @abstractmethod
    def start_step(self) -> None:
        """The first half of `run_step`."""

    @abstractmethod
    def save_step(self) -> int:
        """The second half of `run_step`."""

    @abstractmethod
    def deliver(self, step_id: int) -> Delivered:
        """The consumer's part: rows of all requests of the step. Any thread."""

    @abstractmethod
    def discard(self, step_id: int) -> None:
        """Nobody wants the step's rows. Any thread."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until everything saved is stored, as far as it is not deferred."""

    @abstractmethod
    def close(self) -> None:
        """End the threads."""


class OurStage(Stage):
    """This project's cache on the CPU simulator."""

    name = OURS

    def __init__(self, shape: StageShape, runtime: Runtime, *, deliver_all: bool = True) -> None:
        """Build the cache.

        Args:
            shape: of the stage.
            runtime: makes the threads.
            deliver_all: whether rows of discarded steps come again with later steps, as an engine wants that delivers
                every row; `False` for an engine that never delivers.
        """
        self._backend = backend_for_tensor(torch.empty(0), runtime=runtime, override="cpu_sim")
        config = PrefixCacheConfig(
            num_blocks=shape.num_blocks,
            block_size=BLOCK_SIZE,
            hidden_size=shape.hidden_size or 1,
            hidden_dtype=HIDDEN_DTYPE,
            max_num_tokens=shape.max_num_tokens,
            staging_depth=shape.staging_depth,
            device_staging_bytes=shape.device_staging_bytes,
        )
        self.cache = OmniPrefixCacheManager(
            config, self._backend, self._layout, runtime=runtime, device=torch.device("cpu")
        )
        self.cache.register_policy(
            ModelCachePolicy(
                token_keys=frozenset(shape.token_keys),
                deferred_keys=frozenset(shape.deferred_keys),
                needs_full_hidden_states=shape.hidden_size is not None,
            )
        )
        self._deliver_all = deliver_all
        self.layout_s: list[float] = []
        """What finding the slots of each step took, inside `save_step`: the benchmark's own part of it."""
        self._req_ids: dict[int, tuple[str, ...]] = {}

    def prepare(self, step: EngineStep) -> None:
        scheduled = dict(zip(step.batch.req_ids, step.batch.num_scheduled.tolist(), strict=True))
        finished = tuple(RequestEvent(RequestEventKind.FINISHED, req_id) for req_id in step.finished)
        started = tuple(
            RequestEvent(
                RequestEventKind.STARTED,
                new.req_id,
                new.block_ids,
                new.num_computed_tokens,
                scheduled.get(new.req_id, 0),
            )
            for new in step.started
        )
        self._events = StepEvents(finished + started)
        self._step = step
        self._num_tokens = step.num_tokens

    def start_step(self) -> None:
        self.cache.new_step_starts(self._events)

    def save_step(self) -> int:
        step = self._step
        step_id = self.cache.save_outputs(
            step.hidden,
            step.outputs,
            num_tokens_unpadded=self._num_tokens,
            num_tokens_padded=self._num_tokens,
            carry_owed=self._deliver_all,
        )
        self._req_ids[step_id] = step.batch.req_ids
        return step_id

    def deliver(self, step_id: int) -> OurRows:
        outputs = self.cache.materialize(step_id, self._req_ids.pop(step_id))
        if outputs.failed:
            raise RuntimeError(f"step {step_id} of the benchmark failed: {dict(outputs.failed)}")
        return OurRows(outputs)

    def discard(self, step_id: int) -> None:
        del self._req_ids[step_id]
        self.cache.discard_step(step_id)

    def settle(self) -> None:
        self.cache.flush()

    def stats(self) -> CacheStats:
        """What the cache holds now."""
        return self.cache.stats()

    def close(self) -> None:
        self.cache.close()
        self._backend.close()

    def _layout(self) -> StepLayout:
        """Where the step's rows belong, from the batch's block table. Inside `save_outputs`, so it is timed."""
        began = time.perf_counter()
        batch = self._step.batch
        starts, row, positions = batch_rows(batch.num_scheduled, batch.num_computed)
        blocks, offsets = np.divmod(positions, BLOCK_SIZE)
        slots = batch.block_table[row, blocks].astype(np.int64) * BLOCK_SIZE + offsets
        layout = StepLayout(batch.req_ids, starts, positions, slots)
        self.layout_s.append(time.perf_counter() - began)
        return layout


class OurRows(Delivered):
    """Rows that this project's cache delivered."""

    def __init__(self, outputs: StageCacheOutputs) -> None:
        self._outputs = outputs

    def release(self) -> None:
        self._outputs.release()
