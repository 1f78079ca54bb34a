# SPDX-License-Identifier: Apache-2.0
"""The feeder thread: calls the sink, behind a queue that is bounded in bytes.

Nobody waits for the sink but this thread. Whoever saves a step asks `has_room` first; a step that was let in is queued
whatever its size, so a delivery bigger than the whole queue passes too. What can wait here is therefore
`max_queue_bytes`, the rows of the steps that were let in before it was reached, and a thousand last words.

If the sink's rows may wait, a few steps are handed over at a time; last words, marks and a queue that is half full
never wait for more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from omni_core.integrations.vllm.delivery.delivery_log import Count, DeliveryLog, error_text
from omni_core.integrations.vllm.delivery.linger import Linger
from omni_core.runtime import Runtime
from omni_core.sinks.base import RequestKey, SinkDelivery, SinkRequestEnd, StageSink
from omni_core.sinks.sizes import ENTRY_BYTES, held_nbytes

_MAX_ROWLESS_ENDS = 1024
"""Most last words on requests without a row that wait for the sink. There may be more such requests than any queue
holds; of requests with rows there are no more than their rows found room for."""
_ENTRIES_AT_A_TIME = 8
"""Steps that wait for each other, where the sink lets them wait."""


@dataclass(frozen=True, slots=True)
class FedStep:
    """One step's deliveries. Their tensors are valid until `release`, which the feeder calls after the last of them."""

    deliveries: tuple[SinkDelivery, ...]
    release: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Mark:
    number: int


@dataclass(frozen=True, slots=True)
class _Entry:
    item: FedStep | SinkRequestEnd | _Mark
    nbytes: int
    is_rowless_end: bool = False


class SinkFeeder:
    """Feeds one sink in the order of its queue; closes it as the last act of its thread.

    `feed`, `end` and `end_rowless` belong to the builder thread; everything else may be called from any thread. Only
    `wait_for_room`, `wait_for_mark` and `join` wait, each in bounded time; no other call waits for the sink.
    """

    def __init__(self, sink: StageSink, log: DeliveryLog, *, runtime: Runtime, max_queue_bytes: int) -> None:
        """Start the thread.

        Args:
            sink: receives the rows.
            log: told what was delivered and what failed.
            runtime: makes the thread, its lock and its clock.
            max_queue_bytes: with that many bytes of rows queued there is no room for a further step.
        """
        self._sink = sink
        self._log = log
        self._max_queue_bytes = max_queue_bytes
        self._lock = runtime.lock("feeder")
        self._changed = runtime.condition(self._lock, "feeder-changed")
        self._queue: deque[_Entry] = deque()
        self._queued_bytes = 0
        self._peak_bytes = 0
        self._rowless_ends = 0
        self._steps_queued = 0
        self._entries_queued = 0
        self._entries_done = 0
        self._highest_mark = 0
        self._calls_returned = 0
        self._stalled = False
        self._closing = False
        self._busy_with: tuple[str, str] | None = None
        self._broken: set[RequestKey] = set()
        self._linger = Linger(self._changed, has_work=self._has_work, is_due=self._is_due, may_wait=sink.rows_may_wait)
        self._thread = runtime.spawn("omni-core-feeder", self._run)

    def feed(self, step: FedStep) -> None:
        """Queue a step's deliveries, in order. Never blocks."""
        self._append(_Entry(step, held_nbytes(step.deliveries)))

    def end(self, end: SinkRequestEnd) -> None:
        """Queue the last word on a request of which rows were fed. Never blocks; as many as requests with rows."""
        self._append(_Entry(end, ENTRY_BYTES))

    def end_rowless(self, end: SinkRequestEnd) -> None:
        """Queue the last word on a request of which no row was fed; dropped and counted if too many wait."""
        with self._lock:
            dropped = self._rowless_ends >= _MAX_ROWLESS_ENDS
        if dropped:
            self._log.count(Count.LAST_WORDS_DROPPED)
        else:
            self._append(_Entry(end, 0, is_rowless_end=True))

    def has_room(self) -> bool:
        """Whether a further step may be let in. Never blocks."""
        with self._lock:
            return self._has_room()

    def wait_for_room(self, timeout_s: float) -> bool:
        """As `has_room`, after waiting for it up to `timeout_s`."""
        with self._lock:
            return self._changed.wait_for(self._has_room, timeout_s)

    def begin_stall(self) -> bool:
        """Note that a step was not let in; whether it is the first since the queue was last half empty."""
        with self._lock:
            first, self._stalled = not self._stalled, True
            return first

    @property
    def calls_returned(self) -> int:
        """How often the sink has come back from a call: tells a slow sink from a stuck one."""
        return self._calls_returned

    def busy_with(self) -> str:
        """What the sink is doing, in words."""
        busy = self._busy_with
        return "nothing" if busy is None else f"the sink's {busy[0]}() for request {busy[1]!r}"

    def mark(self, number: int) -> None:
        """Note the place that the queue has reached now; never blocks, and neighbouring marks are one entry.

        Args:
            number: whatever was fed for this or a lower number is in the queue.
        """
        with self._lock:
            if self._entries_done == self._entries_queued:
                self._highest_mark = max(self._highest_mark, number)
                self._changed.notify_all()
                return
            last = self._queue[-1].item if self._queue else None
            if isinstance(last, _Mark):
                self._queue[-1] = _Entry(_Mark(max(last.number, number)), 0)
                return
        self._append(_Entry(_Mark(number), 0))

    def wait_for_mark(self, number: int, timeout_s: float) -> bool:
        """Whether the sink has everything queued before a mark of this or a higher number, after waiting for it."""
        with self._lock:
            return self._changed.wait_for(lambda: self._highest_mark >= number, timeout_s)

    def close_when_fed(self) -> None:
        """Let the thread end once the queue is empty and the sink closed. Returns at once; idempotent."""
        with self._lock:
            self._closing = True
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended, after waiting for that up to `timeout_s`."""
        return self._thread.join(timeout_s)

    def report(self) -> dict[str, int]:
        """Plain numbers: what waits for the sink."""
        with self._lock:
            return {
                "sink_queue_entries": self._entries_queued - self._entries_done,
                "sink_queue_bytes": self._queued_bytes,
                "sink_queue_peak_bytes": self._peak_bytes,
            }

    def _has_room(self) -> bool:
        return self._queued_bytes < self._max_queue_bytes

    def _append(self, entry: _Entry) -> None:
        with self._lock:
            self._queue.append(entry)
            self._entries_queued += 1
            self._queued_bytes += entry.nbytes
            self._rowless_ends += entry.is_rowless_end
            self._steps_queued += isinstance(entry.item, FedStep)
            self._peak_bytes = max(self._peak_bytes, self._queued_bytes)
            if self._linger.wants_to_know:
                self._changed.notify_all()

    def _has_work(self) -> bool:
        return bool(self._queue) or self._closing

    def _is_due(self) -> bool:
        """Something other than rows came, or many rows did."""
        return (
            len(self._queue) > min(self._steps_queued, _ENTRIES_AT_A_TIME - 1)
            or 2 * self._queued_bytes >= self._max_queue_bytes
            or self._closing
        )

    def _run(self) -> None:
        while (entry := self._next_entry()) is not None:
            self._hand_over(entry.item)
            with self._lock:
                self._entries_done += 1
                self._steps_queued -= isinstance(entry.item, FedStep)
                if isinstance(entry.item, _Mark):
                    self._highest_mark = max(self._highest_mark, entry.item.number)
                self._queued_bytes -= entry.nbytes
                self._rowless_ends -= entry.is_rowless_end
                if 2 * self._queued_bytes <= self._max_queue_bytes:
                    self._stalled = False
                self._changed.notify_all()
            del entry
        try:
            self._sink.close()
        except BaseException as error:
            self._log.stage_failed(f"closing the sink raised {error_text(error)}")

    def _next_entry(self) -> _Entry | None:
        """Waits for one; `None`: the thread is to end."""
        with self._lock:
            if not self._queue:
                self._linger.wait_for_work()
            return self._queue.popleft() if self._queue else None

    def _hand_over(self, item: FedStep | SinkRequestEnd | _Mark) -> None:
        if isinstance(item, _Mark):
            return
        if isinstance(item, SinkRequestEnd):
            self._finish(item)
            return
        for delivery in item.deliveries:
            self._accept(delivery)
        try:
            item.release()
        except BaseException as error:
            self._log.stage_failed(f"giving a step's buffers back raised {error_text(error)}")

    def _accept(self, delivery: SinkDelivery) -> None:
        if delivery.key in self._broken:
            return
        if self._call("accept", delivery.req_id, lambda: self._sink.accept(delivery)):
            self._log.count(Count.DELIVERIES)
            self._log.count(Count.ROWS_DELIVERED, len(delivery.token_ids))
        else:
            self._broken.add(delivery.key)

    def _finish(self, end: SinkRequestEnd) -> None:
        if end.key in self._broken:
            self._broken.discard(end.key)
        else:
            self._call("finish", end.req_id, lambda: self._sink.finish(end))

    def _call(self, name: str, req_id: str, action: Callable[[], None]) -> bool:
        """Whether a call of the sink returned. Nothing it raises ends the thread, `SystemExit` neither."""
        self._busy_with = (name, req_id)
        try:
            action()
        except BaseException as error:
            self._log.sink_failed(req_id, f"the sink's {name}() raised {error_text(error)}")
            return False
        finally:
            self._busy_with = None
            self._calls_returned += 1
        return True
