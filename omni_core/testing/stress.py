# SPDX-License-Identifier: Apache-2.0
"""Makes real threads change places as often as the interpreter can: a complement to seeded schedules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frequent_switches(interval_s: float = 1e-6) -> Iterator[None]:
    """Real threads are interrupted as often as the interpreter can, until the block ends."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(interval_s)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
