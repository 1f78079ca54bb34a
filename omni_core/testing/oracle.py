# SPDX-License-Identifier: Apache-2.0
"""Judges every delivery: a right cache delivers just the rows the ledger says exist, each once, each the right one.

A delivered row must equal what the model computes for that request, position and key, and what the tap saw a
forward of this very run compute. A row that no forward stored must not appear; a row that one did must not be missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.errors import HitRowsAbsentError
from omni_core.prefix_cache.outputs import PartialRequest, RequestRows, StageCacheOutputs, TokenRange
from omni_core.testing.fake_model import FakeModel
from omni_core.testing.ledger import EngineLedger, RequestRecord
from omni_core.testing.output_builder import BuiltStep
from omni_core.testing.sim_engine import SavedStep
from omni_core.testing.sim_scheduler import ScheduledRun
from omni_core.testing.tap import RowTap, row_bytes


class OracleViolationError(AssertionError):
    """A delivery that a right cache does not make. Names the step, the request, the position and the key."""


class RowKind(Enum):
    """Ways a row comes to be delivered (or, for one kind, refused) that a cache can get wrong."""

    STORED_HIT = "stored hits"
    """Rows of a prefix hit that an earlier step computed."""
    SAME_STEP_HIT = "same-step hits"
    """Rows of a prefix hit that this very step computed for another request."""
    RECYCLED_BLOCK = "recycled blocks, other key set"
    """Rows of a prefix hit in a block whose previous tenant stored another set of keys there."""
    HASHED_NEVER_COMPUTED = "hashed, never computed"
    """Positions of a prefix hit for which no forward ran: reported in `failed`, never served."""
    PARTIAL_CHUNK = "partial chunks"
    """Rows of prompts that were computed in several chunks."""
    LATE_MATERIALISE = "late materialise"
    """Rows materialised after the engine had started a later step."""
    LATE_AFTER_REUSE = "late, slot given away"
    """Rows of a prefix hit materialised after their block had begun another tenancy."""
    REDELIVERED = "discarded, delivered later"
    """Rows of a discarded or unasked step, delivered with a later one."""
    ABSENT_KEY_ZEROS = "zeros for a key not stored"
    """Rows of a further key behind a hit where no forward stored that key."""
    COPIED_BLOCK = "hits inside a copied block"
    """Rows of a prefix hit that were stored in another block and came along with its copy."""


class StageOracle:
    """Judges one cache by the ledger of its engine. One thread: the engine's.

    Args:
        model: what rows are.
        block_size: tokens per block.
        tap: what rows were computed; the ledger feeds it.
    """

    def __init__(self, model: FakeModel, block_size: int, tap: RowTap) -> None:
        self.ledger = EngineLedger(block_size, tap)
        self.counts: Counter[RowKind] = Counter()
        self.rows_delivered = 0
        self.requests_failed = 0
        self.requests_partial = 0
        self._model = model
        self._key_names = frozenset(key.name for key in model.all_keys)
        self._tap = tap

    def check(self, built: BuiltStep) -> None:
        """Judge one materialised step; `built.outputs` must not be released yet.

        Raises:
            OracleViolationError: names what is wrong.
        """
        outputs, step = built.outputs, built.order.step
        if outputs is None:
            return
        asked = set(built.order.req_ids or ())
        answered = set(outputs) | set(outputs.failed)
        if answered != asked or set(outputs) & set(outputs.failed):
            raise OracleViolationError(
                f"step {step.step_id}: asked for {sorted(asked)}, served {sorted(outputs)}, "
                f"failed {sorted(outputs.failed)}"
            )
        for run in step.runs:
            if run.req_id in asked:
                self._check_request(built, outputs, run)

    def _check_request(self, built: BuiltStep, outputs: StageCacheOutputs, run: ScheduledRun) -> None:
        request = self.ledger.requests[run.req_id]
        where = f"step {built.order.step.step_id}, request {run.req_id!r}"
        error = outputs.failed.get(run.req_id)
        if request.absent:
            if error is None:
                raise OracleViolationError(
                    f"{where}: {request.absent} of {request.hit} hit positions were never computed, yet it was served"
                )
            if not isinstance(error, HitRowsAbsentError):
                raise OracleViolationError(f"{where}: expected HitRowsAbsentError, got {error!r}")
            if not request.failure_reported:
                request.failure_reported = True
                self.requests_failed += 1
                self.counts[RowKind.HASHED_NEVER_COMPUTED] += request.absent
            return
        if error is not None:
            raise OracleViolationError(f"{where}: every row of it exists, yet it failed with {error!r}") from error
        delivery = outputs[run.req_id]
        positions = self._check_positions(where, request, run, delivery)
        self._check_keys(where, built.order.step, request, delivery, positions)
        self._check_leftovers(where, built.order.step.leftovers[run.req_id], delivery)
        request.delivered.update(positions)
        self.rows_delivered += len(positions)
        self._count(built, request, run, positions)

    def _check_positions(
        self, where: str, request: RequestRecord, run: ScheduledRun, delivery: RequestRows
    ) -> list[int]:
        positions = _positions_of(where, delivery.ranges)
        own_start = 0 if run.first else run.start
        missing = sorted(set(range(own_start, run.stop)) - set(positions))
        if missing:
            raise OracleViolationError(
                f"{where}: delivered {delivery.ranges}, but the step owes [{own_start}, {run.stop}); "
                f"first missing position {missing[0]}"
            )
        twice = sorted(request.delivered.intersection(positions))
        if twice:
            raise OracleViolationError(f"{where}: delivered {delivery.ranges}; position {twice[0]} came before already")
        if positions[-1] >= run.stop:
            raise OracleViolationError(f"{where}: delivered {delivery.ranges}, but the step ends at {run.stop}")
        return positions

    def _check_keys(
        self,
        where: str,
        step: SavedStep,
        request: RequestRecord,
        delivery: RequestRows,
        positions: Sequence[int],
    ) -> None:
        expected_keys = {key for position in positions for key in request.keys_at[position]}
        if not expected_keys <= set(delivery.rows):
            raise OracleViolationError(
                f"{where}: rows of {sorted(expected_keys)} exist, delivered only {sorted(delivery.rows)}"
            )
        for name, rows in delivery.rows.items():
            if name not in self._key_names:
                raise OracleViolationError(f"{where}: delivered rows under {name!r}, which the model does not have")
            self._check_key(f"{where}, key {name!r}", name, step, request, delivery, rows, positions)

    def _check_key(
        self,
        where: str,
        name: str,
        step: SavedStep,
        request: RequestRecord,
        delivery: RequestRows,
        rows: torch.Tensor,
        positions: Sequence[int],
    ) -> None:
        covered = _positions_of(where, delivery.ranges_of(name))
        zeros = set(_positions_of(where, delivery.zero_ranges.get(name, ())))
        stored = [position for position in positions if name in request.keys_at[position]]
        strict = name == HIDDEN_KEY or name in step.emitted
        if not set(stored) <= set(covered) or not set(covered) <= set(positions):
            raise OracleViolationError(f"{where}: covers {delivery.ranges_of(name)}, rows exist at {_short(stored)}")
        if strict and covered != list(positions):
            raise OracleViolationError(f"{where}: covers {delivery.ranges_of(name)} of {delivery.ranges}")
        expected_zeros = set(covered) - set(stored)
        if zeros != expected_zeros:
            raise OracleViolationError(
                f"{where}: zero_ranges say {_short(sorted(zeros))}, "
                f"but no row was ever stored at {_short(sorted(expected_zeros))}"
            )
        key = self._model.key(name)
        expected = self._model.rows(key, request.track, np.array(covered, np.int64))
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
        self._check_tap(where, name, request, rows, covered, zeros)
        self.counts[RowKind.ABSENT_KEY_ZEROS] += len(zeros)

    def _check_tap(
        self, where: str, name: str, request: RequestRecord, rows: torch.Tensor, covered: Sequence[int], zeros: set[int]
    ) -> None:
        served = [i for i, position in enumerate(covered) if position not in zeros]
        if not served:
            return
        at = [covered[i] for i in served]
        verdicts = self._tap.equal(name, request.digests(at), at, rows[served])
        if not verdicts.all():
            position = at[int(np.argmin(verdicts))]
            raise OracleViolationError(f"{where}, position {position}: no forward of this run computed that row")

    def _check_leftovers(self, where: str, expected: Mapping[str, Any], delivery: RequestRows) -> None:
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

    def _whose(self, row: torch.Tensor, is_zero: bool) -> str:
        if is_zero:
            return "it is all zeros"
        entries = self._tap.find(row)
        if not entries:
            return "no forward of this run computed it"
        names = [
            f"position {entry.position} of request {req_id!r} under {entry.key!r}"
            for entry in entries
            for req_id, request in self.ledger.requests.items()
            if len(request.digester) > entry.position and request.digester[entry.position] == entry.digest
        ]
        return "it is the row of " + ", ".join(names[:3])

    def _count(self, built: BuiltStep, request: RequestRecord, run: ScheduledRun, positions: Sequence[int]) -> None:
        own_start = 0 if run.first else run.start
        hits = [request.hit_facts[position] for position in positions if position < request.hit]
        same_step = sum(fact.same_step for fact in hits)
        self.counts.update(
            {
                RowKind.LATE_MATERIALISE: len(positions) if built.order.steps_late > 0 else 0,
                RowKind.PARTIAL_CHUNK: len(request.chunked.intersection(positions)),
                RowKind.REDELIVERED: sum(position < own_start for position in positions),
                RowKind.SAME_STEP_HIT: same_step,
                RowKind.STORED_HIT: len(hits) - same_step,
                RowKind.RECYCLED_BLOCK: sum(fact.recycled for fact in hits),
                RowKind.COPIED_BLOCK: sum(fact.copied for fact in hits),
                RowKind.LATE_AFTER_REUSE: sum(self.ledger.was_given_away(fact) for fact in hits),
            }
        )

    # -- the end ------------------------------------------------------------------------------------------------------

    def check_ended(self, partials: Sequence[PartialRequest]) -> None:
        """Judge the whole run, once every step was consumed and every request has ended.

        Every promised row was delivered once, or is named missing in a partial report, never both.

        Raises:
            OracleViolationError: names the request and the position.
        """
        missing: dict[str, list[int]] = {}
        for partial in partials:
            where = f"partial report of request {partial.req_id!r}"
            missing.setdefault(partial.req_id, []).extend(_positions_of(where, partial.missing))
        unknown = set(missing) - set(self.ledger.requests)
        if unknown:
            raise OracleViolationError(f"partial report of unknown request {min(unknown)!r}")
        for req_id, request in self.ledger.requests.items():
            reported = missing.get(req_id, [])
            if request.absent:
                continue
            # A hit whose request ended before any step of it was saved may be reported; nothing was promised yet.
            promised = request.promised_upto or (request.hit if reported else 0)
            accounted = sorted([*request.delivered, *reported])
            if accounted != list(range(promised)):
                lost = sorted(set(range(promised)) - set(accounted))
                raise OracleViolationError(
                    f"request {req_id!r}: {promised} rows promised, {len(request.delivered)} delivered, "
                    f"{len(reported)} reported missing; unaccounted: {_short(lost)}"
                )
            self.requests_partial += bool(reported)


def _positions_of(where: str, ranges: Sequence[TokenRange]) -> list[int]:
    positions: list[int] = []
    for start, stop in ranges:
        if start >= stop or (positions and start <= positions[-1]):
            raise OracleViolationError(f"{where}: ranges {tuple(ranges)} are not ascending, disjoint and non-empty")
        positions.extend(range(start, stop))
    return positions


def _short(positions: Sequence[int]) -> str:
    listed = ", ".join(map(str, positions[:6]))
    return f"[{listed}{', …' if len(positions) > 6 else ''}]"
