# SPDX-License-Identifier: Apache-2.0
"""How a step's rows are kept: understood, given a staging slot, cloned, and then entered into the tables at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from omni_core.backend import DeviceBackend
from omni_core.prefix_cache.block_pool import RowSpec
from omni_core.prefix_cache.buffers import HostBuffer
from omni_core.prefix_cache.config import PrefixCacheConfig
from omni_core.prefix_cache.controller import OmniPrefixCacheController
from omni_core.prefix_cache.errors import OmniPrefixCacheStagingTimeoutError, StepOrderError, StepTooLargeError
from omni_core.prefix_cache.events import StepLayout
from omni_core.prefix_cache.layout_check import LayoutChecker
from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.prefix_cache.slot_table import SlotTable, WriteIds
from omni_core.prefix_cache.staging import StagingSlot
from omni_core.prefix_cache.state import CacheState
from omni_core.prefix_cache.step_context import OpenSteps
from omni_core.prefix_cache.step_inputs import OutputClassifier, StepInputs
from omni_core.prefix_cache.step_intake import StepIntake
from omni_core.prefix_cache.step_record import StepRecord, check_devices, step_nbytes
from omni_core.runtime import Runtime

_CLAIM_HOLDER = "save_outputs"
"""The name under which `save_outputs` holds a staging slot until the step and its write do."""


@dataclass(frozen=True, slots=True)
class _ReservedKey:
    """What a new key needs, made before the lock is taken."""

    spec: RowSpec
    rows: torch.Tensor
    tables: tuple[WriteIds, WriteIds]


class StepSaver:
    """The work of `OmniPrefixCacheManager.save_outputs`. Engine thread only."""

    def __init__(
        self,
        config: PrefixCacheConfig,
        backend: DeviceBackend,
        layout_source: Callable[[], StepLayout],
        state: CacheState,
        table: SlotTable,
        controller: OmniPrefixCacheController,
        intake: StepIntake,
        steps: OpenSteps,
        runtime: Runtime,
    ) -> None:
        self._config = config
        self._backend = backend
        self._layout_source = layout_source
        self._state = state
        self._table = table
        self._controller = controller
        self._intake = intake
        self._steps = steps
        self._runtime = runtime
        self._layouts = LayoutChecker(config)
        self.steps_saved = 0
        """How many were saved so far."""
        self.use(ModelCachePolicy())

    def use(self, policy: ModelCachePolicy) -> None:
        """Understand outputs as this policy declares them. Before the first step."""
        self._policy = policy
        self._classifier = OutputClassifier(self._config, policy)

    def forget_places(self) -> None:
        """The staging memory is gone: keep no view of it. No step is saved meanwhile or later."""
        self.use(self._policy)

    def save(
        self,
        hidden: torch.Tensor | None,
        outputs: Mapping[str, Any],
        num_tokens_unpadded: int,
        num_tokens_padded: int,
        *,
        carry_owed: bool,
    ) -> int:
        """See `OmniPrefixCacheManager.save_outputs`."""
        layout = self._layout_source()
        all_stored = self._layouts.check(layout, num_tokens_unpadded)
        inputs = self._classifier.understand(
            hidden, outputs, num_tokens_unpadded, num_tokens_padded, len(layout.req_ids)
        )
        if not inputs.is_known:
            check_devices(inputs, self._backend)
            self._check_size(inputs, num_tokens_unpadded)
        slot, epoch = self._claim_staging()
        record: StepRecord | None = None
        step_id = 0
        unused: list[HostBuffer] = []
        try:
            new_keys = {} if inputs.is_known else self._reserve_keys(inputs)
            record = self._controller.record(inputs, slot)
            self._runtime.checkpoint("save_outputs.recorded")
        finally:
            with self._state.lock:
                problem = self._state.problem("save_outputs")
                if problem is None and self._state.epoch != epoch:
                    problem = StepOrderError("save_outputs: the cache was reset meanwhile; announce the step again")
                try:
                    if record is not None and problem is None:
                        for key, reserved in new_keys.items():
                            self._controller.pool.add_key(key, reserved.spec, reserved.rows)
                            self._table.add_key(key, reserved.tables)
                        self._classifier.confirm(inputs)
                        step_id = self._intake.save_step(
                            layout,
                            record,
                            slot,
                            all_stored=all_stored,
                            hidden_needed=self._policy.needs_full_hidden_states,
                            carry_owed=carry_owed,
                        )
                        self.steps_saved += 1
                    elif problem is not None:
                        unused.extend(self._intake.end_unsaved_step())
                        if record is not None:
                            self._controller.drop(record, slot)
                except BaseException as error:  # tables half changed: nothing may be served from them
                    self._state.fail(error)
                    if record is not None:
                        self._controller.drop_half_saved(record, slot)
                    raise
                finally:
                    self._controller.staging.release(slot, _CLAIM_HOLDER)
                    self._state.leave_pages()
            self._controller.buffers.give_back(unused)
        if problem is not None:
            raise problem
        return step_id

    def _check_size(self, inputs: StepInputs, num_tokens: int) -> None:
        needed_bytes = step_nbytes(inputs)
        if needed_bytes > self._config.staging_arena_bytes:
            raise StepTooLargeError(
                f"the step's {num_tokens} rows and other outputs take {needed_bytes} bytes, but a staging arena has "
                f"{self._config.staging_arena_bytes} (max_num_tokens={self._config.max_num_tokens}, "
                f"extra_row_bytes={self._config.extra_row_bytes}, extra_step_bytes={self._config.extra_step_bytes}); "
                "raise the one that is too small"
            )

    def _claim_staging(self) -> tuple[StagingSlot, int]:
        """A staging slot, and the epoch it was claimed in."""
        staging = self._controller.staging
        unused: list[HostBuffer] = []
        slot = None
        holders = ""
        with self._state.lock:
            if self._state.usable and not self._intake.step_under_way:
                raise StepOrderError("save_outputs was called without new_step_starts; announce each step once, first")
            epoch = self._state.epoch
            if not staging.has_free:
                self._state.wait(lambda: staging.has_free, self._config.staging_claim_timeout_s)
            problem = self._state.problem("save_outputs")
            if problem is None and self._state.epoch != epoch:
                problem = StepOrderError("save_outputs: the cache was reset meanwhile; announce the step again")
            if problem is not None:
                unused.extend(self._intake.end_unsaved_step())
            else:
                slot = staging.try_claim(_CLAIM_HOLDER)
                if slot is not None:
                    self._state.enter_pages()
                else:
                    holders = self._controller.under_way(self._steps)
        self._controller.buffers.give_back(unused)
        if problem is not None:
            raise problem
        if slot is None:
            raise OmniPrefixCacheStagingTimeoutError(
                f"no staging slot became free within staging_claim_timeout_s={self._config.staging_claim_timeout_s}: "
                f"staging_depth={self._config.staging_depth} slots are held by {holders}; "
                "materialize or discard the steps, or raise staging_depth"
            )
        return slot, epoch

    def _reserve_keys(self, inputs: StepInputs) -> dict[str, _ReservedKey]:
        """Room for keys that the step brings for the first time; nothing knows of it until the step is saved."""
        reserved = {}
        for value, tensor in inputs.token_values():
            if value.stored and value.key not in self._controller.pool:
                spec = RowSpec(tuple(tensor.shape[1:]), tensor.dtype)
                rows = self._controller.pool.reserve(value.key, spec)
                reserved[value.key] = _ReservedKey(spec, rows, self._table.new_key_tables(value.key))
        return reserved
