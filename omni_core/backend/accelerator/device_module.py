# SPDX-License-Identifier: Apache-2.0
"""What backends use of a vendor's device module, such as `torch.npu`: few calls, and none that blocks.

Left out on purpose: `Stream.query`, `Stream.synchronize` and the stream's raw handle drain NPU's host task queue;
`Event.synchronize` cannot be bounded and spins on NPU; `Event.elapsed_time` synchronises there; `Tensor.is_pinned` asks
the driver (backend-facts A1).
"""

from __future__ import annotations

from typing import Any, Protocol


class NativeEvent(Protocol):
    """A vendor's event. Never recorded, it counts as complete, so only `AcceleratorStream.record` makes any."""

    def record(self, stream: Any, /) -> None:
        """Mark the work of a native stream of the same module. NPU casts anything else to one, unchecked."""
        ...

    def query(self) -> bool:
        """Whether the work is complete; raises if the device reports an error. Never blocks."""
        ...


class NativeStream(Protocol):
    """A vendor's stream."""

    @property
    def stream_id(self) -> int:
        """Tells streams of one device apart. Unlike the raw handle, and `hash()`, it waits for nothing."""
        ...

    def wait_event(self, event: Any, /) -> None:
        """Order later work after a native event of the same module. A generic `torch.Event` would do nothing."""
        ...


class DeviceModule(Protocol):
    """Named as torch names it, so that a vendor's module is one. All of them return at once."""

    Stream: type[Any]
    """Without arguments: a stream of the calling thread's device, from a pool of 32."""
    Event: type[Any]
    """Without arguments: an event that takes no time stamps."""

    def set_device(self, device: int, /) -> None:
        """Give the calling thread a device."""
        ...

    def current_device(self) -> int:
        """The calling thread's device."""
        ...

    def current_stream(self, device: int, /) -> NativeStream:
        """The stream the calling thread's work on a device goes to."""
        ...

    def set_stream(self, stream: Any, /) -> None:
        """Let the calling thread's work go to a stream of its device."""
        ...

    def get_device_name(self, device: int, /) -> str:
        """The vendor's name of a device."""
        ...

    def mem_get_info(self, device: int, /) -> tuple[int, int]:
        """Free and total bytes of a device."""
        ...
