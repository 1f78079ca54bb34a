# SPDX-License-Identifier: Apache-2.0
"""What an engine process is told to run and what it says of it: plain values that go through pipes as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np


class EngineKind(Enum):
    """How the engine is built."""

    OFF = "prefix caching off"
    PLAIN = "on, without Omni Core"
    MEMORY = "on, Omni Core, memory sink"
    FILES = "on, Omni Core, safetensors sink"


class LoadKind(Enum):
    """Whether prompts have a beginning in common."""

    REUSE = "reuse"
    NO_REUSE = "no reuse"


@dataclass(frozen=True, slots=True)
class Load:
    """Requests for one engine, sent in order, so many at a time. A load has prompts that no other load has."""

    kind: LoadKind
    number: int
    """Loads of one kind with other numbers have other prompts."""
    concurrency: int
    num_requests: int
    prefix_tokens: int
    """Tokens all prompts of the load begin with; without reuse each has its own instead."""
    own_tokens: int
    """Tokens after those, each prompt's own."""
    output_tokens: int
    first_request: int = 0
    """The load is the part of a larger one that begins with this request."""

    @property
    def num_rows(self) -> int:
        """Rows a stage delivers: one per token but the last, which no forward sees."""
        return self.num_requests * (self.prefix_tokens + self.own_tokens + self.output_tokens - 1)

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Token ids of every prompt. Equal loads have equal prompts, in any process.

        Args:
            vocab_size: of the model. Its first ids, which special tokens have, are left out.
        """
        seed = (tuple(LoadKind).index(self.kind), self.concurrency, self.number)
        generator = np.random.default_rng(seed)

        def tokens(count: int) -> list[int]:
            drawn: list[int] = generator.integers(vocab_size // 8, vocab_size, count).tolist()
            return drawn

        shared = tokens(self.prefix_tokens)
        prompts = []
        for _ in range(self.first_request + self.num_requests):
            prefix = shared if self.kind is LoadKind.REUSE else tokens(self.prefix_tokens)
            prompts.append(prefix + tokens(self.own_tokens))
        return prompts[self.first_request :]

    def as_document(self) -> dict[str, str | int]:
        """For JSON."""
        return {
            "kind": self.kind.value,
            "number": self.number,
            "concurrency": self.concurrency,
            "num_requests": self.num_requests,
            "prefix_tokens": self.prefix_tokens,
            "own_tokens": self.own_tokens,
            "output_tokens": self.output_tokens,
            "first_request": self.first_request,
        }

    @classmethod
    def from_document(cls, document: dict[str, str | int]) -> Load:
        """What `as_document` made."""
        numbers = {name: int(value) for name, value in document.items() if name != "kind"}
        return cls(kind=LoadKind(document["kind"]), **numbers)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a load took, on the client's side of the engine."""

    wall_s: float
    """From the first request to the last token of the last one."""
    first_token_s: list[float]
    """Per request, from when it was sent."""
    per_token_s: list[float]
    """Per request, the mean gap between its later tokens."""
    end_to_end_s: list[float]
    """Per request, until its last token."""
    prefill_tokens: int
    """Prompt tokens that were computed, by the engine's own count."""
    output_tokens: int
