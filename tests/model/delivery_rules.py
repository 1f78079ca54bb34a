# SPDX-License-Identifier: Apache-2.0
"""What may happen in a delivery world, and the changes against the final rules it can be run with."""

from dataclasses import dataclass
from enum import Enum


class Happening(Enum):
    """What the engine or the consumer may do, beside plain steps."""

    PREEMPTION = "the request is preempted and resumed with any hit its blocks still allow"
    THIEF = "another request takes a free block and computes other rows there"
    TWIN = "another request takes a free block and computes this request's next rows there"
    DRAFTS = "runs have draft tokens, of which any number is accepted"
    LONG_DRAFT_RUNS = "a run with draft tokens may compute more than one row before them"
    REPLACEMENT = "the request's content is replaced, any computed prefix of it kept"
    ID_REUSE = "the request ends and another one of the same id starts in the same step"
    UNSAVED_STEP = "the step that lets the request in does not run it"
    TWO_PHASE = "rows count as delivered when they are acknowledged"


class Change(Enum):
    """Without any, the world follows the final rules."""

    # -- resume
    RECOMPUTED_ROWS_TWICE = "rows that a resumed request computes again are delivered again"
    WHOLE_HIT_READ_AGAIN = "a resumed request's whole hit is read, although part of it was promised before"
    LONGER_HIT_NOT_READ = "rows of a resumed request's hit beyond what was promised are not read"
    RESUME_DOES_NOT_PROMISE = "rows of a longer hit are read, but promised_upto does not rise"
    RESUME_LOWERS_PROMISE = "promised_upto falls to a shorter hit"
    MISSING_LOST_ON_RESUME = "the missing set is emptied by a resume"
    # -- owed rows
    MISSING_LOST_ON_DISCARD = "owed rows carried by a step that is discarded are not owed again"
    PROMISE_FALLS_ON_DISCARD = "instead of a set, promised_upto falls to the first row not delivered"
    OWED_FROM_OLD_BLOCKS = "owed rows are read from the blocks they were computed in"
    OWED_AFTER_THE_RUN = "all owed rows are planned, also those at or beyond the end of the run"
    UNSAVED_HIT_LOST = "rows read for a step that did not run the request are not owed"
    BACK_OFF_FOR_EVER = "owed rows that came back once are not carried again"
    # -- drafts
    REJECTION_AS_RESUME = "a run that starts where drafts were rejected is taken as a resume"
    REJECTION_KEPT_ON_RESUME = "rows of rejected drafts stay promised when the request is resumed"
    REJECTED_ROWS_DELIVERED = "rows of rejected drafts are delivered"
    COUNT_IS_OF_TOKENS = "the count of valid rows is the number of sampled tokens, however many rows precede the drafts"
    LATE_COUNT_LOWERS_PROMISE = "materialize lowers promised_upto by the drafts rejected in its step"
    # -- replacement
    OLD_VERSION_DELIVERED = "open steps of the old version deliver their rows"
    OLD_MISSING_KEPT = "the missing set of the old version stays owed"
    OLD_VERSION_OWED = "rows of the old version that come back are owed to the new one"
    # -- two phases
    RELEASE_FORGETS = "rows released without acknowledgement are not owed again"
    OWED_WHEN_HANDED_OVER = "rows are owed again as soon as they are handed over"


@dataclass(frozen=True)
class DeliveryWorldSize:
    """How far the search goes."""

    name: str
    happenings: frozenset[Happening]
    num_steps: int
    prompt_tokens: int = 2
    max_tokens: int = 4
    """Positions the request may have."""
    num_blocks: int = 5
    max_drafts: int = 2
    max_preemptions: int = 1
    max_thefts: int = 1
    """Blocks that a thief or a twin takes."""
    open_steps: int = 2
