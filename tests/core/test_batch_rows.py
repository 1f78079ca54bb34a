# SPDX-License-Identifier: Apache-2.0
"""A batch's rows as arrays are those one gets by walking its requests."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_core.prefix_cache.batch_rows import batch_rows

RUNS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 1000)), max_size=20)


@given(RUNS, st.sampled_from([np.int32, np.int64]))
def test_rows_are_those_of_each_request_in_turn(runs, dtype):
    counts, computed = (np.array([run[column] for run in runs], dtype) for column in (0, 1))
    rows = batch_rows(counts, computed)
    walked = [(index, first + offset) for index, (count, first) in enumerate(runs) for offset in range(count)]
    assert list(zip(rows.in_batch.tolist(), rows.positions.tolist(), strict=True)) == walked
    assert rows.starts.tolist() == [sum(run[0] for run in runs[:index]) for index in range(len(runs) + 1)]
    assert {array.dtype for array in rows} == {np.dtype(np.int64)}


@pytest.mark.parametrize("counts", [[1, 1, 1], [2, 1, 1]])
def test_nothing_is_a_view_of_what_the_runner_reuses(counts):
    computed = np.array([7, 8, 9])
    rows = batch_rows(np.array(counts), computed)
    before = rows.positions.copy()
    computed[:] = 0
    assert (rows.positions == before).all()
