# SPDX-License-Identifier: Apache-2.0
"""The outputs of a step are a mapping in full: guarded access to a failed request answers, it does not raise."""

import pytest
from cache_rig import new

from omni_core.prefix_cache.errors import HitRowsAbsentError


@pytest.fixture
def taken(rig):
    """A was served; C's hit rows are absent; X was not asked for."""
    outputs = rig.run(new("A", [1]), new("C", [2, 3], hit=4))
    assert set(outputs.failed) == {"C"}
    return outputs


def test_membership_says_who_was_served(taken):
    assert "A" in taken
    assert "C" not in taken
    assert "X" not in taken
    assert ("C" in taken) is ("C" in list(taken))


def test_get_gives_the_rows_or_the_default(taken):
    assert taken.get("A") is taken["A"]
    default = object()
    for absent in ("C", "X"):
        assert taken.get(absent) is None
        assert taken.get(absent, default) is default


def test_indexing_a_failed_request_raises_why(taken):
    with pytest.raises(HitRowsAbsentError, match=r"^request 'C': step ") as raised:
        taken["C"]
    assert raised.value is taken.failed["C"]
    with pytest.raises(KeyError, match="X"):
        taken["X"]


def test_views_and_comparison_hold_the_served_requests_only(taken):
    assert dict(taken) == {"A": taken["A"]}
    assert list(taken.items()) == [("A", taken["A"])]
    assert taken.keys() == {"A"}
    assert len(taken) == len(taken.values()) == 1
    assert taken == {"A": taken["A"]}
    assert taken != {}
