# SPDX-License-Identifier: Apache-2.0
"""One request under the real scheduler, as the worker sees it: its table, what is computed, what is known."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from omni_core.testing.sim_request import SimRequest, TokenTrack


class SchedulerMismatchError(AssertionError):
    """vLLM's scheduler did what the driver, and with it the adapter, holds for impossible; says what and where."""


@dataclass(slots=True, eq=False)
class FollowedRequest:
    """One request between `add` and its end. Follows scheduler outputs, as a worker does."""

    request: Any
    """vLLM's `Request`."""
    track: TokenTrack
    pieces: deque[tuple[int, ...]]
    """Parts of the prompt that no step has begun with yet."""
    num_pieces_sent: int = 0
    """Parts of the prompt the scheduler was given, the first one not counted."""
    next_piece_at: int = 0
    """The schedule before which the next part is sent."""
    block_ids: list[int] = field(default_factory=list)
    """The table of the mirrored group."""
    num_computed: int = 0
    """Positions whose rows exist and whose tokens were accepted."""
    computed_before: int = 0
    """The same, at its most since the request began."""
    num_known: int = 0
    """Tokens the worker knows of it. Beyond what the scheduler knows, while scheduling runs ahead."""
    num_preemptions: int = 0
    """How often it had been preempted when it was announced last."""
    digests_told: int = 0
    """Leading blocks whose digest the cache has heard of, or holds as unknown."""

    @classmethod
    def of(cls, request: Any, asked: SimRequest) -> FollowedRequest:
        """A request that was just submitted."""
        return cls(request, TokenTrack(asked), deque(asked.later_pieces))

    @property
    def req_id(self) -> str:
        """The request's id."""
        return self.track.req_id

    def enter(self, block_ids: Sequence[int], num_computed: int) -> None:
        """A step announces it with its whole table: it starts, comes back, or goes on with the next part of its prompt.

        Raises:
            SchedulerMismatchError: the scheduler knows other tokens of it than its client and the model gave.
        """
        self.block_ids = list(block_ids)
        self.num_computed = num_computed
        self.num_known = self.request.num_tokens
        self.num_preemptions = self.request.num_preemptions
        while self.pieces and len(self.track.token_ids) < self.num_known:
            self.track.token_ids.extend(self.pieces.popleft())
        known = list(self.request.all_token_ids)
        if known != self.track.token_ids[: len(known)]:
            raise SchedulerMismatchError(f"request {self.req_id!r}: vLLM knows {known}, track {self.track.token_ids}")

    def extend(self, block_ids: Sequence[int], num_computed: int, *, runs_ahead: bool) -> None:
        """A step goes on with it.

        Args:
            block_ids: the blocks its table grew by.
            num_computed: the scheduler's count; with `runs_ahead` it holds every draft in flight for accepted.
            runs_ahead: whether scheduling is asynchronous.

        Raises:
            SchedulerMismatchError: the scheduler holds other positions for computed.
        """
        self.block_ids.extend(block_ids)
        agrees = num_computed >= self.num_computed if runs_ahead else num_computed == self.num_computed
        if not agrees:
            raise SchedulerMismatchError(
                f"request {self.req_id!r}: vLLM goes on at {num_computed}, but {self.num_computed} are computed"
            )

    def accept(self, start_known: int, sampled: Sequence[int]) -> None:
        """A run ended after `start_known` known tokens, and these were sampled: all but the last were its drafts.

        Raises:
            SchedulerMismatchError: a token that was thrown away came out differently when it was sampled again.
        """
        self.num_computed = start_known + max(0, len(sampled) - 1)
        self.computed_before = max(self.computed_before, self.num_computed)
        if self.pieces:
            return  # the session throws this token away when the next part of the prompt comes
        again = self.track.token_ids[start_known : start_known + len(sampled)]
        if again != list(sampled[: len(again)]):
            raise SchedulerMismatchError(f"request {self.req_id!r}: sampled {again} before, now {list(sampled)}")
        self.track.token_ids.extend(sampled[len(again) :])
        if sampled:
            self.num_known = start_known + len(sampled)
