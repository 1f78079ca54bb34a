# SPDX-License-Identifier: Apache-2.0
"""A step's values on their way to the host: cloned once on the device, copied once into the step's pinned page."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from omni_core.backend import ByteCarver, DeviceBackend, Event, NoBackendForTensorError, Stream
from omni_core.backend.memory import aligned_nbytes
from omni_core.prefix_cache.staging import StagingSlot
from omni_core.prefix_cache.step_inputs import LeftoverShare, LeftoverValue, StepInputs
from omni_core.prefix_cache.task import StagedRows


@dataclass(frozen=True, slots=True)
class StagedLeftover:
    """A leftover whose tensors lie in the page."""

    key: str
    share: LeftoverShare
    value: Any
    """A page view, a tuple of values, or a foreign value copied at save."""
    element_rows: tuple[int, ...] | None = None
    """Set if `value` is one page view over the concatenated elements of a list: their row counts."""

    def detached(self) -> Any:
        """The value, independent of the page: tensors cloned, a concatenated list split again. Once per delivery."""
        if self.element_rows is not None:
            return torch.split(self.value.clone(), list(self.element_rows))
        if isinstance(self.value, tuple):
            return tuple(each.clone() if isinstance(each, torch.Tensor) else each for each in self.value)
        return self.value.clone() if isinstance(self.value, torch.Tensor) else self.value


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Everything a step saved, as views of its staging page. Readable once `copy_done` has completed."""

    rows: tuple[StagedRows, ...]
    """Outputs with a row per token."""
    stored_keys: frozenset[str]
    leftovers: tuple[StagedLeftover, ...]
    copy_done: Event | None
    """`None` if nothing had to cross from the device."""

    @property
    def stored(self) -> tuple[StagedRows, ...]:
        """The rows that go into the pool."""
        return tuple(staged for staged in self.rows if staged.key in self.stored_keys)


def step_nbytes(inputs: StepInputs) -> int:
    """Bytes of the staging page that `inputs` will take, alignment included."""
    total = 0
    for value in inputs.token_values:
        total += aligned_nbytes(value.rows.nbytes)
    for leftover in inputs.leftovers:
        for tensor in _tensors_of(leftover.value):
            total += aligned_nbytes(tensor.nbytes)
    return total


def check_devices(inputs: StepInputs, backend: DeviceBackend) -> None:
    """Refuse tensors that neither the backend nor the host owns. Changes nothing.

    Raises:
        NoBackendForTensorError: names the key, the tensor's device and the backend.
    """
    for value in inputs.token_values:
        _check_device(value.key, value.rows, backend)
    for leftover in inputs.leftovers:
        for tensor in _tensors_of(leftover.value):
            _check_device(leftover.key, tensor, backend)


def _check_device(key: str, tensor: torch.Tensor, backend: DeviceBackend) -> None:
    if not tensor.is_cpu and not backend.owns(tensor):
        raise NoBackendForTensorError(
            f"key {key!r} lies on device {tensor.device}, which backend {backend.name!r} does not own; "
            f"build the cache with the backend of that device"
        )


def record_step(
    inputs: StepInputs, backend: DeviceBackend, slot: StagingSlot, ring: ByteCarver, stream: Stream
) -> StepRecord:
    """Clone a step's tensors into the snapshot ring and start their one copy to the page. Engine thread; never blocks.

    Values that already lie in host memory the backend does not own are copied at once, behind the device's part of the
    page.
    """
    page = _PageWriter(backend, slot.host, ring)
    rows = {value.key: page.put(value.rows) for value in inputs.token_values if backend.owns(value.rows)}
    device_leftovers = [leftover for leftover in inputs.leftovers if _on_device(leftover, backend)]
    leftovers = {leftover.key: _stage(leftover, page) for leftover in device_leftovers}
    copy_done = None
    if ring.used_bytes:
        copy_done = backend.copy_to_host(slot.host.used(), ring.used(), stream)
    page.host_only = True
    for value in inputs.token_values:
        if value.key not in rows:
            rows[value.key] = page.put(value.rows)
    for leftover in inputs.leftovers:
        if leftover.key not in leftovers:
            leftovers[leftover.key] = _stage(leftover, page)
    return StepRecord(
        rows=tuple(StagedRows(value.key, rows[value.key]) for value in inputs.token_values),
        stored_keys=frozenset(value.key for value in inputs.token_values if value.stored),
        leftovers=tuple(leftovers[leftover.key] for leftover in inputs.leftovers),
        copy_done=copy_done,
    )


class _PageWriter:
    """Puts tensors into the page: through the snapshot ring, or straight once `host_only` is set."""

    def __init__(self, backend: DeviceBackend, page: ByteCarver, ring: ByteCarver) -> None:
        self._backend = backend
        self._page = page
        self._ring = ring
        self.host_only = False

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        view = self._page.take(tensor.shape, tensor.dtype)
        if self.host_only:
            view.copy_(tensor)
        else:
            self._backend.snapshot(tensor, self._ring)
        return view

    def put_concatenated(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """One operation for a whole list, which has an element per request."""
        shape = (sum(tensor.shape[0] for tensor in tensors), *tensors[0].shape[1:])
        view = self._page.take(shape, tensors[0].dtype)
        target = view if self.host_only else self._ring.take(shape, tensors[0].dtype)
        torch.cat(list(tensors), out=target)
        return view


def _stage(leftover: LeftoverValue, page: _PageWriter) -> StagedLeftover:
    value = leftover.value
    if isinstance(value, torch.Tensor):
        return StagedLeftover(leftover.key, leftover.share, page.put(value))
    if isinstance(value, tuple):
        if _can_concatenate(value):
            joined = page.put_concatenated(value)
            return StagedLeftover(leftover.key, leftover.share, joined, tuple(each.shape[0] for each in value))
        staged = tuple(page.put(each) if isinstance(each, torch.Tensor) else copy.copy(each) for each in value)
        return StagedLeftover(leftover.key, leftover.share, staged)
    return StagedLeftover(
        leftover.key, leftover.share, value.copy() if isinstance(value, np.ndarray) else copy.copy(value)
    )


def _can_concatenate(values: tuple[Any, ...]) -> bool:
    first = values[0] if values else None
    if not isinstance(first, torch.Tensor) or first.dim() == 0:
        return False
    return all(
        isinstance(each, torch.Tensor)
        and each.dim() == first.dim()
        and each.shape[1:] == first.shape[1:]
        and each.dtype == first.dtype
        and each.device == first.device
        for each in values
    )


def _tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple):
        return [each for each in value if isinstance(each, torch.Tensor)]
    return []


def _on_device(leftover: LeftoverValue, backend: DeviceBackend) -> bool:
    tensors = _tensors_of(leftover.value)
    return bool(tensors) and all(backend.owns(tensor) for tensor in tensors)
