# SPDX-License-Identifier: Apache-2.0
"""Where requests arrive: laid out and identified by the client's thread, then taken by the engine's.

Hashing a picture takes milliseconds; it happens here, under no lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from omni_core.diffusion_kv.errors import RequestRefusedError, RowError
from omni_core.diffusion_kv.pipeline import AnyPipeline, DiffusionRequest, PreparedRequest
from omni_core.diffusion_kv.reservations import RowDemand
from omni_core.diffusion_kv.rows import RowIdentity
from omni_core.integrations.diffusion.admission import AdmissionEnvelope
from omni_core.runtime import Runtime


class RowIdentifier(Protocol):
    """What decides which prefixes two requests share. Made of a model's hook; any thread calls."""

    def identify(self, prepared: PreparedRequest, weight_epoch: int) -> Sequence[RowIdentity]:
        """One identity per row, in order. Hashes the request's pictures.

        Args:
            prepared: after preprocessing.
            weight_epoch: grows with each change of the model's weights.

        Raises:
            RequestRefusedError: something of it has no canonical hash.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A request that may be queued."""

    prepared: PreparedRequest
    demands: tuple[RowDemand, ...]
    """Per row; empty where the model owns its KV."""
    weight_epoch: int
    """That `demands` are of."""
    began_at_s: float
    """When the client asked, by `time.perf_counter`."""
    queued_at_s: float
    preprocess_s: float
    hash_s: float

    @property
    def request_id(self) -> str:
        return self.prepared.request.request_id


class RequestIntake:
    """The door between clients' threads and the engine's."""

    def __init__(
        self,
        pipeline: AnyPipeline,
        envelope: AdmissionEnvelope,
        identifier: RowIdentifier | None,
        *,
        paged: bool,
        runtime: Runtime,
    ) -> None:
        """Open the door.

        Args:
            pipeline: lays requests out.
            envelope: the largest request that is let in.
            identifier: `None` where prefix caching is off: then nothing is hashed.
            paged: whether rows need pages at all.
            runtime: makes the lock.
        """
        self._pipeline = pipeline
        self._envelope = envelope
        self._identifier = identifier
        self._paged = paged
        self._lock = runtime.lock("diffusion intake")
        self._live_ids: set[str] = set()
        self._arrivals: deque[Arrival] = deque()
        self._aborts: deque[str] = deque()
        self._weight_epoch = 0
        self._closed_by: Callable[[], Exception] | None = None

    @property
    def weight_epoch(self) -> int:
        return self._weight_epoch

    @property
    def num_live(self) -> int:
        """Requests that were let in or are being looked at, and have not ended."""
        with self._lock:
            return len(self._live_ids)

    @property
    def num_arrived(self) -> int:
        """Requests the engine has not taken yet."""
        with self._lock:
            return len(self._arrivals)

    def add(self, request: DiffusionRequest) -> None:
        """Lay out, check and identify a request, then let it in. Any thread may call; blocks on nobody.

        Raises:
            RequestRefusedError: it cannot be served, or its id is live; nothing was changed.
            DiffusionKVError: the door is closed.
        """
        self._claim(request.request_id)
        try:
            arrival = self._look_at(request)
        except BaseException:
            self.forget(request.request_id)
            raise
        with self._lock:
            closed_by = self._closed_by
            if closed_by is None:
                self._arrivals.append(arrival)
                return
            self._live_ids.discard(request.request_id)
        raise closed_by()

    def abort(self, request_id: str) -> bool:
        """Ask for the end of a live request. Any thread may call; `False` if there is no such request."""
        with self._lock:
            if request_id not in self._live_ids:
                return False
            self._aborts.append(request_id)
            return True

    def take(self) -> tuple[tuple[Arrival, ...], tuple[str, ...]]:
        """What arrived and what is to be aborted since the last call. The engine's thread calls."""
        with self._lock:
            arrivals, aborts = tuple(self._arrivals), tuple(self._aborts)
            self._arrivals.clear()
            self._aborts.clear()
            return arrivals, aborts

    def current(self, arrival: Arrival) -> Arrival:
        """The arrival as it is to be queued: identified again if the weights changed since. The engine's thread calls.

        Raises:
            RequestRefusedError: as `add`.
        """
        if arrival.weight_epoch == self._weight_epoch:
            return arrival
        demands, hash_s = self._demands(arrival.prepared, self._weight_epoch)
        return Arrival(
            arrival.prepared,
            demands,
            self._weight_epoch,
            arrival.began_at_s,
            arrival.queued_at_s,
            arrival.preprocess_s,
            arrival.hash_s + hash_s,
        )

    def forget(self, request_id: str) -> None:
        """The request has ended; its id may be used again."""
        with self._lock:
            self._live_ids.discard(request_id)

    def new_weights(self) -> None:
        """Keys and values from here on are other weights'. The engine's thread calls."""
        self._weight_epoch += 1

    def close(self, reason: Callable[[], Exception]) -> tuple[Arrival, ...]:
        """Let nobody in any more; every later call raises a new `reason()`. Returns what was not taken yet."""
        with self._lock:
            self._closed_by = reason
        arrivals, _ = self.take()
        return arrivals

    def _claim(self, request_id: str) -> None:
        if not isinstance(request_id, str) or not request_id:
            raise RequestRefusedError(str(request_id), "a request's id is a non-empty str")
        with self._lock:
            if self._closed_by is not None:
                raise self._closed_by()
            if request_id in self._live_ids:
                raise RequestRefusedError(
                    request_id, "a request of this id is live; wait for its end or use another id"
                )
            self._live_ids.add(request_id)

    def _look_at(self, request: DiffusionRequest) -> Arrival:
        began_at_s = perf_counter()
        prepared = self._pipeline.preprocess(request)
        self._envelope.check(prepared)
        preprocess_s = perf_counter() - began_at_s
        weight_epoch = self._weight_epoch
        demands, hash_s = self._demands(prepared, weight_epoch)
        return Arrival(prepared, demands, weight_epoch, began_at_s, perf_counter(), preprocess_s, hash_s)

    def _demands(self, prepared: PreparedRequest, weight_epoch: int) -> tuple[tuple[RowDemand, ...], float]:
        geometries = [row.layout.geometry for row in prepared.rows]
        if not self._paged:
            return (), 0.0
        if self._identifier is None:
            return tuple(RowDemand(geometry, None) for geometry in geometries), 0.0
        began_at_s = perf_counter()
        try:
            identities = self._identifier.identify(prepared, weight_epoch)
        except RowError as error:
            raise RequestRefusedError(prepared.request.request_id, str(error)) from error
        demands = tuple(
            RowDemand(geometry, identity) for geometry, identity in zip(geometries, identities, strict=True)
        )
        return demands, perf_counter() - began_at_s
