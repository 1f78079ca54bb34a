# SPDX-License-Identifier: Apache-2.0
"""The builder thread: takes each step's rows out of the cache and feeds the sink while the next step runs.

At most `max_open_steps` steps wait to be delivered. When there is no room the engine waits for it, at most
`room_timeout_s`; after one wait in vain it gives steps up without waiting until the sink moves again. A step given up
is not lost: the cache delivers its rows with a later step of the same requests, and what never comes is reported as
missing or failed when the request ends. News of requests and steps given up are queued without a bound.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from omni_core.integrations.vllm.errors import FlushTimeoutError
from omni_core.integrations.vllm.ledger import RequestLedger
from omni_core.integrations.vllm.pieces import pieces_of
from omni_core.prefix_cache.outputs import RequestRows, StageCacheOutputs
from omni_core.runtime import Runtime
from omni_core.sinks.base import RequestEnd, SinkDelivery, SinkRequestEnd, StageSink

_LOG = logging.getLogger(__name__)

_MAX_RECORDED_REQUESTS = 1024
"""Most requests whose failure is kept for the report; older ones are dropped first."""


class StepSource(Protocol):
    """The part of the cache manager that the builder uses. Every method may be called from any thread."""

    def materialize(
        self, step_id: int, req_ids: Sequence[str], sampled_counts: Mapping[str, int] | None = None
    ) -> StageCacheOutputs:
        """Every row a step owes these requests; blocks until they lie in host memory, in bounded time."""
        ...


@dataclass(frozen=True, slots=True)
class StartedRequest:
    """A request the engine scheduled for the first time."""

    req_id: str
    prompt_token_ids: Sequence[int] | None
    num_skipped_tokens: int


@dataclass(frozen=True, slots=True)
class BuiltStep:
    """A step that was saved: batch order, one entry per real row. The arrays are the builder's to keep."""

    step_id: int
    req_ids: tuple[str, ...]
    starts: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int64]
    sampled_counts: Mapping[str, int] | None = None
    """For each request with draft tokens, how many of its sampled tokens count; rows of the others are left out above.
    `None`: the step has no drafts."""


@dataclass(frozen=True, slots=True)
class _News:
    started: tuple[StartedRequest, ...]
    ended: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Step:
    step: BuiltStep
    given_up: bool


@dataclass(frozen=True, slots=True)
class _EndOpenRequests:
    end: RequestEnd
    reason: str | None
    keep: frozenset[str] | None
    """Requests that go on; `None`: all of them."""


@dataclass(slots=True)
class _Counters:
    steps_delivered: int = 0
    steps_given_up: int = 0
    stalls: int = 0
    deliveries: int = 0
    rows_delivered: int = 0
    requests_ended: int = 0
    requests_failed: int = 0
    stage_errors: list[str] = field(default_factory=list)


class StageBuilder:
    """Feeds one sink from one cache on a thread of its own.

    `news`, `room_for_step`, `submit` and `give_up` belong to the engine thread and never block, except `room_for_step`
    as described. `flush`, `fail_open_requests`, `close` and `report` may be called from any thread.
    """

    def __init__(
        self,
        source: StepSource,
        sink: StageSink,
        *,
        runtime: Runtime,
        client_req_id_of: Callable[[str], str | None],
        max_open_steps: int,
        room_timeout_s: float,
        whole_prefix: bool = True,
        bind_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the thread.

        Args:
            source: the cache.
            sink: receives the rows; closed by the builder's thread as its last act.
            runtime: makes the thread, its lock and its clock.
            client_req_id_of: from an internal request id to the client's, if known.
            max_open_steps: steps that may be saved and not consumed, of the cache's `staging_depth`, at most.
            room_timeout_s: the longest the engine waits for a stalled sink, once per stall.
            whole_prefix: whether rows are owed for the tokens the engine skipped.
            bind_thread: gives the new thread its device.
        """
        self._source = source
        self._sink = sink
        self._runtime = runtime
        self._client_req_id_of = client_req_id_of
        self._max_open_steps = max_open_steps
        self._room_timeout_s = room_timeout_s
        self._whole_prefix = whole_prefix
        self._bind_thread = bind_thread
        self._lock = runtime.lock("builder")
        self._changed = runtime.condition(self._lock, "builder-changed")
        self._queue: deque[_News | _Step | _EndOpenRequests] = deque()
        self._open_steps = 0
        self._items_queued = 0
        self._items_done = 0
        self._stalled = False
        self._closing = False
        self._busy_with = "nothing"
        self._ledgers: dict[str, RequestLedger] = {}
        self._counters = _Counters()
        self._failures: dict[str, str] = {}
        self._sink_errors: dict[str, str] = {}
        self._thread = runtime.spawn("omni-core-builder", self._run)

    def news(self, started: Sequence[StartedRequest], ended: Collection[str]) -> None:
        """What the next step's scheduler output says. Ends take effect after every step submitted before."""
        if started or ended:
            self._enqueue(_News(tuple(started), tuple(ended)))

    def room_for_step(self) -> bool:
        """Whether a further step may be submitted; asked before the step is saved.

        Waits up to `room_timeout_s` for the sink, unless it has already waited in vain since the sink last moved.
        """
        with self._lock:
            if self._has_room():
                return True
            if not self._stalled and self._changed.wait_for(self._has_room, self._room_timeout_s):
                return True
            if not self._stalled:
                self._stalled = True
                self._counters.stalls += 1
                _LOG.warning(
                    "the sink took nothing for %.1f s (staging_claim_timeout_s); deliveries of further steps are put "
                    "off until it does. Builder busy with: %s",
                    self._room_timeout_s,
                    self._busy_with,
                )
            return False

    def submit(self, step: BuiltStep) -> None:
        """Deliver a saved step."""
        self._enqueue(_Step(step, given_up=False))

    def give_up(self, step: BuiltStep) -> None:
        """Take note of a step that was discarded: its tokens label rows that come later."""
        self._enqueue(_Step(step, given_up=True))

    def fail_open_requests(self, reason: str) -> None:
        """Every request not ended fails with `reason`, after the steps submitted before. Returns at once."""
        self._enqueue(_EndOpenRequests(RequestEnd.FAILED, reason, frozenset()))

    def flush(self, timeout_s: float, still_running: Collection[str] | None = ()) -> None:
        """Deliver every step submitted before, and end every request that is not `still_running`; `None` ends none.

        Needed because the engine's news of an end comes with its next step, and after the last request there is none.
        Rows of a request that was ended here and goes on nevertheless are dropped and reported as its failure.

        Raises:
            FlushTimeoutError: not done within `timeout_s`; nothing is lost and the call may be repeated.
        """
        keep = None if still_running is None else frozenset(still_running)
        self._enqueue(_EndOpenRequests(RequestEnd.FLUSHED, None, keep))
        with self._lock:
            target = self._items_queued
            if not self._changed.wait_for(lambda: self._items_done >= target, timeout_s):
                raise FlushTimeoutError(
                    f"flush: {target - self._items_done} entries of the builder's queue were not done within "
                    f"{timeout_s} s; it is busy with {self._busy_with}"
                )

    def close(self, timeout_s: float) -> bool:
        """Deliver what was submitted, end every request, close the sink and end the thread. Idempotent.

        Returns:
            Whether all of that was done within `timeout_s`. If not (the sink is stuck), the thread is left behind and
            requests the sink has not finished stay unfinished.
        """
        with self._lock:
            if not self._closing:
                self._append(_EndOpenRequests(RequestEnd.FLUSHED, None, frozenset()))
                self._closing = True
                self._changed.notify_all()
        return self._thread.join(timeout_s)

    def report(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts: what was delivered, and what was not and why."""
        with self._lock:
            counters = self._counters
            return {
                "steps_open": self._open_steps,
                "steps_delivered": counters.steps_delivered,
                "steps_given_up": counters.steps_given_up,
                "stalls": counters.stalls,
                "deliveries": counters.deliveries,
                "rows_delivered": counters.rows_delivered,
                "requests_open": len(self._ledgers),
                "requests_ended": counters.requests_ended,
                "requests_failed": counters.requests_failed,
                "failures": dict(self._failures),
                "sink_errors": dict(self._sink_errors),
                "stage_errors": list(counters.stage_errors),
            }

    def _has_room(self) -> bool:
        return self._open_steps < self._max_open_steps

    def _enqueue(self, item: _News | _Step | _EndOpenRequests) -> None:
        with self._lock:
            if not self._closing:
                self._append(item)

    def _append(self, item: _News | _Step | _EndOpenRequests) -> None:
        self._queue.append(item)
        self._items_queued += 1
        if isinstance(item, _Step) and not item.given_up:
            self._open_steps += 1
        self._changed.notify_all()

    def _run(self) -> None:
        self._bind_thread()
        while True:
            with self._lock:
                self._changed.wait_for(lambda: bool(self._queue) or self._closing, None)
                if not self._queue:
                    break
                item = self._queue.popleft()
                self._busy_with = _describe(item)
            try:
                self._process(item)
            except Exception as error:
                self._stage_error(f"{_describe(item)}: {error}")
            with self._lock:
                self._items_done += 1
                self._busy_with = "nothing"
                if isinstance(item, _Step) and not item.given_up:
                    self._open_steps -= 1
                    self._stalled = False
                self._changed.notify_all()
        try:
            self._sink.close()
        except Exception as error:
            self._stage_error(f"closing the sink: {error}")

    def _process(self, item: _News | _Step | _EndOpenRequests) -> None:
        if isinstance(item, _News):
            for req_id in item.ended:
                self._end(req_id, RequestEnd.FINISHED, None)
            for started in item.started:
                self._start(started)
        elif isinstance(item, _Step):
            self._note_tokens(item.step)
            if item.given_up:
                self._counters.steps_given_up += 1
            else:
                self._deliver(item.step)
        elif item.keep is not None:
            for req_id in [one for one in self._ledgers if one not in item.keep]:
                self._end(req_id, item.end, item.reason)

    def _start(self, started: StartedRequest) -> None:
        if started.req_id not in self._ledgers:
            ledger = RequestLedger(
                started.req_id,
                self._client_req_id_of(started.req_id),
                started.prompt_token_ids,
                started.num_skipped_tokens,
            )
            with self._lock:
                self._ledgers[started.req_id] = ledger

    def _note_tokens(self, step: BuiltStep) -> None:
        for index, req_id in enumerate(step.req_ids):
            ledger = self._ledgers.get(req_id)
            if ledger is not None:
                run = slice(int(step.starts[index]), int(step.starts[index + 1]))
                ledger.note_run(step.positions[run], step.token_ids[run])

    def _deliver(self, step: BuiltStep) -> None:
        try:
            outputs = self._source.materialize(step.step_id, step.req_ids, step.sampled_counts)
        except Exception as error:
            for req_id in step.req_ids:
                self._fail(req_id, f"step {step.step_id} could not be read: {error}")
            raise
        try:
            for req_id, failure in outputs.failed.items():
                self._fail(req_id, str(failure))
            for req_id, rows in outputs.items():
                self._hand_over(step.step_id, req_id, rows)
        finally:
            outputs.release()
        self._counters.steps_delivered += 1

    def _hand_over(self, step_id: int, req_id: str, rows: RequestRows) -> None:
        ledger = self._ledgers.get(req_id)
        if ledger is None:
            self._fail(req_id, f"rows at {list(rows.ranges)} came after a flush had ended it; flush with still_running")
            return
        if ledger.closed_by is not None:
            return
        for piece in pieces_of(rows):
            if not piece.ranges and not piece.leftovers:
                continue  # a step that only computed rows again, after a preemption
            delivery = SinkDelivery(
                req_id=req_id,
                client_req_id=ledger.client_req_id,
                step_id=step_id,
                ranges=piece.ranges,
                rows=piece.rows,
                token_ids=ledger.token_ids(piece.ranges),
                leftovers=piece.leftovers,
            )
            try:
                self._sink.accept(delivery)
            except Exception as error:
                self._sink_failed(ledger, "accept", error)
                return
            ledger.note_delivered(piece.ranges)
            self._counters.deliveries += 1
            self._counters.rows_delivered += piece.num_rows

    def _end(self, req_id: str, end: RequestEnd, reason: str | None) -> None:
        ledger = self._ledgers.get(req_id)
        if ledger is None:
            return
        if end is RequestEnd.FAILED:
            self._fail(req_id, reason or "no reason given")
        elif ledger.closed_by is None and not ledger.rows_delivered and ledger.missing(whole_prefix=self._whole_prefix):
            self._fail(req_id, "no row of it was delivered: its steps were given up or could not be read")
        with self._lock:
            del self._ledgers[req_id]
            self._counters.requests_ended += 1
        if ledger.closed_by is None and ledger.rows_delivered:
            self._finish(ledger, end, None)

    def _fail(self, req_id: str, reason: str) -> None:
        ledger = self._ledgers.get(req_id)
        if ledger is not None and ledger.closed_by is not None:
            return
        if req_id not in self._failures:
            self._record(self._failures, req_id, reason)
            with self._lock:
                self._counters.requests_failed += 1
            _LOG.warning("request %s: its rows are not delivered: %s", req_id, reason)
        if ledger is not None:
            ledger.closed_by = reason
            self._finish(ledger, RequestEnd.FAILED, reason)

    def _finish(self, ledger: RequestLedger, end: RequestEnd, error: str | None) -> None:
        last_word = SinkRequestEnd(
            req_id=ledger.req_id,
            client_req_id=ledger.client_req_id,
            end=end,
            missing=ledger.missing(whole_prefix=self._whole_prefix),
            error=error,
        )
        try:
            self._sink.finish(last_word)
        except Exception as failure:
            self._sink_failed(ledger, "finish", failure)

    def _sink_failed(self, ledger: RequestLedger, call: str, error: Exception) -> None:
        ledger.closed_by = f"the sink's {call}() raised {type(error).__name__}: {error}"
        self._record(self._sink_errors, ledger.req_id, ledger.closed_by)
        _LOG.warning("request %s: %s; the sink sees no more of it", ledger.req_id, ledger.closed_by)

    def _record(self, records: dict[str, str], req_id: str, text: str) -> None:
        with self._lock:
            records[req_id] = text
            if len(records) > _MAX_RECORDED_REQUESTS:
                del records[next(iter(records))]

    def _stage_error(self, text: str) -> None:
        with self._lock:
            first = not self._counters.stage_errors
            if len(self._counters.stage_errors) < _MAX_RECORDED_REQUESTS:
                self._counters.stage_errors.append(text)
        if first:
            _LOG.error("the builder could not process %s; further errors appear in the report only", text)


def _describe(item: _News | _Step | _EndOpenRequests) -> str:
    if isinstance(item, _Step):
        return f"step {item.step.step_id} of {len(item.step.req_ids)} requests"
    if isinstance(item, _News):
        return f"news of {len(item.started)} started and {len(item.ended)} ended requests"
    return f"ending open requests as {item.end.value}"
