# SPDX-License-Identifier: Apache-2.0
"""The layers: attention through whoever owns keys and values, a SwiGLU MLP, modulation of the target alone.

Under tensor parallelism every rank draws all weights and keeps its share, so that the ranks' number changes nothing but
rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from omni_core.diffusion_kv.attention.owner import StepAttention
from omni_core.diffusion_kv.parallel import RankGroup
from omni_core.diffusion_kv.tiny_hunyuan.layouts import TransformerSize
from omni_core.diffusion_kv.tiny_hunyuan.lora import PROJECTIONS, Adapter, LowRankPair, projection_widths
from omni_core.diffusion_kv.tiny_hunyuan.rope import Rotary
from omni_core.diffusion_kv.tiny_hunyuan.weights import WeightSource, rms_norm

_QK_GAIN = 2.0**0.5
"""Of normalised queries and keys, so that random heads still choose where they look."""
_ATTENTION_OUT_GAIN = 2.0
"""An average over many values is small; this makes it count."""


@dataclass(frozen=True, slots=True, eq=False)
class QueryWindow:
    """Which tokens of the row one forward computes. Everything in it counts from the window's first token."""

    rotary: Rotary
    target: slice
    """Timestep and target image tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Modulation:
    """What the timestep does to the target's tokens in half a layer; each `[dim]`. The prefix is left alone."""

    scale: torch.Tensor
    shift: torch.Tensor
    gate: torch.Tensor

    def before(self, hidden: torch.Tensor, target: slice) -> torch.Tensor:
        """`hidden`, normalised; its target scaled and shifted."""
        normed = rms_norm(hidden)
        normed[:, target] = normed[:, target] * (1.0 + self.scale) + self.shift
        return normed

    def after(self, output: torch.Tensor, target: slice) -> torch.Tensor:
        """`output`, whose target is gated in place."""
        output[:, target] *= 1.0 + self.gate
        return output


class _Share:
    """This rank's part of one matrix: some of its rows, or some of its columns."""

    def __init__(self, matrix: torch.Tensor, *, rows: slice = slice(None), columns: slice = slice(None)) -> None:
        self._weight = matrix[rows, columns].contiguous()
        self._rows = rows
        self._columns = columns

    def __call__(self, hidden: torch.Tensor, change: LowRankPair | None = None, scale: float = 0.0) -> torch.Tensor:
        output = functional.linear(hidden, self._weight)
        if change is not None:
            narrow = functional.linear(hidden, change.a[:, self._columns])
            output += scale * functional.linear(narrow, change.b[self._rows])
        return output


class TransformerLayer:
    """One layer on this rank."""

    def __init__(self, layer_index: int, size: TransformerSize, ranks: RankGroup, source: WeightSource) -> None:
        """Draw the layer's weights from `source`; the heads and the MLP must divide by the ranks."""
        self._layer_index = layer_index
        self._head_size = size.head_size
        self._ranks = ranks
        matrices = {
            name: source.matrix(width_in, width_out, gain=_ATTENTION_OUT_GAIN if name == "o_proj" else 1.0)
            for name, (width_in, width_out) in projection_widths(size).items()
        }
        heads = {
            "q_proj": _part(ranks, size.num_query_heads * size.head_size),
            "k_proj": _part(ranks, size.num_kv_heads * size.head_size),
            "v_proj": _part(ranks, size.num_kv_heads * size.head_size),
        }
        self._projections = {name: _Share(matrices[name], rows=part) for name, part in heads.items()}
        self._projections["o_proj"] = _Share(matrices["o_proj"], columns=heads["q_proj"])
        middle = _part(ranks, size.mlp_dim)
        self._gate = _Share(source.matrix(size.dim, size.mlp_dim), rows=middle)
        self._up = _Share(source.matrix(size.dim, size.mlp_dim), rows=middle)
        self._down = _Share(source.matrix(size.mlp_dim, size.dim), columns=middle)
        self._modulation = source.normal((6, size.dim), std=0.1)

    def forward(
        self,
        hidden: torch.Tensor,
        window: QueryWindow,
        timestep: torch.Tensor,
        adapter: Adapter | None,
        attention: StepAttention,
    ) -> torch.Tensor:
        """One layer over the window's tokens.

        Args:
            hidden: `[rows, tokens, dim]`.
            window: which tokens these are.
            timestep: `[6, dim]`, what the timestep says to every layer.
            adapter: of all rows, or none.
            attention: the step's.

        Returns:
            A tensor shaped like `hidden`, the same on every rank.
        """
        scales = timestep + self._modulation
        attend, mlp = Modulation(*scales[:3]), Modulation(*scales[3:])
        attended = self._attend(attend.before(hidden, window.target), window, adapter, attention)
        hidden = hidden + attend.after(attended, window.target)
        return hidden + mlp.after(self._mlp(mlp.before(hidden, window.target)), window.target)

    def _attend(
        self, normed: torch.Tensor, window: QueryWindow, adapter: Adapter | None, attention: StepAttention
    ) -> torch.Tensor:
        changes: Mapping[str, LowRankPair | None] = (
            dict.fromkeys(PROJECTIONS) if adapter is None else adapter.layers[self._layer_index]
        )
        scale = 0.0 if adapter is None else adapter.lora.scale

        def heads(name: str) -> torch.Tensor:
            projected = self._projections[name](normed, changes[name], scale)
            return projected.view(*projected.shape[:-1], -1, self._head_size)

        query = window.rotary.turn(_QK_GAIN * rms_norm(heads("q_proj")))
        key = window.rotary.turn(_QK_GAIN * rms_norm(heads("k_proj")))
        seen = attention.attend(self._layer_index, query, key, heads("v_proj"))
        return self._ranks.all_reduce_sum(self._projections["o_proj"](seen.flatten(-2), changes["o_proj"], scale))

    def _mlp(self, normed: torch.Tensor) -> torch.Tensor:
        return self._ranks.all_reduce_sum(self._down(functional.silu(self._gate(normed)) * self._up(normed)))


def _part(ranks: RankGroup, width: int) -> slice:
    """This rank's part of `width`."""
    share = width // ranks.size
    return slice(ranks.rank * share, (ranks.rank + 1) * share)
