# SPDX-License-Identifier: Apache-2.0
"""Bugs in what a slot holds and what a step reads: tenancies, write ids, plans, gathers."""

from mutants.model import CORE, WORKLOADS, Edit, Mutant, bug, files

READS = files("core/test_reads_and_rescue.py", "core/test_mutant_reads.py")
HITS = files("core/test_hits.py", "core/test_keys.py")
IDENTITY = files("core/test_replacement.py")
GONE = files("core/test_mutant_identity.py")
ENGINE = files("core/test_sim_engine.py")

TENANCIES_AND_READS = (
    bug(
        "write-id-not-raised",
        "every write has the id of the one before: a read cannot tell their rows apart",
        CORE + "slot_table.py",
        """\
        self.last_id += 1
        self.last_write_id = self.last_id
""",
        """\
        self.last_id = max(self.last_id, 1)
        self.last_write_id = self.last_id
""",
        HITS,
        READS,
        listed_as="version not bumped",
        note="our version is the write id, from one counter with the tenancies",
    ),
    bug(
        "tenancy-not-raised",
        "a block that gets a new tenant keeps the rows of the old one",
        CORE + "slot_table.py",
        """\
            self.last_id += 1
            self._tenancy_floor[block_ids] = self.last_id
""",
        """\
            self.last_id += 1
""",
        HITS,
        listed_as="version not bumped",
        note="a tenancy is a floor under the write ids of a block",
    ),
    bug(
        "other-keys-keep-their-tenancy",
        "a new tenancy hides the old tenant's hidden rows only; rows of its further keys are still found",
        CORE + "slot_table.py",
        """\
        present = (ids > self._tenancy_floor[blocks]) & (slots >= 0)
""",
        """\
        present = (slots >= 0) & (
            (ids > self._tenancy_floor[blocks]) | ((ids > 0) & (key != "__hidden_states__"))
        )
""",
        HITS,
        listed_as="other keys not dropped on new tenancy",
    ),
    bug(
        "read-planned-at-materialize",
        "a late step reads what its hit slots hold by then",
        CORE + "step_consumer.py",
        """\
                problem = self._await_step(context, what)
                failed = dict(context.failed)
""",
        """\
                for read in context.reads:
                    self._settlement._planner.plan_again(read, read.slots)
                problem = self._await_step(context, what)
                failed = dict(context.failed)
""",
        WORKLOADS,
        READS,
        listed_as="read planned at materialise",
    ),
    bug(
        "no-second-plan-at-save",
        "a hit on rows that the same step writes is looked up before they exist, and only then",
        CORE + "step_intake.py",
        """\
            self._planner.plan_again(read, stored_slots)
""",
        "",
        HITS,
        READS,
        listed_as="re-plan at save missing",
    ),
    bug(
        "old-gather-fills-a-new-plan",
        "a gather that was started for a row's old id settles the entry that now wants a newer one",
        CORE + "prefetcher.py",
        "entries[(table.ids[entries] == ids) & ~table.resolved[entries]]",
        "entries[~table.resolved[entries]]",
        READS,
        listed_as="gather of an old plan fills a re-planned entry",
    ),
    bug(
        "reader-does-not-wait-for-landing",
        "stored rows are gathered before the write that brings them is in the pool",
        CORE + "prefetcher.py",
        "lambda: read.ended or self._committer.have_landed(batch.newest_id, batch.newest_record_id),",
        "lambda: read.ended or self._committer.have_landed(0, 0),",
        READS,
        listed_as="reader not waiting for landing",
    ),
    Mutant(
        "reads-planned-before-tenancies",
        "a hit is looked up before the request that fills its block in the same step has taken the block over",
        (
            Edit(
                CORE + "step_intake.py",
                """\
        self._table.start_tenancies(digest.fresh_blocks)
""",
                """\
        hits = [request.hit_slots // self._table.block_size for request in digest.entering]
        late = np.isin(digest.fresh_blocks, np.concatenate([digest.fresh_blocks[:0], *hits]))
        self._table.start_tenancies(digest.fresh_blocks[~late])
""",
            ),
            Edit(
                CORE + "step_intake.py",
                """\
        self._started_reads = [self._planner.plan("the step under way", reads)] if reads else []
""",
                """\
        self._started_reads = [self._planner.plan("the step under way", reads)] if reads else []
        self._table.start_tenancies(digest.fresh_blocks[late])
""",
            ),
        ),
        (READS, ENGINE, WORKLOADS),
        listed_as="event order instead of tenancy first",
        note="the order in which the hit comes before the request that it hits",
    ),
    bug(
        "pins-kept-at-discard",
        "a discarded step's reads never end: their slots stay pinned and their buffers are lost",
        CORE + "step_consumer.py",
        """\
            context = self._consume(step_id, StepEnd.DISCARDED, (), sampled_counts, what)
""",
        """\
            context = self._consume(step_id, StepEnd.DISCARDED, (), sampled_counts, what)
            context.reads = []
""",
        READS,
        listed_as="pin not released on discard",
    ),
    bug(
        "pins-kept-at-abort",
        "the reads of a step whose requests were aborted before its forward never end",
        CORE + "step_intake.py",
        """\
            unused.extend(self._planner.end(read))
            for req_id, span in read.spans.items():
""",
        """\
            for req_id, span in read.spans.items():
""",
        READS,
        listed_as="pin not released on abort",
        note="an abort ends no read here; the step that is started and never saved does",
    ),
    bug(
        "block-copy-ignored",
        "rows of a block the engine copied are not found in the copy",
        CORE + "step_intake.py",
        """\
            self._copy_block(source, destination, num_rows)
""",
        """\
            self._table.start_tenancies(np.array([destination], np.int64))
""",
        HITS,
        READS,
        ENGINE,
        listed_as="block copy ignored",
    ),
    bug(
        "unaligned-tail-dropped",
        "of a hit that ends inside a block, the rows of that block are given up",
        CORE + "event_digest.py",
        """\
    return max(0, -(-num_tokens // block_size))
""",
        """\
    return max(0, num_tokens // block_size)
""",
        HITS,
        ENGINE,
        listed_as="unaligned tail dropped",
    ),
    bug(
        "reset-keeps-tenancies",
        "rows written before a reset are served after it",
        CORE + "cache_reset.py",
        """\
            self._table.start_all_tenancies()
""",
        "",
        files("core/test_reset_and_close.py"),
        listed_as="reset keeps versions",
    ),
    bug(
        "digest-ignored",
        "a hit takes a block whose rows are of another token prefix",
        CORE + "slot_table.py",
        "(named & other) | (private & (other | ~named))",
        "private & (other | ~named)",
        IDENTITY,
    ),
    bug(
        "private-block-served",
        "a hit finds the rows of a replaced content in a block whose hash stands for what was there before",
        CORE + "step_intake.py",
        """\
            self._table.make_private(block_id, block_digest, self._requests.life(req_id))
""",
        """\
            self._table.set_digests(np.array([block_id]), np.array([block_digest], np.uint64))
""",
        IDENTITY,
    ),
    bug(
        "copy-of-a-private-block-served",
        "a hit finds the rows of a replaced content in a copy of its block",
        CORE + "step_intake.py",
        """\
        readable = self._table.private_to(source) == NOBODY
""",
        """\
        readable = True
""",
        GONE,
    ),
    bug(
        "digest-outlives-its-tenancy",
        "a new tenant's rows are withheld because the block's digest is still the old tenant's",
        CORE + "slot_table.py",
        """\
            if self._any_digest:
                self._digests[block_ids] = 0
                self._private_to[block_ids] = NOBODY
""",
        "",
        IDENTITY,
    ),
    bug(
        "rewritten-rows-keep-their-other-keys",
        "rows of a rejected draft, or of a replaced content, are served under keys that its successor did not bring",
        CORE + "step_intake.py",
        """\
            self._table.expire(slots[rewritten & (slots >= 0)])
""",
        """\
            pass
""",
        GONE,
    ),
)
