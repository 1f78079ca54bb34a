# SPDX-License-Identifier: Apache-2.0
"""Cases that reviewers of the cache found: each once gave a wrong row, a lost row, or something that stayed held."""

import pytest
import torch
from cache_rig import more, new
from row_values import assert_rows

from omni_core.backend.observer import DeviceObserver
from omni_core.prefix_cache.errors import CacheClosedError, RequestEventError
from omni_core.prefix_cache.events import BlockCopy, RequestEvent, RequestEventKind, StepEvents
from omni_core.prefix_cache.policy import ModelCachePolicy


def test_a_block_copied_whole_has_the_digest_of_its_source(rig):
    rig.begin_as([RequestEvent(RequestEventKind.STARTED, "A", (1,), 0, 4, block_digests=(7,))], new("A", [1]))
    rig.take(rig.save())
    rig.schedule(new("C", [2, 3], hit=4, run=4))
    event = RequestEvent(RequestEventKind.STARTED, "C", (2, 3), 4, 4, block_digests=(7, 8))
    rig.cache.new_step_starts(StepEvents((event,), (BlockCopy(1, 2),)))
    assert_rows(rig.take(rig.save())["C"], ("A", 0, 4), ("C", 4, 8))


def test_a_block_copied_whole_is_not_served_under_another_digest(rig):
    rig.begin_as([RequestEvent(RequestEventKind.STARTED, "A", (1,), 0, 4, block_digests=(7,))], new("A", [1]))
    rig.take(rig.save())
    rig.schedule(new("C", [2, 3], hit=4, run=4))
    event = RequestEvent(RequestEventKind.STARTED, "C", (2, 3), 4, 4, block_digests=(9, 8))
    rig.cache.new_step_starts(StepEvents((event,), (BlockCopy(1, 2),)))
    assert "C" in rig.take(rig.save()).failed


@pytest.mark.parametrize("order", [1, -1])
def test_a_request_whose_table_is_announced_whole_and_appended_to_at_once_is_refused_alone(rig, order):
    """Its table would lack a block, and rows owed to it would be read one block too far on."""
    events = [
        RequestEvent(RequestEventKind.STARTED, "A", (1,), 0, 8),
        RequestEvent(RequestEventKind.EXTENDED, "A", (2,)),
        RequestEvent(RequestEventKind.STARTED, "B", (5,), 0, 4),
    ]
    rig.begin_as(events[::order], new("A", [1, 2], run=8), new("B", [5]))
    taken = rig.take(rig.save())
    assert isinstance(taken.failed["A"], RequestEventError)
    assert "name all of them there" in str(taken.failed["A"])
    assert_rows(taken["B"], ("B", 0, 4))
    taken = rig.run(more("A", 4, blocks=[3]), more("B", blocks=[6]))
    assert isinstance(taken.failed["A"], RequestEventError)
    assert_rows(taken["B"], ("B", 4, 5))


@pytest.mark.parametrize("hit", [0, 4])
def test_a_block_copied_onto_one_outside_the_hit_brings_no_rows_of_other_content(make_rig, hit):
    rig = make_rig(keys={"codes": ((2,), torch.int64)}, policy=ModelCachePolicy(token_keys=frozenset({"codes"})))
    rig.run(new("A", [1, 5], run=8))
    blocks = [2] if hit == 0 else [1, 2]
    rig.run(new("C", blocks, hit=hit, run=4), copies=[(5, 2)], keys=[])
    taken = rig.run(new("D", [*blocks, 3], hit=hit + 4, run=1))
    codes = taken["D"]["codes"]
    assert torch.equal(codes[hit : hit + 4], torch.zeros((4, 2), dtype=torch.int64))
    assert taken["D"].zero_ranges["codes"] == ((hit, hit + 4),)


def test_memory_for_deferred_keys_is_given_back_if_the_cache_closes_while_it_is_allocated(make_rig):
    class ClosesTheCache(DeviceObserver):
        cache = None

        def arena_wanted(self, nbytes):
            if self.cache is not None:
                self.cache.close()

    observer = ClosesTheCache()
    rig = make_rig(backend_options={"observer": observer})
    observer.cache = rig.cache
    with pytest.raises(CacheClosedError, match="register_policy"):
        rig.cache.register_policy(ModelCachePolicy(deferred_keys=frozenset({"codes"})))
    assert rig.backend.pinned_bytes == 0
    assert rig.backend.device_bytes == 0
