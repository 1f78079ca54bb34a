# SPDX-License-Identifier: Apache-2.0
"""First come, first served: public requests become waves, each with the pages of all its rows.

    scheduler.add(prepared, kv_rows)           # a client's request; RequestRefusedError goes to that client
    wave = scheduler.schedule()                # None: nothing can start now
    for failed in scheduler.take_failed(): ... # requests that can never be served
    ... install snapshots, step 0 on all ranks ...
    scheduler.acknowledge_first_step(wave)     # its prefixes are final: later requests may hit them
    ... later steps, decode ...
    removal = scheduler.finish(request_id)     # to the worker: drop the rows

Any number of waves may run at once, up to `max_running_requests` requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from omni_core.diffusion_kv.errors import DiffusionKVError, RequestRefusedError
from omni_core.diffusion_kv.pipeline import PreparedRequest
from omni_core.diffusion_kv.reservations import KVReservations, RowDemand
from omni_core.integrations.diffusion.admission import AdmissionEnvelope
from omni_core.integrations.diffusion.live_request import Candidate, LiveRequest
from omni_core.integrations.diffusion.request_states import RequestStatus
from omni_core.integrations.diffusion.twins import hit_after
from omni_core.integrations.diffusion.waves import FailedRequest, KVRemoval, ScheduledRequest, Wave


class DiffusionScheduler:
    """Strict first come, first served; nobody overtakes. The engine's one thread calls; nothing blocks."""

    def __init__(
        self,
        reservations: KVReservations | None,
        envelope: AdmissionEnvelope,
        *,
        max_wave_requests: int,
        max_running_requests: int,
        block_size: int | None = None,
    ) -> None:
        """Schedule onto `reservations`, or densely with `None`.

        Args:
            reservations: who hands out pages; `None` for `dense_legacy`.
            envelope: the largest request the stage was profiled for.
            max_wave_requests: requests that share a forward at most.
            max_running_requests: requests that run at once at most, over all waves (`max_num_seqs`).
            block_size: tokens per page: a request that will hit more once a wave is published does not join that wave.
                `None`: it computes what others compute beside it.
        """
        self._reservations = reservations
        self._envelope = envelope
        self._max_wave_requests = max_wave_requests
        self._max_running_requests = max_running_requests
        self._block_size = block_size
        self._entries: dict[str, LiveRequest] = {}
        self._queue: deque[LiveRequest] = deque()
        self._num_running = 0
        self._failed: list[FailedRequest] = []
        self._next_wave_id = 0
        self._arrivals = 0

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Requests in waves."""
        return self._num_running

    def status(self, request_id: str) -> RequestStatus | None:
        """Where a live request stands; `None` for one that has ended or was never added."""
        entry = self._entries.get(request_id)
        return None if entry is None else entry.status

    def check(self, prepared: PreparedRequest) -> None:
        """Refuse early what `add` would refuse, before anyone hashes the request's content.

        Raises:
            RequestRefusedError: the id is live, or the request is larger than the profiled one.
        """
        request_id = prepared.request.request_id
        if request_id in self._entries:
            raise RequestRefusedError(request_id, "a request of this id is live; wait for its end or use another id")
        self._envelope.check(prepared)

    def add(self, prepared: PreparedRequest, kv_rows: Sequence[RowDemand] = ()) -> None:
        """Put a request at the end of the queue.

        Args:
            prepared: after preprocessing.
            kv_rows: what each of its rows wants of the pages, one per row in order; empty on a dense stage. The
                identities stay in the scheduler and never reach a worker.

        Raises:
            RequestRefusedError: the id is live, the request is larger than the profiled one, or `kv_rows` does not
                belong to this mode or these rows; nothing was changed.
        """
        self.check(prepared)
        request_id = prepared.request.request_id
        if self._reservations is None and kv_rows:
            raise RequestRefusedError(
                request_id, f"it brings {len(kv_rows)} KV rows, and the stage runs diffusion_kv_mode=dense_legacy"
            )
        if self._reservations is not None:
            wanted = [row.layout.geometry for row in prepared.rows]
            if [row.geometry for row in kv_rows] != wanted:
                raise RequestRefusedError(
                    request_id,
                    f"it brings {len(kv_rows)} KV rows for its {len(wanted)} rows, or of other lengths; "
                    "diffusion_kv_mode=paged_scheduler needs one for each, in order",
                )
        entry = LiveRequest(self._arrivals, prepared, tuple(kv_rows))
        self._arrivals += 1
        self._entries[request_id] = entry
        self._queue.append(entry)

    def schedule(self) -> Wave | None:
        """Start the next wave: the head of the queue and those behind it that can share its forwards.

        The first request that cannot, or that finds no pages, ends the wave and keeps its place. A request that can
        never be served is taken out, see `take_failed`, and the next one is looked at.

        Returns:
            The wave, its requests running; `None` if none can start now.

        Raises:
            DiffusionKVError: nobody holds pages and yet there are none for the head; pages were lost.
        """
        room = min(self._max_wave_requests, self._max_running_requests - self._num_running)
        members: list[Candidate] = []
        try:
            while self._queue and len(members) < room:
                entry = self._queue[0]
                candidate = self._candidate(entry, members)
                if candidate is None:
                    break
                if isinstance(candidate, RequestRefusedError):
                    self._queue.popleft()
                    self._end(entry, RequestStatus.FAILED)
                    self._failed.append(FailedRequest(entry.prepared, candidate))
                    continue
                self._queue.popleft()
                members.append(candidate)
        except BaseException:
            self._give_back(members)
            raise
        return self._start(members) if members else None

    def _candidate(self, entry: LiveRequest, members: Sequence[Candidate]) -> Candidate | RequestRefusedError | None:
        """Pages for `entry` in the wave of `members`, or in one of its own; `None`: not in this wave, or not now."""
        first = members[0] if members else None
        if first is not None and entry.forward_key != first.entry.forward_key:
            return None
        if self._reservations is None or entry.snapshot is not None:
            kept = Candidate(entry, entry.snapshot)
            return kept if first is None or kept.hit_tokens == first.hit_tokens else None
        hit_tokens = None if first is None else first.hit_tokens
        if self._hits_more_after(entry, members):
            return None
        try:
            snapshot = self._reservations.reserve(entry.request_id, entry.kv_rows, only_at_hit_tokens=hit_tokens)
        except RequestRefusedError as error:
            return error
        if snapshot is not None:
            return Candidate(entry, snapshot)
        if first is None and self._num_running == 0:
            raise DiffusionKVError(
                f"request {entry.request_id!r} waits for pages, and no request holds any: {self._reservations.stats()}"
            )
        return None

    def _hits_more_after(self, entry: LiveRequest, members: Sequence[Candidate]) -> bool:
        """Whether `entry` would hit more pages once the wave of `members` is published than the wave hits now."""
        if self._block_size is None:
            return False
        return any(
            hit_after(member.entry.kv_rows, entry.kv_rows, self._block_size) > member.hit_tokens for member in members
        )

    def _give_back(self, members: Sequence[Candidate]) -> None:
        """Undo a wave that did not come about; its requests stand in the queue as before."""
        for candidate in reversed(members):
            entry, snapshot = candidate.entry, candidate.snapshot
            self._queue.appendleft(entry)
            if self._reservations is not None and snapshot is not None and entry.snapshot is None:
                self._reservations.free(snapshot.request_id, snapshot.generation)

    def _start(self, members: Sequence[Candidate]) -> Wave:
        for candidate in members:
            candidate.entry.transition(RequestStatus.RUNNING)
            candidate.entry.snapshot = candidate.snapshot
        self._num_running += len(members)
        wave = Wave(
            wave_id=self._next_wave_id,
            requests=tuple(ScheduledRequest(member.entry.prepared, member.snapshot) for member in members),
            forward_key=members[0].entry.forward_key,
            hit_tokens=members[0].hit_tokens,
        )
        self._next_wave_id += 1
        return wave

    def take_failed(self) -> tuple[FailedRequest, ...]:
        """Requests `schedule` took out because they can never be served, each told once."""
        failed, self._failed = tuple(self._failed), []
        return failed

    def acknowledge_first_step(self, wave: Wave) -> None:
        """Every rank has computed step 0 of `wave`: publish the prefixes of those that have not ended.

        Calling it is optional; `finish` publishes what was not. Idempotent.
        """
        for scheduled in wave.requests:
            entry = self._entries.get(scheduled.request_id)
            if entry is not None and entry.snapshot is scheduled.snapshot:
                self._publish(entry)

    def preempt(self, request_id: str, completed_steps: int) -> None:
        """Take a running request out of its wave, between steps. It keeps its pages and its place by arrival.

        Its next wave holds the same snapshot and only requests that have completed as many steps.

        Raises:
            DiffusionKVError: the request is not running.
        """
        entry = self._running(request_id, "preempt")
        entry.transition(RequestStatus.PREEMPTED)
        entry.completed_steps = completed_steps
        self._num_running -= 1
        earlier = sum(1 for other in self._queue if other.arrival < entry.arrival)
        self._queue.insert(earlier, entry)

    def finish(self, request_id: str) -> KVRemoval | None:
        """A running request's picture is done: publish its prefix if that has not happened, give its pages back.

        Returns:
            What to tell the worker; `None` on a dense stage.

        Raises:
            DiffusionKVError: the request is not running.
        """
        entry = self._running(request_id, "finish")
        self._publish(entry)
        return self._end(entry, RequestStatus.COMPLETED)

    def fail(self, request_id: str) -> KVRemoval | None:
        """A running request broke: give its pages back, publish nothing further.

        Returns:
            What to tell the worker; `None` on a dense stage.

        Raises:
            DiffusionKVError: the request is not running.
        """
        return self._end(self._running(request_id, "fail"), RequestStatus.FAILED)

    def abort(self, request_id: str) -> KVRemoval | None:
        """A client left: drop its request from the queue, or stop it and give its pages back unpublished.

        What was published after step 0 stays; those pages are final. An id that is not live is let pass: aborts race
        with the end of a request. The caller skips the request in later steps of its wave.

        Returns:
            What to tell the worker; `None` if it holds nothing of this request.
        """
        entry = self._entries.get(request_id)
        if entry is None:
            return None
        if entry.status is not RequestStatus.RUNNING:
            self._queue.remove(entry)
        return self._end(entry, RequestStatus.ABORTED)

    def _running(self, request_id: str, call: str) -> LiveRequest:
        entry = self._entries.get(request_id)
        if entry is None or entry.status is not RequestStatus.RUNNING:
            status = "not live" if entry is None else entry.status.value
            raise DiffusionKVError(f"{call}: request {request_id!r} is {status}, not running")
        return entry

    def _publish(self, entry: LiveRequest) -> None:
        if self._reservations is not None and entry.snapshot is not None:
            self._reservations.publish(entry.snapshot.request_id, entry.snapshot.generation)

    def _end(self, entry: LiveRequest, status: RequestStatus) -> KVRemoval | None:
        """Forget a request that stands in no queue any more, and give its pages back."""
        if entry.status is RequestStatus.RUNNING:
            self._num_running -= 1
        entry.transition(status)
        del self._entries[entry.request_id]
        snapshot = entry.snapshot
        if self._reservations is None or snapshot is None:
            return None
        self._reservations.free(snapshot.request_id, snapshot.generation)
        return KVRemoval(snapshot.request_id, snapshot.generation)
