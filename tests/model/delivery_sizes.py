# SPDX-License-Identifier: Apache-2.0
"""The delivery worlds that are searched: each lets a few things happen, and the large ones let them meet."""

from .delivery_rules import DeliveryWorldSize, Happening

PLAIN = DeliveryWorldSize("steps delivered or discarded in any order", frozenset(), num_steps=4)
RESUME = DeliveryWorldSize(
    "resumed with a shorter, equal or longer hit",
    frozenset({Happening.PREEMPTION, Happening.THIEF, Happening.TWIN}),
    num_steps=3,
    prompt_tokens=3,
    max_tokens=5,
    num_blocks=6,
)
BACK_OFF = DeliveryWorldSize(
    "owed rows come back from the step that carried them", frozenset({Happening.PREEMPTION}), num_steps=4
)
UNSAVED = DeliveryWorldSize(
    "let in by a step that does not run it",
    frozenset({Happening.UNSAVED_STEP, Happening.PREEMPTION, Happening.TWIN}),
    num_steps=3,
    max_preemptions=2,
)
DRAFTS = DeliveryWorldSize(
    "drafts rejected, counts told late, preempted after drafts",
    frozenset({Happening.DRAFTS, Happening.PREEMPTION}),
    num_steps=3,
    max_tokens=6,
    num_blocks=7,
)
LATE_COUNTS = DeliveryWorldSize(
    "a draft's count told after the next step, then computed again",
    frozenset({Happening.DRAFTS, Happening.PREEMPTION}),
    num_steps=4,
    max_tokens=6,
    num_blocks=6,
    max_drafts=1,
)
LONG_DRAFT_RUNS = DeliveryWorldSize(
    "drafts behind several rows",
    frozenset({Happening.DRAFTS, Happening.LONG_DRAFT_RUNS, Happening.PREEMPTION}),
    num_steps=3,
    max_tokens=6,
    num_blocks=7,
)
REPLACED = DeliveryWorldSize(
    "content replaced while steps are open",
    frozenset({Happening.REPLACEMENT, Happening.PREEMPTION}),
    num_steps=3,
)
ID_REUSE = DeliveryWorldSize(
    "id used again in the step in which it ends",
    frozenset({Happening.ID_REUSE, Happening.UNSAVED_STEP, Happening.PREEMPTION}),
    num_steps=3,
)
TWO_PHASE = DeliveryWorldSize(
    "two phases, content replaced between them",
    frozenset({Happening.TWO_PHASE, Happening.PREEMPTION, Happening.REPLACEMENT}),
    num_steps=3,
)
RESUMED_TWICE = DeliveryWorldSize(
    "resumed twice over four steps, blocks taken by others",
    frozenset({Happening.PREEMPTION, Happening.THIEF, Happening.TWIN, Happening.UNSAVED_STEP}),
    num_steps=4,
    prompt_tokens=3,
    max_tokens=5,
    num_blocks=6,
    max_preemptions=2,
)
DRAFTS_TWO_PHASE = DeliveryWorldSize(
    "drafts, two phases and a replacement",
    frozenset({Happening.DRAFTS, Happening.TWO_PHASE, Happening.PREEMPTION, Happening.REPLACEMENT}),
    num_steps=3,
    max_tokens=6,
    num_blocks=7,
)
EVERYTHING = DeliveryWorldSize(
    "everything at once",
    frozenset(Happening),
    num_steps=3,
    max_tokens=5,
    num_blocks=6,
)

SMALL = (PLAIN, RESUME, BACK_OFF, UNSAVED, DRAFTS, LATE_COUNTS, LONG_DRAFT_RUNS, REPLACED, ID_REUSE, TWO_PHASE)
LARGE = (RESUMED_TWICE, DRAFTS_TWO_PHASE, EVERYTHING)
