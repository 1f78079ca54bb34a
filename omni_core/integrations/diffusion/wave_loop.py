# SPDX-License-Identifier: Apache-2.0
"""The books of the engine loop: which request is queued, which runs in which wave, and how each ends.

A request leaves in one order: the worker drops it, the scheduler gives its pages back, its client is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter

from omni_core.diffusion_kv.errors import DiffusionKVError, RequestRefusedError
from omni_core.diffusion_kv.pipeline import Pixels
from omni_core.integrations.diffusion.engine_request import EngineRequest
from omni_core.integrations.diffusion.intake import Arrival, RequestIntake
from omni_core.integrations.diffusion.results import FinishedRequest, Outcome
from omni_core.integrations.diffusion.scheduler import DiffusionScheduler
from omni_core.integrations.diffusion.wave_execution import RunningWave, WaveExecution
from omni_core.integrations.diffusion.waves import Wave


class WaveLoop:
    """Moves requests through the scheduler and the worker. The engine's thread calls; what escapes stops the engine."""

    def __init__(self, intake: RequestIntake, scheduler: DiffusionScheduler, execution: WaveExecution) -> None:
        self._intake = intake
        self._scheduler = scheduler
        self._execution = execution
        self._requests: dict[str, EngineRequest] = {}
        self._waves: list[RunningWave] = []
        self._ended: list[FinishedRequest] = []
        self.forwards = 0
        """Steps computed."""
        self.first_step_tokens = 0
        """Tokens of every step 0."""
        self.counts = dict.fromkeys(Outcome, 0)
        """How requests ended."""

    @property
    def num_waves(self) -> int:
        return len(self._waves)

    @property
    def has_ended(self) -> bool:
        """Whether some request's end was not told yet."""
        return bool(self._ended)

    def take_ended(self) -> list[FinishedRequest]:
        """Requests that ended, each told once."""
        ended, self._ended = self._ended, []
        return ended

    def put_back(self, ended: list[FinishedRequest]) -> None:
        """Tell these once more."""
        self._ended.extend(ended)

    def take_arrivals(self) -> None:
        """Queue what has arrived, then end what is to be aborted."""
        arrivals, aborts = self._intake.take()
        for arrival in arrivals:
            self._queue(arrival)
        for request_id in aborts:
            request = self._requests.get(request_id)
            if request is not None:
                self._abort(request)

    def advance_waves(self) -> None:
        """One more step of every wave that has begun."""
        for running in tuple(self._waves):
            if self._step(running) and running.done:
                self._complete(running)
        self._waves = [running for running in self._waves if running.requests]

    def start_waves(self) -> None:
        """The first step of one new wave after the other, each published before the next is looked at."""
        while True:
            began_at_s = perf_counter()
            wave = self._scheduler.schedule()
            schedule_s = perf_counter() - began_at_s
            for failed in self._scheduler.take_failed():
                self._end(self._requests[failed.prepared.request.request_id], Outcome.REFUSED, error=failed.error)
            if wave is None:
                return
            self._start(wave, began_at_s, schedule_s)

    def abandon(
        self, arrivals: Sequence[Arrival], outcome: Outcome, error: Exception | None, *, free_pages: bool
    ) -> None:
        """End every request that is left, the worker having stopped.

        Args:
            arrivals: requests that were never queued.
            outcome: of each.
            error: of each.
            free_pages: whether the worker is known to write no more.
        """
        self._waves.clear()
        for request in tuple(self._requests.values()):
            if free_pages:
                # Books that were wrong before stay wrong: nobody is served from them any more.
                with suppress(DiffusionKVError):
                    self._scheduler.abort(request.request_id)
            self._end(request, outcome, error=error)
        for arrival in arrivals:
            request = EngineRequest(arrival)
            self._requests[arrival.request_id] = request
            self._end(request, outcome, error=error)

    def _queue(self, arrival: Arrival) -> None:
        request = EngineRequest(arrival)
        self._requests[arrival.request_id] = request
        try:
            request.arrival = self._intake.current(arrival)
            self._scheduler.add(request.arrival.prepared, request.arrival.demands)
        except Exception as error:
            self._end(request, _outcome_of(error), error=error)

    def _start(self, wave: Wave, began_at_s: float, schedule_s: float) -> None:
        running = RunningWave(wave, [])
        for scheduled in wave.requests:
            request = self._requests[scheduled.request_id]
            request.snapshot = scheduled.snapshot
            request.queue_s = began_at_s - request.arrival.queued_at_s
            request.schedule_s = schedule_s / len(wave.requests)
            try:
                self._execution.start(request)
            except Exception as error:
                self._fail(request, error)
            else:
                running.requests.append(request)
        if not running.requests or not self._step(running):
            return
        self._publish(running)
        if running.done:
            self._complete(running)
        else:
            self._waves.append(running)

    def _step(self, running: RunningWave) -> bool:
        """Whether the wave's next step was computed; if not, its requests have failed."""
        try:
            self._execution.step(running)
        except Exception as error:
            for request in tuple(running.requests):
                self._fail(request, error)
            running.requests.clear()
            return False
        self.forwards += 1
        if running.next_step_index == 1:
            self.first_step_tokens += sum(request.first_step_tokens for request in running.requests)
        return True

    def _publish(self, running: RunningWave) -> None:
        began_at_s = perf_counter()
        self._scheduler.acknowledge_first_step(running.wave)
        publish_s = (perf_counter() - began_at_s) / len(running.requests)
        for request in running.requests:
            request.publish_s = publish_s

    def _complete(self, running: RunningWave) -> None:
        for request in running.requests:
            try:
                image = self._execution.decode(request)
            except Exception as error:
                self._fail(request, error)
                continue
            self._execution.remove(request)
            self._scheduler.finish(request.request_id)
            self._end(request, Outcome.COMPLETED, image=image)
        running.requests.clear()

    def _fail(self, request: EngineRequest, error: Exception) -> None:
        self._execution.remove(request)
        self._scheduler.fail(request.request_id)
        self._end(request, _outcome_of(error), error=error)

    def _abort(self, request: EngineRequest) -> None:
        self._execution.remove(request)
        self._scheduler.abort(request.request_id)
        for running in self._waves:
            if request in running.requests:
                running.requests.remove(request)
        self._waves = [running for running in self._waves if running.requests]
        self._end(request, Outcome.ABORTED)

    def _end(
        self, request: EngineRequest, outcome: Outcome, *, image: Pixels | None = None, error: Exception | None = None
    ) -> None:
        del self._requests[request.request_id]
        self.counts[outcome] += 1
        self._ended.append(request.finished(outcome, image=image, error=error))
        self._intake.forget(request.request_id)


def _outcome_of(error: Exception) -> Outcome:
    return Outcome.REFUSED if isinstance(error, RequestRefusedError) else Outcome.FAILED
