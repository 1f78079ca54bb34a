# SPDX-License-Identifier: Apache-2.0
"""Judges rows of an author's model: nobody knows what they should be, so each must be one that a forward computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.outputs import RequestRows
from omni_core.testing.ledger_records import ContentRecord, StepDue
from omni_core.testing.model_check.understanding import same_value
from omni_core.testing.row_judge import OracleViolationError, positions_of, short
from omni_core.testing.tap import RowTap


@dataclass(frozen=True, slots=True)
class DeliveredRows:
    """Rows of one key that one delivery brought, zeros left out. Copies."""

    content: ContentRecord
    key: str
    positions: tuple[int, ...]
    rows: torch.Tensor
    num_from_hit: int
    """How many of them the forward of that step did not compute for the request itself."""


class TappedRowJudge:
    """Judges rows by the tap alone, bit for bit. Engine thread.

    Args:
        tap: every row that was computed.
        keeps_hidden: whether hidden rows are stored; if not, each delivery has those of its own step only.
        contents: every content so far, to say whose row a wrong one is.
    """

    def __init__(self, tap: RowTap, *, keeps_hidden: bool, contents: Callable[[], Sequence[ContentRecord]]) -> None:
        self.delivered: list[DeliveredRows] = []
        """Everything judged, for whoever compares it with something else."""
        self.shares: Counter[str] = Counter()
        """By key without rows: how many requests were given the right share of it."""
        self.hidden_comes = True
        """Whether the model's latest forward returned hidden rows."""
        self._tap = tap
        self._keeps_hidden = keeps_hidden
        self._contents = contents

    def check(
        self, where: str, owed: StepDue, emitted: Collection[str], delivery: RequestRows, positions: Sequence[int]
    ) -> tuple[dict[str, int], int]:
        """Judge every key of a delivery of `positions`.

        Returns:
            Rows served under each key, and how many rows were rightly zeros.

        Raises:
            OracleViolationError: names what is wrong.
        """
        expected = {key for position in positions for key in self._keys_at(owed, position)}
        if not expected <= set(delivery.rows):
            raise OracleViolationError(
                f"{where}: rows of {sorted(expected)} exist, delivered only {sorted(delivery.rows)}"
            )
        served, zeros = {}, 0
        for name, rows in delivery.rows.items():
            num_zeros = self._check_key(f"{where}, key {name!r}", name, owed, emitted, delivery, positions)
            served[name] = rows.shape[0] - num_zeros
            zeros += num_zeros
        return served, zeros

    def check_leftovers(self, where: str, expected: Mapping[str, Any], delivery: RequestRows) -> None:
        """Judge what has no row per token.

        Raises:
            OracleViolationError: names what is wrong.
        """
        if set(delivery.leftovers) != set(expected):
            raise OracleViolationError(f"{where}: leftovers {sorted(delivery.leftovers)}, expected {sorted(expected)}")
        for name, value in expected.items():
            if not same_value(delivery.leftovers[name], value):
                raise OracleViolationError(
                    f"{where}: leftover {name!r} is {delivery.leftovers[name]!r}, the model returned {value!r}"
                )
            self.shares[name] += 1

    def _keys_at(self, owed: StepDue, position: int) -> frozenset[str]:
        comes = self._keeps_hidden or (self.hidden_comes and position >= owed.run.start)
        return owed.keys_at[position] if comes else owed.keys_at[position] - {HIDDEN_KEY}

    def _check_key(
        self,
        where: str,
        name: str,
        owed: StepDue,
        emitted: Collection[str],
        delivery: RequestRows,
        positions: Sequence[int],
    ) -> int:
        rows = delivery.rows[name]
        covered = positions_of(where, delivery.ranges_of(name))
        zeros = set(positions_of(where, delivery.zero_ranges.get(name, ())))
        stored = [position for position in positions if name in self._keys_at(owed, position)]
        if rows.shape[0] != len(covered):
            raise OracleViolationError(f"{where}: {rows.shape[0]} rows for positions {delivery.ranges_of(name)}")
        if not set(stored) <= set(covered) or not set(covered) <= set(positions):
            raise OracleViolationError(f"{where}: covers {delivery.ranges_of(name)}, rows exist at {short(stored)}")
        whole = name in emitted or (name == HIDDEN_KEY and self._keeps_hidden)
        if whole and covered != list(positions):
            raise OracleViolationError(f"{where}: covers {delivery.ranges_of(name)} of {delivery.ranges}")
        if zeros != set(covered) - set(stored):
            raise OracleViolationError(
                f"{where}: zero_ranges say {short(sorted(zeros))}, "
                f"but no row was ever stored at {short(sorted(set(covered) - set(stored)))}"
            )
        if bool(rows[[i for i, position in enumerate(covered) if position in zeros]].count_nonzero()):
            raise OracleViolationError(f"{where}: rows at {short(sorted(zeros))} were never stored and are not zeros")
        self._check_tap(where, name, owed, rows, covered, zeros)
        return len(zeros)

    def _check_tap(
        self,
        where: str,
        name: str,
        owed: StepDue,
        rows: torch.Tensor,
        covered: Sequence[int],
        zeros: Collection[int],
    ) -> None:
        served = [i for i, position in enumerate(covered) if position not in zeros]
        if not served:
            return
        content, at = owed.content, [covered[i] for i in served]
        verdicts = self._tap.equal(name, content.digests(at), at, rows[served])
        if not verdicts.all():
            wrong = int(np.argmin(verdicts))
            raise OracleViolationError(
                f"{where}, position {at[wrong]}: the model computed other rows for this prefix; "
                f"{self._whose(rows[served[wrong]])}"
            )
        from_hit = sum(position < owed.run.start for position in at)
        self.delivered.append(DeliveredRows(content, name, tuple(at), rows[served].clone(), from_hit))

    def _whose(self, row: torch.Tensor) -> str:
        names = [
            f"position {entry.position} of request {content.track.req_id!r} under {entry.key!r}"
            for entry in self._tap.find(row)
            for content in self._contents()
            if len(content.digester) > entry.position and content.digester[entry.position] == entry.digest
        ]
        return f"it is the row of {', '.join(names[:3])}" if names else "no forward computed this one"
