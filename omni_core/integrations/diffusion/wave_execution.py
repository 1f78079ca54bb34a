# SPDX-License-Identifier: Apache-2.0
"""One wave on the worker: pages installed, requests started, steps computed, pictures decoded."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import torch

from omni_core.diffusion_kv.attention.owner import RowKey
from omni_core.diffusion_kv.parallel import Ranks
from omni_core.diffusion_kv.pipeline import AnyPipeline, Pixels
from omni_core.diffusion_kv.rows import RowLayout
from omni_core.integrations.diffusion.engine_request import EngineRequest
from omni_core.integrations.diffusion.errors import WorkerCleanupError
from omni_core.integrations.diffusion.step_worker import StepWorker
from omni_core.integrations.diffusion.waves import Wave


@dataclass(slots=True, eq=False)
class RunningWave:
    """A wave between steps. The engine's thread alone changes it."""

    wave: Wave
    requests: list[EngineRequest]
    """Those of the wave that have not ended."""
    next_step_index: int = 0

    @property
    def layout(self) -> RowLayout:
        """Of every row."""
        return self.wave.forward_key.layouts[0]

    @property
    def done(self) -> bool:
        """Whether every step was computed."""
        return self.next_step_index == self.wave.forward_key.num_inference_steps


class WaveExecution:
    """Runs waves on this rank. The engine's one thread calls; every call blocks on the model."""

    def __init__(self, pipeline: AnyPipeline, worker: StepWorker, ranks: Ranks) -> None:
        self._pipeline = pipeline
        self._worker = worker
        self._ranks = ranks

    def start(self, request: EngineRequest) -> None:
        """Install its pages, then run its encoders and draw its noise.

        Raises:
            Exception: the worker or the model refused; the request is to be removed from the worker.
        """
        request.on_worker = True
        if request.snapshot is not None:
            began_at_s = perf_counter()
            self._worker.install(request.snapshot)
            request.schedule_s += perf_counter() - began_at_s
        began_at_s = perf_counter()
        request.state = self._pipeline.start(request.arrival.prepared)
        request.start_s = perf_counter() - began_at_s

    def step(self, running: RunningWave) -> None:
        """Compute the wave's next step; returns once every rank has.

        Raises:
            Exception: the forward failed; no request of the wave can go on.
        """
        step_index = running.next_step_index
        began_at_s = perf_counter()
        rows = self._row_keys(running)
        states = [request.state for request in running.requests]
        begin = self._worker.owner.first_step if step_index == 0 else self._worker.owner.later_step
        self._pipeline.denoise(states, step_index, begin(rows, running.layout))
        self._wait_for_all_ranks()
        took_s = perf_counter() - began_at_s
        running.next_step_index += 1
        for request in running.requests:
            if step_index == 0:
                request.first_step_s = took_s
                request.first_step_tokens = request.query_tokens
            else:
                request.later_steps_s += took_s

    def decode(self, request: EngineRequest) -> Pixels:
        """The finished picture.

        Raises:
            Exception: the decoder failed.
        """
        began_at_s = perf_counter()
        pixels = self._pipeline.decode(request.state)
        request.decode_s = perf_counter() - began_at_s
        return pixels

    def remove(self, request: EngineRequest) -> None:
        """Drop what the worker holds of a request.

        Raises:
            WorkerCleanupError: it may still write to the request's pages.
        """
        if not request.on_worker:
            return
        try:
            self._worker.remove(request.request_id, request.generation)
        except Exception as error:
            raise WorkerCleanupError(request.request_id, request.generation, error) from error
        request.on_worker = False

    def close(self) -> None:
        """Stop the worker; after this no page is written."""
        self._worker.close()

    def _wait_for_all_ranks(self) -> None:
        for group in (self._ranks.tensor, self._ranks.cfg):
            if group.size > 1:
                group.all_gather(torch.zeros(1))

    def _row_keys(self, running: RunningWave) -> tuple[RowKey, ...]:
        """The rows of this rank, request by request: all of them, or its own under CFG parallelism."""
        cfg = self._ranks.cfg
        return tuple(
            RowKey(request.request_id, row)
            for request in running.requests
            for row in ((cfg.rank,) if cfg.size > 1 else range(len(request.arrival.prepared.rows)))
        )
