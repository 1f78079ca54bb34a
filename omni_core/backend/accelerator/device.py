# SPDX-License-Identifier: Apache-2.0
"""One device, through what its vendor's module held when the backend was made."""

from __future__ import annotations

import logging

from omni_core.backend.accelerator.device_module import DeviceModule, NativeEvent, NativeStream
from omni_core.backend.accelerator.in_flight import CopyParts
from omni_core.backend.errors import BackendError

logger = logging.getLogger(__name__)


class AcceleratorDevice:
    """A device of a vendor's module.

    Classes and functions are taken from the module here and never again: workers and plugins replace those of
    `torch.cuda`, and `torch.Event`, with stand-ins that do nothing (backend-facts A4.2). Every method may be called
    from any bound thread and returns at once, but `new_stream`, which may make a context.

    Args:
        module: the vendor's.
        index: which device; `None`: the calling thread's.
    """

    def __init__(self, module: DeviceModule, index: int | None) -> None:
        self.stream_class = module.Stream
        self.event_class = module.Event
        self._set_device = module.set_device
        self._current_stream = module.current_stream
        self._set_stream = module.set_stream
        self._get_device_name = module.get_device_name
        self._mem_get_info = module.mem_get_info
        self.index = module.current_device() if index is None else index

    def bind_thread(self) -> None:
        """Give the calling thread this device. Any thread.

        A new thread has no device on NPU, and device 0 on CUDA, where a call from another rank's thread would leave a
        context (backend-facts A1 "Threads", E).
        """
        self._set_device(self.index)

    def try_bind_thread(self) -> bool:
        """`bind_thread` for whoever gives things back: a device that is gone is a warning, and `False`."""
        try:
            self.bind_thread()
        except Exception as error:  # of any type
            logger.warning("device %d cannot be used any more: %s: %s", self.index, type(error).__name__, error)
            return False
        return True

    def new_stream(self) -> NativeStream:
        """A stream from the vendor's pool. Slow; start-up only."""
        stream: NativeStream = self.stream_class()
        return stream

    def new_event(self) -> NativeEvent:
        """An event, not recorded yet; the device makes it at the first `record`."""
        event: NativeEvent = self.event_class()
        return event

    def current_stream(self) -> NativeStream:
        """The stream the calling thread's work goes to.

        Raises:
            BackendError: the vendor's module answers with something else; its functions were replaced.
        """
        stream = self._current_stream(self.index)
        is_native = isinstance(stream, self.stream_class)
        if not is_native:
            raise BackendError(
                f"the current stream of device {self.index} is a {_named(type(stream))}, not a "
                f"{_named(self.stream_class)}: another package had replaced functions of torch before the backend was "
                "made"
            )
        return stream

    def copy(self, parts: CopyParts, stream: NativeStream, current: NativeStream) -> None:
        """Queue one copy on `stream`; the calling thread, whose stream is `current`, goes on there."""
        self._set_stream(stream)
        try:
            for destination, source in parts:
                destination.copy_(source, non_blocking=True)
        finally:
            self._set_stream(current)

    def name(self) -> str:
        """The vendor's name of the device."""
        return self._get_device_name(self.index)

    def memory_bytes(self) -> tuple[int, int]:
        """Free and total bytes."""
        free_bytes, total_bytes = self._mem_get_info(self.index)
        return int(free_bytes), int(total_bytes)


def _named(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
