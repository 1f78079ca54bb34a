# SPDX-License-Identifier: Apache-2.0
"""One CFG row of a request: how long its parts are and which of its tokens see each other both ways.

    [ text | reference image(s) | text | t | target image | trailer ]
     <----------- prefix -------------> <--- target ----->

Text is causal. A span is bidirectional inside itself and sees everything before it. Every position counts from the
row's first token.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from omni_core.diffusion_kv.errors import RowError


@dataclass(frozen=True, slots=True)
class RowGeometry:
    """The lengths of one row, in tokens.

    Raises:
        RowError: a length is no plain int, the prefix is negative, target or total is not positive, or they do not fit.
    """

    prefix_tokens: int
    """Tokens before the timestep token: what a hit may skip."""
    target_tokens: int
    """Timestep and generated-image tokens, rewritten at each denoise step."""
    total_tokens: int
    """Everything: prefix, target and trailer."""

    def __post_init__(self) -> None:
        for name in ("prefix_tokens", "target_tokens", "total_tokens"):
            value = getattr(self, name)
            if type(value) is not int:
                raise RowError(f"{name}={value!r} is a {type(value).__name__}; a row's lengths are plain ints")
        if self.prefix_tokens < 0:
            raise RowError(f"prefix_tokens={self.prefix_tokens} is negative")
        if self.target_tokens <= 0:
            raise RowError(f"target_tokens={self.target_tokens}; a row generates at least one token")
        if self.target_end > self.total_tokens:
            raise RowError(
                f"prefix_tokens={self.prefix_tokens} and target_tokens={self.target_tokens} are more than "
                f"total_tokens={self.total_tokens}"
            )

    @property
    def target_end(self) -> int:
        """The position after the target's last token."""
        return self.prefix_tokens + self.target_tokens

    @property
    def trailer_tokens(self) -> int:
        """Closing tokens after the target."""
        return self.total_tokens - self.target_end

    def cacheable_tokens(self, block_size: int) -> int:
        """The prefix rounded down to whole pages of `block_size` tokens: all that is ever published or hit."""
        return self.prefix_tokens // block_size * block_size


@dataclass(frozen=True, slots=True)
class BidirectionalSpan:
    """Tokens `[start, end)` that see each other both ways: one image."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class RowLayout:
    """A row's lengths and its bidirectional spans, references and target image alike. Equal layouts share a forward.

    Raises:
        RowError: a span is empty, unsorted, overlaps its neighbour, leaves the row, or crosses the prefix's or the
            target's end.
    """

    geometry: RowGeometry
    spans: tuple[BidirectionalSpan, ...]

    def __post_init__(self) -> None:
        geometry = self.geometry
        for span in self.spans:
            if not 0 <= span.start < span.end <= geometry.total_tokens:
                raise RowError(
                    f"span [{span.start}, {span.end}) is empty or outside the row of {geometry.total_tokens}"
                )
            for edge, name in ((geometry.prefix_tokens, "prefix"), (geometry.target_end, "target")):
                if span.start < edge < span.end:
                    raise RowError(
                        f"span [{span.start}, {span.end}) crosses the end of the {name} at {edge}: a query in the "
                        f"{name} would attend to what is rewritten later"
                    )
        for before, after in pairwise(self.spans):
            if after.start < before.end:
                raise RowError(
                    f"spans [{before.start}, {before.end}) and [{after.start}, {after.end}) overlap or are not sorted"
                )


@dataclass(frozen=True, slots=True)
class ImageFeature:
    """What stands for one reference image in the identity of its row: the whole span, never a part of it.

    A joint "VAE tokens, separator, ViT tokens" reference is one feature.
    """

    identifier: str
    """Digest of everything the span's keys and values depend on, its position included; never empty."""
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class RowIdentity:
    """What decides which prefixes one row shares. Made by a model hook, only when prefix caching is on.

    Raises:
        RowError: a token id is no plain int; the namespace is empty; a feature has no identifier, is empty, unsorted
            or overlaps its neighbour. (vLLM skips a nested feature silently, so an overlap would be a wrong hit.)
    """

    token_ids: tuple[int, ...]
    """At least the prefix's."""
    features: tuple[ImageFeature, ...]
    namespace: bytes
    """Root of the chain: model, layout rule, hashing rule, adapter, weights."""

    def __post_init__(self) -> None:
        if not self.namespace:
            raise RowError("the namespace is empty; two models would share pages")
        for position, token_id in enumerate(self.token_ids):
            if type(token_id) is not int:
                raise RowError(f"token id {token_id!r} at {position} is a {type(token_id).__name__}, not a plain int")
        for feature in self.features:
            if not feature.identifier:
                raise RowError(f"the image feature at [{feature.start}, {feature.end}) has no identifier")
            if not 0 <= feature.start < feature.end:
                raise RowError(f"image feature {feature.identifier!r} spans [{feature.start}, {feature.end})")
        for before, after in pairwise(self.features):
            if after.start < before.end:
                raise RowError(
                    f"image features [{before.start}, {before.end}) and [{after.start}, {after.end}) overlap or are "
                    "not sorted"
                )

    def check_against(self, geometry: RowGeometry) -> None:
        """Check that this identity can be that of a row of `geometry`.

        Raises:
            RowError: fewer token ids than prefix tokens, or a feature beyond the row's end.
        """
        if len(self.token_ids) < geometry.prefix_tokens:
            raise RowError(
                f"{len(self.token_ids)} token ids identify a prefix of {geometry.prefix_tokens} tokens; give all of it"
            )
        if self.features and self.features[-1].end > geometry.total_tokens:
            last = self.features[-1]
            raise RowError(f"image feature [{last.start}, {last.end}) ends beyond the row of {geometry.total_tokens}")
