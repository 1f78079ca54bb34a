# SPDX-License-Identifier: Apache-2.0
"""Counts what a scheduler did: a workload in which something rare never happened is no test of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from typing import Any

from omni_core.integrations.vllm.simulation.followed_request import FollowedRequest
from omni_core.testing.engine_schedule import ScheduledRun


class Happening(Enum):
    """Something a scheduler does that a cache must be ready for."""

    PREEMPTED = "requests preempted"
    RESUMED_LONGER = "resumed with a hit beyond what was computed before"
    RESUMED_EQUAL = "resumed with a hit of just what was computed before"
    RESUMED_SHORTER = "resumed with a hit of less than was computed before"
    RESUMED_AS_NEW = "resumed requests announced as new"
    CONTINUED = "sessions continued with the next part of their prompt"
    SESSION_GAVE_UP = "sessions ended because nothing else could run"
    PREFIX_CACHE_RESET = "resets of the prefix cache under running requests"
    RUNS_WITH_DRAFTS = "runs with drafts"
    DRAFTS_ON_ENTRY = "runs with placeholder drafts in the step that announces the request"
    DRAFTS_ACCEPTED = "drafts accepted"
    DRAFTS_REJECTED = "drafts rejected"
    PREFILL_CHUNKS = "prompts not computed in one run"
    BLOCK_COPIES = "copies of blocks of the mirrored group"
    OTHER_BLOCK_COPIES = "copies of blocks of other groups"
    HITS_INSIDE_A_BLOCK = "hits that end inside a block"
    REUSED_WITH_END = "blocks given away by the output that reports their last owner's end"
    ENDED_WHILE_PREEMPTED = "requests that ended while they held no blocks"
    RAN_AFTER_END = "runs of requests whose end the scheduler did not know of yet"


class HappeningCounter:
    """Sees every output before the driver follows it. Engine thread only.

    Args:
        block_size: tokens per block of the mirrored group.
    """

    def __init__(self, block_size: int) -> None:
        self.counts: Counter[Happening] = Counter()
        self._block_size = block_size
        self._tables_of_ended: dict[str, frozenset[int]] = {}

    def entered(self, followed: FollowedRequest, hit: int, *, told_as_new: bool) -> None:
        """A request is announced with its whole table; `followed` is as the step before left it."""
        if hit % self._block_size:
            self.counts[Happening.HITS_INSIDE_A_BLOCK] += 1
        if not followed.block_ids:
            return
        if followed.request.num_preemptions == followed.num_preemptions:
            self.counts[Happening.CONTINUED] += 1
            return
        self.counts[Happening.RESUMED_AS_NEW] += told_as_new
        before = followed.computed_before
        longer, equal = hit > before, hit == before
        kind = Happening.RESUMED_LONGER if longer else Happening.RESUMED_EQUAL if equal else Happening.RESUMED_SHORTER
        self.counts[kind] += 1

    def scheduled(self, output: Any, runs: Sequence[ScheduledRun], mirrored_tables: Collection[int]) -> None:
        """A step is scheduled.

        Args:
            output: vLLM's.
            runs: what the step computes.
            mirrored_tables: blocks of the mirrored group in the tables of the step's requests.
        """
        counts = self.counts
        counts[Happening.PREEMPTED] += len(output.preempted_req_ids or ())
        announced = {new.req_id for new in output.scheduled_new_reqs} | output.scheduled_cached_reqs.resumed_req_ids
        for run in runs:
            counts[Happening.RUNS_WITH_DRAFTS] += bool(run.drafts)
            counts[Happening.DRAFTS_ON_ENTRY] += bool(run.drafts) and run.req_id in announced
            counts[Happening.PREFILL_CHUNKS] += not run.samples
        for copy in output.kv_cache_block_copies or ():
            mirrored = copy.dst_block_id in mirrored_tables
            counts[Happening.BLOCK_COPIES if mirrored else Happening.OTHER_BLOCK_COPIES] += 1
        given = set(_blocks_given(output))
        for req_id in output.finished_req_ids:
            counts[Happening.REUSED_WITH_END] += bool(self._tables_of_ended.pop(req_id, frozenset()) & given)

    def sampled(self, num_drafts: int, num_tokens: int) -> None:
        """A run with drafts was sampled."""
        accepted = max(0, num_tokens - 1)
        self.counts[Happening.DRAFTS_ACCEPTED] += accepted
        self.counts[Happening.DRAFTS_REJECTED] += num_drafts - accepted

    def ended(self, followed: FollowedRequest, *, while_preempted: bool) -> None:
        """A request ended; no output has reported it."""
        self.counts[Happening.ENDED_WHILE_PREEMPTED] += while_preempted
        self._tables_of_ended[followed.req_id] = frozenset(followed.block_ids)


def _blocks_given(output: Any) -> Iterable[int]:
    """Blocks of all groups that the output's requests have got, those of their hits included."""
    for new in output.scheduled_new_reqs:
        for group in new.block_ids:
            yield from group
    for blocks in output.scheduled_cached_reqs.new_block_ids:
        for group in blocks or ():
            yield from group
