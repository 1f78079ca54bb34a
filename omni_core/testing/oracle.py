# SPDX-License-Identifier: Apache-2.0
"""Judges every delivery: a right cache delivers just the rows the ledger says exist, each once, each the right one.

A delivered row must equal what the model computes for that request, position and key, and what the tap saw a
forward of this very run compute. A row that no forward stored must not appear; a row that one did must not be missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from omni_core.prefix_cache.errors import ContentReplacedError, HitRowsAbsentError, RequestError
from omni_core.prefix_cache.outputs import PartialRequest, RequestRows, StageCacheOutputs
from omni_core.testing.fake_model import FakeModel
from omni_core.testing.final_account import check_everything_accounted
from omni_core.testing.ledger import EngineLedger
from omni_core.testing.ledger_records import StepDue
from omni_core.testing.output_builder import BuiltStep
from omni_core.testing.row_checker import RowChecker
from omni_core.testing.row_judge import OracleViolationError, RowJudge, positions_of
from omni_core.testing.row_kinds import RowKind, count_delivery
from omni_core.testing.tap import RowTap

__all__ = ["OracleViolationError", "RowKind", "StageOracle"]


class StageOracle:
    """Judges one cache by the ledger of its engine. One thread: the engine's.

    Args:
        model: what rows are; or who judges rows in its place.
        block_size: tokens per block.
        tap: what rows were computed; the ledger feeds it.
        deferred_keys: keys whose rows may stay on the device for a while; they are counted.
        digests_told: whether the cache is told block digests, so that it can know which rows a hash stands for.
    """

    def __init__(
        self,
        model: FakeModel | RowChecker,
        block_size: int,
        tap: RowTap,
        *,
        deferred_keys: Collection[str] = (),
        digests_told: bool = False,
    ) -> None:
        self.ledger = EngineLedger(block_size, tap, digests_told=digests_told)
        self.counts: Counter[RowKind] = Counter()
        self.rows_delivered = 0
        """Positions delivered and judged."""
        self.rows_kept = 0
        """Of those, positions that were not taken back for want of an acknowledgement."""
        self.requests_failed = 0
        self.requests_partial = 0
        self._deferred_keys = frozenset(deferred_keys)
        self._rows: RowChecker = (
            RowJudge(model, tap, lambda: self.ledger.contents) if isinstance(model, FakeModel) else model
        )

    def check(self, built: BuiltStep) -> None:
        """Judge one materialised step; `built.outputs` must not be released yet.

        Its rows count as delivered for good; see `taken_back`.

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
        for req_id in step.req_ids:
            if req_id in asked:
                self._check_request(built, outputs, self.ledger.due(step, req_id))

    def taken_back(self, built: BuiltStep, req_ids: Collection[str]) -> None:
        """The outputs were released, and the rows of these requests had not been acknowledged: they stay owed."""
        outputs = built.outputs
        if outputs is None:
            return
        for req_id in req_ids:
            content = self.ledger.due(built.order.step, req_id).content
            positions = positions_of(req_id, outputs[req_id].ranges)
            content.delivered.difference_update(positions)
            self.rows_kept -= len(positions)

    def check_ended(self, partials: Sequence[PartialRequest]) -> None:
        """Judge the whole run, once every step was consumed and every request has ended.

        Every promised row was delivered once, or is named missing in a partial report, never both.

        Raises:
            OracleViolationError: names the request and the position.
        """
        self.requests_partial += check_everything_accounted(self.ledger.contents, partials)

    def _check_request(self, built: BuiltStep, outputs: StageCacheOutputs, owed: StepDue) -> None:
        where = f"step {built.order.step.step_id}, request {owed.run.req_id!r}"
        error = outputs.failed.get(owed.run.req_id)
        if self._check_replaced(where, built, owed, error) or self._check_refusal(where, owed, error):
            return
        if error is not None:
            raise OracleViolationError(f"{where}: every row of it exists, yet it failed with {error!r}") from error
        delivery = outputs[owed.run.req_id]
        positions = self._check_positions(where, owed, delivery)
        served, zeros = self._rows.check(where, owed, built.order.step.emitted, delivery, positions)
        self._rows.check_leftovers(where, built.order.step.leftovers[owed.run.req_id], delivery)
        owed.content.delivered.update(positions)
        self.rows_delivered += len(positions)
        self.rows_kept += len(positions)
        self.counts[RowKind.ABSENT_KEY_ZEROS] += zeros
        self.counts[RowKind.DEFERRED] += sum(served.get(key, 0) for key in self._deferred_keys)
        count_delivery(
            self.counts,
            owed,
            positions,
            late=built.order.steps_late > 0,
            was_given_away=self.ledger.was_given_away,
        )

    def _check_replaced(self, where: str, built: BuiltStep, owed: StepDue, error: RequestError | None) -> bool:
        """Whether the content was replaced before the step was asked for, so that its rows are nobody's."""
        replaced_in = owed.content.replaced_in
        if isinstance(error, ContentReplacedError):
            if replaced_in is None or replaced_in > built.announcing_after:
                raise OracleViolationError(f"{where}: its content was not replaced, yet it failed with {error!r}")
            self.counts[RowKind.REPLACED] += len(owed.due)
            return True
        was_refused = isinstance(error, HitRowsAbsentError)  # before its replacement; judged as a refusal
        if replaced_in is not None and replaced_in <= built.announced_before and not was_refused:
            raise OracleViolationError(
                f"{where}: its content was replaced in schedule {replaced_in}, before the step was asked for; "
                f"expected ContentReplacedError, got {'its rows' if error is None else repr(error)}"
            )
        return False

    def _check_refusal(self, where: str, owed: StepDue, error: RequestError | None) -> bool:
        """Whether the request was rightly refused: rows of a hit do not exist."""
        content, refused = owed.content, isinstance(error, HitRowsAbsentError)
        if content.failed_in is not None and content.failed_in <= owed.number:
            if error is None:
                raise OracleViolationError(
                    f"{where}: rows of its hit of {content.hit} were never computed, yet it was served"
                )
            if not refused:
                raise OracleViolationError(f"{where}: expected HitRowsAbsentError, got {error!r}")
            self._count_failure(owed)
            return True
        if content.doubtful_from is None or content.doubtful_from > owed.number:
            return False
        if error is not None and not refused:
            raise OracleViolationError(f"{where}: expected its rows or HitRowsAbsentError, got {error!r}")
        if refused:
            content.refused_from = min(owed.number, content.refused_from or owed.number)
            self._count_failure(owed)
        else:
            content.served_upto = max(owed.number, content.served_upto)
        if content.refused_from is not None and content.refused_from <= content.served_upto:
            raise OracleViolationError(
                f"{where}: refused in schedule {content.refused_from}, yet served in schedule {content.served_upto}"
            )
        return refused

    def _count_failure(self, owed: StepDue) -> None:
        self.counts[RowKind.HASHED_NEVER_COMPUTED] += len(owed.absent)
        self.counts[RowKind.OTHER_CONTENT] += owed.absent_other_content
        self.counts[RowKind.OLD_WEIGHTS] += owed.absent_old_weights
        if not owed.content.failure_counted:
            owed.content.failure_counted = True
            self.requests_failed += 1

    def _check_positions(self, where: str, owed: StepDue, delivery: RequestRows) -> list[int]:
        content, run = owed.content, owed.run
        positions = positions_of(where, delivery.ranges)
        missing = sorted(set(owed.due) - set(positions))
        if missing:
            raise OracleViolationError(
                f"{where}: delivered {delivery.ranges}, but the step owes {len(owed.due)} rows up to position "
                f"{owed.valid_stop}; first missing position {missing[0]}"
            )
        twice = sorted(content.delivered.intersection(positions))
        if twice:
            raise OracleViolationError(f"{where}: delivered {delivery.ranges}; position {twice[0]} came before already")
        if positions and positions[-1] >= owed.valid_stop:
            raise OracleViolationError(
                f"{where}: delivered {delivery.ranges}, but the step ends at {owed.valid_stop} "
                f"(it ran [{run.start}, {run.stop}) with {len(run.drafts)} drafts)"
            )
        return positions
