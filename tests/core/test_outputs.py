# SPDX-License-Identifier: Apache-2.0
"""What `materialize` gives back: a mapping of the served requests, the failed ones beside it."""

import pytest
from cache_rig import new
from row_values import assert_rows

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.errors import HitRowsAbsentError, RequestError


def test_outputs_are_a_mapping_of_what_was_served(rig):
    step = rig.step(new("A", [1]), new("B", [2], run=2), new("C", [9, 3], hit=4))
    taken = rig.take(step)
    assert taken.step_id == step
    assert set(taken) == set(taken.keys()) == {"A", "B"}
    assert len(taken) == 2
    assert {req_id: rows.num_rows for req_id, rows in taken.items()} == {"A": 4, "B": 2}
    assert taken["A"].req_id == "A"
    assert taken["A"].hidden_states is taken["A"].rows[HIDDEN_KEY]
    with pytest.raises(HitRowsAbsentError):
        taken["C"]
    with pytest.raises(KeyError):
        taken["D"]


def test_failed_names_only_requests_that_were_asked_for(rig):
    step = rig.step(new("A", [1]), new("C", [9, 3], hit=4), new("D", [8, 4], hit=4))
    taken = rig.take(step, "A", "D")
    assert set(taken.failed) == {"D"}
    error = taken.failed["D"]
    assert isinstance(error, RequestError)
    assert error.req_id == "D"
    assert str(error).startswith("request 'D': ")
    assert_rows(taken["A"], ("A", 0, 4))


def test_rows_are_contiguous_cpu_tensors_in_the_engines_dtype(rig):
    rig.run(new("A", [1]))
    for rows in rig.run(new("C", [1, 2], hit=4), new("B", [3])).values():
        assert rows.hidden_states.is_contiguous()
        assert rows.hidden_states.is_cpu
        assert rows.hidden_states.dtype == rig.config.hidden_dtype
