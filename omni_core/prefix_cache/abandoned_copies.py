# SPDX-License-Identifier: Apache-2.0
"""Device copies whose rows nobody wants any more: what they read and write stays out of use until they have ended."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from omni_core.backend import DeviceBackend, DeviceCopyError, DeviceWaitTimeoutError, Event
from omni_core.prefix_cache.state import CacheState
from omni_core.runtime import Runtime

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Abandoned:
    where: str
    copy_done: Event
    give_back: Callable[[], None]


class AbandonedCopies:
    """Looked after by the committer thread. The property and `add` need the state lock held."""

    def __init__(self, state: CacheState, backend: DeviceBackend, runtime: Runtime) -> None:
        self._state = state
        self._backend = backend
        self._runtime = runtime
        self._copies: list[_Abandoned] = []
        self._bound = False

    @property
    def places(self) -> tuple[str, ...]:
        """What is kept out of use, in words for errors."""
        return tuple(abandoned.where for abandoned in self._copies)

    def add(self, where: str, copy_done: Event, give_back: Callable[[], None]) -> None:
        """Call `give_back` once, with the state lock held, when the copy into `where` has ended in any way."""
        self._copies.append(_Abandoned(where, copy_done, give_back))
        self._state.committer_work.notify_all()

    def bind_thread(self) -> None:
        """Give the calling thread, which is always the committer's, its device. No lock held; once is enough."""
        if not self._bound:
            self._backend.bind_thread()
            self._bound = True

    def free(self, wait_s: float) -> None:
        """Give back what belongs to copies that have ended, waiting up to `wait_s` for each. No lock held."""
        with self._state.lock:
            copies = tuple(self._copies)
        for abandoned in copies:
            try:
                self._try_to_bind_thread()
                ended = abandoned.copy_done.query() or (wait_s > 0 and self._await(abandoned.copy_done, wait_s))
            except DeviceCopyError as error:
                logger.warning("a copy into %s that nobody waits for failed: %s", abandoned.where, error)
                ended = True
            except BaseException as error:  # whether the copy has ended cannot be told now, and the thread must go on
                logger.debug("a copy into %s that nobody waits for is still running: %s", abandoned.where, error)
                ended = False
                if wait_s:
                    self._runtime.sleep(wait_s)
            if not ended:
                continue
            with self._state.lock:
                self._copies.remove(abandoned)
                abandoned.give_back()
                self._state.progress.notify_all()

    def _try_to_bind_thread(self) -> None:
        try:
            self.bind_thread()
        except Exception as error:  # the device may be lost; its event may tell all the same, or says so itself
            logger.debug("the committer has no device to ask for a copy's end: %s", error)

    def _await(self, copy_done: Event, wait_s: float) -> bool:
        try:
            copy_done.synchronize(wait_s)
        except DeviceWaitTimeoutError:
            return False
        return True
