# SPDX-License-Identifier: Apache-2.0
"""One denoise step of a wave of requests: what goes in, which tokens of it, and what comes out for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from omni_core.diffusion_kv.attention.owner import RowKey, StepAttention
from omni_core.diffusion_kv.errors import DiffusionKVError, PagedAttentionError
from omni_core.diffusion_kv.parallel import RankGroup
from omni_core.diffusion_kv.rows import RowGeometry, RowLayout
from omni_core.diffusion_kv.tiny_hunyuan.flow_matching import guided
from omni_core.diffusion_kv.tiny_hunyuan.rope import Rotary
from omni_core.diffusion_kv.tiny_hunyuan.state import TinyHunyuanState
from omni_core.diffusion_kv.tiny_hunyuan.transformer import QueryWindow


@dataclass(frozen=True, slots=True)
class Wave:
    """States that share a forward, and which of their rows this rank computes."""

    states: tuple[TinyHunyuanState, ...]
    row_indices: tuple[tuple[int, ...], ...]
    """Per state, the CFG rows of this rank."""

    @property
    def layout(self) -> RowLayout:
        """The one layout of all rows."""
        return self.states[0].prepared.rows[0].layout

    @property
    def row_keys(self) -> tuple[RowKey, ...]:
        """The batch dimension, in order."""
        return tuple(
            RowKey(state.prepared.request.request_id, row)
            for state, rows in zip(self.states, self.row_indices, strict=True)
            for row in rows
        )

    def row_embeddings(self, start: int, stop: int) -> torch.Tensor:
        """A new `[rows, stop - start, dim]`: of every row the tokens `[start, stop)`."""
        return torch.cat(
            [
                state.embeddings[list(rows), start:stop]
                for state, rows in zip(self.states, self.row_indices, strict=True)
            ]
        )

    def row_latents(self) -> torch.Tensor:
        """`[rows, channels, height, width]`: the rows of one request start from one latent."""
        repeats = [len(rows) for rows in self.row_indices]
        return torch.cat(
            [state.latents[None].expand(count, -1, -1, -1) for state, count in zip(self.states, repeats, strict=True)]
        )

    def guided_velocities(self, velocity: torch.Tensor, cfg_ranks: RankGroup) -> tuple[torch.Tensor, ...]:
        """Per state its velocity. Gathers the other ranks' rows under CFG parallelism; blocks on them then.

        Args:
            velocity: of this rank's rows, `[rows, channels, height, width]`.
            cfg_ranks: the ranks that share rows.
        """
        if cfg_ranks.size > 1:
            conditional, unconditional = cfg_ranks.all_gather(velocity)
            return tuple(
                guided(conditional[index], unconditional[index], state.prepared.request.guidance_scale)
                for index, state in enumerate(self.states)
            )
        of_states = torch.split(velocity, [len(rows) for rows in self.row_indices])
        return tuple(
            rows[0] if len(rows) == 1 else guided(rows[0], rows[1], state.prepared.request.guidance_scale)
            for rows, state in zip(of_states, self.states, strict=True)
        )


def checked_wave(
    states: Sequence[TinyHunyuanState], step_index: int, attention: StepAttention, cfg_ranks: RankGroup
) -> Wave:
    """The wave of these states, once they are found fit for one forward.

    Raises:
        DiffusionKVError: none, one is at another step, or they differ in layout, adapter or steps.
        PagedAttentionError: the attention is for other rows.
    """
    if not states:
        raise DiffusionKVError("a denoise step without a request")
    first = states[0]
    for state in states:
        name = state.prepared.request.request_id
        if state.finished or state.next_step_index != step_index:
            raise DiffusionKVError(
                f"request {name!r}: step {step_index} was asked for; of {len(state.sigmas) - 1} steps "
                f"{state.next_step_index} are done"
            )
        for what, own, shared in (
            ("row layout", _layouts(state), {first.prepared.rows[0].layout}),
            ("adapter", state.prepared.request.lora, first.prepared.request.lora),
            ("number of steps", len(state.sigmas) - 1, len(first.sigmas) - 1),
        ):
            if own != shared:
                raise DiffusionKVError(
                    f"request {name!r} has another {what} than {first.prepared.request.request_id!r}: {own} and "
                    f"{shared}; such requests cannot share a forward"
                )
        if cfg_ranks.size > 1 and len(state.prepared.rows) != cfg_ranks.size:
            raise DiffusionKVError(
                f"request {name!r} has {len(state.prepared.rows)} rows for {cfg_ranks.size} CFG-parallel ranks"
            )
    wave = Wave(
        states=tuple(states),
        row_indices=tuple(
            (cfg_ranks.rank,) if cfg_ranks.size > 1 else tuple(range(len(state.prepared.rows))) for state in states
        ),
    )
    if attention.rows != wave.row_keys:
        raise PagedAttentionError(f"the attention is for the rows {attention.rows}; this forward has {wave.row_keys}")
    return wave


def query_window(geometry: RowGeometry, rotary: Rotary, step_index: int, attention: StepAttention) -> QueryWindow:
    """The window `attention` asks for: the leading tokens dropped, every index into the queries shifted.

    Args:
        geometry: of all rows.
        rotary: of the whole row.
        step_index: the first step computes to the row's end. A later one computes the target alone, or the whole row
            again for an owner that keeps nothing.
        attention: the step's.

    Raises:
        PagedAttentionError: another window.
    """
    start, count = attention.query_start_tokens, attention.num_query_tokens
    whole_row = start == 0 and count == geometry.total_tokens
    if step_index == 0:
        fits = 0 <= start <= geometry.prefix_tokens and count == geometry.total_tokens - start
        wanted = f"[hit, {geometry.total_tokens}) with a hit in the prefix of {geometry.prefix_tokens}"
    else:
        fits = whole_row or (start == geometry.prefix_tokens and count == geometry.target_tokens)
        wanted = f"[{geometry.prefix_tokens}, {geometry.target_end}), the target"
    if not fits:
        raise PagedAttentionError(
            f"step {step_index} was asked for the tokens [{start}, {start + count}) of a row of "
            f"{geometry.total_tokens}; it computes {wanted}"
        )
    target_start = geometry.prefix_tokens - start
    return QueryWindow(
        rotary=rotary.window(start, start + count),
        target=slice(target_start, target_start + geometry.target_tokens),
    )


def _layouts(state: TinyHunyuanState) -> set[RowLayout]:
    return {row.layout for row in state.prepared.rows}
