# SPDX-License-Identifier: Apache-2.0
"""Large arenas are page-locked piece by piece behind one index; a refusal is one clean error that leaves nothing."""

from __future__ import annotations

import pytest
import torch
from omni_core_cpu_sim import CpuSimBackend

from omni_core.backend.host_pages import PAGE_BYTES
from omni_core.backend.pinned_pieces import PinnedPieces, piece_sizes

CHUNK = 4 * PAGE_BYTES


class Driver:
    """Notes every pin and unpin; refuses the pin with number `refused`."""

    def __init__(self, refused: int | None = None) -> None:
        self.pins: list[tuple[int, int]] = []
        self.live: dict[int, int] = {}
        self._refused = refused

    def pin(self, address: int, nbytes: int) -> None:
        self.pins.append((address, nbytes))
        if len(self.pins) == self._refused:
            raise MemoryError("the driver said no")
        self.live[address] = nbytes

    def unpin(self, address: int, nbytes: int) -> None:
        assert self.live.pop(address) == nbytes


@pytest.mark.parametrize("nbytes", [1, CHUNK - 1, CHUNK, CHUNK + 1, 7 * CHUNK + 5])
def test_fault_085_pieces_cover_the_range_once_and_none_is_larger_than_asked(nbytes: int) -> None:
    driver = Driver()
    pieces = PinnedPieces(nbytes, CHUNK, driver.pin, driver.unpin)
    assert pieces.buffer is not None
    start = pieces.buffer.data_ptr()
    ends = [address + size for address, size in driver.pins]
    assert [address for address, _ in driver.pins] == [start, *ends[:-1]]
    assert ends[-1] == start + nbytes
    assert max(size for _, size in driver.pins) <= CHUNK
    assert pieces.pinned_bytes == pieces.buffer.numel() == nbytes
    pieces.close()
    pieces.close()
    assert (driver.live, pieces.pinned_bytes, pieces.buffer) == ({}, 0, None)


def test_without_a_chunk_size_there_is_one_pin() -> None:
    driver = Driver()
    PinnedPieces(5 * CHUNK + 1, 0, driver.pin, driver.unpin)
    assert [size for _, size in driver.pins] == [5 * CHUNK + 1]


@pytest.mark.parametrize("refused", [1, 3, 5])
def test_fault_090_a_refused_piece_is_one_error_no_ladder_and_nothing_stays_pinned(refused: int) -> None:
    driver = Driver(refused)
    with pytest.raises(MemoryError, match=rf"piece {refused} of 5 of an arena of .* {CHUNK} bytes.*driver said no"):
        PinnedPieces(5 * CHUNK, CHUNK, driver.pin, driver.unpin)
    assert [size for _, size in driver.pins] == [CHUNK] * refused
    assert driver.live == {}


@pytest.mark.parametrize("chunk_bytes", [-PAGE_BYTES, 1, PAGE_BYTES + 1])
def test_a_chunk_that_is_not_whole_pages_is_refused_before_anything_is_pinned(chunk_bytes: int) -> None:
    driver = Driver()
    with pytest.raises(ValueError, match=f"chunk_bytes={chunk_bytes}: must be 0 or a multiple of the page"):
        PinnedPieces(CHUNK, chunk_bytes, driver.pin, driver.unpin)
    assert driver.pins == []


def test_the_sizes_of_a_terabyte_in_pieces_add_up() -> None:
    nbytes = (1 << 40) + 12_345
    sizes = piece_sizes(nbytes, 128 << 20)
    assert sum(sizes) == nbytes
    assert len(sizes) == 8193


# -- the simulated device


def test_fault_085_a_driver_with_a_limit_per_pin_takes_the_arena_in_pieces(make_sim) -> None:
    sim: CpuSimBackend = make_sim(max_pin_bytes=CHUNK, report_arenas_as_pinned=True)
    with pytest.raises(MemoryError, match=rf"{3 * CHUNK + 64} bytes.*max_pin_bytes={CHUNK}.*pin_chunk_bytes"):
        sim.pinned_arena(3 * CHUNK + 64)
    assert (sim.pins_tried, sim.num_pins, sim.pinned_bytes) == (1, 0, 0)
    arena = sim.pinned_arena(3 * CHUNK + 64, chunk_bytes=CHUNK)
    assert (sim.num_pins, sim.pinned_bytes, arena.pinned_bytes) == (4, 3 * CHUNK + 64, 3 * CHUNK + 64)
    arena.buffer[CHUNK - 8 : CHUNK + 8] = torch.arange(16, dtype=torch.uint8)
    assert arena.buffer[CHUNK - 8 : CHUNK + 8].tolist() == list(range(16))
    arena.close()
    assert (sim.num_pins, sim.pinned_bytes) == (0, 0)


def test_fault_086_a_range_above_the_drivers_limit_lies_behind_one_index(make_sim) -> None:
    sim: CpuSimBackend = make_sim(max_pin_bytes=PAGE_BYTES)
    arena = sim.pinned_arena(1000 * PAGE_BYTES, chunk_bytes=PAGE_BYTES)
    assert sim.num_pins == 1000
    numbers = arena.buffer.view(torch.int64)
    numbers.copy_(torch.arange(numbers.numel()))
    assert torch.equal(numbers, torch.arange(numbers.numel()))


def test_fault_087_pinned_bytes_are_what_was_asked_for_not_a_power_of_two(make_sim) -> None:
    sim: CpuSimBackend = make_sim(report_arenas_as_pinned=True)
    nbytes = 3 * CHUNK + 1
    assert sim.pinned_arena(nbytes).pinned_bytes == sim.pinned_bytes == nbytes


def test_fault_090_after_a_refusal_a_small_arena_works_and_the_refused_one_is_not_on_the_books(make_sim) -> None:
    sim: CpuSimBackend = make_sim(refused_pins=(3,))
    with pytest.raises(MemoryError, match="piece 3 of 8"):
        sim.pinned_arena(8 * CHUNK, chunk_bytes=CHUNK)
    assert (sim.pins_tried, sim.num_pins, sim.pinned_bytes, sim.pinned_allocations) == (3, 0, 0, 0)
    assert sim.pinned_arena(64).buffer.numel() == 64


def test_fault_090_what_all_arenas_may_have_is_checked_before_the_first_pin(make_sim) -> None:
    sim: CpuSimBackend = make_sim(max_pinned_bytes=4 * CHUNK)
    with pytest.raises(MemoryError, match="max_pinned_bytes"):
        sim.pinned_arena(5 * CHUNK, chunk_bytes=CHUNK)
    assert sim.pins_tried == 0
