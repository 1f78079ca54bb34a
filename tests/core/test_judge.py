# SPDX-License-Identifier: Apache-2.0
"""The judge of simulated stages: it has nothing against a right cache, and notices each way of being wrong."""

import re
from dataclasses import replace

import pytest
import torch

from omni_core.prefix_cache.config import HIDDEN_KEY, Delivery
from omni_core.prefix_cache.errors import HitRowsAbsentError
from omni_core.prefix_cache.outputs import PartialRequest
from omni_core.testing import (
    FakeKey,
    FakeModel,
    Mishaps,
    OracleViolationError,
    Preemption,
    RowKind,
    SchedulerConfig,
    SimRequest,
    SimStage,
    StageConfig,
    WorkloadConfig,
    hidden_key,
    run_workload,
)
from omni_core.testing.reference_cache import ReferenceCache
from omni_core.testing.workload_config import Likelihoods

SEEDS = range(8)


class StaleRows(ReferenceCache):
    """Rows of a block's previous tenant stay readable."""

    def begin_tenancy(self, block_ids):
        return None


class LiveBuffers(ReferenceCache):
    """Reads the engine's output buffers after it overwrote them."""

    def snapshot(self, rows):
        return rows


class LostWrites(ReferenceCache):
    """Every seventh position is never written, and reads zeros."""

    def row_of(self, request, position):
        zero = torch.zeros(self.config.hidden_size, dtype=self.config.hidden_dtype)
        return {HIDDEN_KEY: zero} if position % 7 == 6 else super().row_of(request, position)


class ShiftedHits(ReferenceCache):
    """A stored row is that of the position before."""

    def row_of(self, request, position):
        return super().row_of(request, max(position - 1, 0))


class MissedHits(ReferenceCache):
    """Hits are left out: what an engine without the cache gives."""

    def read_stored(self, request, positions):
        return {}


class ServesAbsentRows(ReferenceCache):
    """A hit with absent hidden rows reads zeros."""

    def row_of(self, request, position):
        zero = torch.zeros(self.config.hidden_size, dtype=self.config.hidden_dtype)
        return {HIDDEN_KEY: zero} | super().row_of(request, position)


class FailsWithoutCause(ReferenceCache):
    """A hit always fails."""

    def read_stored(self, request, positions):
        if positions:
            request.error = HitRowsAbsentError(request.req_id, "refused for no reason")
        return super().read_stored(request, positions)


class ForgetsDiscarded(ReferenceCache):
    """Rows of a discarded step are gone."""

    def owe(self, request, rows):
        return None


class DeliversTwice(ReferenceCache):
    """Rows of a delivered step are delivered again."""

    def join(self, share):
        self.owe(share.request, share.rows)
        return super().join(share)


class SilentZeros(ReferenceCache):
    """Zeros are not declared in `zero_ranges`."""

    def join(self, share):
        return replace(super().join(share), zero_ranges={})


class NeighboursLeftovers(ReferenceCache):
    """Every request gets nothing of the values without a row per token."""

    def join(self, share):
        return replace(super().join(share), leftovers=dict.fromkeys(share.leftovers))


class RoundedRows(ReferenceCache):
    """Rows are off in their last bit."""

    def write(self, slot, rows):
        super().write(
            slot, {key: (row + 1 if not row.is_floating_point() else row * 1.01) for key, row in rows.items()}
        )


class RepeatsRecomputedRows(ReferenceCache):
    """Whatever a run computes is delivered, though it was promised before."""

    def wanted(self, request, stop):
        wanted = super().wanted(request, stop)
        return sorted({*wanted, *range(request.computed_upto, stop)})


class ForgetsProgressWhenResumed(ReferenceCache):
    """A resumed request is taken for a new one: its whole hit is delivered once more."""

    def enter(self, event):
        request = self.live.get(event.req_id)
        if request is not None:
            request.promised.clear()
        super().enter(event)


class IgnoresLongerHit(ReferenceCache):
    """Of a resumed request's hit nothing is read."""

    def enter(self, event):
        request = self.live.get(event.req_id)
        if request is not None and request.promised:
            request.promised.update(range(event.num_computed_tokens))
        super().enter(event)


class KeepsTheOldTable(ReferenceCache):
    """A resumed request's rows are read through the block table it had before."""

    def enter(self, event):
        request = self.live.get(event.req_id)
        old = list(request.block_ids) if request is not None else []
        super().enter(event)
        self.live[event.req_id].block_ids[: len(old)] = old


class DeliversRejectedDrafts(ReferenceCache):
    """Rows of rejected drafts are delivered."""

    def clip(self, share, count):
        return None


class ClipsOneMore(ReferenceCache):
    """The last accepted draft's row is lost."""

    def clip(self, share, count):
        share.clip(None if count is None else max(1, count - 1))


class KeepsRowsOfRejectedDrafts(ReferenceCache):
    """What a rejected draft stored under a further key stays readable where the next run does not bring that key."""

    def settle_drafts(self, request, run_start):
        if run_start < request.computed_upto:
            request.reject_from(run_start)


class DeliversReplacedContent(ReferenceCache):
    """Late rows of replaced content are delivered."""

    def failure(self, share):
        return share.error


class CarriesOldContentOver(ReferenceCache):
    """A replacement is taken for a resumption: rows promised of the old content are not delivered of the new one."""

    def replace(self, event):
        old = self.live.get(event.req_id)
        super().replace(event)
        if old is not None:
            self.live[event.req_id].promised = set(old.promised)


class ReportsReplacedContent(ReferenceCache):
    """Rows nobody wants any more are reported missing."""

    def replace(self, event):
        old = self.live.get(event.req_id)
        super().replace(event)
        if old is not None:
            self.ended.append(old)


class ServesStaleHashes(ReferenceCache):
    """Blocks that a replaced request keeps in part are shown to everybody, and digests are not compared."""

    def withheld(self, request, event):
        return set()


class KeepsRestOfReplacedBlock(ReferenceCache):
    """Behind the kept prefix, rows of the old content stay readable under keys the new content does not bring."""

    def forget_rows(self, block_id, first_offset):
        if first_offset == 0:
            super().forget_rows(block_id, 0)


class MixesUpLives(ReferenceCache):
    """What one life of an id was not given comes to the next."""

    def owe(self, request, rows):
        super().owe(self.live.get(request.req_id, request), rows)


class OwesAcknowledgedRows(ReferenceCache):
    """Acknowledged rows are owed again when the outputs are released."""

    def acknowledge(self, handed_over, req_ids):
        return None


class TakesReleaseForAcknowledgement(ReferenceCache):
    """Rows that were released unacknowledged never come again."""

    def materialize(self, step_id, req_ids, sampled_counts=None):
        outputs = super().materialize(step_id, req_ids, sampled_counts)
        outputs.acknowledge()
        return outputs


class NeverReports(ReferenceCache):
    """Ended requests with missing rows are not reported."""

    def take_partial_requests(self):
        return ()


class ReportsDeliveredRows(ReferenceCache):
    """A report names rows that were delivered."""

    def take_partial_requests(self):
        return (*super().take_partial_requests(), PartialRequest("r0", ((0, 1),)))


class ServesOldWeights(ReferenceCache):
    """Rows stay readable although the weights changed."""

    def forget_old(self, adapter_id):
        return None


class ForgetsOldRowsOfSomeBlocks(ReferenceCache):
    """New weights miss every third block."""

    def forget_rows(self, block_id, first_offset):
        if self.forgetting_old and block_id % 3 == 0:
            return
        super().forget_rows(block_id, first_offset)

    forgetting_old = False

    def forget_old(self, adapter_id):
        self.forgetting_old = True
        super().forget_old(adapter_id)
        self.forgetting_old = False


class TakesEveryAdapterForOne(ReferenceCache):
    """A new version of an adapter makes all rows absent."""

    def forget_old(self, adapter_id):
        super().forget_old(None)


class IgnoresNewAdapters(ReferenceCache):
    """A new version of an adapter changes nothing."""

    def bump_adapter_version(self, adapter_id):
        return None


class ForgetsTooEarly(ReferenceCache):
    """New weights take rows from a step that is under way."""

    def bump_weight_version(self):
        self.forget_old(None)


WRONG_CACHES = [
    ServesOldWeights,
    ForgetsOldRowsOfSomeBlocks,
    TakesEveryAdapterForOne,
    IgnoresNewAdapters,
    ForgetsTooEarly,
    StaleRows,
    LiveBuffers,
    LostWrites,
    ShiftedHits,
    MissedHits,
    ServesAbsentRows,
    FailsWithoutCause,
    ForgetsDiscarded,
    DeliversTwice,
    SilentZeros,
    NeighboursLeftovers,
    RoundedRows,
    RepeatsRecomputedRows,
    ForgetsProgressWhenResumed,
    IgnoresLongerHit,
    KeepsTheOldTable,
    DeliversRejectedDrafts,
    ClipsOneMore,
    KeepsRowsOfRejectedDrafts,
    DeliversReplacedContent,
    CarriesOldContentOver,
    ReportsReplacedContent,
    OwesAcknowledgedRows,
    TakesReleaseForAcknowledgement,
    NeverReports,
    ReportsDeliveredRows,
]


def lively(seed):
    """A small workload with everything an engine does in it."""
    digests = seed % 2 == 0
    partial_hits = seed % 4 < 2
    scheduler = SchedulerConfig(
        num_blocks=12,
        block_size=4,
        max_num_tokens=24,
        max_num_requests=4,
        max_chunk_tokens=(None, 7)[seed % 2],
        partial_block_hits=partial_hits,
        preemption=(Preemption.RECOMPUTE_V1, Preemption.RECOMPUTE_V2)[seed // 2 % 2],
        block_digests=digests,
        max_draft_tokens=3,
        mishaps=Mishaps(seed, preempted=0.2, taken_back=0.1 if digests and not partial_hits else 0.0),
    )
    stage = StageConfig(
        scheduler,
        staging_depth=3,
        capture_sizes=(8, 24),
        deferred_keys=frozenset({"codes"}),
        delivery=(Delivery.ON_MATERIALIZE, Delivery.TWO_PHASE)[seed // 4 % 2],
        shuffle_batch_seed=seed,
        leftovers=True,
    )
    return WorkloadConfig(
        stage,
        hidden_key(4),
        (FakeKey("codes", (3,), torch.int64), FakeKey("scores", (2, 2), torch.bfloat16, padded=False)),
        num_requests=24,
        num_prefixes=2,
        max_prompt_tokens=24,
        max_output_tokens=12,
        likelihoods=Likelihoods(
            id_reused=0.4, in_pieces=0.2, replaced=0.2, abort_before_forward=0.1, weights_changed=0.15
        ),
    )


def judged(seed, make_cache):
    return run_workload(seed, lively(seed), make_cache=make_cache)


def test_the_judge_has_nothing_against_a_right_cache():
    reports = [judged(seed, ReferenceCache) for seed in SEEDS]
    assert {kind: 0 for kind in RowKind if not sum(report.rows[kind] for report in reports)} == {}


def verdicts(run, make_cache, seeds):
    """What the judge says against a cache, until it says something."""
    for seed in seeds:
        try:
            run(seed, make_cache)
        except OracleViolationError as error:
            return ["\n".join([str(error), *getattr(error, "__notes__", ())])]
    return []


@pytest.mark.parametrize("wrong_cache", WRONG_CACHES, ids=lambda cache: cache.__name__)
def test_the_judge_notices_a_wrong_cache(wrong_cache):
    assert "workload seed=" in "".join(verdicts(judged, wrong_cache, SEEDS))


def test_a_verdict_says_whose_row_was_delivered():
    verdict = verdicts(judged, ShiftedHits, SEEDS)[0]
    assert re.search(r"wrong row .* it is the row of position \d+ of request", verdict)


def test_a_verdict_says_which_rows_were_of_drafts():
    found = [verdict for seed in SEEDS for verdict in verdicts(judged, DeliversRejectedDrafts, [seed])]
    assert any("drafts)" in verdict for verdict in found)


# -- what workloads find too seldom to be waited for -------------------------------------------------------------------

PROMPT = tuple(range(1, 13))
GEOMETRY = SchedulerConfig(num_blocks=16, block_size=4, max_num_tokens=64)


def stage_of(make_cache, scheduler=GEOMETRY):
    return SimStage(StageConfig(scheduler), FakeModel(hidden_key(4)), make_cache=make_cache)


def hit_a_hash_of_replaced_content(seed, make_cache):
    with stage_of(make_cache, replace(GEOMETRY, mishaps=Mishaps(seed))) as stage:
        stage.submit(SimRequest("a", PROMPT, max_output_tokens=9))
        stage.build(stage.step())
        stage.engine.scheduler.replace(SimRequest("a", (*PROMPT[:6], 77, 78, 79)))
        stage.build(stage.step())
        stage.submit(SimRequest("b", PROMPT))
        stage.run_to_end()


def test_the_judge_notices_rows_served_under_a_hash_of_replaced_content():
    assert verdicts(hit_a_hash_of_replaced_content, ReferenceCache, range(6)) == []
    (verdict,) = verdicts(hit_a_hash_of_replaced_content, ServesStaleHashes, range(6))
    assert "never computed, yet it was served" in verdict


def use_an_id_again(make_cache):
    with stage_of(make_cache) as stage:
        stage.submit(SimRequest("a", PROMPT))
        old = stage.step()
        stage.submit(SimRequest("a", tuple(range(50, 64)), max_output_tokens=2))
        stage.build(stage.step())
        stage.discard(old)
        stage.run_to_end()


def test_the_judge_notices_rows_of_another_life_of_the_id():
    use_an_id_again(ReferenceCache)
    with pytest.raises(OracleViolationError, match="came before already"):
        use_an_id_again(MixesUpLives)


def replace_behind_a_kept_prefix(make_cache):
    codes = FakeKey("codes", (3,), torch.int64)
    with SimStage(StageConfig(GEOMETRY), FakeModel(hidden_key(4), (codes,)), make_cache=make_cache) as stage:
        stage.submit(SimRequest("a", PROMPT, max_output_tokens=9))
        stage.build(stage.step())
        stage.engine.scheduler.replace(SimRequest("a", (*PROMPT[:6], 77, 78, 79), max_output_tokens=2))
        stage.discard(stage.step(emitted=frozenset()))
        stage.run_to_end()


def test_the_judge_notices_rows_of_old_content_behind_the_prefix_that_a_replacement_keeps():
    replace_behind_a_kept_prefix(ReferenceCache)
    with pytest.raises(OracleViolationError, match=r"no row was ever stored at \[6, 7"):
        replace_behind_a_kept_prefix(KeepsRestOfReplacedBlock)
