# SPDX-License-Identifier: Apache-2.0
"""What an owner of pages refuses: each with a message of its own, and nothing computed or kept."""

from dataclasses import replace

import pytest
import torch
from diffusion_kv.worker_rig import (
    CPU,
    HIT,
    LAYOUT,
    SHAPE,
    RowTensors,
    compute,
    dense,
    keys_of,
    opened_owner,
    pages_from,
    snapshot,
)

from omni_core.diffusion_kv.attention.masked import layout_mask
from omni_core.diffusion_kv.attention.metadata import MetadataKind, check_metadata
from omni_core.diffusion_kv.attention.profiling import ProfilingAttention, required_attention
from omni_core.diffusion_kv.errors import PagedAttentionError
from omni_core.diffusion_kv.rows import RowGeometry

GEOMETRY = LAYOUT.geometry
PAGES = (pages_from(1), pages_from(9))
ROWS = keys_of("a")
OTHER_LAYOUT = replace(LAYOUT, geometry=RowGeometry(70, 40, 112))


@pytest.fixture
def owner():
    with opened_owner("gathered") as owner:
        owner.worker.install(snapshot("a", *PAGES))
        yield owner


@pytest.fixture
def step(owner):
    return owner.first_step(ROWS, LAYOUT)


def tensors_of(rows=2, tokens=113, heads=(6, 2, 2), head_size=32, dtype=torch.float32, device=CPU):
    return [torch.zeros(rows, tokens, count, head_size, dtype=dtype, device=device) for count in heads]


WRONG_TENSORS = {
    "a row too many": (tensors_of(rows=3), r"query has the shape \(3, 113, 6, 32\), and this forward's is \(2, 113"),
    "a token too few": (tensors_of(tokens=112), r"query has the shape \(2, 112, 6, 32\)"),
    "key heads": (tensors_of(heads=(6, 6, 2)), r"key has the shape \(2, 113, 6, 32\), .* \(2, 113, 2, 32\)"),
    "value heads": (tensors_of(heads=(6, 2, 1)), "value has the shape"),
    "head size": (tensors_of(head_size=64), "query has the shape"),
    "dtype": (tensors_of(dtype=torch.bfloat16), "query is torch.bfloat16, and keys and values are kept as torch.float"),
    "device": (tensors_of(device=torch.device("meta")), "query lies on meta, and keys and values on cpu"),
}


class TestALayersTensors:
    @pytest.mark.parametrize("name", WRONG_TENSORS)
    def test_tensors_that_are_not_the_pools(self, owner, step, name):
        before = [layer.clone() for layer in owner.worker.pool.layers]
        tensors, message = WRONG_TENSORS[name]
        with pytest.raises(PagedAttentionError, match=f"layer 0: {message}"):
            step.attend(0, *tensors)
        for layer, held in zip(owner.worker.pool.layers, before, strict=True):
            assert torch.equal(layer.view(torch.int32), held.view(torch.int32))

    @pytest.mark.parametrize("layer", [-1, 2])
    def test_a_layer_out_of_range(self, step, layer):
        with pytest.raises(PagedAttentionError, match=f"layer {layer}: the keys and values of 2 are kept"):
            step.attend(layer, *tensors_of())

    def test_a_layer_twice(self, step):
        step.attend(0, *tensors_of())
        with pytest.raises(PagedAttentionError, match="layer 0 attends a second time"):
            step.attend(0, *tensors_of())

    def test_a_step_after_the_next_one_began(self, owner, step):
        owner.first_step(ROWS, LAYOUT)
        with pytest.raises(PagedAttentionError, match="attention is over: another forward began"):
            step.attend(0, *tensors_of())

    def test_a_step_of_a_closed_worker(self, owner, step):
        owner.worker.close()
        with pytest.raises(PagedAttentionError, match="the worker closed"):
            step.attend(0, *tensors_of())
        with pytest.raises(PagedAttentionError, match="the worker was closed"):
            owner.first_step(ROWS, LAYOUT)


class TestTheRowsOfAForward:
    def test_no_row(self, owner):
        with pytest.raises(PagedAttentionError, match="a forward without rows"):
            owner.first_step((), LAYOUT)

    def test_a_row_twice(self, owner):
        with pytest.raises(PagedAttentionError, match="a row stands twice"):
            owner.first_step((ROWS[0], ROWS[0]), LAYOUT)

    def test_a_row_that_is_not_installed(self, owner):
        with pytest.raises(PagedAttentionError, match=r"'b'.*no pages on this worker; install its snapshot first"):
            owner.first_step((*ROWS, *keys_of("b")), LAYOUT)

    def test_rows_of_another_geometry(self, owner):
        with pytest.raises(PagedAttentionError, match=r"its pages are for RowGeometry.*total_tokens=113"):
            owner.first_step(ROWS, OTHER_LAYOUT)

    def test_rows_of_different_hits(self, owner):
        owner.worker.install(snapshot("b", pages_from(17), pages_from(25), hit=HIT))
        with pytest.raises(PagedAttentionError, match=r"rows of one forward hit \[0, 64\] tokens"):
            owner.first_step((*ROWS, *keys_of("b")), LAYOUT)

    def test_a_later_step_without_a_whole_first_one(self, owner, step):
        with pytest.raises(PagedAttentionError, match="a later step, but its first one was not computed in every lay"):
            owner.later_step(ROWS, LAYOUT)
        step.attend(0, *tensors_of())
        with pytest.raises(PagedAttentionError, match="a later step"):
            owner.later_step(ROWS, LAYOUT)

    def test_a_first_step_again(self, owner, step):
        compute(step, RowTensors())
        with pytest.raises(PagedAttentionError, match="its first step was computed; its prefix may be others' hit"):
            owner.first_step(ROWS, LAYOUT)

    def test_a_page_that_another_row_hits(self, owner):
        """A scheduler that hands a page out twice is found out before the page is overwritten."""
        owner.worker.install(snapshot("b", PAGES[0][:4] + pages_from(25, 4), hit=HIT))
        with pytest.raises(PagedAttentionError, match=r"tokens \[0, 113\) would be written to page 1, which is hit by"):
            owner.first_step(ROWS, LAYOUT)


class TestDenseRows:
    def test_a_later_step_without_a_first_one(self):
        with pytest.raises(PagedAttentionError, match="'a': a later step, but its first one was not computed"):
            dense().later_step(ROWS, LAYOUT)

    def test_a_later_step_of_other_rows_or_another_layout(self):
        owner = dense()
        compute(owner.first_step(ROWS, LAYOUT), RowTensors())
        for rows, layout in ((ROWS[:1], LAYOUT), (ROWS, OTHER_LAYOUT)):
            with pytest.raises(PagedAttentionError, match="'a': its first step was of the rows"):
                owner.later_step(rows, layout)

    def test_rows_of_a_request_that_are_apart(self):
        b = keys_of("b")
        with pytest.raises(PagedAttentionError, match="the rows of request 'a' do not stand side by side"):
            dense().first_step((ROWS[0], *b, ROWS[1]), LAYOUT)


class TestALayerWithoutAnAttention:
    def test_it_says_so(self):
        with pytest.raises(PagedAttentionError, match="layer 3 was reached without an attention"):
            required_attention(None, 3)

    def test_profiling_is_an_owner_one_asks_for(self):
        tensors, owner = RowTensors(), ProfilingAttention(SHAPE, CPU)
        step = required_attention(owner.first_step(ROWS, LAYOUT), 0)
        whole = compute(dense().first_step(ROWS, LAYOUT), tensors)
        assert torch.equal(compute(step, tensors), whole)
        assert compute(owner.later_step(ROWS, LAYOUT), tensors).shape == (2, 2, GEOMETRY.target_tokens, 6, 32)


class TestMetadataOfAModel:
    def mask(self, owner):
        step = owner.first_step(ROWS, LAYOUT)
        return step, layout_mask(LAYOUT, 0, 113, CPU)[None, None]

    def test_a_mask_that_says_what_the_layout_says_is_let_pass(self, owner):
        step, mask = self.mask(owner)
        check_metadata({MetadataKind.ATTENTION_MASK: mask.expand(2, 6, -1, -1)}, LAYOUT, step)
        check_metadata({MetadataKind.JOINT_MASK: None}, LAYOUT, step)

    @pytest.mark.parametrize("kind", [MetadataKind.JOINT_MASK, MetadataKind.QUERY_RANGES, MetadataKind.VIDEO_LAYOUT])
    def test_what_the_owners_cannot_express(self, owner, kind):
        step, _ = self.mask(owner)
        with pytest.raises(PagedAttentionError, match=f"{kind} was given, which attention over pages cannot express"):
            check_metadata({kind: torch.zeros(1)}, LAYOUT, step)

    def test_a_mask_of_another_form(self, owner):
        step, mask = self.mask(owner)
        for wrong in (mask[0], mask.float(), [[True]]):
            with pytest.raises(PagedAttentionError, match="it is a 4-D boolean tensor"):
                check_metadata({MetadataKind.ATTENTION_MASK: wrong}, LAYOUT, step)
        with pytest.raises(PagedAttentionError, match=r"this forward has \(113, 113\) queries and keys"):
            check_metadata({MetadataKind.ATTENTION_MASK: mask[:, :, 1:]}, LAYOUT, step)

    def test_a_mask_that_says_something_else(self, owner):
        step, mask = self.mask(owner)
        other = mask.clone()
        other[..., 30, 57] = False
        with pytest.raises(PagedAttentionError, match="attention_mask is not the row's layout"):
            check_metadata({MetadataKind.ATTENTION_MASK: other}, LAYOUT, step)
