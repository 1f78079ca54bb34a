# SPDX-License-Identifier: Apache-2.0
"""A talker in small: for each token a hidden row and sixteen audio codes, and beside them outputs of other kinds."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.testing import SequenceRun

VOCABULARY = 64
WIDTH = 16
CODEBOOKS = 16
CODES = 128


class Talker(nn.Module):
    """One layer of causal attention, sixteen code heads, and random weights that are always the same.

    It computes in float64. In a shorter type, two equally likely codes could change places with the size of the batch.
    """

    omni_cache_policy = ModelCachePolicy(
        token_keys=frozenset({"codes.audio"}),
        deferred_keys=frozenset({"layers.0"}),
        request_keys=frozenset({"speaker"}),
    )

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(20)

        def weights(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, dtype=torch.float64, generator=generator) / WIDTH**0.5)

        self.embedding = weights(VOCABULARY, WIDTH)
        self.query, self.key, self.value = (weights(WIDTH, WIDTH) for _ in range(3))
        self.code_heads = weights(WIDTH, CODEBOOKS * CODES)
        self.speakers = weights(4, WIDTH)

    def forward(self, runs: Sequence[SequenceRun]) -> tuple[torch.Tensor, Mapping[str, Any]]:
        """One forward for several requests; every tensor has their rows one after the other."""
        hidden = torch.cat([self.rows(run) for run in runs])
        codes = (hidden @ self.code_heads).view(-1, CODEBOOKS, CODES).argmax(-1)
        return hidden.to(torch.float32), {
            "codes": {"audio": codes},  # (num_tokens, 16) int64: stored, and joined on a hit
            "layers": {"0": hidden.to(torch.bfloat16)},  # the same, but it may stay on the device for a while
            "speaker": torch.stack([self.speakers[run.token_ids[0] % 4] for run in runs]),  # an entry per request
            "progress": [{"tokens": len(run.token_ids)} for run in runs],  # a list: passed on with its step
        }

    def rows(self, run: SequenceRun) -> torch.Tensor:
        """`(run.num_tokens, WIDTH)`: attention over all tokens so far, as an engine's KV cache makes it possible."""
        tokens = self.embedding[run.token_ids]
        scores = tokens @ self.query @ (tokens @ self.key).T
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        attention = scores.masked_fill(later, -torch.inf).softmax(-1) @ (tokens @ self.value)
        return torch.tanh(tokens + attention)[run.start :]
