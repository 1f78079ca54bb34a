# SPDX-License-Identifier: Apache-2.0
"""The small runs about deferred keys, whose rows may stay on the device for a while."""

from .storage_scenario import Ended, Fresh, Hit, Owed, Scenario, Write, step_of

RECYCLED = Scenario(
    "block recycled after a preemption, new owner ends first",
    1,
    "D",
    (
        step_of(Fresh(0), Write(0, "D", "B")),
        step_of(Fresh(0), Write(0, "D", "A")),
        step_of(Ended("A"), Hit((0,))),
    ),
)
SAME_STEP = Scenario(
    "hit on deferred rows of its own step, block recycled",
    1,
    "D",
    (
        step_of(Fresh(0), Hit((0,)), Write(0, "D")),
        step_of(Fresh(0), Write(0, "D", "B")),
    ),
)
NO_ROOM = Scenario(
    "no room on the device: copied at once, then hit",
    1,
    "D",
    (
        step_of(Fresh(0), Write(0, "D")),
        step_of(Fresh(0), Write(0, "D", "B")),
        step_of(Hit((0,))),
    ),
    ring_units=1,
)
RING_WRAPS = Scenario(
    "records of two units in a ring of three",
    2,
    "D",
    (
        step_of(Fresh(0), Write(0, "D")),
        step_of(Fresh(1), Write(1, "D", "B")),
        step_of(Hit((0, 1)), Fresh(0), Write(0, "D", "C")),
    ),
    ring_units=3,
    record_units=2,
)
AND_HIDDEN = Scenario(
    "hidden rows at once, deferred rows later, one hit on both",
    2,
    "HD",
    (
        step_of(Fresh(0), Write(0, "HD")),
        step_of(Hit((0,)), Fresh(1), Write(1, "HD", "B")),
    ),
)
HIDDEN_AFTER_RECORD = Scenario(
    "hit on hidden rows newer than a record that lands late",
    2,
    "HD",
    (
        step_of(Fresh(0), Write(0, "D")),
        step_of(Fresh(1), Write(1, "H", "B")),
        step_of(Hit((1,))),
    ),
)
TWO_WRITES = Scenario(
    "a request's second deferred write after a hit closed the first",
    2,
    "D",
    (
        step_of(Fresh(0), Write(0, "D")),
        step_of(Hit((0,)), Fresh(1), Write(1, "D")),
        step_of(Hit((0, 1)), Ended("A")),
    ),
)
PAGE_REUSED = Scenario(
    "one page: a record is on its way into it while its step is discarded",
    2,
    "D",
    (
        step_of(Fresh(0), Write(0, "D")),
        step_of(Fresh(1), Write(1, "D")),
        step_of(Hit((0, 1))),
    ),
    staging_depth=1,
)
OWED = Scenario(
    "deferred rows owed to a request, read at save",
    2,
    "D",
    (
        step_of(Fresh(0), Write(0, "D")),
        step_of(Fresh(1), Write(1, "D"), Owed((0, 1), held_since=2)),
        step_of(Fresh(0), Write(0, "D", "B"), Owed((0,), held_since=2)),
    ),
)
ALL = (
    RECYCLED,
    SAME_STEP,
    NO_ROOM,
    RING_WRAPS,
    AND_HIDDEN,
    HIDDEN_AFTER_RECORD,
    TWO_WRITES,
    PAGE_REUSED,
    OWED,
)
