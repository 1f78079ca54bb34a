# SPDX-License-Identifier: Apache-2.0
"""What was promised and never delivered is reported once, whatever order steps, ends and resets come in."""

import pytest
from cache_rig import more, new
from row_values import assert_rows

from omni_core.prefix_cache.outputs import PartialRequest


def nothing_more(rig):
    return rig.cache.take_partial_requests() == ()


@pytest.mark.parametrize("discarded", [(), (0,), (1,), (0, 1), (1, 0)], ids=str)
def test_a_reset_reports_open_steps_like_discarded_ones(rig, discarded):
    steps = [rig.step(new("A", [1]), new("B", [2])), rig.step(more("A", 2, blocks=[3]))]
    for index in discarded:
        rig.cache.discard_step(steps[index])
    assert rig.cache.reset().requests_forgotten == 2
    reports = rig.cache.take_partial_requests()
    assert sorted(reports, key=lambda report: report.req_id) == [
        PartialRequest("A", ((0, 6),)),
        PartialRequest("B", ((0, 4),)),
    ]
    assert nothing_more(rig)


def test_a_reset_reports_the_hit_of_an_open_step(rig):
    rig.run(new("P", [1, 2], run=8))
    rig.step(new("A", [1, 2, 3], hit=8, run=2), finish=["P"])
    rig.cache.reset()
    assert rig.cache.take_partial_requests() == (PartialRequest("A", ((0, 10),)),)
    assert nothing_more(rig)


def test_a_reset_reports_the_hit_of_a_step_that_was_only_announced(rig):
    rig.run(new("P", [1, 2], run=8))
    rig.begin(new("A", [1, 2, 3], hit=8), finish=["P"])
    rig.cache.reset()
    assert rig.cache.take_partial_requests() == (PartialRequest("A", ((0, 8),)),)
    assert nothing_more(rig)


def test_a_reset_reports_what_was_not_delivered_and_nothing_else(rig):
    rig.run(new("A", [1]), new("B", [2]))
    rig.step(more("A", 1, blocks=[3]), more("B", 1, blocks=[4]))
    step = rig.step(more("A", 1), more("B", 1))
    assert_rows(rig.take(step, "B")["B"], ("B", 5, 6))
    rig.cache.reset()
    reports = {report.req_id: report.missing for report in rig.cache.take_partial_requests()}
    assert reports == {"A": ((4, 6),), "B": ((4, 5),)}
    assert nothing_more(rig)


def test_a_reset_reports_no_failed_request(rig):
    rig.step(new("C", [1, 2], hit=4), new("A", [3]))
    rig.cache.reset()
    assert rig.cache.take_partial_requests() == (PartialRequest("A", ((0, 4),)),)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)], ids=str)
def test_late_discards_of_an_ended_request_come_as_one_report(rig, order):
    steps = [rig.step(new("A", [1])), rig.step(more("A", 1, blocks=[2])), rig.step(more("A", 2))]
    rig.begin(finish=["A"])
    for index in order:
        rig.cache.discard_step(steps[index])
    assert rig.cache.take_partial_requests() == (PartialRequest("A", ((0, 7),)),)
    assert nothing_more(rig)


def test_two_lives_of_one_id_are_two_reports(rig):
    first = rig.step(new("A", [1]))
    second = rig.step(new("A", [2], run=2), finish=["A"])
    rig.begin(finish=["A"])
    rig.cache.discard_step(second)
    rig.cache.discard_step(first)
    reports = rig.cache.take_partial_requests()
    assert sorted(report.missing for report in reports) == [((0, 2),), ((0, 4),)]
    assert {report.req_id for report in reports} == {"A"}
    assert nothing_more(rig)


def test_a_discard_after_the_report_was_taken_is_a_report_of_its_own(rig):
    first = rig.step(new("A", [1]))
    second = rig.step(more("A", 1, blocks=[2]))
    rig.begin(finish=["A"])
    rig.cache.discard_step(first)
    assert rig.cache.take_partial_requests() == (PartialRequest("A", ((0, 4),)),)
    rig.cache.discard_step(second)
    assert rig.cache.take_partial_requests() == (PartialRequest("A", ((4, 5),)),)
    assert nothing_more(rig)
