# SPDX-License-Identifier: Apache-2.0
"""For models that bring attention metadata of their own: what the owners can express of it, and what they refuse.

An owner knows a row by its layout alone. A model whose blocks were written for explicit masks checks them here once per
forward and drops them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

import torch

from omni_core.diffusion_kv.attention.masked import layout_mask
from omni_core.diffusion_kv.attention.owner import StepAttention
from omni_core.diffusion_kv.errors import PagedAttentionError
from omni_core.diffusion_kv.rows import RowLayout


class MetadataKind(StrEnum):
    """What a model's attention may be told beside queries, keys and values."""

    ATTENTION_MASK = "attention_mask"
    """Which keys each query sees."""
    JOINT_MASK = "joint_mask"
    """A mask over two streams of keys."""
    QUERY_RANGES = "query_ranges"
    """Tokens of which only some are queries."""
    VIDEO_LAYOUT = "video_layout"
    """Frames, height and width that decide who sees whom."""


_INEXPRESSIBLE: Mapping[MetadataKind, str] = MappingProxyType(
    {
        MetadataKind.JOINT_MASK: "a row has one stream of keys; lay both streams out in one row",
        MetadataKind.QUERY_RANGES: "the queries of a forward are one range of each row; the step decides which",
        MetadataKind.VIDEO_LAYOUT: "text is causal and a span sees itself; there is no other rule",
    }
)


def check_metadata(metadata: Mapping[MetadataKind, object], layout: RowLayout, attention: StepAttention) -> None:
    """See that a model's metadata says what the layout says. Compares a whole mask; once per forward.

    Args:
        metadata: what the model brought; `None` where it brought nothing.
        layout: of the rows.
        attention: the step's.

    Raises:
        PagedAttentionError: a kind the owners cannot express, or a mask that is not 4-D, not boolean, of another
            shape, or not the layout's.
    """
    for kind, reason in _INEXPRESSIBLE.items():
        if metadata.get(kind) is not None:
            raise PagedAttentionError(f"{kind} was given, which attention over pages cannot express: {reason}")
    mask = metadata.get(MetadataKind.ATTENTION_MASK)
    if mask is not None:
        _check_mask(mask, layout, attention)


def _check_mask(mask: object, layout: RowLayout, attention: StepAttention) -> None:
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4 or mask.dtype != torch.bool:
        told = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise PagedAttentionError(f"attention_mask is {told}; it is a 4-D boolean tensor [rows, heads, queries, keys]")
    start = attention.query_start_tokens
    wanted = layout_mask(layout, start, start + attention.num_query_tokens, mask.device)
    if mask.shape[2:] != wanted.shape:
        raise PagedAttentionError(
            f"attention_mask has the shape {tuple(mask.shape)}; this forward has {tuple(wanted.shape)} queries and keys"
        )
    if not torch.equal(mask, wanted.expand_as(mask)):
        raise PagedAttentionError(
            "attention_mask is not the row's layout: causal text, and spans that see themselves and all before them"
        )
