# SPDX-License-Identifier: Apache-2.0
"""The engine loop of a diffusion stage: concurrent requests, each denoised step by step, on one model.

    add_request   any thread: lay out, check, identify, queue
    step          the engine's thread: one denoise step of each running wave, then first steps of new ones
    per request   schedule, install, start, step 0, all ranks, publish, later steps, decode, remove, free

A forward is always one wave. New waves start one after the other within a step, so that a request hits what the one
before it has just published. A page is given back after the worker has dropped it, never before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Self

from omni_core.diffusion_kv.errors import RequestRefusedError
from omni_core.diffusion_kv.parallel import Ranks
from omni_core.diffusion_kv.pipeline import AnyPipeline, DiffusionRequest
from omni_core.diffusion_kv.reservations import KVReservations
from omni_core.integrations.diffusion.admission import AdmissionEnvelope
from omni_core.integrations.diffusion.errors import EngineBusyError, EngineClosedError, EngineDeadError
from omni_core.integrations.diffusion.intake import RequestIntake, RowIdentifier
from omni_core.integrations.diffusion.loras import LoRARegistry
from omni_core.integrations.diffusion.results import EngineStats, FinishedRequest, Outcome
from omni_core.integrations.diffusion.scheduler import DiffusionScheduler
from omni_core.integrations.diffusion.step_worker import StepWorker
from omni_core.integrations.diffusion.wave_execution import WaveExecution
from omni_core.integrations.diffusion.wave_loop import WaveLoop
from omni_core.runtime import Runtime, ThreadingRuntime

_ALONE = Ranks()


class DiffusionEngine:
    """One diffusion stage. Use as a context manager, or call `close`.

    `add_request`, `abort` and `loras` are for any thread, everything else for one.
    """

    def __init__(
        self,
        pipeline: AnyPipeline,
        worker: StepWorker,
        envelope: AdmissionEnvelope,
        *,
        reservations: KVReservations | None = None,
        identifier: RowIdentifier | None = None,
        max_wave_requests: int = 1,
        max_running_requests: int = 1,
        block_size: int | None = None,
        ranks: Ranks = _ALONE,
        runtime: Runtime | None = None,
        resources: ExitStack | None = None,
    ) -> None:
        """Serve requests with parts that are already open; `assembly.open_engine` opens them from a configuration.

        Args:
            pipeline: the model.
            worker: holds keys and values; closed with the engine.
            envelope: the largest request that is let in.
            reservations: who hands out pages; `None`: the worker's owner keeps KV of its own.
            identifier: what requests share pages by; `None`: nothing is hashed, and nothing is ever hit.
            max_wave_requests: requests that share a forward at most.
            max_running_requests: requests that run at once at most.
            block_size: tokens per page: of equal requests that wait, one computes the prefix and the others hit it.
                `None`: those that share a forward compute it side by side.
            ranks: this process's place; every rank runs an engine of its own and is given the same calls in the same
                order.
            runtime: makes the locks; `None`: that of production.
            resources: closed after the worker.

        Raises:
            ValueError: an identifier without reservations.
        """
        if identifier is not None and reservations is None:
            raise ValueError("an identifier finds pages, and without reservations there are none")
        runtime = ThreadingRuntime() if runtime is None else runtime
        self._loras = LoRARegistry(runtime)
        self._intake = RequestIntake(pipeline, envelope, identifier, paged=reservations is not None, runtime=runtime)
        self._reservations = reservations
        self._scheduler = DiffusionScheduler(
            reservations,
            envelope,
            max_wave_requests=max_wave_requests,
            max_running_requests=max_running_requests,
            block_size=block_size,
        )
        self._execution = WaveExecution(pipeline, worker, ranks)
        self._loop = WaveLoop(self._intake, self._scheduler, self._execution)
        self._resources = ExitStack() if resources is None else resources
        self._stopped_by: Callable[[], Exception] | None = None

    @property
    def loras(self) -> LoRARegistry:
        """The adapters requests may name."""
        return self._loras

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether another `step` has something to do or to hand out."""
        return self._intake.num_live > 0 or self._loop.has_ended

    def add_request(self, request: DiffusionRequest) -> None:
        """Lay out, check and identify a request, and queue it. Any thread may call; waits for no step.

        Raises:
            RequestRefusedError: it cannot be served, or its id is live; the others go on.
            EngineDeadError, EngineClosedError: nobody is served any more.
        """
        self._intake.add(request)

    def abort(self, request_id: str) -> bool:
        """End a request before its next forward. Any thread may call.

        What it published after step 0 stays; nothing further is published. `step` reports it as aborted.

        Returns:
            Whether the request was live. It may still complete in a step that is under way.
        """
        return self._intake.abort(request_id)

    def step(self) -> list[FinishedRequest]:
        """One denoise step of each running wave, then the first step of every wave that can start.

        A forward that fails ends its own wave's requests.

        Returns:
            The requests that ended, each once.

        Raises:
            EngineDeadError: what a request left behind could not be removed, or the books are wrong; carries the
                requests that ended with it. Every later call raises it again.
            EngineClosedError: the engine was closed.
        """
        self._check_serving()
        try:
            self._loop.take_arrivals()
            self._loop.advance_waves()
            self._loop.start_waves()
        except Exception as error:
            raise self._die(error) from error
        except BaseException as error:
            self._die(error)
            raise
        return self._loop.take_ended()

    def run(self) -> list[FinishedRequest]:
        """Step until no request is left.

        Returns:
            The requests that ended, in that order.

        Raises:
            EngineDeadError, EngineClosedError: as `step`.
        """
        self._check_serving()
        ended = []
        while self.has_unfinished_requests:
            ended.extend(self.step())
        return ended

    def generate(self, requests: Sequence[DiffusionRequest]) -> list[FinishedRequest]:
        """Serve these requests at once and wait for them. Others that end meanwhile are left to the next `step`.

        Returns:
            One per request, in the order given; one that is refused is among them.

        Raises:
            EngineDeadError, EngineClosedError: as `step`.
        """
        done: dict[str, FinishedRequest] = {}
        refused: dict[int, FinishedRequest] = {}
        for index, request in enumerate(requests):
            try:
                self.add_request(request)
            except RequestRefusedError as error:
                refused[index] = FinishedRequest.never_queued(request, error)
        wanted = {request.request_id for index, request in enumerate(requests) if index not in refused}
        others: list[FinishedRequest] = []
        while len(done) < len(wanted):
            for finished in self.step():
                if finished.request_id in wanted:
                    done[finished.request_id] = finished
                else:
                    others.append(finished)
        self._loop.put_back(others)
        return [refused[i] if i in refused else done[request.request_id] for i, request in enumerate(requests)]

    def reset_prefix_cache(self) -> bool:
        """Forget every published page. `False`, and nothing is changed, while a request holds pages."""
        self._check_serving()
        return self._reservations is None or self._reservations.reset()

    def update_weights(self, load: Callable[[], None]) -> None:
        """Change the model's weights between requests. Pages computed with the earlier ones are never hit again.

        Requests that arrived and are not queued yet run on the new weights.

        Args:
            load: changes the weights in place. If it raises, they count as changed.

        Raises:
            EngineBusyError: a request is queued or running; nothing was changed.
        """
        self._check_serving()
        live = self._scheduler.num_waiting + self._scheduler.num_running
        if live:
            raise EngineBusyError(
                f"{live} requests are queued or running, and their later steps would mix two models; wait for them or "
                "abort them, then update the weights"
            )
        try:
            load()
        finally:
            self._intake.new_weights()
            self.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """What is going on and what was done; also of an engine that has stopped."""
        counts = self._loop.counts
        return EngineStats(
            waiting_requests=self._scheduler.num_waiting + self._intake.num_arrived,
            running_requests=self._scheduler.num_running,
            running_waves=self._loop.num_waves,
            completed_requests=counts[Outcome.COMPLETED],
            aborted_requests=counts[Outcome.ABORTED],
            refused_requests=counts[Outcome.REFUSED],
            failed_requests=counts[Outcome.FAILED],
            forwards=self._loop.forwards,
            first_step_tokens=self._loop.first_step_tokens,
            weight_epoch=self._intake.weight_epoch,
            kv=None if self._reservations is None else self._reservations.stats(),
        )

    def close(self) -> list[FinishedRequest]:
        """Stop the worker, then give every page back. Idempotent.

        Returns:
            Requests that were still live, as aborted, and those no `step` has handed out.
        """
        if self._stopped_by is None:
            self._stopped_by = _closed
            arrivals = self._intake.close(_closed)
            self._execution.close()
            self._loop.abandon(arrivals, Outcome.ABORTED, None, free_pages=True)
            self._resources.close()
        return self._loop.take_ended()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check_serving(self) -> None:
        if self._stopped_by is not None:
            raise self._stopped_by()

    def _die(self, error: BaseException) -> EngineDeadError:
        """Stop for good: the worker first, then the pages, which stay taken if the worker cannot be stopped."""
        reason = f"{type(error).__name__}: {error}"
        self._stopped_by = partial(EngineDeadError, reason)
        arrivals = self._intake.close(self._stopped_by)
        try:
            self._execution.close()
            self._resources.close()
        except Exception as second:
            error.add_note(f"the worker could not be stopped either: {type(second).__name__}: {second}")
            worker_stopped = False
        else:
            worker_stopped = True
        self._loop.abandon(arrivals, Outcome.FAILED, EngineDeadError(reason), free_pages=worker_stopped)
        return EngineDeadError(reason, tuple(self._loop.take_ended()))


def _closed() -> Exception:
    return EngineClosedError("the diffusion engine was closed; open another one")
