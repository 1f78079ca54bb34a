# SPDX-License-Identifier: Apache-2.0
"""The clients of a random workload: prompts that share prefixes, bursts, images, salts, pieces, replaced contents."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import pairwise

from omni_core.testing.sim_request import ImageSpan, SimRequest
from omni_core.testing.workload_config import WorkloadConfig

_TEMPLATE = "template"

SALTS = ("voice",)
"""Besides none."""


class RequestSource:
    """Makes up requests from one random source."""

    def __init__(self, config: WorkloadConfig, rng: random.Random) -> None:
        self._config = config
        self._rng = rng
        self._prefixes = [self.tokens(config.max_prompt_tokens) for _ in range(config.num_prefixes)]
        self._again: list[SimRequest] = []
        self._by_id: dict[str, SimRequest] = {}
        self.num_made = 0
        """Requests made, a repeated id counted each time."""

    def tokens(self, count: int) -> list[int]:
        """Random token ids."""
        return [self._rng.randrange(10, 10_000) for _ in range(count)]

    def want_again(self, requests: Iterable[SimRequest]) -> None:
        """Clients will send these prompts again: their rows were lost, or somebody else replaced them."""
        self._again.extend(requests)

    def named(self, req_id: str, request: SimRequest) -> SimRequest:
        """The request under an id of its own."""
        named = replace(request, req_id=req_id)
        self._by_id[req_id] = named
        self.num_made += 1
        return named

    def burst(self, live: Collection[str]) -> list[SimRequest]:
        """Requests submitted at one time; `live` are the ids in use."""
        rng, config = self._rng, self._config
        count = min(rng.randint(1, config.largest_burst), config.num_requests - self.num_made)
        if self._again and rng.random() < config.likelihoods.sent_again:
            burst = [self._again.pop()] * count
        elif rng.random() < config.equal_burst:
            burst = [self._request()] * count
        else:
            burst = [self._request() for _ in range(count)]
        taken = set(live)
        requests = []
        for request in burst:
            req_id = self._id(taken)
            taken.add(req_id)
            requests.append(self.named(req_id, request))
        return requests

    def replacement(self, req_id: str) -> SimRequest:
        """Other content for a live request: often its own beginning and something new, sometimes nothing new at all.

        Clients will ask for the old and for the new content again.
        """
        rng, config, old = self._rng, self._config, self._by_id[req_id]
        known = [token for piece in (old.prompt_token_ids, *old.later_pieces) for token in piece]
        kept = known[: rng.randint(0, len(known))]
        longest = config.max_prompt_tokens - len(kept)
        prompt = (*kept, *self.tokens(rng.randint(0 if kept else 1, longest)))
        images = old.images if all(image.offset + image.length <= len(kept) for image in old.images) else ()
        outputs = rng.randint(1, config.max_output_tokens)
        new = SimRequest(req_id, prompt, outputs, images, old.salt)
        self._by_id[req_id] = new
        self.want_again((replace(old, req_id=_TEMPLATE), replace(new, req_id=_TEMPLATE)))
        return new

    def _id(self, taken: Collection[str]) -> str:
        if self._rng.random() < self._config.likelihoods.id_reused:
            ended = [req_id for req_id in self._by_id if req_id not in taken]
            if ended:
                return self._rng.choice(ended[-8:])
        return f"r{self.num_made}"

    def _request(self) -> SimRequest:
        rng, config = self._rng, self._config
        length = rng.randint(1, config.max_prompt_tokens)
        shared = rng.randint(0, length)
        prefix = rng.choice(self._prefixes)[:shared]
        prompt = (*prefix, *self.tokens(length - len(prefix)))
        images: tuple[ImageSpan, ...] = ()
        if length >= 8 and rng.random() < 0.15:
            # Placeholder tokens are all alike: only the identity tells the images apart.
            span = ImageSpan(rng.randint(0, 3), rng.randint(3, length - 4), rng.choice(("cat", "dog")))
            stop = span.offset + span.length
            prompt = (*prompt[: span.offset], *([9] * span.length), *prompt[stop:])
            images = (span,)
        salt = rng.choice(("", "", "", "", *SALTS))
        outputs = rng.randint(1, config.max_output_tokens)
        if not images and length > 1 and rng.random() < config.likelihoods.in_pieces:
            cuts = sorted({0, *(rng.randint(1, length - 1) for _ in range(rng.randint(1, 3))), length})
            first, *later = (prompt[start:stop] for start, stop in pairwise(cuts))
            return SimRequest(_TEMPLATE, first, outputs, images, salt, tuple(later))
        return SimRequest(_TEMPLATE, prompt, outputs, images, salt)
