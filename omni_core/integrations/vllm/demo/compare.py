# SPDX-License-Identifier: Apache-2.0
"""Holds delivered rows against what forwards really computed: bit for bit in one run, row-relative across runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from omni_core.integrations.vllm.demo.job import ComparedRequest, DeliveredRequest
from omni_core.integrations.vllm.tapped_request import prefix_digests
from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.sinks.rows import StoredRequest


class RowTap(Protocol):
    """The part of a tap that comparing needs."""

    def rows(self, digest: bytes, position: int, key: str = HIDDEN_KEY) -> list[torch.Tensor]:
        """The bitwise different rows computed for one token prefix."""
        ...

    def equal_rows(
        self, token_ids: Sequence[int], rows: torch.Tensor, key: str = HIDDEN_KEY, first_position: int = 0
    ) -> npt.NDArray[np.bool_]:
        """Per row, whether a forward computed exactly this row for its prefix."""
        ...


def check_against_tap(
    name: str, path: Path, stored: StoredRequest, tap: RowTap, prompt: Sequence[int], generated: Sequence[int]
) -> DeliveredRequest:
    """Whether a file holds exactly the request's rows, each as a forward of this run computed it.

    Args:
        name: the client's request id.
        path: the file.
        stored: what was read from it.
        tap: the run's.
        prompt: the prompt's token ids.
        generated: every sampled token id; the last one has no row.
    """
    fed = [*prompt, *generated[:-1]]
    equal = [int(tap.equal_rows(fed, rows, key).sum()) for key, rows in stored.rows.items() if len(rows) <= len(fed)]
    return DeliveredRequest(
        name=name,
        file=str(path),
        rows=stored.num_rows,
        rows_equal_to_tap=min(equal, default=0),
        problem=_problem_of(stored, fed),
    )


def _problem_of(stored: StoredRequest, fed: Sequence[int]) -> str | None:
    if not stored.complete:
        return f"the file is not of a whole request: end {stored.end.value}, missing {list(stored.missing)}"
    if stored.ranges != ((0, len(fed)),):
        return f"the file covers positions {list(stored.ranges)}, not [0, {len(fed)})"
    if HIDDEN_KEY not in stored.rows:
        return "the file has no hidden rows"
    for key in stored.rows:
        if stored.ranges_of(key) != stored.ranges:
            return f"key {key!r} covers positions {list(stored.ranges_of(key))} only"
    if stored.token_ids.tolist() != list(fed):
        return "the file's token ids are not the tokens that were fed to the model"
    return None


def cache_off_rows(tap: RowTap, prompt: Sequence[int]) -> list[list[torch.Tensor]]:
    """Per prompt position, every different hidden row the tap's engine has computed for that prefix."""
    return [tap.rows(digest, position) for position, digest in enumerate(prefix_digests(prompt))]


def compare_with_cache_off(
    name: str,
    delivered: torch.Tensor,
    reference: Sequence[Sequence[torch.Tensor]],
    reference_again: Sequence[Sequence[torch.Tensor]] | None,
) -> ComparedRequest:
    """The largest row-relative differences over a prompt.

    Args:
        name: the client's request id.
        delivered: `(at least num_prompt_tokens, hidden_size)`: rows of the cache-on run, from position 0.
        reference: per prompt position, the rows the cache-off engine computed in the waves.
        reference_again: the same after this prompt ran once more in a batch of another shape; holds `reference`. `None`
            if it did not.
    """
    absent = [position for position, rows in enumerate(reference) if not rows]
    if absent:
        return ComparedRequest(name, problem=f"the cache-off run computed no row for positions {absent[:8]}")
    if len(delivered) < len(reference):
        return ComparedRequest(name, problem=f"{len(delivered)} rows delivered for {len(reference)} prompt tokens")
    largest, at_position = 0.0, 0
    for position, rows in enumerate(reference):
        difference = max(row_relative_difference(delivered[position], row) for row in rows)
        if difference > largest:
            largest, at_position = difference, position
    if math.isinf(largest):
        return ComparedRequest(name, problem=f"position {at_position}: a row that is not finite, or of another width")
    control = None if reference_again is None else _largest_between(reference, reference_again)
    return ComparedRequest(name, largest_difference=largest, at_position=at_position, control_difference=control)


def _largest_between(first: Sequence[Sequence[torch.Tensor]], second: Sequence[Sequence[torch.Tensor]]) -> float:
    pairs = zip(first, second, strict=True)
    return max(row_relative_difference(other, row) for rows, others in pairs for row in rows for other in others)


def row_relative_difference(row: torch.Tensor, reference: torch.Tensor) -> float:
    """`max|row - reference| / max|reference|`, in double precision; infinite for NaN or another width."""
    if row.shape != reference.shape:
        return math.inf
    exact, other = reference.double(), row.double()
    scale = float(exact.abs().max()) if exact.numel() else 0.0
    difference = float((other - exact).abs().max()) if exact.numel() else 0.0
    if difference == 0.0:
        return 0.0
    quotient = difference / scale if scale > 0.0 else math.inf
    return math.inf if math.isnan(quotient) else quotient
