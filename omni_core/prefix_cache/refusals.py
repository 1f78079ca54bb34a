# SPDX-License-Identifier: Apache-2.0
"""Finds the requests of a step that cannot be served, and says why; the others of the step are not touched."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.errors import (
    HitRowsAbsentError,
    LifecycleError,
    PositionGapError,
    RequestError,
    RequestNotStartedError,
)
from omni_core.prefix_cache.progress import UNKNOWN
from omni_core.prefix_cache.reads import StepRead, ranges_of
from omni_core.prefix_cache.requests import RequestTable


class RequestRefusals:
    """Turns requests away, each once and for good. Every method needs the state lock."""

    def __init__(self, requests: RequestTable) -> None:
        self._requests = requests
        self.count = 0
        """Requests turned away so far."""

    def refuse(self, error: RequestError) -> None:
        """This error is the request's answer from now on; a request not known yet is tracked to be answered so."""
        if error.req_id not in self._requests:
            self._requests.start(error.req_id, (), 0, 0)
        self.count += self._requests.fail(error)

    def unexpected(
        self, step: str, req_ids: tuple[str, ...], rows: npt.NDArray[np.int64], firsts: npt.NDArray[np.int64]
    ) -> dict[str, RequestError]:
        """Requests that are unknown, turned away before, or do not continue where their last step ended."""
        refused: dict[str, RequestError] = {}
        for index in self._requests.progress.unexpected(rows, firsts).tolist():
            req_id = req_ids[index]
            error = self._requests.error(req_id)
            if rows[index] == UNKNOWN:
                error = RequestNotStartedError(
                    req_id, f"is in {step}, but was never started (or was forgotten by reset)"
                )
            elif error is None:
                error = self._discontinuity(step, req_id, int(firsts[index]))
                self.refuse(error)
            refused[req_id] = error
        return refused

    def absent_hidden(self, step: str, read: StepRead, req_ids: tuple[str, ...]) -> dict[str, RequestError]:
        """Requests of the step, `req_ids`, whose hit reaches over hidden rows that do not exist.

        A request that started and is not in the step yet is answered with its own first step.
        """
        refused: dict[str, RequestError] = {}
        for req_id in read.absent_hidden(HIDDEN_KEY):
            if req_id not in req_ids:
                continue
            ranges = ranges_of(read.absent_positions(req_id, HIDDEN_KEY))
            error = HitRowsAbsentError(
                req_id,
                f"{step}: tokens {list(ranges)} were not computed in this step, and no hidden rows are stored for them "
                "(the engine took them as cached although their forward never ran or ran before the cache was on, or "
                "their block changed hands before an undelivered step could be read again, or the weights or the "
                "adapter changed since and the engine's own prefix cache was not reset); run the request again without "
                "prefix-cache reads",
            )
            self.refuse(error)
            refused[req_id] = error
        return refused

    def _discontinuity(self, step: str, req_id: str, first: int) -> RequestError:
        expected = self._requests.computed_upto(req_id)
        if first > expected:
            return PositionGapError(
                req_id, f"{step} starts at position {first}, but rows are known up to {expected} only"
            )
        return LifecycleError(
            req_id,
            f"{step} computes position {first} again, rows up to {expected} were computed before; announce a preempted "
            "request as RESUMED, a changed content as REPLACED, and drafts in num_draft_tokens",
        )
