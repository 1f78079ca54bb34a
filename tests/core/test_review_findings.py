# SPDX-License-Identifier: Apache-2.0
"""Cases that reviewers of the cache found: each once gave a wrong row, a lost row, or something that stayed held."""

import pytest
from cache_rig import more, new
from row_values import assert_rows

from omni_core.prefix_cache.errors import RequestEventError
from omni_core.prefix_cache.events import BlockCopy, RequestEvent, RequestEventKind, StepEvents


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
