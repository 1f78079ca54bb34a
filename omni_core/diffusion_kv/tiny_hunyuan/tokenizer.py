# SPDX-License-Identifier: Apache-2.0
"""Token ids: the 256 bytes of UTF-8 text, and special tokens after them."""

from __future__ import annotations

import math
from enum import IntEnum

from omni_core.diffusion_kv.errors import RequestRefusedError
from omni_core.diffusion_kv.tiny_hunyuan.layouts import Grid, RowSlots


class SpecialToken(IntEnum):
    """Everything that is no byte of text."""

    PAD = 256
    CFG = 257
    """Stands for each byte of text in the unconditional row."""
    BEGIN_ROW = 258
    END_ROW = 259
    BEGIN_IMAGE = 260
    END_IMAGE = 261
    SEPARATOR = 262
    """Between the VAE and the ViT tokens of one reference."""
    TIMESTEP = 263
    IMAGE = 264
    """Placeholder of every image token; what is in the picture stands in the embeddings alone."""


_FIRST_RATIO = 265
_RATIOS = 33
"""Height to width from 1:16 to 16:1, a quarter of an octave apart."""
_FIRST_SIZE = _FIRST_RATIO + _RATIOS
_SIZES = 129
VOCABULARY_SIZE = _FIRST_SIZE + _SIZES

_SYSTEM_PROMPT = b"Draw what the text says of the pictures."
_BETWEEN_PROMPT = b"and"


def size_token(target: Grid) -> int:
    """Which tells the longer side of the target, in image tokens."""
    return _FIRST_SIZE + max(target.height, target.width)


def ratio_token(target: Grid) -> int:
    """Which tells the target's height to its width."""
    return _FIRST_RATIO + _RATIOS // 2 + round(4 * math.log2(target.height / target.width))


def prompt_bytes_that_fit(slots: RowSlots, num_references: int, prefix_tokens: int) -> int:
    """How long a prompt a row of `prefix_tokens` takes, in bytes of UTF-8."""
    return prefix_tokens - slots.tokens_before_tail(num_references) - len(_tail_frame(slots, num_references))


def conditional_token_ids(
    request_id: str, prompt: str, slots: RowSlots, num_references: int, prefix_tokens: int
) -> tuple[int, ...]:
    """The ids of the whole row. A text shorter than its slot is padded.

    Raises:
        RequestRefusedError: the prompt is longer than its slot; nothing is cut off silently.
    """
    text = prompt.encode()
    room = prompt_bytes_that_fit(slots, num_references, prefix_tokens)
    if len(text) > room:
        raise RequestRefusedError(
            request_id,
            f"the prompt has {len(text)} bytes; this layout leaves {max(room, 0)} with {num_references} references and "
            f"a prefix of {prefix_tokens} tokens. Shorten it, or set a larger prefix_tokens or layout",
        )
    ids: list[int] = [SpecialToken.BEGIN_ROW]
    ids += _padded(_SYSTEM_PROMPT, slots.head_tokens - (2 if num_references else 1))
    for index in range(num_references):
        if index:
            ids.append(SpecialToken.END_IMAGE)
            ids += _padded(_BETWEEN_PROMPT, slots.between_tokens - 2)
        ids.append(SpecialToken.BEGIN_IMAGE)
        ids += [SpecialToken.IMAGE] * slots.vae_grid.tokens
        ids.append(SpecialToken.SEPARATOR)
        ids += [SpecialToken.IMAGE] * slots.vit_grid.tokens
    frame = _tail_frame(slots, num_references)
    ids += frame[:-3]
    ids += _padded(text, room)
    ids += frame[-3:]
    ids.append(SpecialToken.TIMESTEP)
    ids += [SpecialToken.IMAGE] * slots.target_grid.tokens
    ids += [SpecialToken.END_IMAGE, SpecialToken.END_ROW]
    return tuple(map(int, ids))


def unconditional_token_ids(conditional: tuple[int, ...]) -> tuple[int, ...]:
    """The same row with every byte of text and its padding replaced; references and special tokens stay."""
    return tuple(int(SpecialToken.CFG) if token_id <= SpecialToken.PAD else token_id for token_id in conditional)


def _tail_frame(slots: RowSlots, num_references: int) -> list[int]:
    """What stands around the prompt: the end of the last reference before it, size, ratio and begin of image after."""
    after = [size_token(slots.target_grid), ratio_token(slots.target_grid), int(SpecialToken.BEGIN_IMAGE)]
    return [int(SpecialToken.END_IMAGE), *after] if num_references else after


def _padded(text: bytes, length: int) -> list[int]:
    """`length` ids: the text's bytes, cut or padded. Only fixed texts are ever cut."""
    kept = text[:length]
    return [*kept, *[int(SpecialToken.PAD)] * (length - len(kept))]
