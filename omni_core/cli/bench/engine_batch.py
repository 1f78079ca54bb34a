# SPDX-License-Identifier: Apache-2.0
"""The engine's side of a benchmark: a stage's shape, a runner's batch, and the steps that every side is given alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

BLOCK_SIZE = 16
HIDDEN_SIZE = 2048
HIDDEN_DTYPE = torch.bfloat16
CODES_KEY = "codes"
CODES_WIDTH = 16
CODES_DTYPE = torch.int64
STAGING_DEPTH = 4
"""The default of both sides."""


@dataclass(frozen=True, slots=True)
class StageShape:
    """What a stage computes per token, and the KV cache it runs with. One-dimensional rows only."""

    num_blocks: int
    max_num_tokens: int
    hidden_size: int | None = HIDDEN_SIZE
    """`None`: the stage keeps no hidden rows."""
    token_keys: Mapping[str, int] = field(default_factory=lambda: {CODES_KEY: CODES_WIDTH})
    """Key → width of its int64 rows."""
    deferred_keys: Mapping[str, int] = field(default_factory=dict)
    """The same, of keys that may stay on the device until their request ends."""
    staging_depth: int = STAGING_DEPTH
    device_staging_bytes: int = 64 << 20

    @property
    def row_bytes(self) -> int:
        """Bytes one token brings, all keys together."""
        widths = (*self.token_keys.values(), *self.deferred_keys.values())
        return (self.hidden_size or 0) * HIDDEN_DTYPE.itemsize + sum(widths) * CODES_DTYPE.itemsize


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that enters in a step: its whole block table, and the tokens whose KV is cached."""

    req_id: str
    block_ids: tuple[int, ...]
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class Batch:
    """What a model runner holds of its batch, one row per request, in the batch's order."""

    req_ids: tuple[str, ...]
    block_table: npt.NDArray[np.int32]
    """`(num_reqs, blocks_per_request)`"""
    num_computed: npt.NDArray[np.int32]
    """`(num_reqs,)`: where each request's run begins."""
    num_scheduled: npt.NDArray[np.int64]
    """`(num_reqs,)`: tokens of each run."""


@dataclass(frozen=True, slots=True)
class EngineStep:
    """One step as an engine announces and computes it."""

    batch: Batch
    hidden: torch.Tensor | None
    """`(num_tokens, hidden_size)`"""
    outputs: Mapping[str, torch.Tensor]
    """Key → `(num_tokens, width)`"""
    started: tuple[NewRequest, ...] = ()
    finished: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Rows of the step."""
        return int(self.batch.num_scheduled.sum())


class StepTensors:
    """What the model computed: the same tensors for every step and every side, as graph buffers would be."""

    def __init__(self, shape: StageShape) -> None:
        generator = torch.Generator().manual_seed(0)
        rows = shape.max_num_tokens
        self._hidden = None
        if shape.hidden_size is not None:
            self._hidden = torch.randn(rows, shape.hidden_size, generator=generator).to(HIDDEN_DTYPE)
        widths = {**shape.token_keys, **shape.deferred_keys}
        self._outputs = {
            key: torch.randint(0, 1 << 20, (rows, width), dtype=CODES_DTYPE, generator=generator)
            for key, width in widths.items()
        }

    def hidden(self, num_tokens: int) -> torch.Tensor | None:
        """Hidden rows of a step."""
        return None if self._hidden is None else self._hidden[:num_tokens]

    def outputs(self, num_tokens: int, keys: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        """Further rows of a step: of the named keys, by default of all."""
        return {key: rows[:num_tokens] for key, rows in self._outputs.items() if keys is None or key in keys}


class DecodeBatch:
    """Requests that get one token each per step. Their blocks are theirs from the start.

    One object makes the steps of one side; sides that get the same number of steps get the same ones.
    """

    def __init__(
        self,
        shape: StageShape,
        num_requests: int,
        blocks_per_request: int = 4,
        *,
        first_block: int = 1,
        name: str = "request",
    ) -> None:
        self.shape = shape
        self._tensors = StepTensors(shape)
        self._names = [f"{name}-{index}" for index in range(num_requests)]
        blocks = first_block + np.arange(num_requests * blocks_per_request, dtype=np.int32)
        self._table = blocks.reshape(num_requests, blocks_per_request)
        self._position: int | None = None

    @staticmethod
    def num_blocks(num_requests: int, blocks_per_request: int = 4) -> int:
        """Blocks that the batch needs, the null block included."""
        return 1 + num_requests * blocks_per_request

    @property
    def room(self) -> int:
        """Steps until the blocks are full; 0: `restart` comes first."""
        return 0 if self._position is None else self._table.shape[1] * BLOCK_SIZE - self._position

    @property
    def num_requests(self) -> int:
        """Requests of the batch now."""
        return len(self._names)

    def restart(self, keys: Sequence[str] | None = None) -> EngineStep:
        """The step in which all requests end and begin again at their first token; of `keys` as in `next_step`."""
        finished = () if self._position is None else tuple(self._names)
        self._position = 0
        started = tuple(
            NewRequest(name, tuple(blocks), 0) for name, blocks in zip(self._names, self._table.tolist(), strict=True)
        )
        return self._step(started, finished, keys)

    def next_step(self, keys: Sequence[str] | None = None) -> EngineStep:
        """A decode step, with rows of the named keys only if any are named."""
        return self._step((), (), keys)

    def finish_last(self) -> EngineStep:
        """A decode step of one request less: the last one has ended."""
        finished = self._names.pop()
        self._table = self._table[:-1]
        return self._step((), (finished,))

    def _step(
        self, started: tuple[NewRequest, ...], finished: tuple[str, ...], keys: Sequence[str] | None = None
    ) -> EngineStep:
        if self._position is None or not self.room:
            raise ValueError("the requests' blocks are full; restart the batch")
        num = len(self._names)
        computed = np.full(num, self._position, np.int32)
        self._position += 1
        batch = Batch(tuple(self._names), self._table, computed, np.ones(num, np.int64))
        return EngineStep(batch, self._tensors.hidden(num), self._tensors.outputs(num, keys), started, finished)


class HitPrompts:
    """One stored prompt in scattered blocks, and request after request that hits all of it and computes one token."""

    def __init__(self, shape: StageShape, hit_tokens: int) -> None:
        self._tensors = StepTensors(shape)
        self._chunk_tokens = shape.max_num_tokens
        self._hit_tokens = hit_tokens
        num_stored = hit_tokens // BLOCK_SIZE
        order = 1 + np.random.default_rng(0).permutation(num_stored)
        self._table = np.append(order, 1 + num_stored).astype(np.int32)[None, :]
        self._count = 0

    @staticmethod
    def num_blocks(hit_tokens: int) -> int:
        """Blocks that the stored prompt and the token behind it need, the null block included."""
        return 2 + hit_tokens // BLOCK_SIZE

    def storing_steps(self) -> list[EngineStep]:
        """The chunked prefill that stores the prompt."""
        steps = []
        for first in range(0, self._hit_tokens, self._chunk_tokens):
            started = (NewRequest("writer", tuple(self._table[0].tolist()), 0),) if first == 0 else ()
            num_tokens = min(self._chunk_tokens, self._hit_tokens - first)
            steps.append(self._step("writer", first, num_tokens, started, ()))
        return steps

    def reading_step(self) -> EngineStep:
        """The step in which the next request hits the stored prompt."""
        finished = "writer" if self._count == 0 else f"reader-{self._count}"
        self._count += 1
        name = f"reader-{self._count}"
        started = (NewRequest(name, tuple(self._table[0].tolist()), self._hit_tokens),)
        return self._step(name, self._hit_tokens, 1, started, (finished,))

    def _step(
        self, req_id: str, first: int, num_tokens: int, started: tuple[NewRequest, ...], finished: tuple[str, ...]
    ) -> EngineStep:
        batch = Batch((req_id,), self._table, np.array([first], np.int32), np.array([num_tokens], np.int64))
        hidden, outputs = self._tensors.hidden(num_tokens), self._tensors.outputs(num_tokens)
        return EngineStep(batch, hidden, outputs, started, finished)
