# SPDX-License-Identifier: Apache-2.0
"""What the oracle asks of whoever judges rows: one for the fake model, whose rows are known, one for any other."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from omni_core.prefix_cache.outputs import RequestRows
from omni_core.testing.ledger_records import StepDue


class RowChecker(Protocol):
    """Judges what one step delivered to one request. Engine thread."""

    def check(
        self, where: str, owed: StepDue, emitted: Collection[str], delivery: RequestRows, positions: Sequence[int]
    ) -> tuple[dict[str, int], int]:
        """Judge every key of a delivery of `positions`.

        Returns:
            Rows served under each key, and how many rows were rightly zeros.

        Raises:
            OracleViolationError: names what is wrong.
        """

    def check_leftovers(self, where: str, expected: Mapping[str, Any], delivery: RequestRows) -> None:
        """Judge the values that have no row per token.

        Raises:
            OracleViolationError: names what is wrong.
        """
