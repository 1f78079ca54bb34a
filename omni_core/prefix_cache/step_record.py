# SPDX-License-Identifier: Apache-2.0
"""A step's values on their way to the host: cloned once on the device, copied once into the step's pinned page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from omni_core.backend import ByteCarver, DeviceBackend, Event, NoBackendForTensorError, Stream
from omni_core.backend.memory import aligned_nbytes
from omni_core.prefix_cache.device_ring import DeviceRing, RingTicket
from omni_core.prefix_cache.leftovers import StagedLeftover, stage_leftover, tensors_of, with_views
from omni_core.prefix_cache.staging import StagingSlot
from omni_core.prefix_cache.step_form import PagePlaces
from omni_core.prefix_cache.step_inputs import StepInputs
from omni_core.prefix_cache.task import DeferredRecord, RecordPart, StagedRows, WriteSchedule


class StepRecord(NamedTuple):
    """Everything a step saved, as views of its staging page.

    Readable once `copy_done` has completed; deferred rows once their record is host-ready.
    """

    rows: tuple[StagedRows, ...]
    """Outputs with a row per token."""
    stored: tuple[StagedRows, ...]
    """Of these, the rows that go into the pool with the page."""
    stored_keys: frozenset[str]
    immediate_keys: frozenset[str]
    """Of these, the keys whose rows cross with the page; the others wait in `deferred`."""
    leftovers: tuple[StagedLeftover, ...]
    copy_done: Event | None
    """`None` if nothing had to cross from the device."""
    deferred: DeferredRecord | None
    """The step's deferred rows; `None` if it has none, or all cross with the page."""


@dataclass(frozen=True, slots=True)
class DeferredPlace:
    """Room on the device for the deferred rows of one step."""

    ring: DeviceRing
    ticket: RingTicket
    numbers: tuple[int, ...]
    """Which of the step's token values are deferred, as indices."""


def deferrable(inputs: StepInputs, backend: DeviceBackend) -> tuple[tuple[int, ...], int]:
    """The token values that may wait on the device: of deferred keys, and lying there.

    Returns:
        Their indices, and the bytes of the device ring they will take, alignment included.
    """
    if inputs.form.deferrable is not None:
        return inputs.form.deferrable
    numbers = []
    nbytes = 0
    for number, (value, rows) in enumerate(inputs.token_values()):
        if value.schedule is WriteSchedule.JOIN_ON_FINISH and backend.owns(rows):
            numbers.append(number)
            nbytes += aligned_nbytes(rows.nbytes)
    inputs.form.deferrable = (tuple(numbers), nbytes)
    return inputs.form.deferrable


def step_nbytes(inputs: StepInputs) -> int:
    """Bytes of the staging page that `inputs` will take, alignment included."""
    total = inputs.form.nbytes
    for leftover in inputs.leftovers:
        for tensor in tensors_of(leftover.value):
            total += aligned_nbytes(tensor.nbytes)
    return total


def check_devices(inputs: StepInputs, backend: DeviceBackend) -> None:
    """Refuse tensors that neither the backend nor the host owns. Changes nothing.

    Raises:
        NoBackendForTensorError: names the key, the tensor's device and the backend.
    """
    for value, rows in inputs.token_values():
        _check_device(value.key, rows, backend)
    for leftover in inputs.leftovers:
        for tensor in tensors_of(leftover.value):
            _check_device(leftover.key, tensor, backend)


def _check_device(key: str, tensor: torch.Tensor, backend: DeviceBackend) -> None:
    if not tensor.is_cpu and not backend.owns(tensor):
        raise NoBackendForTensorError(
            f"key {key!r} lies on device {tensor.device}, which backend {backend.name!r} does not own; "
            f"build the cache with the backend of that device"
        )


def record_step(
    inputs: StepInputs,
    backend: DeviceBackend,
    slot: StagingSlot,
    ring: ByteCarver,
    stream: Stream,
    place: DeferredPlace | None = None,
) -> StepRecord:
    """Clone a step's tensors into the snapshot ring and start their one copy to the page. Engine thread; never blocks.

    Values that already lie in host memory the backend does not own are copied at once, behind the device's part of the
    page. Token values that have a `place` are cloned there instead and get room at the page's end, for the case that
    they are copied before the step is consumed. The copy from the device is started last: nothing that can fail comes
    after it.
    """
    blocks: list[tuple[torch.Tensor, ...]] = [(rows,) for rows in inputs.rows]

    def stage(tensors: tuple[torch.Tensor, ...]) -> int:
        blocks.append(tensors)
        return len(blocks) - 1

    leftovers = [stage_leftover(leftover, stage) for leftover in inputs.leftovers]
    views = [block[0] for block in blocks]
    on_host = []
    clones: list[torch.Tensor] = []
    deferred = () if place is None else place.numbers
    for number, block in enumerate(blocks):
        if number in deferred:
            continue
        if backend.owns(block[0]):
            views[number] = _take(slot.host, block)
            if len(block) == 1:
                clones.append(backend.snapshot(block[0], ring))
            else:
                torch.cat(block, out=_take(ring, block))
        else:
            on_host.append(number)
    device_part = slot.host.used()
    for number in on_host:
        views[number] = _take(slot.host, blocks[number])
        if len(blocks[number]) == 1:
            views[number].copy_(blocks[number][0])
        else:
            torch.cat(blocks[number], out=views[number])
    stored_keys = immediate_keys = inputs.form.stored_keys
    record = None
    if place is not None:
        record = _defer(inputs, backend, slot, views, place)
        immediate_keys = stored_keys.difference(record.keys)
    staged = tuple(StagedRows(value.key, view) for value, view in zip(inputs.form.values, views, strict=False))
    stored = tuple(one for one in staged if one.key in immediate_keys)
    # Leftovers, and values that lie on the host, have no place of their own in the snapshot buffer.
    if inputs.is_known and len(clones) + len(deferred) == len(views):
        inputs.form.places[slot.index, place is not None] = PagePlaces(
            immediate=tuple(number for number in range(len(views)) if number not in deferred),
            clones=tuple(clones),
            device_part=ring.used(),
            host_part=device_part,
            staged=staged,
            stored=stored,
            immediate_keys=immediate_keys,
            deferred_parts=() if record is None else record.parts,
            deferred_start=0 if record is None else record.page_start,
        )
    return StepRecord(
        rows=staged,
        stored=stored,
        stored_keys=stored_keys,
        immediate_keys=immediate_keys,
        leftovers=tuple(with_views(leftover, views) for leftover in leftovers),
        copy_done=backend.copy_to_host(device_part, ring.used(), stream) if ring.used_bytes else None,
        deferred=record,
    )


def record_known_step(
    inputs: StepInputs,
    places: PagePlaces,
    backend: DeviceBackend,
    slot: StagingSlot,
    stream: Stream,
    place: DeferredPlace | None,
) -> StepRecord:
    """`record_step` for a form that was recorded in this slot before: the same places of the page, carved once."""
    for number, clone in zip(places.immediate, places.clones, strict=True):
        backend.refresh_snapshot(clone, inputs.rows[number])
    deferred = None
    if place is not None:
        carver = place.ring.carver(place.ticket)
        for number in place.numbers:
            backend.snapshot(inputs.rows[number], carver)
        cloned = backend.current_stream().record()
        deferred = DeferredRecord(places.deferred_parts, place.ticket, cloned, slot, places.deferred_start)
    copy_done = backend.copy_to_host(places.host_part, places.device_part, stream) if places.clones else None
    return StepRecord(
        places.staged, places.stored, inputs.form.stored_keys, places.immediate_keys, (), copy_done, deferred
    )


def _defer(
    inputs: StepInputs,
    backend: DeviceBackend,
    slot: StagingSlot,
    views: list[torch.Tensor],
    place: DeferredPlace,
) -> DeferredRecord:
    """Clone deferred rows, each key once, and carve the same places in the page; one event says when they are there."""
    carver = place.ring.carver(place.ticket)
    page_start = slot.host.used_bytes
    parts = []
    for number in place.numbers:
        rows = inputs.rows[number]
        start = slot.host.used_bytes - page_start
        views[number] = slot.host.take(rows.shape, rows.dtype)
        backend.snapshot(rows, carver)
        parts.append(RecordPart(inputs.form.values[number].key, start, start + rows.nbytes))
    return DeferredRecord(tuple(parts), place.ticket, backend.current_stream().record(), slot, page_start)


def _take(carver: ByteCarver, block: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Room for a tensor, or for several concatenated along the first dimension."""
    first = block[0]
    if len(block) == 1:
        return carver.take(first.shape, first.dtype)
    return carver.take((sum(tensor.shape[0] for tensor in block), *first.shape[1:]), first.dtype)
