# SPDX-License-Identifier: Apache-2.0
"""Emulated graphs do to a caller what captured ones do: pad, and overwrite what the last step returned."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omni_core_cpu_sim import CaptureSizePadding, CpuSimBackend, GraphEmulator

from omni_core.backend import ByteCarver

WAIT_S = 20.0
SIZES = (1, 2, 4, 8, 16)


def step_rows(step: int, num_tokens: int) -> torch.Tensor:
    return (step * 1000 + torch.arange(num_tokens * 3)).view(num_tokens, 3).to(torch.float32)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sizes=st.sets(st.integers(1, 600), max_size=8), num_tokens=st.integers(1, 700))
def test_a_step_is_padded_to_the_smallest_size_that_holds_it(sizes: set[int], num_tokens: int) -> None:
    padding = CaptureSizePadding(tuple(sorted(sizes)))
    assert padding.padded(num_tokens) == min((size for size in sizes if size >= num_tokens), default=num_tokens)
    assert padding.largest == max(sizes, default=0)


def test_the_backend_gives_its_rule(sim: CpuSimBackend) -> None:
    padding = sim.graph_padding(SIZES)
    assert [padding.padded(count) for count in (1, 3, 8, 9, 16, 17)] == [1, 4, 8, 16, 16, 17]
    assert sim.graph_padding(()).padded(37) == 37


@pytest.mark.parametrize("sizes", [(0, 1), (2, 2), (4, 2), (-1,)])
def test_sizes_that_do_not_rise_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"capture_sizes=.*must rise strictly"):
        CaptureSizePadding(sizes)


def test_a_step_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="num_tokens=0"):
        CaptureSizePadding(SIZES).padded(0)


def test_real_rows_come_first_and_padding_is_no_row() -> None:
    output = GraphEmulator(SIZES).replay("hidden", step_rows(1, 5))
    assert output.shape == (8, 3)
    assert torch.equal(output[:5], step_rows(1, 5))
    assert bool(output[5:].isnan().all())


@pytest.mark.parametrize("later_tokens", [1, 5, 16])
def test_the_next_replay_of_any_size_overwrites_the_last_output(later_tokens: int) -> None:
    graph = GraphEmulator(SIZES)
    kept = graph.replay("hidden", step_rows(1, 5))
    graph.replay("hidden", step_rows(2, later_tokens))
    assert not bool((kept[:5] == step_rows(1, 5)).any())


def test_keys_have_buffers_of_their_own() -> None:
    graph = GraphEmulator(SIZES)
    hidden = graph.replay("hidden", step_rows(1, 5))
    codes = graph.replay("codes", torch.arange(5))
    assert torch.equal(hidden[:5], step_rows(1, 5))
    assert torch.equal(codes[:5], torch.arange(5))
    assert codes[5:].tolist() == [-1, -1, -1]


def test_a_step_beyond_the_largest_size_is_eager() -> None:
    graph = GraphEmulator(SIZES)
    eager = graph.replay("hidden", step_rows(1, 17))
    graph.replay("hidden", step_rows(2, 17))
    graph.replay("hidden", step_rows(3, 16))
    assert torch.equal(eager, step_rows(1, 17))


def test_rows_unlike_the_captured_ones_are_refused() -> None:
    graph = GraphEmulator(SIZES)
    graph.replay("hidden", step_rows(1, 5))
    with pytest.raises(ValueError, match=r"'hidden' was captured as rows of \(3,\) torch\.float32, got \(4,\)"):
        graph.replay("hidden", torch.zeros(5, 4))
    with pytest.raises(ValueError, match=r"got \(3,\) torch\.float64"):
        graph.replay("hidden", step_rows(1, 5).double())


def test_a_snapshot_outlives_the_static_buffer_and_an_alias_does_not(sim: CpuSimBackend) -> None:
    graph, stream = GraphEmulator(SIZES), sim.new_stream("copy")
    page, ring = ByteCarver(sim.pinned_arena(4096).buffer), sim.snapshot_ring(1, 4096, torch.device("cpu"))
    with sim.hold_copies():
        output = graph.replay("hidden", step_rows(1, 5))
        snapshotted, aliased = (page.take((5, 3), torch.float32) for _ in range(2))
        sim.copy_to_host(snapshotted, sim.snapshot(output[:5], ring.slot(0)), stream)
        done = sim.copy_to_host(aliased, output[:5], stream)
        graph.replay("hidden", step_rows(2, 5))
    done.synchronize(WAIT_S)
    assert torch.equal(snapshotted, step_rows(1, 5))
    assert torch.equal(aliased, step_rows(2, 5))
