# SPDX-License-Identifier: Apache-2.0
"""Compares what the cache delivered with what `DictionaryModel` expects. A row is a number; its tensor repeats it."""

import math

import torch

from omni_core.prefix_cache.config import HIDDEN_KEY

PATIENCE_S = 20.0
KEYS = {
    HIDDEN_KEY: ((3,), torch.float32),
    "codes": ((2, 2), torch.int64),
    "pooled.late": ((5,), torch.float64),
}
"""Key → (trailing shape, dtype)."""


def tensor_of(key, numbers):
    """`(len(numbers), *trailing)`: the rows of these numbers; 0 is a row of zeros."""
    trailing, dtype = KEYS[key]
    columns = torch.arange(math.prod(trailing)) * (1 + len(key))
    rows = torch.tensor(numbers, dtype=torch.int64).reshape(-1, 1)
    return torch.where(rows > 0, rows + columns, 0).to(dtype).reshape(-1, *trailing)


def ranges_of(positions):
    """Ascending positions as the fewest `(start, stop)` ranges."""
    ranges = []
    for position in positions:
        if ranges and ranges[-1][1] == position:
            ranges[-1][1] += 1
        else:
            ranges.append([position, position + 1])
    return tuple(map(tuple, ranges))


def assert_delivered(req_id, rows, expected):
    """`rows` (a `RequestRows`) are what the model expects."""
    assert rows.ranges == ranges_of(expected.positions), f"request {req_id!r}: delivered {rows.ranges}"
    assert set(rows.rows) == set(expected.keys), f"request {req_id!r}"
    for key, numbers in expected.keys.items():
        where = f"request {req_id!r}, key {key!r}"
        assert rows.ranges_of(key) == ranges_of(numbers), where
        zeros = ranges_of([position for position, number in numbers.items() if number == 0])
        assert rows.zero_ranges.get(key, ()) == zeros, where
        right = tensor_of(key, list(numbers.values()))
        assert rows[key].dtype == right.dtype, where
        assert torch.equal(rows[key], right), f"{where}: expected rows {numbers}, found {rows[key].tolist()}"


class Handed:
    """Outputs in the consumer's hands, with what they have to be."""

    def __init__(self, outputs, served, failed):
        self.outputs = outputs
        self.served = served
        self.failed = failed
        self.unacknowledged = dict(served)

    def check(self):
        """They are right, and still are when another step has used the cache since."""
        assert set(self.outputs) == set(self.served)
        assert {req_id: type(error) for req_id, error in self.outputs.failed.items()} == self.failed
        for req_id, expected in self.served.items():
            assert_delivered(req_id, self.outputs[req_id], expected)


class LateCall:
    """A `materialize` on a thread of its own."""

    def __init__(self, runtime, materialize, served, failed):
        self._materialize = materialize
        self._expected = (served, failed)
        self._outputs = None
        self._error = None
        self._handle = runtime.spawn("late", self._run)

    def result(self):
        """What it returned, to be checked; raises what it raised."""
        assert self._handle.join(PATIENCE_S), "materialize has not returned"
        if self._error is not None:
            raise self._error
        return Handed(self._outputs, *self._expected)

    def _run(self):
        try:
            self._outputs = self._materialize()
        except Exception as error:
            self._error = error
