# SPDX-License-Identifier: Apache-2.0
"""A stage on the CPU simulator that does nothing but feed the cache: decode steps, and prompts that hit stored rows."""

from __future__ import annotations

import numpy as np
import torch
from omni_core_cpu_sim import CpuSimBackend

from omni_core.prefix_cache.config import PrefixCacheConfig
from omni_core.prefix_cache.events import RequestEvent, RequestEventKind, StepEvents, StepLayout
from omni_core.prefix_cache.manager import OmniPrefixCacheManager
from omni_core.prefix_cache.outputs import StageCacheOutputs
from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.runtime import ThreadingRuntime

HIDDEN_SIZE = 2048
HIDDEN_DTYPE = torch.bfloat16
CODES_WIDTH = 16
BLOCK_SIZE = 16
ROW_BYTES = HIDDEN_SIZE * HIDDEN_DTYPE.itemsize
CODES_ROW_BYTES = CODES_WIDTH * torch.float32.itemsize


class CachedStage:
    """A cache and the engine thread's calls into it, in two halves: what is prepared, and what is timed."""

    def __init__(self, num_blocks: int, max_num_tokens: int, *, staging_depth: int, with_codes: bool) -> None:
        runtime = ThreadingRuntime()
        self._backend = CpuSimBackend(runtime)
        config = PrefixCacheConfig(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            hidden_size=HIDDEN_SIZE,
            hidden_dtype=HIDDEN_DTYPE,
            max_num_tokens=max_num_tokens,
            staging_depth=staging_depth,
        )
        self.cache = OmniPrefixCacheManager(
            config, self._backend, lambda: self._layout, runtime=runtime, device=torch.device("cpu")
        )
        self.cache.register_policy(ModelCachePolicy(token_keys=frozenset({"codes"})))
        self._hidden = torch.randn(max_num_tokens, HIDDEN_SIZE).to(HIDDEN_DTYPE)
        self._codes = torch.randn(max_num_tokens, CODES_WIDTH) if with_codes else None

    def prepare(self, events: StepEvents, layout: StepLayout) -> None:
        """Say what the next step is."""
        num_tokens = len(layout.positions)
        self._events = events
        self._layout = layout
        self._step_hidden = self._hidden[:num_tokens]
        self._step_outputs = {} if self._codes is None else {"codes": self._codes[:num_tokens]}

    def run_step(self) -> int:
        """The engine thread's part of the prepared step."""
        num_tokens = len(self._layout.positions)
        self.cache.new_step_starts(self._events)
        return self.cache.save_outputs(
            self._step_hidden, self._step_outputs, num_tokens_unpadded=num_tokens, num_tokens_padded=num_tokens
        )

    def deliver(self, step_id: int) -> StageCacheOutputs:
        """The consumer's part, for every request of the prepared step."""
        outputs = self.cache.materialize(step_id, self._layout.req_ids)
        if outputs.failed:
            raise RuntimeError(f"benchmark step {step_id} failed: {outputs.failed}")
        return outputs

    def close(self) -> None:
        """End the threads."""
        self.cache.close()
        self._backend.close()


class DecodeBatch:
    """Requests that get one token each per step, and start over when their blocks are full."""

    BLOCKS_PER_REQUEST = 4

    def __init__(self, stage: CachedStage, num_requests: int) -> None:
        self._stage = stage
        self._req_ids = tuple(f"request-{index}" for index in range(num_requests))
        first_blocks = 1 + np.arange(num_requests) * self.BLOCKS_PER_REQUEST
        self._first_slots = first_blocks * BLOCK_SIZE
        self._starts = np.arange(num_requests + 1)
        started = tuple(
            RequestEvent(RequestEventKind.STARTED, req_id, tuple(range(block, block + self.BLOCKS_PER_REQUEST)), 0, 1)
            for req_id, block in zip(self._req_ids, first_blocks.tolist(), strict=True)
        )
        finished = tuple(RequestEvent(RequestEventKind.FINISHED, req_id) for req_id in self._req_ids)
        self._restart = StepEvents(finished + started)
        self._position = 0

    @staticmethod
    def num_blocks(num_requests: int) -> int:
        """Blocks that the batch needs, the null block included."""
        return 1 + num_requests * DecodeBatch.BLOCKS_PER_REQUEST

    def make_room(self, num_steps: int) -> None:
        """Start the requests over if their blocks have no room for that many decode steps more."""
        if not 0 < self._position <= self.BLOCKS_PER_REQUEST * BLOCK_SIZE - num_steps:
            self._position = 0
            self._prepare(self._restart)
            self._stage.deliver(self._stage.run_step()).release()
        self._stage.cache.flush()

    def prepare_step(self) -> None:
        """Prepare the next decode step."""
        self._prepare(StepEvents())

    def _prepare(self, events: StepEvents) -> None:
        positions = np.full(len(self._req_ids), self._position)
        self._stage.prepare(events, StepLayout(self._req_ids, self._starts, positions, self._first_slots + positions))
        self._position += 1


class HitPrompts:
    """One stored prompt in scattered blocks, and request after request that hits all of it and computes one token."""

    def __init__(self, stage: CachedStage, hit_tokens: int, chunk_tokens: int) -> None:
        self._stage = stage
        self._hit_tokens = hit_tokens
        num_stored = hit_tokens // BLOCK_SIZE
        self._blocks = tuple((1 + np.random.default_rng(0).permutation(num_stored)).tolist())
        self._tail_block = 1 + num_stored
        self._count = 0
        self._store(chunk_tokens)

    @staticmethod
    def num_blocks(hit_tokens: int) -> int:
        """Blocks that the stored prompt and the token behind it need, the null block included."""
        return 2 + hit_tokens // BLOCK_SIZE

    def prepare_step(self) -> None:
        """Prepare the step in which the next request hits the stored prompt."""
        finished = RequestEvent(RequestEventKind.FINISHED, f"reader-{self._count}")
        self._count += 1
        req_id = f"reader-{self._count}"
        blocks = (*self._blocks, self._tail_block)
        started = RequestEvent(RequestEventKind.STARTED, req_id, blocks, self._hit_tokens, 1)
        position = np.array([self._hit_tokens])
        slot = np.array([self._tail_block * BLOCK_SIZE])
        self._stage.prepare(StepEvents((finished, started)), StepLayout((req_id,), np.array([0, 1]), position, slot))

    def _store(self, chunk_tokens: int) -> None:
        events = StepEvents((RequestEvent(RequestEventKind.STARTED, "writer", self._blocks, 0, chunk_tokens),))
        blocks = np.array(self._blocks)
        for first in range(0, self._hit_tokens, chunk_tokens):
            positions = np.arange(first, min(first + chunk_tokens, self._hit_tokens))
            slots = blocks[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
            starts = np.array([0, len(positions)])
            self._stage.prepare(events, StepLayout(("writer",), starts, positions, slots))
            self._stage.deliver(self._stage.run_step()).release()
            events = StepEvents()
        self._stage.cache.flush()
