# SPDX-License-Identifier: Apache-2.0
"""A stand-in for vLLM-Ascend's first model runner: vLLM's under asynchronous scheduling, and what differs.

Blocks of the scheduler's are split into the attention kernel's, in the table and in its ids; a state has other fields;
and rows are padded without any graph, because sequence parallelism rounds their number up.
"""

from types import SimpleNamespace

from async_runner import AsyncFakeRunner


class NpuFakeRunner(AsyncFakeRunner):
    """Its kernel's blocks have half the scheduler's tokens."""

    _kernel_blocks = 2

    def __init__(self, model=None):
        super().__init__(model)
        table = self.input_batch.block_table[0]
        table.physical_block_size = table.block_size * self._kernel_blocks
        table.blocks_per_phys_block = self._kernel_blocks

    def execute_model(self, scheduler_output, intermediate_tensors=None):
        result = super().execute_model(scheduler_output, intermediate_tensors)
        if self.execute_model_state is not None:
            self.execute_model_state = SimpleNamespace(
                scheduler_output=scheduler_output,
                attn_metadata=None,
                positions=self.positions,
                batch_desc=None,
                **vars(self.execute_model_state),
            )
        return result
