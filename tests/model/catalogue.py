# SPDX-License-Identifier: Apache-2.0
"""Every search there is: the final rules over every world, and each change against them where it goes wrong soonest."""

from dataclasses import dataclass, replace

from . import delivery_sizes as sizes
from . import storage_deferred_scenarios as deferred
from . import storage_scenarios as runs
from .delivery_rules import Change as DeliveryChange
from .delivery_rules import DeliveryWorldSize
from .delivery_world import DeliveryWorld
from .explorer import Verdict, explore
from .storage_rules import Change as StorageChange
from .storage_scenario import Scenario
from .storage_world import StorageWorld

World = Scenario | DeliveryWorldSize


@dataclass(frozen=True)
class Search:
    """One world, searched under the final rules or with one change against them."""

    world: World
    change: StorageChange | DeliveryChange | None = None
    violated: str = ""
    """The property the change breaks; empty: all hold."""
    may_fail: bool = False
    """The committer may fail at any moment."""
    is_small: bool = False
    """Belongs to the fast tests."""

    def run(self) -> Verdict:
        changes = () if self.change is None else (self.change,)
        if isinstance(self.world, Scenario):
            return explore(StorageWorld(self.world, changes, may_fail=self.may_fail))
        return explore(DeliveryWorld(self.world, changes))

    @property
    def name(self) -> str:
        return f"{self.change.name}: {self.world.name}" if self.change else f"{self.world.name}{self._may_fail}"

    @property
    def _may_fail(self) -> str:
        return ", the committer fails" if self.may_fail else ""

    def row(self, verdict: Verdict) -> str:
        """The search and what it came to, as a line of the README's tables."""
        if self.change is None:
            return f"| {self.world.name}{self._may_fail} | {verdict.num_states:,} |"
        came_to = f"({verdict.kind}), {len(verdict.trace)} actions" if verdict.violation else "all hold"
        return f"| {self.change.value} | {self.world.name} | {came_to} |"


_SMALL_STORAGE = (
    *runs.BASE,
    deferred.SAME_STEP,
    deferred.NO_ROOM,
    deferred.AND_HIDDEN,
    deferred.PAGE_REUSED,
    runs.COPY_SOURCE_RECYCLED,
    runs.COPY_ONTO_READ,
)
_SMALL_DELIVERY = (sizes.PLAIN, sizes.RESUME, sizes.BACK_OFF, sizes.DRAFTS, sizes.REPLACED, sizes.ID_REUSE)
_STORAGE = (*runs.BASE, *deferred.ALL, *runs.COPIES)
_OTHER_DEPTHS = tuple(
    replace(scenario, name=f"{scenario.name}, {depth} page{'s' if depth > 1 else ''}", staging_depth=depth)
    for scenario in (runs.THREE_TENANCIES, runs.MIXED_READ, deferred.RECYCLED, runs.COPY_DEFERRED_SOURCE)
    for depth in (1, 4)
)

FINAL_STORAGE = tuple(
    Search(scenario, is_small=scenario in _SMALL_STORAGE) for scenario in (*_STORAGE, *_OTHER_DEPTHS)
) + tuple(Search(scenario, may_fail=True) for scenario in _STORAGE)
FINAL_DELIVERY = tuple(Search(size, is_small=size in _SMALL_DELIVERY) for size in (*sizes.SMALL, *sizes.LARGE))


WRONG_STORAGE = (
    Search(runs.HIT_BEFORE_TENANCY, StorageChange.PLAN_BEFORE_TENANCIES, "a"),
    Search(runs.SAME_STEP_HIT, StorageChange.PLAN_ONLY_AT_START, "b"),
    Search(runs.REWRITE, StorageChange.OLD_GATHER_FILLS_NEW_ENTRY, "a"),
    Search(runs.SAME_STEP_HIT, StorageChange.NO_LANDING_WAIT, "b"),
    Search(runs.UNSAVED_STEP, StorageChange.UNSAVED_STEP_KEEPS_READS, "e"),
    Search(runs.SILENT_TENANCY, StorageChange.DIGEST_IGNORED, "a"),
    Search(runs.OWED_BLOCK_LOST, StorageChange.LATE_PLAN_IGNORES_TENANCY, "a"),
    Search(runs.NEW_WEIGHTS_UNDER_READS, StorageChange.NEW_WEIGHTS_IGNORED, "a"),
    Search(runs.NEW_WEIGHTS_OWED, StorageChange.NEW_WEIGHTS_ARE_TENANCIES, "b"),
    Search(runs.SAME_STEP_HIT, StorageChange.NO_RESCUE, "b"),
    Search(runs.SAME_STEP_HIT, StorageChange.RESCUE_ANY_PIN, "a"),
    Search(runs.SAME_STEP_HIT, StorageChange.SKIP_SUPERSEDED, "b"),
    Search(runs.SAME_STEP_HIT, StorageChange.SIDE_BUFFER_DROPPED, "e"),
    Search(runs.STORED_HITS, StorageChange.STAGING_FREED_WITH_STEP, "a"),
    Search(deferred.RECYCLED, StorageChange.OWN_RECORDS_FIRST, "d"),
    Search(deferred.PAGE_REUSED, StorageChange.HIT_DOES_NOT_FORCE, "d"),
    Search(deferred.AND_HIDDEN, StorageChange.MATERIALIZE_DOES_NOT_FORCE, "d"),
    Search(deferred.NO_ROOM, StorageChange.FORCE_AFTER_FALLBACK, "b"),
    Search(deferred.NO_ROOM, StorageChange.FALLBACK_DOES_NOT_FORCE, "b"),
    Search(deferred.AND_HIDDEN, StorageChange.ONE_WATERMARK, "b"),
    Search(deferred.HIDDEN_AFTER_RECORD, StorageChange.RECORDS_MOVE_PAGE_WATERMARK, "d"),
    Search(deferred.TWO_WRITES, StorageChange.RING_FREED_EARLY, "a"),
    Search(deferred.TWO_WRITES, StorageChange.RING_RETURNED_TWICE, "f"),
    Search(deferred.TWO_WRITES, StorageChange.RING_NEVER_RETURNED, "e"),
    Search(deferred.PAGE_REUSED, StorageChange.RECORD_DOES_NOT_HOLD_PAGE, "a"),
    Search(deferred.RECYCLED, StorageChange.ONE_BOUNCE, "a"),
    Search(deferred.TWO_WRITES, StorageChange.FORCED_RECORD_STAYS_OPEN, "g"),
    Search(runs.COPY_SOURCE_RECYCLED, StorageChange.COPY_AFTER_TENANCIES, "b"),
    Search(runs.COPY_DEFERRED_SOURCE, StorageChange.COPY_AFTER_TENANCIES, "a"),
    Search(runs.COPY_DEFERRED_SOURCE, StorageChange.COPY_IGNORES_RECORDS, "a"),
    Search(runs.COPY_DEFERRED_DESTINATION, StorageChange.COPY_FORCES_SOURCE_ONLY, "b"),
    Search(runs.COPY_SOURCE_RECYCLED, StorageChange.SKIP_UNWANTED, "a"),
)
WRONG_DELIVERY = (
    Search(sizes.RESUME, DeliveryChange.RECOMPUTED_ROWS_TWICE, "h"),
    Search(sizes.RESUME, DeliveryChange.WHOLE_HIT_READ_AGAIN, "h"),
    Search(sizes.RESUME, DeliveryChange.LONGER_HIT_NOT_READ, "i"),
    Search(sizes.UNSAVED, DeliveryChange.RESUME_DOES_NOT_PROMISE, "h"),
    Search(sizes.RESUME, DeliveryChange.RESUME_LOWERS_PROMISE, "h"),
    Search(sizes.RESUME, DeliveryChange.MISSING_LOST_ON_RESUME, "i"),
    Search(sizes.PLAIN, DeliveryChange.MISSING_LOST_ON_DISCARD, "i"),
    Search(sizes.PLAIN, DeliveryChange.PROMISE_FALLS_ON_DISCARD, "i"),
    Search(sizes.RESUME, DeliveryChange.OWED_FROM_OLD_BLOCKS, "a"),
    Search(sizes.RESUME, DeliveryChange.OWED_AFTER_THE_RUN, "b"),
    Search(sizes.UNSAVED, DeliveryChange.UNSAVED_HIT_LOST, "i"),
    Search(sizes.BACK_OFF, DeliveryChange.BACK_OFF_FOR_EVER, "k"),
    Search(sizes.DRAFTS, DeliveryChange.REJECTION_AS_RESUME, "i"),
    Search(sizes.DRAFTS, DeliveryChange.REJECTION_KEPT_ON_RESUME, "i"),
    Search(sizes.DRAFTS, DeliveryChange.REJECTED_ROWS_DELIVERED, "a"),
    Search(sizes.LONG_DRAFT_RUNS, DeliveryChange.COUNT_IS_OF_TOKENS, "i"),
    Search(sizes.LATE_COUNTS, DeliveryChange.LATE_COUNT_LOWERS_PROMISE, "h"),
    Search(sizes.REPLACED, DeliveryChange.OLD_VERSION_DELIVERED, "j"),
    Search(sizes.REPLACED, DeliveryChange.OLD_MISSING_KEPT, "h"),
    Search(sizes.TWO_PHASE, DeliveryChange.OLD_VERSION_OWED, "h"),
    Search(sizes.TWO_PHASE, DeliveryChange.RELEASE_FORGETS, "i"),
    Search(sizes.TWO_PHASE, DeliveryChange.OWED_WHEN_HANDED_OVER, "h"),
)
FREE_CHOICES = tuple(
    Search(scenario, change)
    for change, scenarios in (
        (StorageChange.SKIP_UNWANTED, (runs.SAME_STEP_HIT, runs.STORED_HITS, runs.THREE_TENANCIES)),
        (StorageChange.COPY_FORCES_ALL, (runs.COPY_DEFERRED_SOURCE, runs.COPY_DEFERRED_DESTINATION)),
        (StorageChange.STAGE_WITH_CLAIM, (deferred.RECYCLED, deferred.NO_ROOM)),
    )
    for scenario in scenarios
)
