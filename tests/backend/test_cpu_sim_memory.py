# SPDX-License-Identifier: Apache-2.0
"""The simulator's books: exact while memory is live, zero afterwards, and no closing under a running copy."""

from __future__ import annotations

import pytest
import torch
from omni_core_cpu_sim import CpuSimBackend

from omni_core.backend import BackendError, ByteCarver

WAIT_S = 20.0
CPU = torch.device("cpu")


def test_live_bytes_are_exact_and_allocations_only_grow(sim: CpuSimBackend) -> None:
    assert (sim.pinned_bytes, sim.device_bytes) == (0, 0)
    first, second = sim.pinned_arena(100), sim.pinned_arena(3)
    ring = sim.snapshot_ring(4, 1000, CPU)
    assert (sim.pinned_bytes, sim.device_bytes) == (103, 4000)
    assert ring.device_bytes == 4000
    first.close()
    first.close()
    assert sim.pinned_bytes == 3
    ring.close()
    ring.close()
    assert (sim.device_bytes, ring.device_bytes) == (0, 0)
    second.close()
    assert sim.pinned_bytes == 0
    assert (sim.pinned_allocations, sim.device_allocations) == (2, 4)


def test_closing_the_backend_frees_what_is_live(sim: CpuSimBackend) -> None:
    arena, ring = sim.pinned_arena(100), sim.snapshot_ring(2, 64, CPU)
    sim.close()
    assert (sim.pinned_bytes, sim.device_bytes) == (0, 0)
    arena.close()
    ring.close()
    assert (sim.pinned_bytes, sim.device_bytes) == (0, 0)
    with pytest.raises(BackendError, match="read after close"):
        _ = arena.buffer
    with pytest.raises(IndexError, match="has 0 buffers, asked for 0"):
        ring.slot(0)


def test_nothing_is_claimed_to_be_page_locked_unless_asked(make_sim) -> None:
    honest, claiming = make_sim(), make_sim(report_arenas_as_pinned=True)
    assert not honest.capabilities.pinned_memory
    assert claiming.capabilities.pinned_memory
    assert honest.pinned_arena(64).pinned_bytes == 0
    arena = claiming.pinned_arena(64)
    assert arena.pinned_bytes == 64
    arena.close()
    assert arena.pinned_bytes == 0


def test_the_limit_refuses_by_name_and_counts_nothing(make_sim) -> None:
    sim = make_sim(max_pinned_bytes=100)
    arena = sim.pinned_arena(60)
    with pytest.raises(
        MemoryError, match=r"pinned_arena\(41\): 60 bytes are pinned and max_pinned_bytes=100; raise it"
    ):
        sim.pinned_arena(41)
    assert (sim.pinned_bytes, sim.pinned_allocations) == (60, 1)
    arena.close()
    assert sim.pinned_arena(100).buffer.numel() == 100


def test_a_refusal_by_the_operating_system_counts_nothing(sim: CpuSimBackend) -> None:
    with pytest.raises(MemoryError, match=f"refused {1 << 60} bytes"):
        sim.pinned_arena(1 << 60)
    with pytest.raises(MemoryError, match=f"refused {1 << 60} bytes"):
        sim.snapshot_ring(1, 1 << 60, CPU)
    assert (sim.pinned_bytes, sim.device_bytes) == (0, 0)
    assert (sim.pinned_allocations, sim.device_allocations) == (0, 0)


@pytest.mark.parametrize("nbytes", [0, -5])
def test_an_empty_buffer_is_refused(sim: CpuSimBackend, nbytes: int) -> None:
    with pytest.raises(ValueError, match=f"nbytes={nbytes} must be at least 1"):
        sim.pinned_arena(nbytes)
    with pytest.raises(ValueError, match=f"depth=1 and nbytes={nbytes}"):
        sim.snapshot_ring(1, nbytes, CPU)


def test_a_ring_on_another_device_is_refused(sim: CpuSimBackend) -> None:
    with pytest.raises(ValueError, match="cpu_sim owns 'cpu' tensors, not cuda:0"):
        sim.snapshot_ring(1, 64, torch.device("cuda:0"))


@pytest.mark.parametrize("index", [-1, 2])
def test_a_ring_has_no_buffer_outside_its_depth(sim: CpuSimBackend, index: int) -> None:
    with pytest.raises(IndexError, match=f"has 2 buffers, asked for {index}"):
        sim.snapshot_ring(2, 64, CPU).slot(index)


@pytest.mark.parametrize("state", ["running", "queued"])
def test_memory_is_not_freed_under_a_copy(sim: CpuSimBackend, state: str) -> None:
    stream, rows = sim.new_stream("d2h"), torch.arange(64.0)
    arena, ring, other = sim.pinned_arena(4096), sim.snapshot_ring(1, 2048, CPU), sim.pinned_arena(4096)
    with sim.hold_copies():
        if state == "queued":
            sim.copy_to_host(ByteCarver(other.buffer).take(rows.shape, rows.dtype), rows, stream)
        clone = sim.snapshot(rows, ring.slot(0))
        done = sim.copy_to_host(ByteCarver(arena.buffer).take(clone.shape, clone.dtype), clone, stream)
        sim.copy_gate.wait_until_waiting(1, WAIT_S)
        for close, what in ((arena.close, "pinned arena of 4096"), (ring.close, "snapshot ring buffer of 2048")):
            with pytest.raises(BackendError, match=rf"{what} bytes: .* stream 'd2h' still uses it; wait for"):
                close()
        assert (sim.pinned_bytes, sim.device_bytes) == (8192, 2048)
    done.synchronize(WAIT_S)
    arena.close()
    ring.close()
    assert (sim.pinned_bytes, sim.device_bytes) == (4096, 0)


def test_a_row_nobody_wrote_is_not_a_row_of_zeros(sim: CpuSimBackend) -> None:
    page = ByteCarver(sim.pinned_arena(4096).buffer)
    ring = sim.snapshot_ring(1, 4096, CPU)
    for carver in (page, ring.slot(0)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert bool(carver.take((4, 4), dtype).isnan().all())
        assert bool((carver.take((4,), torch.int64) == -1).all())


def test_a_default_device_does_not_move_the_buffers(sim: CpuSimBackend) -> None:
    with torch.device("meta"):
        arena, ring = sim.pinned_arena(64), sim.snapshot_ring(1, 64, CPU)
    assert arena.buffer.device == CPU
    assert ring.slot(0).take((1,), torch.uint8).device == CPU


def test_buffers_allocated_in_inference_mode_are_written_outside_it(sim: CpuSimBackend) -> None:
    with torch.inference_mode():
        arena, ring = sim.pinned_arena(64), sim.snapshot_ring(1, 64, CPU)
    for view in (arena.buffer, ring.slot(0).take((64,), torch.uint8)):
        view.fill_(3)
        assert bool((view == 3).all())


def test_device_facts_are_the_hosts(sim: CpuSimBackend) -> None:
    info = sim.device_info()
    assert (info.name, info.device) == ("CPU simulator", "cpu")
    assert 0 < info.free_memory_bytes <= info.total_memory_bytes
    assert sim.owns(torch.empty(1))
    assert CpuSimBackend.unavailable_reason() is None
