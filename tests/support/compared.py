# SPDX-License-Identifier: Apache-2.0
"""Counts what two implementations were asked, and keeps what they answered differently."""

import sys


class Compared:
    """The cases of one comparison.

    Args:
        what: the two implementations, for the printed line.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._cases = 0
        self._mismatches: list[str] = []

    def add(self, case: object, ours: object, theirs: object) -> None:
        """One question and both answers."""
        self._cases += 1
        if ours != theirs:
            self._mismatches.append(f"{case}: ours {ours}, theirs {theirs}")

    def assert_same(self, *, cases: int) -> None:
        """Print the counts. No answer differs, and there were as many questions as the grid has."""
        sys.stdout.write(f"{self._what}: {self._cases} cases, {len(self._mismatches)} mismatches\n")
        assert self._mismatches[:8] == [], f"{len(self._mismatches)} mismatches"
        assert self._cases == cases
