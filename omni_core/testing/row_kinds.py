# SPDX-License-Identifier: Apache-2.0
"""The ways a row comes to be delivered, or is rightly kept back, that a cache can get wrong; each is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum

from omni_core.testing.ledger_records import HitFact, StepDue


class RowKind(Enum):
    """A kind of row. A row can be of several."""

    STORED_HIT = "stored hits"
    """Rows of a prefix hit that an earlier step computed."""
    SAME_STEP_HIT = "same-step hits"
    """Rows of a prefix hit that this very step computed for another request."""
    RECYCLED_BLOCK = "recycled blocks, other key set"
    """Rows of a prefix hit in a block whose previous tenant stored another set of keys there."""
    HASHED_NEVER_COMPUTED = "hashed, never computed"
    """Positions of a prefix hit for which no forward ran: reported in `failed`, never served."""
    OTHER_CONTENT = "hashed, other content there"
    """Of those, positions where rows of other content lie: the hash is older, or newer, than the rows."""
    OLD_WEIGHTS = "hashed, of old weights"
    """Of those, positions whose rows were computed before the weights, or the adapter, changed."""
    PARTIAL_CHUNK = "partial chunks"
    """Rows of prompts that were computed in several chunks."""
    LATE_MATERIALISE = "late materialise"
    """Rows materialised after the engine had started a later step."""
    LATE_AFTER_REUSE = "late, slot given away"
    """Rows of a prefix hit materialised after their block had begun another tenancy."""
    REDELIVERED = "discarded, delivered later"
    """Rows of a discarded, unasked or unacknowledged delivery, delivered with a later step."""
    ABSENT_KEY_ZEROS = "zeros for a key not stored"
    """Rows of a further key behind a hit where no forward stored that key."""
    COPIED_BLOCK = "hits inside a copied block"
    """Rows of a prefix hit that were stored in another block and came along with its copy."""
    RESUMED = "read back after a resume"
    """Rows of the fresh, longer hit of a request that had promised rows before."""
    RECOMPUTED = "computed again, not repeated"
    """Rows of a run that an earlier step had promised: not delivered again."""
    CLIPPED = "rejected drafts kept back"
    """Rows of draft tokens that were not accepted: not delivered."""
    DEFERRED = "rows of deferred keys"
    """Rows of a key that may stay on the device until its request ends."""
    REPLACED = "replaced content"
    """Late rows of content that was replaced since, refused; and delivered rows of content that replaced other."""


def count_delivery(
    counts: Counter[RowKind],
    owed: StepDue,
    positions: Sequence[int],
    *,
    late: bool,
    was_given_away: Callable[[HitFact], bool],
) -> None:
    """Count one request's rows of one step, which were found right."""
    due = set(owed.due)
    hits = [owed.facts[position] for position in positions if position in owed.facts]
    same_step = sum(fact.same_step for fact in hits)
    counts.update(
        {
            RowKind.LATE_MATERIALISE: len(positions) if late else 0,
            RowKind.PARTIAL_CHUNK: len(owed.content.chunked.intersection(positions)),
            RowKind.REDELIVERED: sum(position not in due for position in positions),
            RowKind.SAME_STEP_HIT: same_step,
            RowKind.STORED_HIT: len(hits) - same_step,
            RowKind.RECYCLED_BLOCK: sum(fact.recycled for fact in hits),
            RowKind.COPIED_BLOCK: sum(fact.copied for fact in hits),
            RowKind.LATE_AFTER_REUSE: sum(map(was_given_away, hits)),
            RowKind.RESUMED: len(hits) if owed.resumed else 0,
            RowKind.RECOMPUTED: owed.num_recomputed,
            RowKind.CLIPPED: owed.num_rejected,
            RowKind.REPLACED: len(positions) if owed.content.version else 0,
        }
    )
