# SPDX-License-Identifier: Apache-2.0
"""What the tap knows of a request, and the digests of its token prefixes that rows are filed under.

The digest of a prefix is made of that of the prefix before it and the last token, with the adapter and the pieces of
pictures and embeddings that stand there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from omni_core.integrations.vllm.delivery.ledger import UNKNOWN_TOKEN_ID
from omni_core.integrations.vllm.versions import prompt_is_token_ids

Digest = bytes
"""Digest of a token prefix, its last token included, with the adapter and the pictures it was computed with."""


@dataclass(slots=True)
class TappedRequest:
    """What the engine computed for one request."""

    req_id: str
    num_prompt_tokens: int
    skipped_tokens: int
    """Prompt tokens the engine did not compute because their KV was cached."""
    computed_tokens: int = 0
    """Rows the engine computed: all that vLLM alone would have given for this request."""
    token_ids: list[int] = field(default_factory=list)
    """Every token fed so far, the skipped ones included; of draft tokens those fed last."""
    digests: list[Digest] = field(default_factory=list)
    """Per position."""
    identity: Digest = b""
    """Stands for the adapter; empty for the bare model."""
    pictures: Mapping[int, Digest] = field(default_factory=dict)
    """Position in the prompt → the piece of a picture that stands there."""
    embeddings: Mapping[int, Digest] = field(default_factory=dict)
    """Position in the prompt → the embedding that was given there instead of a token."""
    num_drafts_replaced: int = 0
    """Positions at which another token was fed later than at first: drafts the engine rejected."""

    @classmethod
    def announced(cls, new: Any) -> TappedRequest:
        """A request as it begins; `new` is vLLM's `NewRequestData`."""
        embeddings = _embeddings_of(new)
        prompt = [UNKNOWN_TOKEN_ID] * len(embeddings)
        if new.prompt_token_ids is not None:
            known = enumerate(new.prompt_token_ids)
            prompt = [UNKNOWN_TOKEN_ID if at in embeddings else token_id for at, token_id in known]
        return cls(
            new.req_id,
            len(prompt),
            skipped_tokens=new.num_computed_tokens,
            token_ids=prompt,
            identity=_adapter_of(new.lora_request),
            pictures=_pictures_of(new.mm_features),
            embeddings=embeddings,
        )

    def learn(self, position: int, token_id: int) -> None:
        """The model was fed `token_id` at `position`.

        Raises:
            ValueError: tokens in between were never seen, or it contradicts the prompt.
        """
        if position > len(self.token_ids):
            raise ValueError(f"request {self.req_id!r}: position {position} after {len(self.token_ids)} tokens")
        if position == len(self.token_ids):
            self.token_ids.append(token_id)
        elif self.token_ids[position] != token_id:
            if position < self.num_prompt_tokens:
                raise ValueError(
                    f"request {self.req_id!r}: token {token_id} at {position}, {self.token_ids[position]} in its prompt"
                )
            self.num_drafts_replaced += 1
            del self.token_ids[position:]
            del self.digests[position:]
            self.token_ids.append(token_id)
        while len(self.digests) < len(self.token_ids):
            at = len(self.digests)
            before = self.digests[-1] if self.digests else self.identity
            before += self.pictures.get(at, b"") + self.embeddings.get(at, b"")
            self.digests.append(_chained(before, self.token_ids[at]))


def prefix_digests(token_ids: Iterable[int]) -> list[Digest]:
    """The digest of every prefix of `token_ids`, shortest first."""
    digests: list[Digest] = []
    for token_id in token_ids:
        digests.append(_chained(digests[-1] if digests else b"", int(token_id)))
    return digests


def _adapter_of(lora_request: Any) -> Digest:
    if lora_request is None:
        return b""
    return _digest(f"{lora_request.lora_int_id}:{lora_request.lora_name}".encode())


def _pictures_of(mm_features: Iterable[Any]) -> dict[int, Digest]:
    pictures = {}
    for feature in mm_features or ():
        place = feature.mm_position
        for offset in range(place.length):
            pictures[place.offset + offset] = _digest(f"{feature.identifier}:{offset}".encode())
    return pictures


def _embeddings_of(new: Any) -> dict[int, Digest]:
    if new.prompt_embeds is None:
        return {}
    tokens = prompt_is_token_ids(new) or [False] * len(new.prompt_embeds)
    rows = new.prompt_embeds.detach().cpu().contiguous()
    return {
        at: _digest(row.view(torch.uint8).numpy().tobytes())
        for at, (row, is_token) in enumerate(zip(rows, tokens, strict=True))
        if not is_token
    }


def _chained(before: Digest, token_id: int) -> Digest:
    return _digest(before + token_id.to_bytes(8, "little", signed=True))


def _digest(content: bytes) -> Digest:
    return hashlib.blake2b(content, digest_size=16).digest()
