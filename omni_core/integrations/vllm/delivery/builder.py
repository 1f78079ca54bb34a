# SPDX-License-Identifier: Apache-2.0
"""The builder thread: takes each step's rows out of the cache and queues them for the sink while the next step runs.

Two threads stand between the engine and the sink. The builder's waits for the cache only, in bounded time; the
feeder's (`sink_feeder`) waits for the sink. At most `max_open_steps` steps wait for the builder, and `max_queue_bytes`
of rows for the sink. A step for which there is no room is given up. Its rows are not lost: the cache delivers them with
a later step of the same requests, and what never comes is reported as missing or failed when the request ends. Its
leftovers (outputs without a row per token) are lost, as no cache stores them.

If the sink's rows may wait, two steps are taken at a time, as long as there is room for a further one; news and flushes
never wait for more.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from omni_core.integrations.vllm.delivery.built_step import BuiltStep, StartedRequest, StepSource
from omni_core.integrations.vllm.delivery.delivery_assembler import DeliveryAssembler
from omni_core.integrations.vllm.delivery.delivery_log import Count, DeliveryLog, error_text
from omni_core.integrations.vllm.delivery.linger import Linger
from omni_core.integrations.vllm.delivery.sink_feeder import SinkFeeder
from omni_core.integrations.vllm.errors import FlushTimeoutError
from omni_core.integrations.vllm.request_ids import ClientRequest
from omni_core.runtime import Runtime
from omni_core.settings.stage_settings import OnSlowSink
from omni_core.sinks.base import StageSink

__all__ = ["BuiltStep", "StageBuilder", "StartedRequest", "StepSource"]

_LOG = logging.getLogger(__name__)

_STEPS_AT_A_TIME = 2
"""Steps that wait for each other, where the sink lets them wait. Each of them holds a staging slot."""
DEFAULT_MAX_WAITING_ENTRIES = 65536
DEFAULT_MAX_WAITING_TOKENS = 8 << 20
"""Of each token there wait two 8-byte numbers of its step, or an element of its prompt's list."""


@dataclass(frozen=True, slots=True)
class _News:
    started: tuple[StartedRequest, ...]
    ended: tuple[str, ...]
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class _Step:
    step: BuiltStep


@dataclass(frozen=True, slots=True)
class _StepGivenUp:
    step: BuiltStep


@dataclass(frozen=True, slots=True)
class _Flush:
    keep: frozenset[str]
    """Requests that go on."""


@dataclass(frozen=True, slots=True)
class _FailOpenRequests:
    reason: str


@dataclass(frozen=True, slots=True)
class _FailRequests:
    req_ids: tuple[str, ...]
    reason: str


_Item = _News | _Step | _StepGivenUp | _Flush | _FailOpenRequests | _FailRequests


class StageBuilder:
    """Feeds one sink from one cache, on two threads of its own.

    `news` and `room_for_step` belong to the engine thread; `submit` and `give_up` to it, or to the thread on which an
    asynchronous output becomes complete, in the steps' order (`outbox`). None of them waits for the sink; only
    `room_for_step` waits at all, as described there. The flushes, `fail_open_requests`, `close` and `report` may be
    called from any thread. Whatever the cache or the sink does, what waits here is bounded: the builder's queue by
    `max_waiting_entries` and `max_waiting_tokens`, the sink's by `sink_queue_bytes`.
    """

    def __init__(
        self,
        source: StepSource,
        sink: StageSink,
        *,
        runtime: Runtime,
        client_request_of: Callable[[str], ClientRequest | None],
        max_open_steps: int,
        room_timeout_s: float,
        on_slow_sink: OnSlowSink,
        sink_queue_bytes: int,
        whole_prefix: bool = True,
        bind_thread: Callable[[], None] = lambda: None,
        ids_repeat: bool = False,
        max_waiting_entries: int = DEFAULT_MAX_WAITING_ENTRIES,
        max_waiting_tokens: int = DEFAULT_MAX_WAITING_TOKENS,
    ) -> None:
        """Start the threads.

        Args:
            source: the cache.
            sink: receives the rows; closed by the feeder's thread as its last act.
            runtime: makes the threads, their locks and their clock.
            client_request_of: from an internal request id to the client's, if known.
            max_open_steps: steps that may be saved and not consumed, of the cache's `staging_depth`, at most.
            room_timeout_s: the longest the engine waits for the builder, or for a sink it is to wait for, once per
                stall.
            on_slow_sink: what a step does for which the sink's queue has no room.
            sink_queue_bytes: with that many bytes of rows waiting for the sink, there is no room for a further step.
            whole_prefix: whether rows are owed for the tokens the engine skipped.
            bind_thread: gives the builder's thread its device.
            ids_repeat: whether two requests may have one internal id, one after the other.
            max_waiting_entries: news and steps that may wait for the builder. More means that the cache is stuck: then
                every open request fails.
            max_waiting_tokens: with that many tokens of new prompts and of steps given up waiting for the builder, a
                further entry means the same. Submitted steps do not count: `max_open_steps` bounds them.
        """
        self._runtime = runtime
        self._max_open_steps = max_open_steps
        self._room_timeout_s = room_timeout_s
        self._bind_thread = bind_thread
        self._on_slow_sink = on_slow_sink
        self._max_waiting_entries = max_waiting_entries
        self._max_waiting_tokens = max_waiting_tokens
        self._log = DeliveryLog(runtime)
        self._feeder = SinkFeeder(sink, self._log, runtime=runtime, max_queue_bytes=sink_queue_bytes)
        self._assembler = DeliveryAssembler(
            source,
            self._feeder,
            self._log,
            client_request_of=client_request_of,
            whole_prefix=whole_prefix,
            ids_repeat=ids_repeat,
        )
        self._lock = runtime.lock("builder")
        self._changed = runtime.condition(self._lock, "builder-changed")
        self._queue: deque[_Item] = deque()
        self._waiting_tokens = 0
        self._open_steps = 0
        self._num_held = 0
        self._items_queued = 0
        self._items_done = 0
        self._newest_ticket = 0
        self._newest_mark = 0
        self._builder_stalled = False
        self._sink_calls_when_waited_in_vain: int | None = None
        self._closing = False
        self._busy_with = "nothing"
        self._linger = Linger(self._changed, has_work=self._has_work, is_due=self._is_due, may_wait=sink.rows_may_wait)
        try:
            self._thread = runtime.spawn("omni-core-builder", self._run)
        except BaseException:
            self._feeder.close_when_fed()
            raise

    def news(self, started: Sequence[StartedRequest], ended: Collection[str]) -> None:
        """What the next step's scheduler output says. Ends take effect after every step submitted before."""
        if started or ended:
            prompts = (one.prompt_token_ids for one in started)
            num_prompt_tokens = sum(len(prompt) for prompt in prompts if prompt is not None)
            self._enqueue(_News(tuple(started), tuple(ended), num_prompt_tokens))

    def room_for_step(self, *, num_held: int = 0) -> bool:
        """Whether a further step may be submitted; asked before the step is saved. If not, it is to be given up.

        Steps that were let through and not submitted yet are told of as `num_held`. They are not waited for: they may
        be submitted by the very thread that asks here.

        With `OnSlowSink.SKIP`, answers at once when the sink's queue is full. With `OnSlowSink.WAIT`, waits for the
        sink up to `room_timeout_s`, unless it waited in vain before and the sink has not moved since. In both cases,
        waits for the builder's own work up to `room_timeout_s`, once until that moves again.
        """
        return self._room_at_sink() and self._room_at_builder(num_held)

    def submit(self, step: BuiltStep) -> None:
        """Deliver a saved step."""
        self._enqueue(_Step(step))

    def give_up(self, step: BuiltStep) -> None:
        """Take note of a step that was discarded: its tokens label rows that come later. Its leftovers do not come."""
        self._log.count(Count.STEPS_GIVEN_UP)
        self._enqueue(_StepGivenUp(step))

    def fail_open_requests(self, reason: str) -> None:
        """Every request not ended fails with `reason`, after the steps submitted before. Returns at once."""
        self._enqueue(_FailOpenRequests(reason))

    def fail_requests(self, req_ids: Collection[str], reason: str) -> None:
        """These requests fail with `reason`, after the steps submitted before. Returns at once."""
        self._enqueue(_FailRequests(tuple(req_ids), reason))

    def flush(self, timeout_s: float, still_running: Collection[str] | None = ()) -> None:
        """Deliver every step submitted before, and end every request that is not `still_running`; `None` ends none.

        Needed because the engine's news of an end comes with its next step, and after the last request there is none.
        Rows of a request that was ended here and goes on nevertheless are dropped and reported as its failure.

        Raises:
            FlushTimeoutError: not done within `timeout_s`; nothing is lost and the call may be repeated.
            TypeError: `still_running` is no collection of ids, such as one id alone; nothing was ended.
        """
        ticket = self.begin_flush(still_running)
        if not self.wait_flushed(ticket, timeout_s):
            raise FlushTimeoutError(f"flush: not done within {timeout_s} s: {self.flush_waits_for(ticket)}")

    def begin_flush(self, still_running: Collection[str] | None) -> int:
        """As `flush`, but returns at once.

        Returns:
            A ticket for `wait_flushed`: how far the builder's queue reaches now. What comes later does not move it.

        Raises:
            TypeError: as for `flush`.
        """
        if still_running is not None:
            self._enqueue(_Flush(_request_ids(still_running)))
        with self._lock:
            ticket = self._newest_ticket = self._items_queued
            builder_done = self._items_done >= ticket
            if builder_done:
                self._newest_mark = max(self._newest_mark, ticket)
            else:
                self._changed.notify_all()
        if builder_done:
            self._feeder.mark(ticket)
        return ticket

    def wait_flushed(self, ticket: int, timeout_s: float) -> bool:
        """Whether the sink has everything that was submitted before the ticket, after waiting up to `timeout_s`."""
        return self._feeder.wait_for_mark(ticket, timeout_s)

    def flush_waits_for(self, ticket: int) -> str:
        """What a flush waits for, in words."""
        with self._lock:
            left, busy_with = ticket - self._items_done, self._busy_with
        if left > 0:
            return f"{left} entries of the builder's queue are left; the builder is busy with {busy_with}"
        left = self._feeder.report()["sink_queue_entries"]
        return f"{left} entries of the sink's queue are left; it is busy with {self._feeder.busy_with()}"

    def close(self, timeout_s: float) -> bool:
        """Deliver what was submitted, end every request, close the sink and end the threads. Idempotent.

        In the order in which it came: requests that had ended are whole first, then those still open end as flushed.

        Returns:
            Whether all of that was done within `timeout_s`. If not (the sink is stuck), the threads are left behind
            and requests the sink has not finished stay unfinished.
        """
        deadline_s = self._runtime.monotonic_s() + timeout_s
        with self._lock:
            if not self._closing:
                self._append(_Flush(frozenset()))
                self._closing = True
                self._changed.notify_all()
        if not self._thread.join(timeout_s):
            return False
        return self._feeder.join(max(0.0, deadline_s - self._runtime.monotonic_s()))

    def report(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts: what was delivered, and what was not and why."""
        with self._lock:
            waiting = {"steps_open": self._open_steps, "entries_waiting": self._items_queued - self._items_done}
        return {
            **waiting,
            "requests_open": self._assembler.num_open_requests,
            **self._feeder.report(),
            **self._log.report(),
        }

    def _room_at_sink(self) -> bool:
        if self._feeder.has_room():
            return True
        moved = self._feeder.calls_returned
        if self._on_slow_sink is OnSlowSink.WAIT and self._sink_calls_when_waited_in_vain != moved:
            if self._feeder.wait_for_room(self._room_timeout_s):
                return True
            self._sink_calls_when_waited_in_vain = self._feeder.calls_returned
        if self._feeder.begin_stall():
            self._log.count(Count.STALLS)
            self._log.count(Count.SINK_STALLS)
            _LOG.warning(
                "the sink does not keep up; it is busy with %s. Its queue is full (sink_queue_bytes), so deliveries of "
                "further steps are put off until it has room (on_slow_sink=%r)",
                self._feeder.busy_with(),
                self._on_slow_sink.value,
            )
        return False

    def _room_at_builder(self, num_held: int) -> bool:
        def has_open_step_left() -> bool:
            return self._open_steps + num_held < self._max_open_steps

        with self._lock:
            self._num_held = num_held
            if has_open_step_left():
                return True
            self._changed.notify_all()
            if self._builder_stalled or num_held >= self._max_open_steps:
                return False
            if self._changed.wait_for(has_open_step_left, self._room_timeout_s):
                return True
            self._builder_stalled = True
            busy_with = self._busy_with
        self._log.count(Count.STALLS)
        _LOG.warning(
            "the builder took no step for %.1f s (staging_claim_timeout_s); deliveries of further steps are put off "
            "until it does. It is busy with %s",
            self._room_timeout_s,
            busy_with,
        )
        return False

    def _enqueue(self, item: _Item) -> None:
        with self._lock:
            if self._closing:
                return
            overrun = self._overrun()
            if overrun is not None:
                self._drop_waiting(overrun)
            self._append(item)
        if overrun is not None:
            self._log.count(Count.OVERRUNS)
            self._log.stage_failed(overrun)

    def _overrun(self) -> str | None:
        """Why nothing more may wait for the builder, if so."""
        if len(self._queue) >= self._max_waiting_entries:
            behind = f"{len(self._queue)} entries"
        elif self._waiting_tokens >= self._max_waiting_tokens:
            behind = f"{self._waiting_tokens} tokens"
        else:
            return None
        return f"the builder fell {behind} behind, so the requests then open cannot be served"

    def _append(self, item: _Item) -> None:
        self._queue.append(item)
        self._items_queued += 1
        self._waiting_tokens += _num_waiting_tokens(item)
        if isinstance(item, _Step):
            self._open_steps += 1
        if self._linger.wants_to_know:
            self._changed.notify_all()

    def _has_work(self) -> bool:
        return bool(self._queue) or self._closing

    def _is_due(self) -> bool:
        """Something other than steps came, or a flush; or one step more would leave no room for the next."""
        at_a_time = min(_STEPS_AT_A_TIME, self._max_open_steps - 1 - self._num_held)
        return (
            len(self._queue) > min(self._open_steps, max(1, at_a_time) - 1)
            or (bool(self._queue) and self._newest_mark < self._newest_ticket)
            or self._closing
        )

    def _drop_waiting(self, reason: str) -> None:
        """Keep the open steps, which the cache must be told of; everything else becomes one failure of all.

        Requests whose start waited fail with the others: of them, the newest `max_waiting_entries`, without prompts.
        """
        before = len(self._queue)
        news = [item for item in self._queue if isinstance(item, _News)]
        started = [replace(one, prompt_token_ids=None) for item in news for one in item.started]
        self._queue = deque(item for item in self._queue if isinstance(item, _Step))
        if started:
            self._queue.appendleft(_News(tuple(started[-self._max_waiting_entries :]), (), 0))
        self._items_done += before - len(self._queue)
        self._waiting_tokens = 0
        self._append(_FailOpenRequests(reason))

    def _run(self) -> None:
        try:
            self._bind_thread()
        except BaseException as error:
            self._log.stage_failed(f"binding the builder's thread to its device raised {error_text(error)}")
        while (item := self._next_item()) is not None:
            try:
                self._process(item)
            except BaseException as error:
                self._log.stage_failed(f"the builder could not process {_describe(item)}: {error_text(error)}")
            with self._lock:
                self._items_done += 1
                items_done = self._items_done
                # Not items_done against the ticket: an overrun lets the count jump past it.
                flush_waits = self._newest_mark < self._newest_ticket
                if flush_waits:
                    self._newest_mark = items_done
                self._busy_with = "nothing"
                if isinstance(item, _Step):
                    self._open_steps -= 1
                    self._builder_stalled = False
                self._changed.notify_all()
            if flush_waits:
                self._feeder.mark(items_done)
            del item
        self._feeder.close_when_fed()

    def _next_item(self) -> _Item | None:
        """Waits for one; `None`: the thread is to end."""
        with self._lock:
            if not self._queue:
                self._linger.wait_for_work()
                if not self._queue:
                    return None
            item = self._queue.popleft()
            self._waiting_tokens -= _num_waiting_tokens(item)
            self._busy_with = _describe(item)
        return item

    def _process(self, item: _Item) -> None:
        match item:
            case _News(started, ended):
                for req_id in ended:
                    self._assembler.end(req_id)
                for one in started:
                    self._assembler.start(one)
            case _Step(step):
                self._assembler.note_tokens(step)
                self._assembler.deliver(step)
            case _StepGivenUp(step):
                self._assembler.note_tokens(step)
            case _Flush(keep):
                self._assembler.flush_requests(keep)
            case _FailOpenRequests(reason):
                self._assembler.fail_open_requests(reason)
            case _FailRequests(req_ids, reason):
                self._assembler.fail_requests(req_ids, reason)


def _request_ids(still_running: Collection[str]) -> frozenset[str]:
    is_collection = isinstance(still_running, Collection) and not isinstance(still_running, str | bytes)
    if not is_collection or not all(isinstance(req_id, str) for req_id in still_running):
        raise TypeError(f"flush: still_running={still_running!r:.200}: give a list of internal request ids, or None")
    return frozenset(still_running)


def _num_waiting_tokens(item: _Item) -> int:
    """Tokens an entry keeps in memory; none for one that is bounded by its number."""
    match item:
        case _News():
            return item.num_prompt_tokens
        case _StepGivenUp(step):
            return len(step.token_ids)
        case _:
            return 0


def _describe(item: _Item) -> str:
    match item:
        case _News(started, ended):
            return f"news of {len(started)} started and {len(ended)} ended requests"
        case _Step(step):
            return f"step {step.step_id} of {len(step.req_ids)} requests"
        case _StepGivenUp(step):
            return f"step {step.step_id}, which was given up"
        case _Flush():
            return "a flush"
        case _FailRequests(req_ids):
            return f"the failure of {len(req_ids)} requests"
        case _FailOpenRequests():
            return "failing the open requests"
