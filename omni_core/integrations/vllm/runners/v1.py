# SPDX-License-Identifier: Apache-2.0
"""vLLM's first model runner (`v1/worker/gpu_model_runner.py`), and what extends it: the CPU's, and vLLM-Ascend's.

It keeps its batch, its tokens and its block tables in host memory. With asynchronous scheduling the tokens sampled in
the step before are not there yet: their places hold -1, which is `UNKNOWN_TOKEN_ID`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from omni_core.integrations.vllm.delivery.ledger import UNKNOWN_TOKEN_ID
from omni_core.integrations.vllm.runners.step_arrays import HostBlockTable, StepArrays, slots_of
from omni_core.integrations.vllm.step_events import SchedulerOutput, num_draft_tokens
from omni_core.prefix_cache.batch_rows import batch_rows


class V1View:
    """Reads the first model runner. Keeps nothing."""

    def __init__(self, group_index: int, *, tokens_come_later: bool = False) -> None:
        """See `RunnerView`.

        Args:
            group_index: the KV-cache group whose blocks are read.
            tokens_come_later: whether the engine schedules asynchronously.
        """
        self._group_index = group_index
        self._tokens_come_later = tokens_come_later

    @property
    def tokens_come_later(self) -> bool:
        return self._tokens_come_later

    def is_dummy_run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Never: profile and dummy runs do not go through `execute_model`."""
        return False

    def step_begins(self, scheduler_output: SchedulerOutput) -> None:
        """Nothing to take in: all is the runner's."""

    def adapters_of_step(self, runner: Any, scheduler_output: SchedulerOutput) -> list[Any]:
        new = (request.lora_request for request in scheduler_output.scheduled_new_reqs)
        known = runner.input_batch.lora_id_to_lora_request.values()
        return [*known, *(adapter for adapter in new if adapter is not None)]

    def arrays(self, runner: Any, scheduler_output: SchedulerOutput) -> StepArrays:
        """As the protocol says. Not earlier: only now are the batch's order and its counts those of this step.

        With draft tokens and asynchronous scheduling `num_computed_tokens_cpu` is corrected at the end of
        `execute_model` (vLLM 0.32), for the drafts that were rejected in the step before.
        """
        batch = runner.input_batch
        req_ids = tuple(batch.req_ids)
        num_reqs = len(req_ids)
        scheduled = np.fromiter(map(scheduler_output.num_scheduled_tokens.__getitem__, req_ids), np.int64, num_reqs)
        rows = batch_rows(scheduled, batch.num_computed_tokens_cpu[:num_reqs])
        table = batch.block_table[self._group_index]
        held = HostBlockTable(table.block_table.np, table.num_blocks_per_row, None, table.block_size)
        slots = slots_of(req_ids, rows, held)
        at = rows.in_batch, rows.positions
        token_ids = batch.token_ids_cpu[at].astype(np.int64)
        told = batch.is_token_ids[at]
        if not np.logical_and.reduce(told):  # a prompt given as embeddings
            token_ids[~told] = UNKNOWN_TOKEN_ID
        drafts = num_draft_tokens(scheduler_output, req_ids)
        return StepArrays(req_ids, rows.starts, rows.positions, slots, token_ids, drafts)


def block_table_block_size(runner: Any, group_index: int) -> int:
    """Tokens per entry of the runner's block table of one KV-cache group; may differ from what was asked for.

    vLLM up to 0.30 and vLLM-Ascend split a block of the scheduler's into several of the attention kernel's.
    """
    return int(runner.input_batch.block_table[group_index].block_size)
