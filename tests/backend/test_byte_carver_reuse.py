# SPDX-License-Identifier: Apache-2.0
"""A step that looks like the one before is carved without a torch operation; one that does not is carved afresh."""

import pytest
import torch
from operation_counts import torch_operations

from omni_core.backend import ByteCarver

DECODE = (((8, 3), torch.bfloat16), ((8,), torch.float32))


@pytest.fixture
def carver():
    return ByteCarver(torch.zeros(4096, dtype=torch.uint8))


def carve(carver, wanted):
    carver.restart()
    return [carver.take(shape, dtype) for shape, dtype in wanted], carver.used()


def test_the_second_of_two_equal_steps_costs_no_torch_operation(carver):
    (rows, codes), used = carve(carver, DECODE)
    rows.fill_(1)
    codes.fill_(2)
    with torch_operations() as counted:
        (rows_again, codes_again), used_again = carve(carver, DECODE)
    assert counted.total == 0
    assert torch.equal(rows_again, torch.ones(8, 3, dtype=torch.bfloat16))
    assert torch.equal(codes_again, torch.full((8,), 2.0))
    assert used_again.data_ptr() == used.data_ptr()
    assert used_again.numel() == used.numel() == carver.used_bytes


@pytest.mark.parametrize(
    "other",
    [
        (((9, 3), torch.bfloat16), ((9,), torch.float32)),
        (((8, 3), torch.float16), ((8,), torch.float32)),
        (((8,), torch.float32), ((8, 3), torch.bfloat16)),
        (((40, 3), torch.bfloat16), ((8,), torch.float32)),
        (((8, 3), torch.bfloat16),),
    ],
    ids=["more rows", "other dtype", "other order", "same key further back", "fewer keys"],
)
def test_a_step_of_another_form_between_two_equal_ones_changes_neither(carver, other):
    first, first_used = carve(carver, DECODE)
    between, _ = carve(carver, other)
    assert [(tuple(view.shape), view.dtype) for view in between] == list(other)
    again, again_used = carve(carver, DECODE)
    assert [view.data_ptr() for view in again] == [view.data_ptr() for view in first]
    assert [(tuple(view.shape), view.dtype) for view in again] == list(DECODE)
    assert again_used.numel() == first_used.numel()


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("then", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_views_may_be_written_in_another_mode_than_they_were_carved_in(carver, first, then):
    with first():
        carve(carver, DECODE)
    with then():
        (rows, _), used = carve(carver, DECODE)
        rows.copy_(torch.full((8, 3), 5.0, dtype=torch.bfloat16))
        used[48:].add_(1)
    assert rows.sum() == 120
    assert not rows.is_inference()


def test_a_sibling_carves_the_same_bytes_and_views_them_at_the_cost_of_one_operation(carver):
    (rows, _codes), _ = carve(carver, DECODE)
    rows.fill_(3)
    with torch_operations() as counted:
        sibling = carver.sibling()
        sibling.restart()
        same = sibling.take((8, 3), torch.bfloat16)
    assert counted.total == 1
    assert torch.equal(same, rows)
    carver.restart()
    assert sibling.used_bytes == 64  # each has a place of its own
