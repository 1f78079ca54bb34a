# SPDX-License-Identifier: Apache-2.0
"""The peer's cache behind the same face as ours: the same tensors, slots and calls, in the form its runner gives them.

Read in its sources: `PrefixCacheRunnerMixin` calls `new_step_starts(scheduler_output)` before the runner updates its
batch, `save_outputs` after the forward, and `materialize` with the requests of the saved step. The slots of a step it
computes itself, inside `save_outputs`, from the batch's CPU block table.
"""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch

from omni_core.cli.bench.engine_batch import BLOCK_SIZE, EngineStep, StageShape
from omni_core.cli.bench.peer.package import PeerPackage
from omni_core.cli.bench.stage import Delivered, Stage


class PeerMode(Enum):
    """How the peer copies and stores."""

    EAGER = "peer_eager"
    """Inside the engine thread's calls: what it does without CUDA."""
    ASYNC = "peer_async"
    """On its committer thread: what it does with CUDA."""


class PeerStage(Stage):
    """vllm-omni's cache, fed as its own model runner feeds it."""

    def __init__(self, package: PeerPackage, shape: StageShape, mode: PeerMode) -> None:
        self.name = mode.value
        names = package.exported
        config = names.PrefixCacheConfig(
            num_blocks=shape.num_blocks,
            block_size=BLOCK_SIZE,
            gpu_staging_bytes=shape.device_staging_bytes if shape.deferred_keys else 512 << 20,
            staging_depth=shape.staging_depth,
            staging_capacity_tokens=shape.max_num_tokens,
        )
        self._batch = SimpleNamespace(
            req_ids=[], req_id_to_index={}, num_computed_tokens_cpu=None, block_table=[_block_table(torch.empty(0, 0))]
        )
        view = names.FullAttentionGroupView(self._batch, BLOCK_SIZE)
        self._manager: Any = names.OmniPrefixCacheManager(config, view, eager=mode is PeerMode.EAGER)
        self._manager.register_policy(
            names.ModelCachePolicy(
                needs_full_hidden_states=shape.hidden_size is not None,
                deferred_keys=frozenset(shape.deferred_keys),
            )
        )
        self._req_ids: dict[int, list[str]] = {}

    def prepare(self, step: EngineStep) -> None:
        batch = step.batch
        req_ids = list(batch.req_ids)
        self._batch.req_ids = req_ids
        self._batch.req_id_to_index = {req_id: index for index, req_id in enumerate(req_ids)}
        self._batch.num_computed_tokens_cpu = batch.num_computed
        self._batch.block_table = [_block_table(torch.from_numpy(batch.block_table))]
        self._scheduler_output = SimpleNamespace(
            finished_req_ids=set(step.finished),
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=new.req_id, num_computed_tokens=new.num_computed_tokens, block_ids=(list(new.block_ids),)
                )
                for new in step.started
            ],
            num_scheduled_tokens=dict(zip(req_ids, batch.num_scheduled.tolist(), strict=True)),
        )
        self._step = step
        self._num_tokens = step.num_tokens

    def start_step(self) -> None:
        self._manager.new_step_starts(self._scheduler_output)

    def save_step(self) -> int:
        step_id: int = self._manager.save_outputs(
            self._step.hidden,
            dict(self._step.outputs),
            num_tokens_unpadded=self._num_tokens,
            num_tokens_padded=self._num_tokens,
        )
        self._req_ids[step_id] = self._batch.req_ids
        return step_id

    def deliver(self, step_id: int) -> PeerRows:
        return PeerRows(self._manager.materialize(step_id, self._req_ids.pop(step_id)))

    def discard(self, step_id: int) -> None:
        del self._req_ids[step_id]
        self._manager.discard_step(step_id)

    def settle(self) -> None:
        # It has no call for this; its next save would wait for the same tasks.
        controller = self._manager._controller
        controller.join([tid for tid, task in list(controller._tasks.items()) if task.state.name != "PENDING"])

    def close(self) -> None:
        self._manager.shutdown()


class PeerRows(Delivered):
    """Rows the peer delivered: tensors of its own making, freed with the last reference."""

    def __init__(self, outputs: Any) -> None:
        self.outputs = outputs

    def release(self) -> None:
        self.outputs = None


def _block_table(rows: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(block_table=SimpleNamespace(cpu=rows))
