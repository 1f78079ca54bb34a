# SPDX-License-Identifier: Apache-2.0
"""Bugs in what a request is promised and given: missing sets, resumes, drafts, replacements, acknowledgement."""

from mutants.model import CORE, WORKLOADS, bug, files

OWED = files("core/test_owed_rows.py", "core/test_partial_reports.py")
LIFE = files("core/test_mutant_lifecycle.py")
DRAFTS = files("core/test_drafts.py")
RESUMED = files("core/test_resume.py")
REPLACED = files("core/test_replacement.py")
ACKNOWLEDGED = files("core/test_two_phase_delivery.py")

LIFECYCLE = (
    bug(
        "discarded-rows-not-owed",
        "rows of a discarded step are gone for good, and nobody says so",
        CORE + "settlement.py",
        """\
        if len(served) < len(context.req_ids):
""",
        """\
        if served and len(served) < len(context.req_ids):
""",
        OWED,
        listed_as="missing set not filled on discard",
    ),
    bug(
        "clip-one-row-too-many",
        "one row of a rejected draft is delivered",
        CORE + "step_context.py",
        """\
            valid[index] = rows - drafts - 1 + sampled
""",
        """\
            valid[index] = min(rows - drafts + sampled, rows)
""",
        DRAFTS,
        listed_as="clip off by one",
    ),
    bug(
        "clip-one-row-too-few",
        "the last accepted row of a run with drafts is not delivered",
        CORE + "step_context.py",
        """\
            valid[index] = rows - drafts - 1 + sampled
""",
        """\
            valid[index] = max(rows - drafts - 2 + sampled, 0)
""",
        DRAFTS,
        listed_as="clip off by one",
    ),
    bug(
        "rows-before-the-drafts-clipped",
        "of a run that is longer than its drafts and the token before them, as many rows at its end are lost",
        CORE + "step_context.py",
        """\
            valid[index] = rows - drafts - 1 + sampled
""",
        """\
            valid[index] = sampled
""",
        LIFE,
        listed_as="clip off by one",
        note="the count is of sampled tokens, not of rows",
    ),
    bug(
        "rejection-taken-as-resume",
        "rows that follow a rejected draft count as promised before, and are not delivered",
        CORE + "progress.py",
        """\
        self._promised[rows] = np.minimum(self._promised[rows], firsts)
        return rejected
""",
        """\
        self._num_recomputing += int((self._promised[rows] > firsts).sum())
        return rejected
""",
        DRAFTS,
        listed_as="rejection taken as resume",
    ),
    bug(
        "first-row-after-drafts-refused",
        "a run that starts right behind the last token that was no draft is taken for a gap in the request's life",
        CORE + "progress.py",
        "(firsts < self._computed[rows]) & (firsts >= self._draft_floor[rows])",
        "(firsts < self._computed[rows]) & (firsts > self._draft_floor[rows])",
        DRAFTS,
    ),
    bug(
        "requests-without-drafts-clipped",
        "a count given for a request without drafts cuts its rows",
        CORE + "step_context.py",
        """\
        for index in np.flatnonzero(self.num_draft_tokens).tolist():
""",
        """\
        for index in range(len(self.req_ids)):
            if not self.num_draft_tokens[index] and self.req_ids[index] not in (sampled_counts or {}):
                continue
""",
        LIFE,
    ),
    bug(
        "drafts-without-a-count-accepted",
        "a step with drafts is delivered although nobody said which rows are valid",
        CORE + "step_context.py",
        """\
            if sampled_counts is None or req_id not in sampled_counts:
""",
        """\
            if sampled_counts is None:
                continue
            if req_id not in sampled_counts:
""",
        DRAFTS,
    ),
    bug(
        "resumed-rows-delivered-twice",
        "rows that a preempted request computes again are delivered again",
        CORE + "progress.py",
        """\
        return again if again.any() else None
""",
        """\
        return None
""",
        WORKLOADS,
        RESUMED,
    ),
    bug(
        "longer-hit-of-a-resume-not-read",
        "rows between what was promised and a resumed request's longer hit are skipped by the engine and not read",
        CORE + "entrance.py",
        """\
        if hit <= promised or self._requests.error(req_id) is not None:
""",
        """\
        if promised or self._requests.error(req_id) is not None:
""",
        RESUMED,
    ),
    bug(
        "missing-rows-keep-their-old-slots",
        "rows owed to a resumed request are looked for in the blocks it had before",
        CORE + "requests.py",
        """\
        self._block_tables[req_id] = _BlockTable(block_ids, since, withheld)
        self.progress.resume(self._row_of[req_id], hit, self._block_end(hit))
""",
        """\
        self.progress.resume(self._row_of[req_id], hit, self._block_end(hit))
""",
        RESUMED,
        OWED,
    ),
    bug(
        "old-version-served",
        "a step computed before a replacement still delivers the old content's rows",
        CORE + "entrance.py",
        """\
            if int(context.serials[context.req_ids.index(req_id)]) == serial:
""",
        """\
            if int(context.serials[context.req_ids.index(req_id)]) != serial:
""",
        REPLACED,
    ),
    bug(
        "replaced-rows-still-owed",
        "rows that a content never got delivered before it was replaced are reported missing",
        CORE + "requests.py",
        """\
        self.missing.forget(req_id)
        self._partial.pop((req_id, serial), None)
""",
        """\
        self._partial.pop((req_id, serial), None)
""",
        LIFE,
    ),
    bug(
        "rows-given-back-after-a-replacement-reported",
        "rows of a replaced content that come back unacknowledged are reported missing",
        CORE + "requests.py",
        "if len(positions) == 0 or serial == 0 or serial in self._replaced:",
        "if len(positions) == 0 or serial == 0:",
        LIFE,
    ),
    bug(
        "acknowledgement-lost",
        "rows that were acknowledged come again",
        CORE + "acknowledgement.py",
        """\
                    rows = self._waiting.pop(req_id)
""",
        """\
                    rows = self._waiting[req_id]
""",
        ACKNOWLEDGED,
    ),
    bug(
        "unacknowledged-rows-lost",
        "rows that were released without an acknowledgement are never delivered, and nobody says so",
        CORE + "acknowledgement.py",
        """\
                self._requests.owe(req_id, rows.serial, rows.positions)
""",
        "",
        ACKNOWLEDGED,
    ),
    bug(
        "id-used-again-inherits-missing-rows",
        "rows owed to a request that has ended are delivered to the next one of the same id",
        CORE + "requests.py",
        """\
        if self.serial(req_id) != serial:
            self._report_partial(req_id, serial, positions)
        elif""",
        """\
        if self.serial(req_id) == 0:
            self._report_partial(req_id, serial, positions)
        elif""",
        OWED,
        RESUMED,
    ),
    bug(
        "owed-rows-come-twice",
        "rows that a later step carries stay in the missing set",
        CORE + "owed.py",
        """\
        chunks = self._chunks.pop(req_id, None)
        if chunks is None:
            return NO_POSITIONS
        positions""",
        """\
        chunks = self._chunks.get(req_id)
        if chunks is None:
            return NO_POSITIONS
        positions""",
        OWED,
    ),
    bug(
        "partial-report-forgotten",
        "a request that ends with rows still owed ends in silence",
        CORE + "requests.py",
        """\
        if len(owed):
            self._report_partial(req_id, serial, owed)
""",
        "",
        OWED,
    ),
)
