# SPDX-License-Identifier: Apache-2.0
"""The small runs the storage world is searched over; those about deferred keys: `storage_deferred_scenarios.py`."""

from .storage_scenario import Copy, Ended, Fresh, Hit, NewWeights, Owed, Scenario, Write, step_of

# -- reads, tenancies, one committer ----------------------------------------------------------------------------------

SAME_STEP_HIT = Scenario(
    "hit inside its own step, block recycled",
    1,
    "HM",
    (
        step_of(Fresh(0), Hit((0,)), Write(0, "HM")),
        step_of(Ended("A"), Fresh(0), Write(0, "H")),
        step_of(Hit((0,))),
    ),
)
STORED_HITS = Scenario(
    "stored hits over two slots, both recycled",
    3,
    "HM",
    (
        step_of(Fresh(0), Fresh(1), Write(0, "HM"), Write(1, "H")),
        step_of(Hit((0, 1)), Fresh(2), Write(2, "HM")),
        step_of(Fresh(0), Fresh(1), Write(0, "H"), Write(1, "HM")),
        step_of(Hit((0, 1))),
    ),
)
NEVER_COMPUTED = Scenario(
    "tenancy whose forward never ran",
    2,
    "HM",
    (
        step_of(Fresh(0), Write(0, "HM")),
        step_of(Hit((0,))),
        step_of(Fresh(0), Hit((0,)), Fresh(1), Write(1, "HM")),
        step_of(Fresh(0), Hit((0, 1)), Write(0, "H")),
    ),
)
UNSAVED_STEP = Scenario(
    "step that is never saved",
    1,
    "HM",
    (
        step_of(Fresh(0), Write(0, "HM")),
        step_of(Hit((0,)), saved=False),
        step_of(Fresh(0), Write(0, "HM")),
        step_of(Hit((0,))),
    ),
)
HIT_BEFORE_TENANCY = Scenario(
    "hit listed before the tenancy of its block",
    1,
    "HM",
    (
        step_of(Fresh(0), Write(0, "HM")),
        step_of(Hit((0,)), Fresh(0), Write(0, "H")),
        step_of(Hit((0,)), Fresh(0)),
    ),
)
REWRITE = Scenario(
    "slot written again in its tenancy",
    1,
    "HM",
    (
        step_of(Fresh(0), Write(0, "HM")),
        step_of(Hit((0,)), Write(0, "H")),
        step_of(Hit((0,)), Write(0, "HM")),
    ),
)
THREE_TENANCIES = Scenario(
    "three tenancies, each hit in its own step",
    1,
    "HM",
    (
        step_of(Fresh(0), Hit((0,)), Write(0, "HM")),
        step_of(Fresh(0), Hit((0,)), Write(0, "H")),
        step_of(Fresh(0), Hit((0,)), Write(0, "HM")),
        step_of(Fresh(0), Write(0, "HM")),
    ),
)
MIXED_READ = Scenario(
    "stored and same-step rows in one read",
    2,
    "HM",
    (
        step_of(Fresh(0), Write(0, "HM")),
        step_of(Fresh(1), Hit((0, 1)), Write(1, "HM")),
        step_of(Fresh(0), Hit((0,)), Write(0, "M")),
        step_of(Fresh(1), Hit((1,)), Write(1, "H")),
    ),
)
SILENT_TENANCY = Scenario(
    "tenancy that no event tells of",
    1,
    "HM",
    (
        step_of(Fresh(0, digest=1), Write(0, "HM")),
        step_of(Fresh(0, announced=False)),
        step_of(Hit((0,), digest=2)),
        step_of(Fresh(0, digest=3), Hit((0,), digest=3), Write(0, "H")),
    ),
)
OWED_BLOCK_LOST = Scenario(
    "rows owed from a block that changed hands",
    1,
    "HM",
    (
        step_of(Fresh(0), Write(0, "HM")),
        step_of(Fresh(0), Write(0, "HM")),
        step_of(Owed((0,), held_since=1)),
    ),
)
OWED_NEW_TABLE = Scenario(
    "rows owed after a resume: one hit, one computed again, both in other blocks",
    3,
    "HM",
    (
        step_of(Fresh(0), Fresh(1), Write(0, "HM"), Write(1, "HM")),
        step_of(Fresh(0), Write(0, "H")),
        step_of(Fresh(2), Write(2, "H"), Owed((1, 2), held_since=3)),
        step_of(Fresh(1), Write(1, "HM")),
    ),
)
NEW_WEIGHTS_UNDER_READS = Scenario(
    "weights change under stored rows and a planned read, and the row is written anew",
    2,
    "HM",
    (
        step_of(Fresh(0), Write(0, "HM")),
        step_of(Hit((0,)), Fresh(1), Write(1, "HM")),
        step_of(NewWeights((0, 1)), Hit((0,)), Write(1, "H")),
        step_of(Hit((1,)), Fresh(0), Write(0, "M")),
    ),
)
NEW_WEIGHTS_OWED = Scenario(
    "rows owed across a change of weights: one computed before it, one after it",
    2,
    "HM",
    (
        step_of(Fresh(0), Fresh(1), Write(0, "HM")),
        step_of(NewWeights((0, 1)), Write(1, "HM")),
        step_of(Owed((1,), held_since=1), Owed((0,), held_since=1)),
    ),
)
NEW_WEIGHTS_COPIED = Scenario(
    "weights change between the copies of a block",
    3,
    "HM",
    (
        step_of(Fresh(0), Write(0, "HM")),
        step_of(Copy(0, 1), Hit((1,))),
        step_of(NewWeights((0, 1)), Copy(0, 2), Hit((1, 2))),
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

# -- block copies -----------------------------------------------------------------------------------------------------

COPY_SOURCE_RECYCLED = Scenario(
    "block copied and its source given away in one step",
    2,
    "HM",
    (
        step_of(Fresh(0), Write(0, "HM")),
        step_of(Copy(0, 1), Fresh(0), Write(0, "H")),
        step_of(Hit((1,)), Hit((0,))),
    ),
)
COPY_ONTO_READ = Scenario(
    "block copied onto one that a read still wants, and on in the same step",
    3,
    "HM",
    (
        step_of(Fresh(0), Fresh(1), Write(0, "H"), Write(1, "HM")),
        step_of(Hit((1,))),
        step_of(Copy(0, 1), Copy(1, 2), Hit((2,))),
    ),
)
COPY_DEFERRED_SOURCE = Scenario(
    "block copied while its rows are on the device",
    2,
    "D",
    (
        step_of(Fresh(0), Write(0, "D")),
        step_of(Copy(0, 1), Fresh(0), Write(0, "D", "B")),
        step_of(Hit((1,))),
    ),
)
COPY_DEFERRED_DESTINATION = Scenario(
    "block copied over one whose former rows are on the device",
    2,
    "D",
    (
        step_of(Fresh(0), Write(0, "D")),
        step_of(Fresh(1), Write(1, "D", "B")),
        step_of(Copy(0, 1)),
        step_of(Hit((1,))),
    ),
)
COPIES = (COPY_SOURCE_RECYCLED, COPY_ONTO_READ, COPY_DEFERRED_SOURCE, COPY_DEFERRED_DESTINATION)
