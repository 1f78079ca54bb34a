# SPDX-License-Identifier: Apache-2.0
"""Native events, and waits for them that end.

A vendor's own wait has no time limit, and NPU's keeps a core busy without sleep until the host task queue has launched
the event (backend-facts A1). So a wait asks and sleeps in turn; `docs/decisions/bounded-waits-poll.md` says what it
costs.
"""

from __future__ import annotations

from omni_core.backend.accelerator.device_module import NativeEvent
from omni_core.backend.base import Event
from omni_core.backend.errors import DeviceCopyError, DeviceWaitTimeoutError
from omni_core.runtime import Runtime

FIRST_PAUSE_S = 20e-6
"""The first sleep of a wait; each is twice as long as the one before."""
LONGEST_PAUSE_S = 1e-3
"""The longest: how late a long wait may notice its end."""


class AcceleratorEvent(Event):
    """A native event that was recorded. Made by `AcceleratorStream.record` only.

    Complete once, complete for ever, and failed likewise; the device is not asked again.
    """

    __slots__ = ("_cause", "_complete", "_runtime", "_stream_name", "native")

    def __init__(self, native: NativeEvent, stream_name: str, runtime: Runtime) -> None:
        self.native = native
        self._stream_name = stream_name
        self._runtime = runtime
        self._complete = False
        self._cause: Exception | None = None

    @property
    def known_complete(self) -> bool:
        """Whether someone has seen it complete. Asks nobody."""
        return self._complete

    def query(self) -> bool:
        if self._complete:
            return True
        if self._cause is None:
            try:
                # False on NPU, too, as long as the record waits in the host task queue.
                self._complete = self.native.query()
            except Exception as error:
                # A traceback would keep the tensors of its frames alive as long as the event.
                self._cause = error.with_traceback(None)
        if self._cause is not None:
            raise DeviceCopyError(
                f"work on stream {self._stream_name!r} failed: {type(self._cause).__name__}: {self._cause}"
            ) from self._cause
        return self._complete

    def synchronize(self, timeout_s: float) -> None:
        if self.query():
            return
        deadline_s = self._runtime.monotonic_s() + timeout_s
        pause_s = FIRST_PAUSE_S
        while not self.query():
            left_s = deadline_s - self._runtime.monotonic_s()
            if left_s <= 0:
                raise DeviceWaitTimeoutError(
                    f"an event of stream {self._stream_name!r} is not complete within timeout_s={timeout_s}"
                )
            self._runtime.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
