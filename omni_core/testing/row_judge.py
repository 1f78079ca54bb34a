# SPDX-License-Identifier: Apache-2.0
"""Judges the rows of one delivery, key by key: each is the row the model computes, and one a forward did compute."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.outputs import RequestRows, TokenRange
from omni_core.testing.fake_model import FakeModel
from omni_core.testing.ledger_records import ContentRecord, StepDue
from omni_core.testing.tap import RowTap, row_bytes


class OracleViolationError(AssertionError):
    """A delivery that a right cache does not make. Names the step, the request, the position and the key."""


class RowJudge:
    """Judges rows against the model and the tap.

    Args:
        model: what rows are.
        tap: what rows were computed.
        contents: every content so far, to say whose row a wrong one is.
    """

    def __init__(self, model: FakeModel, tap: RowTap, contents: Callable[[], Sequence[ContentRecord]]) -> None:
        self._model = model
        self._tap = tap
        self._contents = contents
        self._key_names = frozenset(key.name for key in model.all_keys)

    def check(
        self, where: str, owed: StepDue, emitted: Collection[str], delivery: RequestRows, positions: Sequence[int]
    ) -> tuple[dict[str, int], int]:
        """Judge every key of a delivery of `positions`.

        Returns:
            Rows served under each key, and how many rows were rightly zeros.

        Raises:
            OracleViolationError: names what is wrong.
        """
        expected_keys = {key for position in positions for key in owed.keys_at[position]}
        if not expected_keys <= set(delivery.rows):
            raise OracleViolationError(
                f"{where}: rows of {sorted(expected_keys)} exist, delivered only {sorted(delivery.rows)}"
            )
        served, zeros = {}, 0
        for name, rows in delivery.rows.items():
            if name not in self._key_names:
                raise OracleViolationError(f"{where}: delivered rows under {name!r}, which the model does not have")
            count = self._check_key(f"{where}, key {name!r}", name, owed, emitted, delivery, rows, positions)
            served[name] = rows.shape[0] - count
            zeros += count
        return served, zeros

    def check_leftovers(self, where: str, expected: Mapping[str, Any], delivery: RequestRows) -> None:
        """Judge the values that have no row per token.

        Raises:
            OracleViolationError: names what is wrong.
        """
        if set(delivery.leftovers) != set(expected):
            raise OracleViolationError(f"{where}: leftovers {sorted(delivery.leftovers)}, expected {sorted(expected)}")
        for name, value in expected.items():
            given = delivery.leftovers[name]
            if isinstance(value, torch.Tensor) and isinstance(given, torch.Tensor):
                same = given.dtype == value.dtype and torch.equal(given, value)
            else:
                same = given is value
            if not same:
                raise OracleViolationError(f"{where}: leftover {name!r} is {given!r}, expected {value!r}")

    def _check_key(
        self,
        where: str,
        name: str,
        owed: StepDue,
        emitted: Collection[str],
        delivery: RequestRows,
        rows: torch.Tensor,
        positions: Sequence[int],
    ) -> int:
        covered = positions_of(where, delivery.ranges_of(name))
        zeros = set(positions_of(where, delivery.zero_ranges.get(name, ())))
        stored = [position for position in positions if name in owed.keys_at[position]]
        strict = name == HIDDEN_KEY or name in emitted
        if not set(stored) <= set(covered) or not set(covered) <= set(positions):
            raise OracleViolationError(f"{where}: covers {delivery.ranges_of(name)}, rows exist at {short(stored)}")
        if strict and covered != list(positions):
            raise OracleViolationError(f"{where}: covers {delivery.ranges_of(name)} of {delivery.ranges}")
        expected_zeros = set(covered) - set(stored)
        if zeros != expected_zeros:
            raise OracleViolationError(
                f"{where}: zero_ranges say {short(sorted(zeros))}, "
                f"but no row was ever stored at {short(sorted(expected_zeros))}"
            )
        self._check_rows(where, name, owed.content, rows, covered, zeros)
        return len(zeros)

    def _check_rows(
        self,
        where: str,
        name: str,
        content: ContentRecord,
        rows: torch.Tensor,
        covered: Sequence[int],
        zeros: Collection[int],
    ) -> None:
        key = self._model.key(name)
        expected = self._model.rows(key, content.track, np.array(covered, np.int64))
        if rows.shape != expected.shape or rows.dtype != expected.dtype:
            raise OracleViolationError(
                f"{where}: rows are {tuple(rows.shape)} of {rows.dtype}, "
                f"the model's are {tuple(expected.shape)} of {expected.dtype}"
            )
        if not covered:
            return
        given, right = row_bytes(rows), row_bytes(expected)
        zero_row = bytes(key.row_bytes)
        for i, position in enumerate(covered):
            if given[i] != (zero_row if position in zeros else right[i]):
                raise OracleViolationError(
                    f"{where}, position {position}: wrong row {rows[i].flatten()[:4].tolist()}, expected "
                    f"{'zeros' if position in zeros else expected[i].flatten()[:4].tolist()}; "
                    f"{self._whose(rows[i], given[i] == zero_row)}"
                )
        self._check_tap(where, name, content, rows, covered, zeros)

    def _check_tap(
        self,
        where: str,
        name: str,
        content: ContentRecord,
        rows: torch.Tensor,
        covered: Sequence[int],
        zeros: Collection[int],
    ) -> None:
        served = [i for i, position in enumerate(covered) if position not in zeros]
        if not served:
            return
        at = [covered[i] for i in served]
        verdicts = self._tap.equal(name, content.digests(at), at, rows[served])
        if not verdicts.all():
            position = at[int(np.argmin(verdicts))]
            raise OracleViolationError(f"{where}, position {position}: no forward of this run computed that row")

    def _whose(self, row: torch.Tensor, is_zero: bool) -> str:
        if is_zero:
            return "it is all zeros"
        entries = self._tap.find(row)
        if not entries:
            return "no forward of this run computed it"
        names = [
            f"position {entry.position} of request {content.track.req_id!r} under {entry.key!r}"
            for entry in entries
            for content in self._contents()
            if len(content.digester) > entry.position and content.digester[entry.position] == entry.digest
        ]
        if not names:
            return f"it is of a rejected draft, at position {entries[0].position} under {entries[0].key!r}"
        return "it is the row of " + ", ".join(names[:3])


def positions_of(where: str, ranges: Sequence[TokenRange]) -> list[int]:
    """The positions of ranges, which must be ascending, disjoint and non-empty.

    Raises:
        OracleViolationError: they are not.
    """
    positions: list[int] = []
    for start, stop in ranges:
        if start >= stop or (positions and start <= positions[-1]):
            raise OracleViolationError(f"{where}: ranges {tuple(ranges)} are not ascending, disjoint and non-empty")
        positions.extend(range(start, stop))
    return positions


def short(positions: Sequence[int]) -> str:
    """The first few of some positions."""
    listed = ", ".join(map(str, positions[:6]))
    return f"[{listed}{', …' if len(positions) > 6 else ''}]"
