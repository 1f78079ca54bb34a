# SPDX-License-Identifier: Apache-2.0
"""The small runs the storage world is searched over."""

from .storage_scenario import Copy, Ended, Event, Fresh, Hit, NewWeights, Owed, Scenario, Step, Write


def _step(*parts: Event | Write, saved: bool = True) -> Step:
    events = tuple(part for part in parts if not isinstance(part, Write))
    return Step(events, tuple(part for part in parts if isinstance(part, Write)), saved)


# -- reads, tenancies, one committer ----------------------------------------------------------------------------------

SAME_STEP_HIT = Scenario(
    "hit inside its own step, block recycled",
    1,
    "HM",
    (
        _step(Fresh(0), Hit((0,)), Write(0, "HM")),
        _step(Ended("A"), Fresh(0), Write(0, "H")),
        _step(Hit((0,))),
    ),
)
STORED_HITS = Scenario(
    "stored hits over two slots, both recycled",
    3,
    "HM",
    (
        _step(Fresh(0), Fresh(1), Write(0, "HM"), Write(1, "H")),
        _step(Hit((0, 1)), Fresh(2), Write(2, "HM")),
        _step(Fresh(0), Fresh(1), Write(0, "H"), Write(1, "HM")),
        _step(Hit((0, 1))),
    ),
)
NEVER_COMPUTED = Scenario(
    "tenancy whose forward never ran",
    2,
    "HM",
    (
        _step(Fresh(0), Write(0, "HM")),
        _step(Hit((0,))),
        _step(Fresh(0), Hit((0,)), Fresh(1), Write(1, "HM")),
        _step(Fresh(0), Hit((0, 1)), Write(0, "H")),
    ),
)
UNSAVED_STEP = Scenario(
    "step that is never saved",
    1,
    "HM",
    (
        _step(Fresh(0), Write(0, "HM")),
        _step(Hit((0,)), saved=False),
        _step(Fresh(0), Write(0, "HM")),
        _step(Hit((0,))),
    ),
)
HIT_BEFORE_TENANCY = Scenario(
    "hit listed before the tenancy of its block",
    1,
    "HM",
    (
        _step(Fresh(0), Write(0, "HM")),
        _step(Hit((0,)), Fresh(0), Write(0, "H")),
        _step(Hit((0,)), Fresh(0)),
    ),
)
REWRITE = Scenario(
    "slot written again in its tenancy",
    1,
    "HM",
    (
        _step(Fresh(0), Write(0, "HM")),
        _step(Hit((0,)), Write(0, "H")),
        _step(Hit((0,)), Write(0, "HM")),
    ),
)
THREE_TENANCIES = Scenario(
    "three tenancies, each hit in its own step",
    1,
    "HM",
    (
        _step(Fresh(0), Hit((0,)), Write(0, "HM")),
        _step(Fresh(0), Hit((0,)), Write(0, "H")),
        _step(Fresh(0), Hit((0,)), Write(0, "HM")),
        _step(Fresh(0), Write(0, "HM")),
    ),
)
MIXED_READ = Scenario(
    "stored and same-step rows in one read",
    2,
    "HM",
    (
        _step(Fresh(0), Write(0, "HM")),
        _step(Fresh(1), Hit((0, 1)), Write(1, "HM")),
        _step(Fresh(0), Hit((0,)), Write(0, "M")),
        _step(Fresh(1), Hit((1,)), Write(1, "H")),
    ),
)
SILENT_TENANCY = Scenario(
    "tenancy that no event tells of",
    1,
    "HM",
    (
        _step(Fresh(0, digest=1), Write(0, "HM")),
        _step(Fresh(0, announced=False)),
        _step(Hit((0,), digest=2)),
        _step(Fresh(0, digest=3), Hit((0,), digest=3), Write(0, "H")),
    ),
)
OWED_BLOCK_LOST = Scenario(
    "rows owed from a block that changed hands",
    1,
    "HM",
    (
        _step(Fresh(0), Write(0, "HM")),
        _step(Fresh(0), Write(0, "HM")),
        _step(Owed((0,), held_since=1)),
    ),
)
OWED_NEW_TABLE = Scenario(
    "rows owed after a resume: one hit, one computed again, both in other blocks",
    3,
    "HM",
    (
        _step(Fresh(0), Fresh(1), Write(0, "HM"), Write(1, "HM")),
        _step(Fresh(0), Write(0, "H")),
        _step(Fresh(2), Write(2, "H"), Owed((1, 2), held_since=3)),
        _step(Fresh(1), Write(1, "HM")),
    ),
)
NEW_WEIGHTS_UNDER_READS = Scenario(
    "weights change under stored rows and a planned read, and the row is written anew",
    2,
    "HM",
    (
        _step(Fresh(0), Write(0, "HM")),
        _step(Hit((0,)), Fresh(1), Write(1, "HM")),
        _step(NewWeights((0, 1)), Hit((0,)), Write(1, "H")),
        _step(Hit((1,)), Fresh(0), Write(0, "M")),
    ),
)
NEW_WEIGHTS_OWED = Scenario(
    "rows owed across a change of weights: one computed before it, one after it",
    2,
    "HM",
    (
        _step(Fresh(0), Fresh(1), Write(0, "HM")),
        _step(NewWeights((0, 1)), Write(1, "HM")),
        _step(Owed((1,), held_since=1), Owed((0,), held_since=1)),
    ),
)
NEW_WEIGHTS_COPIED = Scenario(
    "weights change between the copies of a block",
    3,
    "HM",
    (
        _step(Fresh(0), Write(0, "HM")),
        _step(Copy(0, 1), Hit((1,))),
        _step(NewWeights((0, 1)), Copy(0, 2), Hit((1, 2))),
    ),
)
BASE = (
    SAME_STEP_HIT,
    STORED_HITS,
    NEVER_COMPUTED,
    UNSAVED_STEP,
    HIT_BEFORE_TENANCY,
    REWRITE,
    THREE_TENANCIES,
    MIXED_READ,
    SILENT_TENANCY,
    OWED_BLOCK_LOST,
    OWED_NEW_TABLE,
    NEW_WEIGHTS_UNDER_READS,
    NEW_WEIGHTS_OWED,
    NEW_WEIGHTS_COPIED,
)

# -- deferred keys ----------------------------------------------------------------------------------------------------

DEFERRED_RECYCLED = Scenario(
    "block recycled after a preemption, new owner ends first",
    1,
    "D",
    (
        _step(Fresh(0), Write(0, "D", "B")),
        _step(Fresh(0), Write(0, "D", "A")),
        _step(Ended("A"), Hit((0,))),
    ),
)
DEFERRED_SAME_STEP = Scenario(
    "hit on deferred rows of its own step, block recycled",
    1,
    "D",
    (
        _step(Fresh(0), Hit((0,)), Write(0, "D")),
        _step(Fresh(0), Write(0, "D", "B")),
    ),
)
DEFERRED_NO_ROOM = Scenario(
    "no room on the device: copied at once, then hit",
    1,
    "D",
    (
        _step(Fresh(0), Write(0, "D")),
        _step(Fresh(0), Write(0, "D", "B")),
        _step(Hit((0,))),
    ),
    ring_units=1,
)
DEFERRED_RING_WRAPS = Scenario(
    "records of two units in a ring of three",
    2,
    "D",
    (
        _step(Fresh(0), Write(0, "D")),
        _step(Fresh(1), Write(1, "D", "B")),
        _step(Hit((0, 1)), Fresh(0), Write(0, "D", "C")),
    ),
    ring_units=3,
    record_units=2,
)
DEFERRED_AND_HIDDEN = Scenario(
    "hidden rows at once, deferred rows later, one hit on both",
    2,
    "HD",
    (
        _step(Fresh(0), Write(0, "HD")),
        _step(Hit((0,)), Fresh(1), Write(1, "HD", "B")),
    ),
)
HIDDEN_AFTER_RECORD = Scenario(
    "hit on hidden rows newer than a record that lands late",
    2,
    "HD",
    (
        _step(Fresh(0), Write(0, "D")),
        _step(Fresh(1), Write(1, "H", "B")),
        _step(Hit((1,))),
    ),
)
DEFERRED_TWO_WRITES = Scenario(
    "a request's second deferred write after a hit closed the first",
    2,
    "D",
    (
        _step(Fresh(0), Write(0, "D")),
        _step(Hit((0,)), Fresh(1), Write(1, "D")),
        _step(Hit((0, 1)), Ended("A")),
    ),
)
DEFERRED_PAGE_REUSED = Scenario(
    "one page: a record is on its way into it while its step is discarded",
    2,
    "D",
    (
        _step(Fresh(0), Write(0, "D")),
        _step(Fresh(1), Write(1, "D")),
        _step(Hit((0, 1))),
    ),
    staging_depth=1,
)
DEFERRED_OWED = Scenario(
    "deferred rows owed to a request, read at save",
    2,
    "D",
    (
        _step(Fresh(0), Write(0, "D")),
        _step(Fresh(1), Write(1, "D"), Owed((0, 1), held_since=2)),
        _step(Fresh(0), Write(0, "D", "B"), Owed((0,), held_since=2)),
    ),
)
DEFERRED = (
    DEFERRED_RECYCLED,
    DEFERRED_SAME_STEP,
    DEFERRED_NO_ROOM,
    DEFERRED_RING_WRAPS,
    DEFERRED_AND_HIDDEN,
    HIDDEN_AFTER_RECORD,
    DEFERRED_TWO_WRITES,
    DEFERRED_PAGE_REUSED,
    DEFERRED_OWED,
)

# -- block copies -----------------------------------------------------------------------------------------------------

COPY_SOURCE_RECYCLED = Scenario(
    "block copied and its source given away in one step",
    2,
    "HM",
    (
        _step(Fresh(0), Write(0, "HM")),
        _step(Copy(0, 1), Fresh(0), Write(0, "H")),
        _step(Hit((1,)), Hit((0,))),
    ),
)
COPY_ONTO_READ = Scenario(
    "block copied onto one that a read still wants, and on in the same step",
    3,
    "HM",
    (
        _step(Fresh(0), Fresh(1), Write(0, "H"), Write(1, "HM")),
        _step(Hit((1,))),
        _step(Copy(0, 1), Copy(1, 2), Hit((2,))),
    ),
)
COPY_DEFERRED_SOURCE = Scenario(
    "block copied while its rows are on the device",
    2,
    "D",
    (
        _step(Fresh(0), Write(0, "D")),
        _step(Copy(0, 1), Fresh(0), Write(0, "D", "B")),
        _step(Hit((1,))),
    ),
)
COPY_DEFERRED_DESTINATION = Scenario(
    "block copied over one whose former rows are on the device",
    2,
    "D",
    (
        _step(Fresh(0), Write(0, "D")),
        _step(Fresh(1), Write(1, "D", "B")),
        _step(Copy(0, 1)),
        _step(Hit((1,))),
    ),
)
COPIES = (COPY_SOURCE_RECYCLED, COPY_ONTO_READ, COPY_DEFERRED_SOURCE, COPY_DEFERRED_DESTINATION)
