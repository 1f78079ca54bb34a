# SPDX-License-Identifier: Apache-2.0
"""The statistics of the benchmarks, on seconds that are known."""

import numpy as np
import pytest

from omni_core.cli.bench.samples import Samples

CALL, FLOOR, OTHER = "call", "floor", "other"


def samples_of(**columns):
    samples = Samples()
    for name, seconds in columns.items():
        for number, value in enumerate(seconds):
            samples.add(name, number, value)
    return samples


def test_equal_rounds_have_an_interval_of_no_width():
    samples = samples_of(call=[0.004] * 9, floor=[0.002] * 9)
    for estimate, value in (
        (samples.median_s(CALL), 0.004),
        (samples.ratio(CALL, FLOOR), 2.0),
        (samples.difference_s(CALL, FLOOR), 0.002),
    ):
        assert estimate.value == estimate.low == estimate.high == pytest.approx(value)


def test_a_ratio_is_that_of_the_medians_not_the_mean_of_ratios():
    samples = samples_of(call=[1.0, 2.0, 9.0], floor=[4.0, 1.0, 2.0])
    assert samples.ratio(CALL, FLOOR).value == 1.0


def test_a_paired_ratio_is_the_median_of_what_single_rounds_say():
    samples = samples_of(call=[1.0, 2.0, 9.0], floor=[4.0, 1.0, 2.0])
    assert samples.paired_ratio(CALL, FLOOR).value == 2.0


def test_a_change_of_pace_between_rounds_leaves_a_paired_ratio_alone():
    drift = np.array([1.0, 7.0, 3.0, 10.0, 2.0, 6.0])
    estimate = samples_of(call=3 * drift, floor=drift).paired_ratio(CALL, FLOOR)
    assert estimate.low == estimate.high == pytest.approx(3.0)


def test_rounds_are_drawn_whole_so_that_what_slows_both_leaves_the_ratio_alone():
    """Call and floor drift tenfold together. Drawn one by one, their ratio would swing as far."""
    drift = np.linspace(1.0, 10.0, 101)
    paired = samples_of(call=3 * drift, floor=drift).ratio(CALL, FLOOR)
    assert paired.low == pytest.approx(3.0)
    assert paired.high == pytest.approx(3.0)
    shuffled = samples_of(call=3 * np.random.default_rng(1).permutation(drift), floor=drift).ratio(CALL, FLOOR)
    assert shuffled.low < 2.9
    assert shuffled.high > 3.1


def test_the_interval_covers_the_true_median_about_as_often_as_it_says():
    generator = np.random.default_rng(7)
    covered = 0
    for _ in range(100):
        estimate = samples_of(call=generator.exponential(1.0, 60)).median_s(CALL)
        covered += estimate.low <= np.log(2) <= estimate.high
    assert 86 <= covered <= 100


def test_a_side_with_fewer_rounds_is_compared_in_those_rounds_only():
    samples = samples_of(call=[1.0, 1.0, 5.0, 5.0, 5.0])
    for number in (0, 1):
        samples.add(OTHER, number, 10.0)
    assert samples.ratio(OTHER, CALL).value == 10.0
    assert samples.median_s(CALL).value == 5.0


def test_without_a_common_round_there_is_no_ratio():
    samples = samples_of(call=[1.0])
    samples.add(FLOOR, 5, 1.0)
    with pytest.raises(ValueError, match="no round has all of call, floor"):
        samples.ratio(CALL, FLOOR)


def test_a_ratio_of_differences():
    samples = samples_of(a=[5.0] * 5, b=[3.0] * 5, c=[14.0] * 5, d=[4.0] * 5)
    assert samples.ratio_of_differences(("a", "b"), ("c", "d")).value == pytest.approx(0.2)


def test_warm_up_rounds_are_left_out():
    samples = Samples()
    for number, seconds in ((-2, 100.0), (-1, 100.0), (0, 1.0), (1, 3.0)):
        samples.add(CALL, number, seconds)
    assert samples.from_round(0).median_s(CALL).value == 2.0
    assert samples.from_round(0).count(CALL) == 2


def test_a_timed_call_gives_its_result_and_one_sample():
    samples = Samples()
    assert samples.time(CALL, 0, lambda: "result") == "result"
    assert samples.count(CALL) == 1
    assert samples.median_s(CALL).value > 0


def test_a_second_look_gives_the_same_interval():
    samples = samples_of(call=np.random.default_rng(3).random(50))
    assert samples.median_s(CALL) == samples.median_s(CALL)
