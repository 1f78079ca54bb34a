# SPDX-License-Identifier: Apache-2.0
"""Delivered rows against the same rows without a cache: each request's tokens computed alone, in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.testing.model_check.calls import ModelCaller, ModelForward
from omni_core.testing.model_check.findings import Finding, Problem, wrong
from omni_core.testing.model_check.judge import DeliveredRows
from omni_core.testing.model_check.probes import Tokens, run_of
from omni_core.testing.model_check.rows import row_differences, tolerance_of


@dataclass(slots=True)
class KeyComparison:
    """One key's delivered rows."""

    dtype: torch.dtype
    rows: int = 0
    from_hits: int = 0
    largest_difference: float = 0.0
    """Relative to the row's largest element."""
    where: str = ""
    """The row with the largest difference."""


class NoCacheComparison:
    """Compares. One thread; each distinct request costs one more forward.

    Args:
        caller: the model.
        tolerance: see `tolerance_of`.
    """

    def __init__(self, caller: ModelCaller, tolerance: float | None) -> None:
        self.counts: dict[str, KeyComparison] = {}
        self._caller = caller
        self._tolerance = tolerance
        self._alone: dict[Tokens, ModelForward] = {}

    def take(self, delivered: Sequence[DeliveredRows]) -> None:
        """Compare some deliveries.

        Raises:
            AuthoredModelError: the model raised, or returned what no stage can take.
        """
        for each in delivered:
            count = self.counts.setdefault(each.key, KeyComparison(each.rows.dtype))
            count.rows += len(each.positions)
            count.from_hits += each.num_from_hit
            alone = self._rows_alone(each)
            if alone is None:
                continue
            apart = row_differences(each.rows, alone[list(each.positions)])
            at = int(apart.argmax())
            if float(apart[at]) > count.largest_difference:
                count.largest_difference = float(apart[at])
                count.where = f"request {each.content.track.req_id!r}, position {each.positions[at]}"

    def findings(self) -> list[Finding]:
        """One per key whose rows differ by more than they may."""
        remedy = "The model itself computed both rows for that token prefix: make them the same."
        return [
            wrong(
                Problem.DIFFERS_WITHOUT_CACHE,
                key,
                f"At {count.where}, the delivered row differs by {count.largest_difference:.2g} of the row's largest "
                "element from the row computed alone.",
                remedy,
            )
            for key, count in sorted(self.counts.items())
            if count.largest_difference > tolerance_of(count.dtype, self._tolerance)
        ]

    def _rows_alone(self, delivered: DeliveredRows) -> torch.Tensor | None:
        """The key's rows of that content's tokens, computed by themselves; `None`: the key did not come."""
        tokens = tuple(delivered.content.track.token_ids)
        if tokens not in self._alone:
            self._alone[tokens] = self._caller([run_of(tokens)]).kept()
        forward = self._alone[tokens]
        if delivered.key == HIDDEN_KEY:
            return forward.hidden
        return forward.outputs[delivered.key] if forward.has_row_per_token(delivered.key) else None
