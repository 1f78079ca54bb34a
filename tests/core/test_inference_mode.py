# SPDX-License-Identifier: Apache-2.0
"""Engines run under torch's inference mode, our threads and consumers do not: every mix of the two works."""

import pytest
import torch
from cache_rig import more, new
from row_values import assert_rows


def mode(inference):
    return torch.inference_mode(inference)


@pytest.mark.parametrize("saving", [True, False])
@pytest.mark.parametrize("taking", [True, False])
def test_rows_saved_and_taken_in_either_mode(make_rig, saving, taking):
    rig = make_rig(keys={"codes": ((4,), torch.bfloat16)}, staging_depth=2)
    previous = ()
    for number in range(6):
        writer, reader = f"r{2 * number}", f"r{2 * number + 1}"
        with mode(saving):
            step = rig.step(
                new(writer, [1]),
                new(reader, [1, 2], hit=4),
                finish=previous,
                outputs={"list": [torch.ones(2), torch.ones(3)], "odd": [torch.ones(2), torch.ones(3, 2)]},
            )
        with mode(taking):
            taken = rig.take(step)
        assert_rows(taken[reader], (writer, 0, 4), (reader, 4, 8))
        assert_rows(taken[reader], (writer, 0, 4), (reader, 4, 8), key="codes", trailing=(4,), dtype=torch.bfloat16)
        assert torch.equal(taken[reader].leftovers["list"], torch.ones(3))
        taken.release()
        previous = (writer, reader)


@pytest.mark.parametrize("saving", [True, False])
@pytest.mark.parametrize("taking", [True, False])
def test_delivered_values_may_be_changed_by_a_consumer_in_ordinary_mode(rig, saving, taking):
    with mode(saving):
        rig.run(new("A", [1]))
        step = rig.step(
            new("C", [1, 2], hit=4), new("B", [3]), outputs={"whole": torch.ones(9), "list": [torch.ones(1)] * 2}
        )
    with mode(taking):
        taken = rig.take(step)
    for req_id in ("C", "B"):
        taken[req_id].hidden_states.add_(1)
        for value in taken[req_id].leftovers.values():
            value.add_(1)


def test_a_rescue_under_a_mix_of_modes(rig):
    with mode(True):
        rig.run(new("A", [1])).release()
    with rig.runtime.stop_at("prefetch.landed") as before_gather:
        with mode(True):
            hit = rig.step(new("C", [1, 2], hit=4))
        before_gather.wait_reached()
        rig.run(new("E", [1]), finish=["A", "C"]).release()
        rig.cache.flush()
    with mode(True):
        taken = rig.take(hit, "C")
    assert_rows(taken["C"], ("A", 0, 4), ("C", 4, 8))
    taken.release()
    assert_rows(rig.run(new("F", [1, 3], hit=4), more("E", 1, blocks=[4]))["F"], ("E", 0, 4), ("F", 4, 8))
