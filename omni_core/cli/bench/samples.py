# SPDX-License-Identifier: Apache-2.0
"""Times several calls in the same rounds of one run, and says what their medians and ratios are, with an interval."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")
Seconds = npt.NDArray[np.float64]

RESAMPLES = 1000
LEVEL_PERCENT = 95
SEED = 0
_RESAMPLED_AT_ONCE = 1 << 21
"""Numbers drawn at one time; bounds the memory of a bootstrap."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its bootstrap interval."""

    value: float
    low: float
    high: float


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """Call; what it returned, and the seconds it took."""
    began = time.perf_counter()
    result = call()
    return result, time.perf_counter() - began


class Samples:
    """Seconds of named calls by the round they were taken in.

    Rounds are drawn whole: a call always with the floor, or the peer, of its round. A slow moment of the machine, which
    hits both, then widens the interval less than it would if they were measured one after the other.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, dict[int, float]] = {}

    def add(self, name: str, round_number: int, seconds: float) -> None:
        """Keep what a call took. Once per name and round."""
        self._seconds.setdefault(name, {})[round_number] = seconds

    def time(self, name: str, round_number: int, call: Callable[[], T]) -> T:
        """Call, keep what it took, and return what it returned."""
        result, seconds = timed(call)
        self.add(name, round_number, seconds)
        return result

    def take_over(self, name: str, other: Samples, other_name: str) -> None:
        """Keep another run's samples of a call under a name of this one, round by round."""
        self._seconds[name] = dict(other._seconds[other_name])

    def from_round(self, first: int) -> Samples:
        """The samples without the rounds before `first`, which were a warm-up."""
        kept = Samples()
        kept._seconds = {
            name: {number: seconds for number, seconds in column.items() if number >= first}
            for name, column in self._seconds.items()
        }
        return kept

    def count(self, name: str) -> int:
        """How many rounds have a sample of that name."""
        return len(self._seconds.get(name, ()))

    def median_s(self, name: str) -> Estimate:
        """The median of a call, over its rounds.

        Raises:
            KeyError: it was never timed.
        """
        return _bootstrap((np.array(list(self._seconds[name].values())),), lambda medians: medians[0])

    def ratio(self, name: str, base: str) -> Estimate:
        """Median of a call over the median of another, over the rounds that have both.

        Raises:
            KeyError: one of them was never timed.
            ValueError: no round has both.
        """
        return _bootstrap(self._paired(name, base), lambda medians: medians[0] / medians[1])

    def paired_ratio(self, name: str, base: str) -> Estimate:
        """Median, over the rounds that have both, of what a call took over what another took in the same round.

        For calls so long that the machine's own pace changes between rounds: it cancels within one.

        Raises:
            KeyError, ValueError: as `ratio`.
        """
        first, second = self._paired(name, base)
        return _bootstrap((first / second,), lambda medians: medians[0])

    def difference_s(self, name: str, base: str) -> Estimate:
        """Median of a call less the median of another, over the rounds that have both.

        Raises:
            KeyError, ValueError: as `ratio`.
        """
        return _bootstrap(self._paired(name, base), lambda medians: medians[0] - medians[1])

    def ratio_of_differences(self, first: tuple[str, str], second: tuple[str, str]) -> Estimate:
        """`difference_s` of one pair of calls over that of another, over the rounds that have all four.

        Raises:
            KeyError, ValueError: as `ratio`.
        """
        columns = self._paired(*first, *second)
        return _bootstrap(columns, lambda medians: (medians[0] - medians[1]) / (medians[2] - medians[3]))

    def _paired(self, *names: str) -> tuple[Seconds, ...]:
        columns = [self._seconds[name] for name in names]
        rounds = sorted(set(columns[0]).intersection(*columns[1:]))
        if not rounds:
            raise ValueError(f"no round has all of {', '.join(names)}")
        return tuple(np.array([column[number] for number in rounds]) for column in columns)


def _bootstrap(columns: tuple[Seconds, ...], statistic: Callable[[list[Seconds]], Seconds]) -> Estimate:
    """A statistic of the columns' medians, and the interval it has when rounds are drawn with replacement."""
    generator = np.random.default_rng(SEED)
    num_rounds = len(columns[0])
    at_once = max(1, _RESAMPLED_AT_ONCE // num_rounds)
    drawn: list[Seconds] = []
    for first in range(0, RESAMPLES, at_once):
        rounds = generator.integers(0, num_rounds, (min(at_once, RESAMPLES - first), num_rounds))
        drawn.append(statistic([np.median(column[rounds], axis=1) for column in columns]))
    outside_percent = (100 - LEVEL_PERCENT) / 2
    low, high = np.percentile(np.concatenate(drawn), [outside_percent, 100 - outside_percent])
    value = statistic([np.median(column, keepdims=True) for column in columns])
    return Estimate(float(value[0]), float(low), float(high))
