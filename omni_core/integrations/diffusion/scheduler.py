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
from omni_core.diffusion_kv.snapshot import KVSnapshot
from omni_core.integrations.diffusion.admission import AdmissionEnvelope
from omni_core.integrations.diffusion.request_states import LEGAL_MOVES, RequestStatus
from omni_core.integrations.diffusion.waves import FailedRequest, ForwardKey, KVRemoval, ScheduledRequest, Wave


class _Entry:
    """One live request."""

    __slots__ = ("completed_steps", "kv_rows", "prepared", "snapshot", "status")

    def __init__(self, prepared: PreparedRequest, kv_rows: tuple[RowDemand, ...]) -> None:
        self.prepared = prepared
        self.kv_rows = kv_rows
        self.status = RequestStatus.WAITING
        self.snapshot: KVSnapshot | None = None
        self.completed_steps = 0

    @property
    def request_id(self) -> str:
        return self.prepared.request.request_id

    @property
    def forward_key(self) -> ForwardKey:
        request = self.prepared.request
        return ForwardKey(
            layouts=tuple(row.layout for row in self.prepared.rows),
            num_inference_steps=request.num_inference_steps,
            completed_steps=self.completed_steps,
            lora=request.lora,
        )

    def transition(self, to: RequestStatus) -> None:
        if to not in LEGAL_MOVES[self.status]:
            raise DiffusionKVError(f"request {self.request_id!r}: illegal move {self.status.name} -> {to.name}")
        self.status = to


def _hit_tokens(snapshot: KVSnapshot | None) -> int:
    return 0 if snapshot is None else snapshot.rows[0].cached_prefix_tokens


class DiffusionScheduler:
    """Strict first come, first served; nobody overtakes. The engine's one thread calls; nothing blocks."""

    def __init__(
        self,
        reservations: KVReservations | None,
        envelope: AdmissionEnvelope,
        *,
        max_wave_requests: int,
        max_running_requests: int,
    ) -> None:
        """Schedule onto `reservations`, or densely with `None`.

        Args:
            reservations: who hands out pages; `None` for `dense_legacy`.
            envelope: the largest request the stage was profiled for.
            max_wave_requests: requests that share a forward at most.
            max_running_requests: requests that run at once at most, over all waves (`max_num_seqs`).
        """
        self._reservations = reservations
        self._envelope = envelope
        self._max_wave_requests = max_wave_requests
        self._max_running_requests = max_running_requests
        self._entries: dict[str, _Entry] = {}
        self._queue: deque[_Entry] = deque()
        self._num_running = 0
        self._failed: list[FailedRequest] = []
        self._next_wave_id = 0

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
        entry = _Entry(prepared, tuple(kv_rows))
        self._entries[request_id] = entry
        self._queue.append(entry)

    def schedule(self) -> Wave | None:
        """Start the next wave: the head of the queue and those behind it that can share its forwards.

        The first request that cannot, or that finds no pages, ends the wave and keeps its place. A request that can
        never be served is taken out, see `take_failed`, and the next one is looked at.

        Returns:
            The wave, its requests running; `None` if none can start now.
        """
        raise NotImplementedError

    def take_failed(self) -> tuple[FailedRequest, ...]:
        """Requests `schedule` took out because they can never be served, each told once."""
        failed, self._failed = tuple(self._failed), []
        return failed

    def acknowledge_first_step(self, wave: Wave) -> None:
        """Every rank has computed step 0 of `wave`: publish the prefixes of those still running.

        Calling it is optional; `finish` publishes what was not. Idempotent.
        """
        raise NotImplementedError

    def preempt(self, request_id: str, completed_steps: int) -> None:
        """Take a running request out of its wave, between steps. It keeps its pages and its place at the head.

        Its next wave holds the same snapshot and only requests that have completed as many steps.
        """
        raise NotImplementedError

    def finish(self, request_id: str) -> KVRemoval | None:
        """A running request's picture is done: publish its prefix if that has not happened, give its pages back.

        Returns:
            What to tell the worker; `None` on a dense stage.

        Raises:
            DiffusionKVError: the request is not running.
        """
        raise NotImplementedError

    def fail(self, request_id: str) -> KVRemoval | None:
        """A running request broke: give its pages back, publish nothing further.

        Returns:
            What to tell the worker; `None` on a dense stage.

        Raises:
            DiffusionKVError: the request is not running.
        """
        raise NotImplementedError

    def abort(self, request_id: str) -> KVRemoval | None:
        """A client left: drop its request from the queue, or stop it and give its pages back unpublished.

        What was published after step 0 stays; those pages are final. An id that is not live is let pass: aborts race
        with the end of a request. The caller skips the request in later steps of its wave.

        Returns:
            What to tell the worker; `None` if it holds nothing of this request.
        """
        raise NotImplementedError
