# SPDX-License-Identifier: Apache-2.0
"""vLLM's second model runner (`v1/worker/gpu/model_runner.py`), read as of vLLM 0.32.

It keeps block tables and tokens on the device only. What it is given is in the scheduler's output, so the block tables
are mirrored from there, and the tokens come with the outputs of its steps. A step is announced in its own form: a
request that was preempted comes back among the new ones, and none is in `resumed_req_ids`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from omni_core.integrations.vllm.delivery.ledger import UNKNOWN_TOKEN_ID
from omni_core.integrations.vllm.errors import BlockTableMismatchError
from omni_core.integrations.vllm.runners.block_table_mirror import BlockTableMirror
from omni_core.integrations.vllm.runners.step_arrays import HostBlockTable, StepArrays, slots_of
from omni_core.integrations.vllm.step_events import SchedulerOutput, num_draft_tokens
from omni_core.prefix_cache.batch_rows import batch_rows

_DUMMY_RUN = "dummy_run"
_DUMMY_RUN_INDEX = 1
"""Behind the scheduler output and the intermediate tensors."""


class V2View:
    """Reads the second model runner. Keeps a mirror of one KV-cache group's block table, and each request's adapter."""

    def __init__(self, group_index: int, *, max_num_reqs: int, max_model_len: int, block_size: int) -> None:
        """Start without requests.

        Args:
            group_index: the KV-cache group that is mirrored.
            max_num_reqs: vLLM's `max_num_seqs`.
            max_model_len: vLLM's.
            block_size: tokens per block of that group.
        """
        self._group_index = group_index
        self._block_size = block_size
        self._mirror = BlockTableMirror(max_num_reqs, -(-max_model_len // block_size))
        self._adapters: dict[str, Any] = {}

    @property
    def tokens_come_later(self) -> bool:
        """Always: this runner returns asynchronous outputs whatever the scheduler does."""
        return True

    def is_dummy_run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Profile, capture and idle runs do go through `execute_model`, with `dummy_run=True`."""
        positional = args[_DUMMY_RUN_INDEX] if len(args) > _DUMMY_RUN_INDEX else False
        return bool(kwargs.get(_DUMMY_RUN, positional))

    def step_begins(self, scheduler_output: SchedulerOutput) -> None:
        """Follow `finish_requests`, `add_requests` and `update_requests` of the runner, in this order."""
        for req_id in (*scheduler_output.finished_req_ids, *(scheduler_output.preempted_req_ids or ())):
            self._mirror.remove(req_id)
            self._adapters.pop(req_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            self._mirror.replace(new.req_id, new.block_ids[self._group_index])
            if new.lora_request is not None:
                self._adapters[new.req_id] = new.lora_request
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, new_blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if new_blocks is not None:
                self._mirror.append(req_id, new_blocks[self._group_index])

    def adapters_of_step(self, runner: Any, scheduler_output: SchedulerOutput) -> list[Any]:
        """Of every live request; the step's news have been taken in."""
        return list(self._adapters.values())

    def arrays(self, runner: Any, scheduler_output: SchedulerOutput) -> StepArrays:
        """As the protocol says. Rows come in the runner's own order, and no token is known."""
        batch = runner.execute_model_state.input_batch
        req_ids = tuple(batch.req_ids)
        rows = batch_rows(batch.num_scheduled_tokens[: len(req_ids)], batch.num_computed_tokens_np[: len(req_ids)])
        row_of_req = self._mirror.rows_of(req_ids)
        self._compare(runner, batch, req_ids, row_of_req, int(rows.starts[-1]))
        table = HostBlockTable(self._mirror.rows, self._mirror.num_blocks, row_of_req, self._block_size)
        slots = slots_of(req_ids, rows, table)
        token_ids = np.full(len(slots), UNKNOWN_TOKEN_ID, np.int64)
        drafts = num_draft_tokens(scheduler_output, req_ids)
        return StepArrays(req_ids, rows.starts, rows.positions, slots, token_ids, drafts)

    def _compare(self, runner: Any, batch: Any, req_ids: tuple[str, ...], row_of_req: Any, num_rows: int) -> None:
        """Hold the mirror against what the runner says of its own table, and the rows against its own count."""
        mirrored = self._mirror.num_blocks[row_of_req]
        used = runner.block_tables.num_blocks.np[self._group_index, batch.idx_mapping_np[: len(req_ids)]]
        if not np.array_equal(mirrored, used):
            index = int((mirrored != used).argmax())
            raise BlockTableMismatchError(
                f"request {req_ids[index]!r} has {int(used[index])} KV blocks in the runner's table and "
                f"{int(mirrored[index])} by the scheduler's news; report this"
            )
        if num_rows != batch.num_tokens:
            raise BlockTableMismatchError(
                f"a step of {num_rows} scheduled tokens ran {int(batch.num_tokens)}: the runner chose which drafts to "
                "verify on the device; turn adaptive verification off"
            )


def block_table_block_size(runner: Any, group_index: int) -> int:
    """Tokens per entry of the runner's block table of one KV-cache group: what the scheduler's blocks have."""
    return int(runner.block_tables.block_sizes[group_index])
