# SPDX-License-Identifier: Apache-2.0
"""The changes against the final rules that the storage world can be run with: wrong ones, and free choices."""

from enum import Enum


class Change(Enum):
    """Without any, the world follows the final rules."""

    # -- reads and tenancies
    PLAN_BEFORE_TENANCIES = "hits are planned before the step's tenancies begin"
    PLAN_ONLY_AT_START = "a read is not planned again when its step is saved"
    OLD_GATHER_FILLS_NEW_ENTRY = "a gather of the old plan fills an entry that was planned again"
    NO_LANDING_WAIT = "the reader does not wait for the write it wants"
    UNSAVED_STEP_KEEPS_READS = "a step that is never saved keeps its reads"
    DIGEST_IGNORED = "a hit is not compared with the digest of the tenancy it finds"
    LATE_PLAN_IGNORES_TENANCY = "owed rows are planned without asking whether their block changed hands"
    NEW_WEIGHTS_IGNORED = "rows of old weights stay present"
    NEW_WEIGHTS_ARE_TENANCIES = "new weights begin a tenancy in every block, as if it changed hands"
    # -- the committer
    NO_RESCUE = "rows that a read still wants are overwritten"
    RESCUE_ANY_PIN = "rows are set aside for every read of the slot, whatever write it wants"
    SKIP_SUPERSEDED = "a superseded write is skipped although a read wants it"
    SIDE_BUFFER_DROPPED = "a read that ends during a rescue drops the side buffer"
    STAGING_FREED_WITH_STEP = "the page is free when its step is consumed, although its rows are not in the pool"
    # -- deferred records
    OWN_RECORDS_FIRST = "the end of a request lands its own records and passes over older ones"
    HIT_DOES_NOT_FORCE = "a read of deferred rows does not ask for their record"
    MATERIALIZE_DOES_NOT_FORCE = "materialize does not ask for the step's record"
    FORCE_AFTER_FALLBACK = "older records are queued behind the rows that are copied at once"
    FALLBACK_DOES_NOT_FORCE = "rows that are copied at once pass older records of their key"
    ONE_WATERMARK = "a reader of deferred rows looks at the watermark of the pages"
    RECORDS_MOVE_PAGE_WATERMARK = "landed records set the watermark of the pages"
    RING_FREED_EARLY = "a record's device bytes are given back when its transfer begins"
    RING_RETURNED_TWICE = "a record's device bytes are given back after the transfer and once more when it has landed"
    RING_NEVER_RETURNED = "a record's device bytes are not given back"
    RECORD_DOES_NOT_HOLD_PAGE = "the step's release frees the page that the committer copies a record into"
    ONE_BOUNCE = "a record and the next one pass through the same bounce buffer"
    FORCED_RECORD_STAYS_OPEN = "a record that was asked for can be asked for again"
    # -- block copies
    COPY_AFTER_TENANCIES = "a block copy looks for its source's rows after the step's tenancies have begun"
    COPY_IGNORES_RECORDS = "a block copy does not ask for records"
    COPY_FORCES_SOURCE_ONLY = "a block copy asks for records of its source, not for older ones of its destination"
    # -- choices that must be free
    SKIP_UNWANTED = "a superseded write that no read wants is skipped"
    COPY_FORCES_ALL = "a block copy asks for every record"
    STAGE_WITH_CLAIM = "a page, device room and write ids are taken in one lock section"
