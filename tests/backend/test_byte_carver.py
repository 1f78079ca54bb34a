# SPDX-License-Identifier: Apache-2.0
"""Carving: aligned, disjoint, contiguous, the same on every arena, and never past its end."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omni_core.backend import ByteCarver
from omni_core.backend.memory import CARVE_ALIGNMENT_BYTES, aligned_nbytes, tensor_nbytes

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool)
Request = tuple[tuple[int, ...], torch.dtype]
few = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
requests = st.lists(
    st.tuples(st.lists(st.integers(0, 9), max_size=3).map(tuple), st.sampled_from(DTYPES)), min_size=1, max_size=8
)


def arena(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def needed_nbytes(wanted: list[Request]) -> int:
    return sum(aligned_nbytes(tensor_nbytes(shape, dtype)) for shape, dtype in wanted)


def offsets(base: torch.Tensor, views: list[torch.Tensor]) -> list[int]:
    """Byte offsets of the views that have bytes; torch gives an empty view no address."""
    return [view.data_ptr() - base.data_ptr() for view in views if view.numel()]


@few
@given(wanted=requests)
def test_views_have_the_asked_form_and_start_aligned(wanted: list[Request]) -> None:
    base = arena(needed_nbytes(wanted) + 1)
    carver = ByteCarver(base)
    views = [carver.take(shape, dtype) for shape, dtype in wanted]
    for view, (shape, dtype) in zip(views, wanted, strict=True):
        assert (tuple(view.shape), view.dtype, view.is_contiguous()) == (shape, dtype, True)
    assert all(offset % CARVE_ALIGNMENT_BYTES == 0 for offset in offsets(base, views))
    assert carver.used_bytes == needed_nbytes(wanted)


@few
@given(wanted=requests)
def test_views_share_no_byte(wanted: list[Request]) -> None:
    carver = ByteCarver(arena(needed_nbytes(wanted) + 1))
    views = [carver.take(shape, dtype) for shape, dtype in wanted]
    for number, view in enumerate(views):
        view.view(-1).view(torch.uint8).fill_(number + 1)
    for number, view in enumerate(views):
        assert bool((view.view(-1).view(torch.uint8) == number + 1).all())


@few
@given(wanted=requests, extra_bytes=st.integers(0, 200))
def test_equal_requests_lie_at_equal_offsets_of_every_arena(wanted: list[Request], extra_bytes: int) -> None:
    first_base, second_base = arena(needed_nbytes(wanted) + 1), arena(needed_nbytes(wanted) + 1 + extra_bytes)
    first, second = ByteCarver(first_base), ByteCarver(second_base)
    first_views = [first.take(shape, dtype) for shape, dtype in wanted]
    second_views = [second.take(shape, dtype) for shape, dtype in wanted]
    assert offsets(first_base, first_views) == offsets(second_base, second_views)
    for number, view in enumerate(first_views):
        view.fill_(number % 2 + 1)
    second.used().copy_(first.used())
    for mirrored, view in zip(second_views, first_views, strict=True):
        assert torch.equal(mirrored, view)


@few
@given(wanted=requests)
def test_a_restarted_carver_starts_at_the_first_byte(wanted: list[Request]) -> None:
    base = arena(needed_nbytes(wanted) + 1)
    carver = ByteCarver(base)
    before = offsets(base, [carver.take(shape, dtype) for shape, dtype in wanted])
    carver.restart()
    assert (carver.used_bytes, carver.used().numel()) == (0, 0)
    assert offsets(base, [carver.take(shape, dtype) for shape, dtype in wanted]) == before


@few
@given(wanted=requests, skipped=st.integers(0, 5))
def test_a_carver_restarted_further_on_leaves_the_bytes_in_front_alone(wanted: list[Request], skipped: int) -> None:
    first_byte = skipped * CARVE_ALIGNMENT_BYTES
    base = arena(first_byte + needed_nbytes(wanted) + 1)
    carver = ByteCarver(base)
    expected = [first_byte + offset for offset in offsets(base, [carver.take(shape, dtype) for shape, dtype in wanted])]
    carver.restart(first_byte)
    assert carver.used_bytes == first_byte
    assert offsets(base, [carver.take(shape, dtype) for shape, dtype in wanted]) == expected
    assert carver.used_bytes == first_byte + needed_nbytes(wanted)


@few
@given(steps=st.lists(st.tuples(requests, st.booleans()), min_size=2, max_size=6))
def test_every_step_gets_its_own_views_whatever_the_steps_before_asked(steps: list[tuple[list[Request], bool]]) -> None:
    base = arena(max(needed_nbytes(wanted) for wanted, _ in steps) + 1)
    carver = ByteCarver(base)
    for wanted, in_inference_mode in steps:
        with torch.inference_mode(in_inference_mode):
            carver.restart()
            views = [carver.take(shape, dtype) for shape, dtype in wanted]
            for number, (view, (shape, dtype)) in enumerate(zip(views, wanted, strict=True)):
                assert (tuple(view.shape), view.dtype, view.is_contiguous()) == (shape, dtype, True)
                view.fill_(number % 2)
            for number, view in enumerate(views):
                assert bool((view == number % 2).all())
            assert carver.used_bytes == carver.used().numel() == needed_nbytes(wanted)
        fresh_base = arena(base.numel())
        fresh = ByteCarver(fresh_base)
        fresh_views = [fresh.take(shape, dtype) for shape, dtype in wanted]
        assert offsets(base, views) == offsets(fresh_base, fresh_views)


@pytest.mark.parametrize("first_inside", [True, False])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_what_was_carved_in_inference_mode_is_carved_writable_outside(first_inside: bool, dtype: torch.dtype) -> None:
    carver = ByteCarver(arena(1024))
    for inside in (first_inside, not first_inside, first_inside):
        with torch.inference_mode(inside):
            carver.restart()
            view = carver.take((4, 4), dtype)
            view.fill_(7)
            carver.used().fill_(1)
            assert bool((view.view(torch.uint8) == 1).all())


@few
@given(wanted=requests, missing_bytes=st.integers(1, 64))
def test_a_view_past_the_end_is_refused_and_takes_nothing(wanted: list[Request], missing_bytes: int) -> None:
    capacity_bytes = max(0, needed_nbytes(wanted) - missing_bytes)
    carver = ByteCarver(arena(capacity_bytes))
    for shape, dtype in wanted:
        used_bytes = carver.used_bytes
        if used_bytes + needed_nbytes([(shape, dtype)]) <= capacity_bytes:
            carver.take(shape, dtype)
            continue
        with pytest.raises(ValueError, match=f"arena of {capacity_bytes} bytes has {capacity_bytes - used_bytes} left"):
            carver.take(shape, dtype)
        assert carver.used_bytes == used_bytes


def test_used_covers_every_view_from_the_first_byte() -> None:
    base = arena(1024)
    carver = ByteCarver(base)
    carver.take((3,), torch.float32)
    carver.take((5, 2), torch.bfloat16)
    assert carver.used().numel() == carver.used_bytes == 2 * CARVE_ALIGNMENT_BYTES
    assert carver.used().data_ptr() == base.data_ptr()
    assert carver.capacity_bytes == 1024


@pytest.mark.parametrize(
    "unfit", [torch.zeros(8), torch.zeros(2, 4, dtype=torch.uint8), torch.zeros((), dtype=torch.uint8)]
)
def test_an_arena_is_a_flat_byte_tensor(unfit: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="arena must be a flat uint8 tensor"):
        ByteCarver(unfit)


@given(nbytes=st.integers(0, 1 << 40))
def test_alignment_rounds_up_by_less_than_one_line(nbytes: int) -> None:
    rounded = aligned_nbytes(nbytes)
    assert rounded % CARVE_ALIGNMENT_BYTES == 0
    assert nbytes <= rounded < nbytes + CARVE_ALIGNMENT_BYTES


@few
@given(shape=st.lists(st.integers(0, 50), max_size=4), dtype=st.sampled_from(DTYPES))
def test_tensor_nbytes_is_what_torch_allocates(shape: list[int], dtype: torch.dtype) -> None:
    assert tensor_nbytes(shape, dtype) == math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
