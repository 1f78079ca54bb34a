# SPDX-License-Identifier: Apache-2.0
"""What requests go on with: tokens that a model without a sampler can be fed, the same after the same prefix."""

from __future__ import annotations

import random
from collections.abc import Sequence

from omni_core.testing.engine_schedule import ScheduledRun
from omni_core.testing.fake_model import FakeModel, hidden_key
from omni_core.testing.sampling import sample
from omni_core.testing.sim_request import TokenTrack


class TokenSource:
    """Samples tokens, and guesses them before as a drafter does. Engine thread only.

    Args:
        vocabulary: every token is below this.
        max_draft_tokens: most tokens of one guess.
        accepted: chance, between 0 and 1, that a token after right ones is guessed right.
        seed: decides how many are guessed and which are right.
    """

    def __init__(self, vocabulary: int, max_draft_tokens: int, accepted: float, seed: int) -> None:
        self._sampler = FakeModel(hidden_key(1), vocabulary=vocabulary)
        self._vocabulary = vocabulary
        self._max_draft_tokens = max_draft_tokens
        self._accepted = accepted
        self._rng = random.Random(f"drafts {seed}")

    def sampled(self, runs: Sequence[ScheduledRun]) -> dict[str, tuple[int, ...]]:
        """Tokens sampled by request: its right drafts, then one more. Runs whose prompt goes on are left out."""
        return sample(self._sampler, runs)

    def drafts(self, track: TokenTrack) -> Sequence[int]:
        """Between none and `max_draft_tokens` guesses at what follows."""
        guess = track.continued(len(track.token_ids), ())
        drafts: list[int] = []
        right = True
        for _ in range(self._rng.randint(0, self._max_draft_tokens)):
            right = right and self._rng.random() < self._accepted
            token = self._sampler.next_token(guess)
            drafts.append(token if right else (token + 1) % self._vocabulary)
            guess.token_ids.append(drafts[-1])
        return drafts
