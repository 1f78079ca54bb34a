# SPDX-License-Identifier: Apache-2.0
"""The plainest owner of keys and values: one tensor per row and layer, a mask of booleans, no pages.

A hit is what an earlier owner computed: `take_over` hands its leading keys and values to rows of this one.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from omni_core.diffusion_kv.attention.owner import RowKey


@dataclass
class PlainStep:
    owner: "PlainOwner"
    rows: tuple
    layout: object
    query_start_tokens: int
    num_query_tokens: int
    visible_tokens: int

    def attend(self, layer_index, query, key, value):
        start, end = self.query_start_tokens, self.query_start_tokens + self.num_query_tokens
        assert query.shape[:2] == key.shape[:2] == value.shape[:2] == (len(self.rows), self.num_query_tokens)
        keys, values = [], []
        for index, row in enumerate(self.rows):
            kept = self.owner.kept.setdefault(
                (row, layer_index),
                torch.full((2, self.layout.geometry.total_tokens, *key.shape[2:]), torch.nan, dtype=key.dtype),
            )
            kept[0, start:end], kept[1, start:end] = key[index], value[index]
            keys.append(kept[0, : self.visible_tokens])
            values.append(kept[1, : self.visible_tokens])
        mask = visible(self.layout)[start:end, : self.visible_tokens]
        return functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            torch.stack(keys).transpose(1, 2),
            torch.stack(values).transpose(1, 2),
            attn_mask=mask,
            enable_gqa=True,
        ).transpose(1, 2)


class PlainOwner:
    def __init__(self, *, hit_tokens=0, recompute=False):
        self.hit_tokens = hit_tokens
        self.recompute = recompute
        self.kept = {}

    def take_over(self, other):
        """The leading `hit_tokens` of every row of `other`; the rest stays NaN, so that a read of it shows."""
        for key, kept in other.kept.items():
            mine = torch.full_like(kept, torch.nan)
            mine[:, : self.hit_tokens] = kept[:, : self.hit_tokens]
            self.kept[key] = mine
        return self

    def first_step(self, rows, layout):
        return self._step(rows, layout, self.hit_tokens, layout.geometry.total_tokens)

    def later_step(self, rows, layout):
        if self.recompute:
            return self._step(rows, layout, 0, layout.geometry.total_tokens)
        return self._step(rows, layout, layout.geometry.prefix_tokens, layout.geometry.target_end)

    def _step(self, rows, layout, start, end):
        return PlainStep(self, tuple(rows), layout, start, end - start, end)


def visible(layout):
    """`[queries, keys]`: what the layout lets each token see."""
    total = layout.geometry.total_tokens
    mask = torch.ones(total, total, dtype=torch.bool).tril_()
    for span in layout.spans:
        mask[span.start : span.end, span.start : span.end] = True
    return mask


def row_keys(states, *, rows=None):
    """The rows of a forward over `states`; `rows` picks some of each."""
    return tuple(
        RowKey(state.prepared.request.request_id, row)
        for state in states
        for row in (range(len(state.prepared.rows)) if rows is None else rows)
    )


def run(pipeline, requests, owner, *, rows=None, steps=None):
    """All steps of requests of one layout, in one wave."""
    states = [pipeline.start(pipeline.preprocess(request)) for request in requests]
    layout = states[0].prepared.rows[0].layout
    for step_index in range(requests[0].num_inference_steps if steps is None else steps):
        begin = owner.first_step if step_index == 0 else owner.later_step
        pipeline.denoise(states, step_index, begin(row_keys(states, rows=rows), layout))
    return states
