# SPDX-License-Identifier: Apache-2.0
"""One step as a scheduler decided it, and what the simulated engine asks of a scheduler.

`SimScheduler` is one; a driver of an engine's own scheduler is another. Whatever decides, the cache is told the events
and the engine computes the runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from omni_core.prefix_cache.events import StepEvents
from omni_core.testing.sim_request import SimRequest, TokenTrack


class LostForward(Enum):
    """What becomes of the requests of a step whose forward never ran."""

    ABORTED = "aborted"
    RETRIED = "retried"
    """Their next step starts where the lost one did."""


@dataclass(frozen=True, slots=True)
class ScheduledRun:
    """Positions `[start, stop)` of one request, to be computed in this step."""

    track: TokenTrack
    """The request's content. The same object for one content version; another once the content is replaced."""
    start: int
    stop: int
    """After the last position computed, drafts included."""
    block_ids: tuple[int, ...]
    """The request's whole table at this step."""
    samples: bool = True
    """Whether tokens are sampled after the run: it reaches the last known token, and the prompt is whole."""
    drafts: tuple[int, ...] = ()
    """Draft tokens at the last `len(drafts)` positions of the run."""

    @property
    def req_id(self) -> str:
        """The request's id."""
        return self.track.req_id

    @property
    def num_tokens(self) -> int:
        """Rows the run brings."""
        return self.stop - self.start

    @property
    def known_stop(self) -> int:
        """After the last position of the run whose token is known, not drafted."""
        return self.stop - len(self.drafts)

    def forward_track(self) -> TokenTrack:
        """The content as the forward sees it: known tokens, then the drafts."""
        return self.track.continued(self.known_stop, self.drafts) if self.drafts else self.track


@dataclass(frozen=True, slots=True)
class SimSchedule:
    """One step as scheduled."""

    number: int
    """Counts the calls of `schedule`, from 0."""
    events: StepEvents
    """What the cache is told. Each request of `runs` that is new, resumed or replaced has its event."""
    runs: tuple[ScheduledRun, ...]

    @property
    def num_tokens(self) -> int:
        """Rows the step would compute."""
        return sum(run.num_tokens for run in self.runs)


SampledTokens = Mapping[str, Sequence[int]]
"""Tokens sampled after a forward, by request: accepted drafts, then one more. Empty or missing: none were sampled."""


class EngineScheduler(Protocol):
    """Decides steps. Engine thread only; never blocks. `schedule`, then `complete` or `lose` of that schedule."""

    @property
    def waiting(self) -> tuple[str, ...]:
        """Ids of requests that wait to be scheduled, preempted ones included."""

    @property
    def running(self) -> tuple[str, ...]:
        """Ids of requests that hold blocks and have not ended."""

    @property
    def has_news(self) -> bool:
        """Whether a step would compute or report anything, now or later."""

    def add(self, request: SimRequest) -> None:
        """Queue a request.

        Raises:
            ValueError: the id is in use, or the request could never be admitted.
        """

    def abort(self, req_id: str) -> bool:
        """End a request at once, also between `schedule` and `complete`. `False`: the id is not known (any more).

        The next schedule reports it.
        """

    def schedule(self) -> SimSchedule:
        """Decide the next step: its events and its runs."""

    def complete(self, schedule: SimSchedule, sampled: SampledTokens) -> tuple[str, ...]:
        """Take in that the step ran, but for requests aborted since.

        Args:
            schedule: the last one.
            sampled: for each run with `samples`, the tokens: `len(sampled) - 1` of its drafts were accepted.

        Returns:
            Ids that finished; the next schedule reports them.
        """

    def lose(self, schedule: SimSchedule, what_then: LostForward) -> tuple[str, ...]:
        """Take in that the step never ran.

        Returns:
            Ids that were aborted for it.
        """
