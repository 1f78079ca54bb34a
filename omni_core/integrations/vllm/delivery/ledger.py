# SPDX-License-Identifier: Apache-2.0
"""What the builder knows of one request: its tokens, and which of its positions were promised and fed to the sink."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from omni_core.integrations.vllm.delivery.built_step import FindsEnd
from omni_core.integrations.vllm.request_ids import ClientRequest
from omni_core.prefix_cache.outputs import TokenRange
from omni_core.sinks.base import PossibleSample

UNKNOWN_TOKEN_ID = -1
"""Stands at positions whose token the engine never told us (a prompt given as embeddings)."""

_MIN_TOKENS = 64


class RequestLedger:
    """One request from its start to its last word. Builder thread only."""

    def __init__(
        self,
        req_id: str,
        client: ClientRequest | None,
        prompt_token_ids: Sequence[int] | None,
        num_skipped_tokens: int,
        *,
        use: int = 0,
        output_end: FindsEnd | None = None,
    ) -> None:
        """Start a request.

        Args:
            req_id: the engine's internal id.
            client: what the client calls it, if known.
            prompt_token_ids: the prompt, or `None` if it was given as embeddings.
            num_skipped_tokens: the prefix hit: tokens whose rows this request never computes.
            use: how many requests had the same id before.
            output_end: tells which sampled token ends it, where this ledger is told what was sampled.
        """
        self.req_id = req_id
        self.client = client
        self.num_skipped_tokens = num_skipped_tokens
        self.use = use
        self.rows_fed = 0
        """Rows of any key on their way to the sink, or there."""
        self.failure: str | None = None
        """Why the sink sees no more of this request, once it has failed."""
        self.end: int | None = None
        """Position of the token that ended it, if this ledger found it: no row from there on is wanted."""
        self._output_end = output_end
        self._num_prompt_tokens = 0
        self._tokens = np.full(_MIN_TOKENS, UNKNOWN_TOKEN_ID, dtype=np.int64)
        self._promised: list[TokenRange] = []
        self._fed: list[TokenRange] = []
        self.note_prompt(prompt_token_ids)

    @property
    def client_req_id(self) -> str | None:
        """The client's id, if known."""
        return None if self.client is None else self.client.client_req_id

    @property
    def sample(self) -> PossibleSample | None:
        """What the id says if this is one of several samples."""
        return None if self.client is None else self.client.sample

    @property
    def prompt_computed(self) -> bool:
        """Whether steps computed the prompt to its end. True, too, for a prompt of unknown length."""
        return self._computed_upto >= self._num_prompt_tokens

    def note_prompt(self, prompt_token_ids: Sequence[int] | None) -> None:
        """The prompt as known now: a session's comes in pieces, each time with what came before."""
        if prompt_token_ids is not None and len(prompt_token_ids) > self._num_prompt_tokens:
            prompt = np.asarray(prompt_token_ids, dtype=np.int64)
            self._num_prompt_tokens = len(prompt)
            self._make_room(2 * len(prompt))
            self._tokens[: len(prompt)] = prompt

    def note_sampled(self, first_position: int, sampled: Sequence[int]) -> None:
        """A step sampled these tokens, the first of which stands at `first_position`. Before its rows are noted.

        A position that was sampled before, and sampled again after a preemption that threw the first away, counts as
        sampled last. What a step sampled for a request that had ended before counts as nothing.
        """
        if not sampled:
            return
        if self.end is not None:
            if first_position > self.end:
                return
            self.end = None
        stop = first_position + len(sampled)
        if stop > len(self._tokens):
            self._make_room(2 * stop)
        self._tokens[first_position:stop] = sampled
        if self._output_end is not None:
            index = self._output_end.first_end(
                sampled,
                num_prompt_tokens=self._num_prompt_tokens,
                num_before=first_position - self._num_prompt_tokens,
                before=lambda: self._tokens[self._num_prompt_tokens : first_position].tolist(),
            )
            self.end = None if index is None else first_position + index

    def note_run(
        self, positions: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64], *, keep_known_tokens: bool = False
    ) -> None:
        """A step computed these positions, which are consecutive, from these tokens.

        Rows behind the request's end are not promised.

        Args:
            positions: of the run.
            token_ids: one per position.
            keep_known_tokens: whether a token that is unknown to the step says nothing.
        """
        if not len(positions):
            return
        first, stop = int(positions[0]), int(positions[-1]) + 1
        if self.end is not None and stop > self.end:
            stop = self.end
            if stop <= first:
                return
            token_ids = token_ids[: stop - first]
        if stop > len(self._tokens):
            self._make_room(2 * stop)
        told = token_ids != UNKNOWN_TOKEN_ID if keep_known_tokens else True
        np.copyto(self._tokens[first:stop], token_ids, where=told)
        self._promised = _union(self._promised, (first, stop))

    def note_fed(self, ranges: Sequence[TokenRange], *, with_hidden: bool) -> None:
        """Rows of `ranges` are on their way to the sink.

        Args:
            ranges: their positions.
            with_hidden: whether the hidden rows are among them. Every forward has those, so a position of which only
                another key came is still missing.
        """
        for one in ranges:
            self.rows_fed += one[1] - one[0]
            if with_hidden:
                self._fed = _union(self._fed, one)

    def token_ids(self, ranges: Sequence[TokenRange]) -> npt.NDArray[np.int64]:
        """`(num_rows,)`: the token at each position of `ranges`, in order."""
        if not ranges:
            return np.empty(0, dtype=np.int64)
        return np.concatenate([self._tokens[start:stop] for start, stop in ranges])

    def missing(self, *, whole_prefix: bool) -> tuple[TokenRange, ...]:
        """Positions whose hidden rows ought to have come and did not; none for a request that never ran.

        Computed and not fed, or of the prompt and not computed.

        Args:
            whole_prefix: whether the tokens the engine skipped were promised too.
        """
        if not self._promised:
            return ()
        promised = self._promised
        if not self.prompt_computed:
            promised = _union(promised, (self._computed_upto, self._num_prompt_tokens))
        if whole_prefix:
            promised = _union(promised, (0, promised[-1][1]))
        gaps: list[TokenRange] = []
        for start, stop in promised:
            edges = [start, *(edge for one in self._fed for edge in one), stop]
            clipped = [min(max(edge, start), stop) for edge in edges]
            gaps.extend((a, b) for a, b in list(pairwise(clipped))[::2] if a < b)
        return tuple(gaps)

    @property
    def _computed_upto(self) -> int:
        return self._promised[-1][1] if self._promised else 0

    def _make_room(self, num_tokens: int) -> None:
        if num_tokens > len(self._tokens):
            grown = np.full(num_tokens, UNKNOWN_TOKEN_ID, dtype=np.int64)
            grown[: len(self._tokens)] = self._tokens
            self._tokens = grown


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
