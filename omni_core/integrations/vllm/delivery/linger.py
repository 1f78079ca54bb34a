# SPDX-License-Identifier: Apache-2.0
"""How a thread waits for work of which several pieces may be done at once, a little later.

Between two steps the model's forward has used every cache of the processor. What a thread does then costs several times
what it costs right after the same work on the step before, and the thread's wake-up comes on top. Where nobody looks at
rows before a request ends, steps are therefore taken a few at a time.
"""

from __future__ import annotations

from collections.abc import Callable

from omni_core.runtime import Condition

LINGER_S = 0.25
"""The longest that work waits for more of its kind."""


class Linger:
    """The waits of one thread. Every method needs the condition's lock."""

    def __init__(
        self, changed: Condition, *, has_work: Callable[[], bool], is_due: Callable[[], bool], may_wait: bool
    ) -> None:
        """Neither callable waits or takes a lock.

        Args:
            changed: notified of work, if `wants_to_know`.
            has_work: whether there is anything to do, or the thread is to end.
            is_due: whether that must not wait for more; never without work.
            may_wait: `False`: all work is due.
        """
        self._changed = changed
        self._has_work = has_work
        self._is_due = is_due if may_wait else has_work
        self._may_wait = may_wait
        self._is_idle = True

    @property
    def wants_to_know(self) -> bool:
        """Whether the thread must be woken for what there is to do now."""
        return self._is_idle or self._is_due()

    def wait_for_work(self) -> None:
        """Return when there is work that is due, or some has waited for `LINGER_S`. Without bound if there is none."""
        if self._may_wait and (self._changed.wait_for(self._is_due, LINGER_S) or self._has_work()):
            return
        self._is_idle = True
        self._changed.wait_for(self._has_work, None)
        self._is_idle = False
        if self._may_wait:
            self._changed.wait_for(self._is_due, LINGER_S)
