# SPDX-License-Identifier: Apache-2.0
"""Targets are data, and held at the bad end of a figure's interval."""

from dataclasses import replace

import pytest

from omni_core.cli.bench.benchmarks import BENCHMARKS
from omni_core.cli.bench.results import Relation, Target, Verdict, with_interval
from omni_core.cli.bench.samples import Estimate

AT_MOST_2 = Target("t", "ratio", Relation.AT_MOST, 2.0, {"requests": 256})
AT_LEAST_2 = Target("t", "ratio", Relation.AT_LEAST, 2.0, {"requests": 256})


def row(low, value, high, requests=256):
    return {"requests": requests, **with_interval("ratio", Estimate(value, low, high))}


@pytest.mark.parametrize(
    ("target", "low", "high", "verdict"),
    [
        (AT_MOST_2, 1.0, 2.0, Verdict.MET),
        (AT_MOST_2, 1.0, 2.1, Verdict.NOT_RESOLVED),
        (AT_MOST_2, 2.0, 2.1, Verdict.NOT_RESOLVED),
        (AT_MOST_2, 2.1, 3.0, Verdict.MISSED),
        (AT_LEAST_2, 2.0, 3.0, Verdict.MET),
        (AT_LEAST_2, 1.9, 3.0, Verdict.NOT_RESOLVED),
        (AT_LEAST_2, 1.0, 1.9, Verdict.MISSED),
    ],
)
def test_the_bad_end_of_the_interval_decides(target, low, high, verdict):
    assert target.judge([row(low, (low + high) / 2, high)]).verdict is verdict


def test_only_rows_of_the_target_are_judged():
    result = AT_MOST_2.judge([row(9.0, 9.0, 9.0, requests=1), row(1.0, 1.5, 1.8)])
    assert (result.verdict, result.measured, result.interval) == (Verdict.MET, 1.5, (1.0, 1.8))


def test_the_worst_of_several_rows_decides():
    rows = [row(1.0, 1.0, 1.0), row(3.0, 3.0, 3.0), row(1.0, 2.0, 3.0)]
    assert AT_MOST_2.judge(rows).verdict is Verdict.MISSED
    assert AT_MOST_2.judge([rows[0], rows[2]]).verdict is Verdict.NOT_RESOLVED


def test_of_rows_with_one_verdict_the_worst_figure_is_told():
    rows = [row(1.0, 1.0, 1.0), row(1.5, 1.5, 1.5), row(0.5, 0.5, 0.5)]
    assert AT_MOST_2.judge(rows).measured == 1.5
    assert replace(AT_MOST_2, relation=Relation.AT_LEAST, value=0.1).judge(rows).measured == 0.5


def test_a_row_without_the_figure_is_not_measured():
    assert AT_MOST_2.judge([{"requests": 256}]).verdict is Verdict.NOT_MEASURED


def test_a_count_has_no_interval():
    none = Target("t", "staging_full", Relation.AT_MOST, 0)
    assert none.judge([{"staging_full": 0}]).verdict is Verdict.MET
    assert none.judge([{"staging_full": 1}]).verdict is Verdict.MISSED


def test_a_count_that_must_be_exact_may_lie_on_neither_side():
    tokens = Target("t", "tokens", Relation.EXACTLY, 810)
    assert tokens.judge([{"tokens": 810}]).verdict is Verdict.MET
    for wrong in (809, 810.5, 811):
        assert tokens.judge([{"tokens": 810}, {"tokens": wrong}]).verdict is Verdict.MISSED
    assert tokens.judge([{"tokens": 811}, {"tokens": 800}]).measured == 800


def test_as_a_document_it_has_name_relation_value_and_verdict():
    assert AT_MOST_2.judge([row(1.0, 1.5, 2.5)]).as_document() == {
        "name": "t",
        "figure": "ratio",
        "relation": "<=",
        "value": 2.0,
        "verdict": "not resolved",
        "measured": 1.5,
        "ci95": [1.0, 2.5],
    }


DESIGN_TARGETS = {  # benchmark -> (figure, relation, value)
    "engine-step": {
        ("ours_ms", "<=", 0.34),
        ("ours_ms", "<=", 0.06),
        ("ours_ms", "<=", 0.7),
        ("peer_eager_ratio", ">=", 120.0),
        ("peer_async_ratio", ">=", 120.0),
        ("staging_full", "<=", 0),
        ("committer_ratio", "<=", 2.0),
        ("slope_us", "<=", 1.0),
    },
    "deferred": {("ours_ms", "<=", 0.2), ("over_peer_eager", "<=", 0.05), ("over_peer_async", "<=", 0.05)},
    "hit-read": {("ratio", "<=", 1.5)},
    "first-save": {("ratio", "<=", 2.0)},
    "scale": {("ratio", "<=", 1.1)},
    "contention": {("ratio", "<=", 1.5)},
}


@pytest.mark.parametrize("name", DESIGN_TARGETS)
def test_the_targets_are_those_of_the_design(name):
    (benchmark,) = [benchmark for benchmark in BENCHMARKS if benchmark.name == name]
    stated = {(target.figure, target.relation.value, target.value) for target in benchmark.targets}
    assert stated == DESIGN_TARGETS[name]
