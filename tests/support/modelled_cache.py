# SPDX-License-Identifier: Apache-2.0
"""A real cache and its `DictionaryModel` side by side: every call goes to both, and what comes back must agree."""

import numpy as np
import pytest
import torch
from delivery_checks import KEYS, PATIENCE_S, Handed, LateCall, ranges_of, tensor_of
from dictionary_model import DictionaryModel
from omni_core_cpu_sim import CpuSimBackend

from omni_core.prefix_cache.config import HIDDEN_KEY, Delivery, PrefixCacheConfig
from omni_core.prefix_cache.errors import (
    CacheFailedError,
    StepAlreadyDiscardedError,
    StepAlreadyMaterializedError,
    StepOrderError,
)
from omni_core.prefix_cache.events import StepEvents, StepLayout
from omni_core.prefix_cache.manager import OmniPrefixCacheManager
from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.runtime import ThreadingRuntime

NUM_BLOCKS = 9
MAX_TOKENS = 24
STAGING_DEPTH = 3
FURTHER_KEYS = sorted(set(KEYS) - {HIDDEN_KEY})
_GARBAGE = -7
_POLL_S = 0.0005


class ModelledCache:
    """The engine thread is the caller's; what it does not do itself, it has done by the time a call returns."""

    def __init__(self, block_size, *, two_phase, stores_hidden, deferred, device_staging_bytes):
        self.block_size = block_size
        self.two_phase = two_phase
        self.device_staging_bytes = device_staging_bytes
        self.runtime = ThreadingRuntime()
        self.backend = CpuSimBackend(self.runtime, copy_parts=2)
        self.layout = None
        config = PrefixCacheConfig(
            num_blocks=NUM_BLOCKS,
            block_size=block_size,
            hidden_size=3,
            hidden_dtype=torch.float32,
            max_num_tokens=MAX_TOKENS,
            staging_depth=STAGING_DEPTH,
            staging_claim_timeout_s=PATIENCE_S,
            join_timeout_s=PATIENCE_S,
            delivery=Delivery.TWO_PHASE if two_phase else Delivery.ON_MATERIALIZE,
            device_staging_bytes=device_staging_bytes,
        )
        self.cache = OmniPrefixCacheManager(
            config, self.backend, lambda: self.layout, runtime=self.runtime, device=torch.device("cpu")
        )
        self.cache.register_policy(
            ModelCachePolicy(
                token_keys=frozenset(FURTHER_KEYS) - deferred,
                deferred_keys=frozenset(deferred),
                needs_full_hidden_states=stores_hidden,
            )
        )
        self.model = DictionaryModel(block_size, NUM_BLOCKS, stores_hidden=stores_hidden)
        self.open = {}
        """Step id → its sampled counts."""
        self.consumed = {}
        """Step id → the error of using it again."""
        self.handed = []
        self._late_calls = []
        self._hold = None
        self._saved_since_hold = 0

    # -- the engine

    def begin(self, events):
        self.cache.new_step_starts(events)
        self.model.step_starts(events)

    def save(self, runs, counts, keys=(), padding=0, *, carry_owed=True):
        """Save `runs`, in batch order; `keys` are the further ones. Returns the step id."""
        self._wait_for_room()
        numbers = [row for run in runs for row in run.rows]
        outputs = {key: tensor_of(key, numbers + [_GARBAGE] * padding) for key in (HIDDEN_KEY, *sorted(keys))}
        self.set_layout_of(runs)
        step_id = self.cache.save_outputs(
            outputs[HIDDEN_KEY],
            {key: rows for key, rows in outputs.items() if key != HIDDEN_KEY},
            num_tokens_unpadded=len(numbers),
            num_tokens_padded=len(numbers) + padding,
            carry_owed=carry_owed,
        )
        for rows in outputs.values():
            rows.fill_(_GARBAGE)
        self.model.save(step_id, runs, tuple(outputs), carry_owed=carry_owed)
        self.open[step_id] = counts
        self._saved_since_hold += 1
        return step_id

    def set_layout_of(self, runs):
        size = self.block_size
        self.set_layout(
            [run.req_id for run in runs],
            starts=np.cumsum([0, *(len(run.rows) for run in runs)]),
            positions=[position for run in runs for position in range(run.first, run.last)],
            slots=[-1 if slot is None else slot[0] * size + slot[1] for run in runs for slot in run.slots],
            num_draft_tokens=[run.drafts for run in runs],
        )

    def set_layout(self, req_ids, **columns):
        self.layout = StepLayout(tuple(req_ids), **{name: np.array(given) for name, given in columns.items()})

    def _wait_for_room(self):
        """A staging slot is free, or will be once writes have landed."""
        while len(self.open) >= STAGING_DEPTH:
            oldest = min(self.open)
            if oldest % 3 == 0:
                self.discard(oldest)
            else:
                self.materialize(oldest)
        in_use = len(self.open) + len(self._late_calls) + self._saved_since_hold
        if self._hold is not None and in_use >= STAGING_DEPTH:
            self.let_late_calls_return()

    # -- the consumer

    def requests_of(self, step_id):
        return list(self.model.steps[step_id].runs)

    def materialize(self, step_id, asked=None):
        """For `asked`, or for every request of the step."""
        self.let_late_calls_return()
        asked = self.requests_of(step_id) if asked is None else asked
        counts = self._consume(step_id, StepAlreadyMaterializedError)
        outputs = self.cache.materialize(step_id, asked, counts)
        self._take(Handed(outputs, *self.model.materialize(step_id, asked, counts, two_phase=self.two_phase)))

    def materialize_on_another_thread(self, step_id):
        """It returns when copies are let through; what comes back is checked then."""
        asked = self.requests_of(step_id)
        counts = self._consume(step_id, StepAlreadyMaterializedError)
        expected = self.model.materialize(step_id, asked, counts, two_phase=self.two_phase)
        call = LateCall(self.runtime, lambda: self.cache.materialize(step_id, asked, counts), *expected)
        self._late_calls.append(call)
        while self.cache.stats().steps_materialized < self.model.counts["materialized"]:
            self.runtime.sleep(_POLL_S)

    def can_come_late(self, step_id):
        """When the call settles does not matter: it serves every request, and none of them backs off."""
        step = self.model.steps[step_id]
        return not step.failed and not any(saved.life.backs_off for saved in step.runs.values())

    def discard(self, step_id):
        self.let_late_calls_return()
        counts = self._consume(step_id, StepAlreadyDiscardedError)
        self.cache.discard_step(step_id, counts)
        self.model.discard(step_id, counts)

    def acknowledge(self, handed, chosen):
        """`chosen=None`: everything."""
        handed.outputs.acknowledge(chosen)
        if self.two_phase:
            for req_id in handed.served if chosen is None else chosen:
                if req_id in handed.unacknowledged:
                    self.model.acknowledge(handed.unacknowledged.pop(req_id))

    def release(self, handed):
        self.handed.remove(handed)
        handed.check()
        handed.outputs.release()
        if self.two_phase:
            for expected in handed.unacknowledged.values():
                self.model.give_up(expected)
            if handed.unacknowledged:
                with pytest.raises(StepOrderError):
                    handed.outputs.acknowledge()

    def _consume(self, step_id, then):
        self.consumed[step_id] = then
        return self.open.pop(step_id)

    def _take(self, handed):
        handed.check()
        self.handed.append(handed)

    # -- copies

    def hold_copies(self):
        """Nothing is copied to the host until late calls return."""
        while self.cache.stats().staging_slots_in_use > len(self.open):
            self.runtime.sleep(_POLL_S)
        self._hold = self.backend.hold_copies()
        self._hold.__enter__()
        self._saved_since_hold = 0

    def let_late_calls_return(self):
        """Let copies through, and check what the late calls brought."""
        if self._hold is not None:
            self._hold.__exit__(None, None, None)
            self._hold = None
        calls, self._late_calls = self._late_calls, []
        for call in calls:
            self._take(call.result())

    def fail_a_copy(self, runs, counts):
        """The next step's copy fails: every call says so until the cache is reset, and the step is used up."""
        self._wait_for_room()
        self.cache.flush()
        lost = OSError("the device lost the page")
        self.backend.copy_gate.fail_next_copy(lost)
        step_id = self.save(runs, counts)
        asked = self.requests_of(step_id)
        for call in (
            self.cache.flush,
            lambda: self.cache.materialize(step_id, asked, counts),
            lambda: self.cache.new_step_starts(StepEvents()),
        ):
            with pytest.raises(CacheFailedError, match="lost the page"):
                call()
        self.model.materialize(step_id, (), self._consume(step_id, StepAlreadyMaterializedError))
        assert "lost the page" in self.reset()

    # -- the rest

    def reset(self):
        """Returns the failure it lifted."""
        report = self.cache.reset()
        rows, requests, steps = self.model.reset()
        assert dict(report.rows_cleared) == rows
        assert (report.requests_forgotten, report.steps_dropped) == (requests, steps)
        for step_id in list(self.open):
            self._consume(step_id, StepAlreadyDiscardedError)
        return report.failure_cleared

    def bump(self, adapter):
        """`adapter=None`: the weights."""
        cache = self.cache
        report = cache.bump_weight_version() if adapter is None else cache.bump_adapter_version(adapter)
        assert dict(report.rows_absent) == self.model.bump(adapter)

    def take_partial_requests(self):
        found = [(report.req_id, report.missing) for report in self.cache.take_partial_requests()]
        expected = [(req_id, ranges_of(missing)) for req_id, missing in self.model.take_partial()]
        assert sorted(found) == sorted(expected)

    def assert_refused(self, error, call, *args, **options):
        """The call raises and changes nothing."""
        before = self.cache.stats()
        with pytest.raises(error):
            call(*args, **options)
        assert self.cache.stats() == before

    def assert_counters(self):
        """They are what the model counted, unless a call is under way."""
        if self._late_calls:
            return
        stats, model = self.cache.stats(), self.model
        assert {
            "saved": stats.steps_saved,
            "materialized": stats.steps_materialized,
            "discarded": stats.steps_discarded,
            "rows": stats.rows_delivered,
            "from_hits": stats.rows_from_hits,
            "failed": stats.requests_failed,
        } == model.counts
        assert stats.open_steps == len(model.steps)
        assert stats.live_requests == len(model.live)
        assert stats.deferred_bytes <= self.device_staging_bytes
        if not model.steps and not model.under_way:
            assert (stats.live_reads, stats.pinned_slots) == (0, 0)

    def close(self):
        """What was handed over is still right; nothing is left."""
        self.let_late_calls_return()
        for handed in self.handed:
            handed.check()
        self.cache.flush()
        assert self.cache.stats().deferred_records == 0
        assert self.cache.close(PATIENCE_S)
        self.backend.close()
