# SPDX-License-Identifier: Apache-2.0
"""What an undeclared output is gets decided by the first value that can tell; a later contradiction is logged once."""

import logging

import numpy as np
import pytest
import torch
from cache_rig import more, new
from row_values import assert_rows, row_values

from omni_core.prefix_cache.config import HIDDEN_KEY

CODES = {"codes": ((4,), torch.float32)}

SAY_NOTHING = {
    "none": None,
    "text": "no codes yet",
    "number": 3.5,
    "scalar": torch.tensor(1.0),
    "empty": torch.empty(0, 4),
    "rows-of-no-width": torch.empty(4, 0),
    "empty-list": [],
    "list-of-none": [None, None],
    "array": np.arange(7),
}


@pytest.mark.parametrize("name", SAY_NOTHING)
def test_a_value_that_cannot_tell_decides_nothing(make_rig, caplog, name):
    rig = make_rig(keys=CODES)
    with caplog.at_level(logging.WARNING, logger="omni_core"):
        rig.begin(new("A", [1]), new("B", [2]))
        rig.take(rig.save({"codes": SAY_NOTHING[name]}, keys=()))
        assert set(rig.cache.stats().key_row_bytes) == {HIDDEN_KEY}
        taken = rig.run(more("A", 2, blocks=[3]), more("B", 3, blocks=[4]), pad=2)
        for req_id, last in (("A", 6), ("B", 7)):
            assert_rows(taken[req_id], (req_id, 4, last), key="codes", trailing=(4,))
            assert taken[req_id].leftovers == {}
        rows = rig.run(new("C", [1, 3, 5], hit=6))["C"]
    assert rows.zero_ranges == {"codes": ((0, 4),)}
    assert torch.equal(rows["codes"][4:6], row_values("A", range(4, 6), "codes", (4,)))
    assert caplog.records == []


def contradictions(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("omni_core")]


def test_rows_per_token_of_a_key_that_had_none_are_logged_once(make_rig, caplog):
    rig = make_rig(keys=CODES)
    with caplog.at_level(logging.WARNING, logger="omni_core"):
        rig.begin(new("A", [1]))
        rig.take(rig.save({"codes": torch.ones(9, 4)}, keys=()))
        assert contradictions(caplog) == []
        for block in (2, 3):
            rig.run(more("A", 4, blocks=[block]))
    assert set(rig.cache.stats().key_row_bytes) == {HIDDEN_KEY}
    (message,) = contradictions(caplog)
    assert "'codes'" in message
    assert "no row per token" in message
    assert "policy" in message


def test_another_form_of_a_key_with_a_row_per_token_is_logged_once(make_rig, caplog):
    rig = make_rig(keys=CODES)
    rig.run(new("A", [1]))
    with caplog.at_level(logging.WARNING, logger="omni_core"):
        for block in (2, 3):
            rig.begin(more("A", 4, blocks=[block]))
            rows = rig.take(rig.save({"codes": torch.ones(9, 4)}, keys=()))["A"]
            assert torch.equal(rows.leftovers["codes"], torch.ones(9, 4))
    (message,) = contradictions(caplog)
    assert "'codes'" in message
    assert "a row per token" in message


def test_each_contradicted_key_is_logged(make_rig, caplog):
    rig = make_rig(keys=CODES)
    with caplog.at_level(logging.WARNING, logger="omni_core"):
        rig.begin(new("A", [1]))
        rig.take(rig.save({"meta": torch.ones(9)}))
        rig.begin(more("A", 4, blocks=[2]))
        rig.take(rig.save({"meta": torch.ones(4), "codes": torch.ones(9, 4)}, keys=()))
    assert sorted(message.split(" ")[1] for message in contradictions(caplog)) == ["'codes'", "'meta'"]
