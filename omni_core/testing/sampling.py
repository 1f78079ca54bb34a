# SPDX-License-Identifier: Apache-2.0
"""What the simulated engine samples after a forward, and what a drafter guesses before it."""

from __future__ import annotations

import random
from collections.abc import Sequence

from omni_core.testing.engine_schedule import ScheduledRun
from omni_core.testing.fake_model import FakeModel
from omni_core.testing.sim_request import TokenTrack


def sample(model: FakeModel, runs: Sequence[ScheduledRun]) -> dict[str, tuple[int, ...]]:
    """Tokens sampled by request: the drafts the model agrees with, then its own next token.

    A run whose prompt goes on samples nothing and is left out.
    """
    return {run.req_id: _verify(model, run) for run in runs if run.samples}


def _verify(model: FakeModel, run: ScheduledRun) -> tuple[int, ...]:
    track = run.track.continued(run.known_stop, ())
    sampled: list[int] = []
    for draft in (*run.drafts, None):
        token = model.next_token(track)
        sampled.append(token)
        if token != draft:
            break
        track.token_ids.append(token)
    return tuple(sampled)


class SimDrafter:
    """Guesses the next tokens of a request, right as often as it is told.

    Args:
        model: knows the right tokens.
        max_draft_tokens: most tokens of one guess.
        accepted: chance, between 0 and 1, that a token after right ones is right.
        seed: decides how many are guessed and which are right.
    """

    def __init__(self, model: FakeModel, max_draft_tokens: int, accepted: float, seed: int) -> None:
        self._model = model
        self._max_draft_tokens = max_draft_tokens
        self._accepted = accepted
        self._rng = random.Random(f"drafter {seed}")

    def __call__(self, track: TokenTrack) -> Sequence[int]:
        """Between none and `max_draft_tokens` guesses."""
        guess = track.continued(len(track.token_ids), ())
        drafts: list[int] = []
        right = True
        for _ in range(self._rng.randint(0, self._max_draft_tokens)):
            right = right and self._rng.random() < self._accepted
            drafts.append(self._model.next_token(guess) if right else self._rng.randrange(10, 10_000))
            guess.token_ids.append(drafts[-1])
        return drafts
