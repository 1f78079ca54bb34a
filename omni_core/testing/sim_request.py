# SPDX-License-Identifier: Apache-2.0
"""What a simulated client asks for, and what the simulated model can see of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass


def adapter_of(salt: str) -> int:
    """The adapter that a salt stands for; 0 without one."""
    return int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=7).digest(), "little") if salt else 0


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Positions of a prompt that stand for one image: the token ids are placeholders, the content is the identity."""

    offset: int
    """First position."""
    length: int
    """Positions covered, at least 1."""
    identity: str
    """Names the image's content; equal identities are equal images."""


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request as a client sends it."""

    req_id: str
    prompt_token_ids: tuple[int, ...]
    """At least one token."""
    max_output_tokens: int = 1
    """The request finishes when so many tokens were sampled. The last one is never computed, so a finished request
    has `num_prompt_tokens + max_output_tokens - 1` rows."""
    images: tuple[ImageSpan, ...] = ()
    """In `prompt_token_ids`."""
    salt: str = ""
    """Conditioning that is part of the request's identity: requests of other salt share no block and no row. The cache
    takes it for an adapter."""
    later_pieces: tuple[tuple[int, ...], ...] = ()
    """Further tokens of the prompt, which arrive piece by piece, each once all before it is computed."""

    def __post_init__(self) -> None:
        """Check the request.

        Raises:
            ValueError: names the request and the field.
        """
        if not self.prompt_token_ids:
            raise ValueError(f"request {self.req_id!r}: prompt_token_ids is empty")
        if not all(self.later_pieces):
            raise ValueError(f"request {self.req_id!r}: one of its {len(self.later_pieces)} later_pieces is empty")
        if self.max_output_tokens < 1:
            raise ValueError(f"request {self.req_id!r}: max_output_tokens={self.max_output_tokens}, must be at least 1")
        for image in self.images:
            if image.length < 1 or image.offset < 0 or image.offset + image.length > len(self.prompt_token_ids):
                raise ValueError(f"request {self.req_id!r}: {image} lies outside the prompt")

    @property
    def adapter_id(self) -> int:
        """The adapter that the salt stands for; 0 without one."""
        return adapter_of(self.salt)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the whole prompt, later pieces included."""
        return len(self.prompt_token_ids) + sum(map(len, self.later_pieces))

    @property
    def max_rows(self) -> int:
        """Rows the request has when it finishes."""
        return self.num_prompt_tokens + self.max_output_tokens - 1

    def image_at(self, position: int) -> ImageSpan | None:
        """The image that covers `position`."""
        for image in self.images:
            if image.offset <= position < image.offset + image.length:
                return image
        return None


class TokenTrack:
    """A request with the tokens known so far. Tokens are only ever appended, so a prefix of it never changes."""

    __slots__ = ("request", "token_ids")

    def __init__(self, request: SimRequest) -> None:
        self.request = request
        self.token_ids: list[int] = list(request.prompt_token_ids)

    @property
    def req_id(self) -> str:
        """The request's id."""
        return self.request.req_id

    def continued(self, stop: int, tokens: Sequence[int]) -> TokenTrack:
        """A track of its own: this one's tokens before position `stop`, then `tokens`."""
        track = TokenTrack(self.request)
        track.token_ids = [*self.token_ids[:stop], *tokens]
        return track

    def content(self, start: int, stop: int) -> Sequence[tuple[int, str, int]]:
        """What stands at positions `[start, stop)`: token id, image identity or "", offset inside the image."""
        if not self.request.images:
            return [(token_id, "", 0) for token_id in self.token_ids[start:stop]]
        found = []
        for position in range(start, min(stop, len(self.token_ids))):
            image = self.request.image_at(position)
            identity, offset = (image.identity, position - image.offset) if image else ("", 0)
            found.append((self.token_ids[position], identity, offset))
        return found

    def shared_prefix(self, other: TokenTrack) -> int:
        """How many leading positions hold the same content in both tracks."""
        if self.request.salt != other.request.salt:
            return 0
        length = min(len(self.token_ids), len(other.token_ids))
        pairs = zip(self.content(0, length), other.content(0, length), strict=True)
        return next((position for position, (ours, theirs) in enumerate(pairs) if ours != theirs), length)
