# SPDX-License-Identifier: Apache-2.0
"""What a device must provide: the contract between the cache and every backend.

A backend is registered under the entry-point group `omni_core.backends`; the entry point's name equals
`DeviceBackend.name`. Its module must import on a machine without the hardware: vendor packages are imported inside
methods. The cache never looks at `torch.cuda`, `torch.npu` or `torch.Event`, because vLLM's CPU, XPU and Ascend workers
replace those with stand-ins.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from omni_core.backend.memory import ByteCarver
from omni_core.runtime import Runtime


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a device can and cannot do, as data. A `False` is answered by a refusal or a documented slower form."""

    async_copy: bool
    """Copies to host run beside the caller."""
    pinned_memory: bool
    """Arenas are page-locked."""
    blocking_events: bool
    """`Event.synchronize` sleeps; `False` means it spins."""
    static_graph_outputs: bool
    """A captured graph returns the same output buffer each replay, so a step's rows must be snapshotted."""
    exact_pinning: bool = True
    """An arena page-locks exactly what was asked for, in pieces if wanted; `False`: the vendor's allocator rounds up,
    and pieces are refused."""


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What `omni-core backends` and `omni-core doctor` print of a device."""

    name: str
    """The vendor's name of the device."""
    device: str
    """torch's name of it, such as `cuda:0`."""
    total_memory_bytes: int
    free_memory_bytes: int
    software: Mapping[str, str] = field(default_factory=dict)
    """Versions of what runs under torch, by name as people know it, such as `driver`, `CUDA runtime`, `torch_npu`."""


class Event(ABC):
    """A point in a stream's work. Made by `Stream.record` only, so an event that was never recorded cannot exist."""

    @abstractmethod
    def query(self) -> bool:
        """Whether the work before the event is complete. Never blocks. Any bound thread.

        Raises:
            DeviceCopyError: the work failed.
        """

    @abstractmethod
    def synchronize(self, timeout_s: float) -> None:
        """Block the calling thread until the work before the event is complete. Any bound thread; hold no lock.

        Raises:
            DeviceWaitTimeoutError: `timeout_s` passed first; names the stream and the time.
            DeviceCopyError: the work failed.
        """


class Stream(ABC):
    """An ordered queue of device work."""

    @property
    @abstractmethod
    def name(self) -> str:
        """For diagnostics."""

    @abstractmethod
    def record(self) -> Event:
        """Mark the work queued so far. Never blocks."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Order all later work of this stream after `event`. Never blocks the caller."""

    @abstractmethod
    def close(self) -> None:
        """Give the stream's resources back after its queued work has run. Idempotent."""


class PinnedArena(ABC):
    """A page-locked byte buffer with exact accounting."""

    @property
    @abstractmethod
    def buffer(self) -> torch.Tensor:
        """uint8 CPU tensor `(nbytes,)`; valid until `close`."""

    @property
    @abstractmethod
    def pinned_bytes(self) -> int:
        """Bytes really page-locked for this arena; 0 where the device has no pinned memory, and once closed."""

    @abstractmethod
    def close(self) -> None:
        """Unpin. No copy may still run into the arena. Idempotent."""


class SnapshotRing(ABC):
    """`depth` device-side byte buffers that a step's rows are cloned into, allocated once."""

    @abstractmethod
    def slot(self, index: int) -> ByteCarver:
        """The carver over buffer `index`, restarted."""

    @property
    @abstractmethod
    def device_bytes(self) -> int:
        """Device memory the ring holds."""

    @abstractmethod
    def close(self) -> None:
        """Free the buffers. No copy may still read from them. Idempotent."""


class GraphPadding(ABC):
    """The token counts a captured graph runs at. Used by simulators and tests; the cache itself trusts the tensor."""

    @abstractmethod
    def padded(self, num_tokens: int) -> int:
        """The row count of the output of a step with `num_tokens` real rows; never smaller. Real rows come first."""


class DeviceBackend(ABC):
    """One kind of device.

    The framework guarantees: one instance per cache; `bind_thread` is called first on each thread that uses the
    instance; every source of a copy stays referenced until the copy's event has completed; nothing here is called
    under the cache's lock.

    An implementation is responsible for:

    1. `snapshot` ordered on the producer's current stream, so that the rows cloned are the rows of the forward that
       was last queued there, and later device work cannot change them;
    2. `copy_to_host` ordered after everything queued on the producer's stream before the call;
    3. events that complete only when the bytes can be read on the host;
    4. no device synchronisation, and no device or pinned allocation, outside the constructor, `pinned_arena` and
       `snapshot_ring`.
    """

    name: ClassVar[str]
    """The operator's name of the backend; equals its entry point's name."""
    device_type: ClassVar[str]
    """torch's device type whose tensors this backend owns, such as `cuda`."""
    refuses: ClassVar[str | None] = None
    """What this version of the backend refuses with `BackendFeatureUnsupportedError`, for `omni-core backends`."""
    serving_options: ClassVar[Mapping[str, Any]] = {}
    """Options it is made with for a real engine's tensors (`backend_for_tensor`), where they are not its defaults."""

    def __init__(self, runtime: Runtime) -> None:
        """Make a backend whose threads, locks and waits go through `runtime`.

        Further keyword arguments of a subclass are its options and must have defaults.

        Raises:
            BackendUnavailableError: the machine cannot run it; the message is `unavailable_reason()`.
        """
        self._runtime = runtime

    @classmethod
    @abstractmethod
    def unavailable_reason(cls) -> str | None:
        """Why this machine cannot run the backend, or `None` if it can.

        Never raises. Imports no vendor package into this process unless the machine has it; a vendor import that may
        break the process is tried in a child process.
        """

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What the device can do."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies on a device of this backend."""
        return tensor.device.type == self.device_type

    @abstractmethod
    def device_info(self) -> DeviceInfo:
        """Facts about the current device. May touch the device; not for the step path."""

    @abstractmethod
    def bind_thread(self) -> None:
        """Give the calling thread the backend's device. A new thread has none on CUDA and NPU until told."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """The stream the calling thread's device work goes to: the producer's stream on the engine thread."""

    @abstractmethod
    def new_stream(self, name: str) -> Stream:
        """Make a stream. Made once and kept: devices have few (NPU reuses them after 32)."""

    @abstractmethod
    def pinned_arena(self, nbytes: int, *, chunk_bytes: int = 0) -> PinnedArena:
        """Allocate exactly `nbytes` of page-locked host memory, one range. Slow; at start-up only.

        `PinnedPieces` does it for a device that can page-lock memory it did not allocate.

        Args:
            nbytes: at least 1.
            chunk_bytes: page-lock the range in pieces of at most so many bytes, a multiple of the page; 0: at once.

        Raises:
            MemoryError: refused; the message names the size and the setting behind it. Nothing is left, and nothing
                smaller was tried.
            BackendFeatureUnsupportedError: the range would need pieces, and `capabilities.exact_pinning` is `False`.
        """

    @abstractmethod
    def snapshot_ring(self, depth: int, nbytes: int, device: torch.device) -> SnapshotRing:
        """Allocate `depth` device buffers of `nbytes` each. Slow; at start-up only."""

    def snapshot(self, tensor: torch.Tensor, carver: ByteCarver) -> torch.Tensor:
        """Clone `tensor` into the next bytes of a ring slot, on the current stream. Engine thread; never blocks.

        Frees the caller from live graph buffers: the clone keeps its values when the source is overwritten.

        Returns:
            The clone: contiguous, of the tensor's shape and dtype.
        """
        clone = carver.take(tensor.shape, tensor.dtype)
        self.refresh_snapshot(clone, tensor)
        return clone

    def refresh_snapshot(self, clone: torch.Tensor, tensor: torch.Tensor) -> None:
        """As `snapshot`, into a clone it made before, of the same shape and dtype."""
        clone.copy_(tensor, non_blocking=True)

    @abstractmethod
    def copy_to_host(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> Event:
        """Queue one copy device → pinned host on `stream`, after all work the current stream has queued so far.

        Args:
            destination: contiguous CPU tensor inside a `PinnedArena`.
            source: contiguous device tensor of the same shape and dtype; the backend keeps it alive until then.
            stream: from `new_stream`.

        Returns:
            The event that completes when `destination` may be read. Never blocks the caller.

        Raises:
            ValueError: shapes, dtypes or layouts do not fit, or the destination lies in no pinned arena; names them.
        """

    @abstractmethod
    def graph_padding(self, capture_sizes: tuple[int, ...]) -> GraphPadding:
        """The device's padding rule for graphs captured at `capture_sizes` (sorted token counts; empty: eager)."""

    @abstractmethod
    def close(self) -> None:
        """End helper threads and give back what the backend still holds. Idempotent; bounded."""
