# SPDX-License-Identifier: Apache-2.0
"""What the builder knows of one request: its tokens, and which of its positions were promised and delivered."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from omni_core.prefix_cache.outputs import TokenRange

UNKNOWN_TOKEN_ID = -1
"""Stands at positions whose token the engine never told us (a prompt given as embeddings)."""


class RequestLedger:
    """One request from its start to its last word. Builder thread only."""

    def __init__(
        self, req_id: str, client_req_id: str | None, prompt_token_ids: Sequence[int] | None, num_skipped_tokens: int
    ) -> None:
        """Start a request.

        Args:
            req_id: the engine's internal id.
            client_req_id: the client's, if known.
            prompt_token_ids: the prompt, or `None` if it was given as embeddings.
            num_skipped_tokens: the prefix hit: tokens whose rows this request never computes.
        """
        self.req_id = req_id
        self.client_req_id = client_req_id
        self.num_skipped_tokens = num_skipped_tokens
        self.rows_delivered = 0
        self.closed_by: str | None = None
        """Why the sink sees no more of this request, once it has failed."""
        prompt = np.asarray(prompt_token_ids if prompt_token_ids is not None else (), dtype=np.int64)
        self._num_tokens = len(prompt)
        self._tokens = np.full(max(64, 2 * len(prompt)), UNKNOWN_TOKEN_ID, dtype=np.int64)
        self._tokens[: len(prompt)] = prompt
        self._promised: list[TokenRange] = []
        self._delivered: list[TokenRange] = []

    def note_run(self, positions: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64]) -> None:
        """A step computed these positions, which are consecutive, from these tokens."""
        first, stop = int(positions[0]), int(positions[-1]) + 1
        if stop > len(self._tokens):
            grown = np.full(2 * stop, UNKNOWN_TOKEN_ID, dtype=np.int64)
            grown[: len(self._tokens)] = self._tokens
            self._tokens = grown
        self._tokens[first:stop] = token_ids
        self._num_tokens = max(self._num_tokens, stop)
        self._promised = _union(self._promised, (first, stop))

    def note_delivered(self, ranges: Sequence[TokenRange]) -> None:
        """The sink accepted the rows of `ranges`."""
        for one in ranges:
            self._delivered = _union(self._delivered, one)
            self.rows_delivered += one[1] - one[0]

    def token_ids(self, ranges: Sequence[TokenRange]) -> npt.NDArray[np.int64]:
        """`(num_rows,)`: the token at each position of `ranges`, in order."""
        if not ranges:
            return np.empty(0, dtype=np.int64)
        return np.concatenate([self._tokens[start:stop] for start, stop in ranges])

    def missing(self, *, whole_prefix: bool) -> tuple[TokenRange, ...]:
        """Positions promised and not delivered.

        Args:
            whole_prefix: whether the tokens the engine skipped were promised too.
        """
        promised = self._promised
        if whole_prefix and promised:
            promised = _union(promised, (0, promised[-1][1]))
        gaps: list[TokenRange] = []
        for start, stop in promised:
            edges = [start, *(edge for one in self._delivered for edge in one), stop]
            clipped = [min(max(edge, start), stop) for edge in edges]
            gaps.extend((a, b) for a, b in list(pairwise(clipped))[::2] if a < b)
        return tuple(gaps)


def _union(ranges: list[TokenRange], new: TokenRange) -> list[TokenRange]:
    """Ascending, disjoint and not adjacent ranges that cover `ranges` and `new`."""
    if ranges and ranges[-1][0] <= new[0] <= ranges[-1][1]:
        return [*ranges[:-1], (ranges[-1][0], max(ranges[-1][1], new[1]))]
    merged: list[TokenRange] = []
    for start, stop in sorted((*ranges, new)):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged
