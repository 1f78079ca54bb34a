# SPDX-License-Identifier: Apache-2.0
"""The simplest cache that is right: dictionaries of single rows, everything done at once, nothing fast.

It gives the judge something to judge when the real cache is in doubt, and tests break it on purpose, one method at a
time, to show that the oracle notices. It serves requests that are started once and never resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from omni_core.prefix_cache.config import HIDDEN_KEY, PrefixCacheConfig
from omni_core.prefix_cache.errors import HitRowsAbsentError, RequestError
from omni_core.prefix_cache.events import RequestEventKind, StepEvents, StepLayout
from omni_core.prefix_cache.outputs import PartialRequest, RequestRows, StageCacheOutputs, TokenRange
from omni_core.prefix_cache.policy import ModelCachePolicy

Rows = dict[str, torch.Tensor]
"""One token's rows by key."""


@dataclass(slots=True)
class LiveRequest:
    """What the cache keeps of a request."""

    block_ids: list[int]
    hit: int
    first_step_due: bool = True
    ended: bool = False
    error: RequestError | None = None
    owed: dict[int, Rows] = field(default_factory=dict)
    """Rows by position that a discarded or unasked step did not deliver."""


@dataclass(slots=True)
class ReferenceStep:
    """A saved step: per request, the rows by position it delivers."""

    rows: dict[str, dict[int, Rows]] = field(default_factory=dict)
    leftovers: dict[str, dict[str, Any]] = field(default_factory=dict)


class ReferenceCache:
    """A `StageCache`. One thread at a time.

    Args:
        config: geometry.
        policy: `token_keys` and `request_keys` must be declared.
        layout_source: as the real cache's.
    """

    def __init__(
        self, config: PrefixCacheConfig, policy: ModelCachePolicy, layout_source: Callable[[], StepLayout]
    ) -> None:
        self.config = config
        self.policy = policy
        self._layout_source = layout_source
        self._pool: dict[int, Rows] = {}
        self._specs: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._requests: dict[str, LiveRequest] = {}
        self._steps: dict[int, ReferenceStep] = {}
        self._next_step_id = 0

    def new_step_starts(self, events: StepEvents) -> None:
        """Take in tables, begin tenancies, copy blocks."""
        size = self.config.block_size
        started = [event for event in events.requests if event.kind is RequestEventKind.STARTED]
        for event in events.requests:
            if event.kind is RequestEventKind.STARTED:
                self._requests[event.req_id] = LiveRequest(list(event.block_ids), event.num_computed_tokens)
                self.begin_tenancy(event.block_ids[-(-event.num_computed_tokens // size) :])
            elif event.kind is RequestEventKind.EXTENDED:
                self._requests[event.req_id].block_ids.extend(event.block_ids)
                self.begin_tenancy(event.block_ids)
            elif event.req_id in self._requests:
                self._requests[event.req_id].ended = True
        for copy in events.block_copies:
            self.begin_tenancy([copy.destination_block_id])
            valid = size
            for event in started:
                at = event.num_computed_tokens // size
                if event.block_ids[at : at + 1] == (copy.destination_block_id,):
                    valid = event.num_computed_tokens % size
            for offset in range(valid):
                source = self._pool.get(copy.source_block_id * size + offset)
                if source is not None:
                    self._pool[copy.destination_block_id * size + offset] = dict(source)

    def begin_tenancy(self, block_ids: Sequence[int]) -> None:
        """Forget the rows of blocks that change hands."""
        for block_id in block_ids:
            for slot in range(block_id * self.config.block_size, (block_id + 1) * self.config.block_size):
                self._pool.pop(slot, None)

    def save_outputs(
        self,
        hidden: torch.Tensor | None,
        mm_outputs: Mapping[str, Any],
        *,
        num_tokens_unpadded: int,
        num_tokens_padded: int,
    ) -> int:
        """Store the step's rows and put together what it delivers."""
        layout = self._layout_source()
        outputs = _flatten(mm_outputs) | ({} if hidden is None else {HIDDEN_KEY: hidden})
        tokens = {key: self.snapshot(rows) for key, rows in outputs.items() if key in self.policy.token_keys}
        tokens[HIDDEN_KEY] = self.snapshot(outputs[HIDDEN_KEY])
        for key, rows in tokens.items():
            self._specs[key] = (rows.shape[1:], rows.dtype)
        for row, slot in enumerate(layout.slots.tolist()):
            if slot >= 0:
                self.write(slot, {key: rows[row] for key, rows in tokens.items()})
        step = ReferenceStep()
        for index, req_id in enumerate(layout.req_ids):
            request = self._requests[req_id]
            delivered, request.owed = request.owed, {}
            if request.first_step_due:
                delivered.update(self.read_hit(req_id, request))
                request.first_step_due = False
            for row in range(int(layout.starts[index]), int(layout.starts[index + 1])):
                delivered[int(layout.positions[row])] = {key: rows[row] for key, rows in tokens.items()}
            step.rows[req_id] = delivered
            step.leftovers[req_id] = self._leftovers(outputs, set(tokens), index)
        self._steps[self._next_step_id] = step
        self._next_step_id += 1
        return self._next_step_id - 1

    def snapshot(self, rows: torch.Tensor) -> torch.Tensor:
        """Copy an output, which the engine may overwrite as soon as the save returns."""
        return rows.clone()

    def write(self, slot: int, rows: Rows) -> None:
        """Store one token's rows."""
        self._pool.setdefault(slot, {}).update(rows)

    def read_hit(self, req_id: str, request: LiveRequest) -> dict[int, Rows]:
        """The rows of a request's prefix hit; a position without a hidden row fails the request."""
        size = self.config.block_size
        found = {}
        for position in range(request.hit):
            slot = request.block_ids[position // size] * size + position % size
            found[position] = dict(self._pool.get(slot, {}))
            if HIDDEN_KEY not in found[position]:
                request.error = HitRowsAbsentError(req_id, f"no hidden row at position {position}")
        return found

    def materialize(
        self, step_id: int, req_ids: Sequence[str], sampled_counts: Mapping[str, int] | None = None
    ) -> StageCacheOutputs:
        """Deliver a step; what was not asked is owed to later steps."""
        step = self._steps.pop(step_id)
        served: dict[str, RequestRows] = {}
        failed: dict[str, RequestError] = {}
        for req_id, rows in step.rows.items():
            error = self._requests[req_id].error
            if req_id not in req_ids:
                self.owe(req_id, rows)
            elif error is not None:
                failed[req_id] = error
            else:
                served[req_id] = self.join(req_id, rows, step.leftovers[req_id])
        return StageCacheOutputs(step_id, served, failed, lambda: None)

    def discard_step(self, step_id: int) -> None:
        """Give a step up; its rows are owed to later steps."""
        for req_id, rows in self._steps.pop(step_id).rows.items():
            self.owe(req_id, rows)

    def owe(self, req_id: str, rows: dict[int, Rows]) -> None:
        """Keep undelivered rows for a later step."""
        self._requests[req_id].owed.update(rows)

    def join(self, req_id: str, rows: dict[int, Rows], leftovers: Mapping[str, Any]) -> RequestRows:
        """Put a request's rows in the order of their positions; zeros where a further key was never stored."""
        positions = sorted(rows)
        joined, zeros = {}, {}
        for key in sorted({key for row in rows.values() for key in row}):
            shape, dtype = self._specs[key]
            zero = torch.zeros(shape, dtype=dtype)
            joined[key] = torch.stack([rows[position].get(key, zero) for position in positions])
            absent = [position for position in positions if key not in rows[position]]
            if absent:
                zeros[key] = _ranges(absent)
        return RequestRows(req_id, _ranges(positions), joined, zero_ranges=zeros, leftovers=leftovers)

    def take_partial_requests(self) -> tuple[PartialRequest, ...]:
        """Ended requests with rows still owed."""
        partial = [
            PartialRequest(req_id, _ranges(sorted(request.owed)))
            for req_id, request in self._requests.items()
            if request.ended and request.owed and request.error is None
        ]
        for report in partial:
            self._requests[report.req_id].owed = {}
        return tuple(partial)

    def _leftovers(self, outputs: Mapping[str, Any], token_keys: set[str], index: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in outputs.items():
            if key in token_keys:
                continue
            if isinstance(value, torch.Tensor):
                found[key] = value[index].clone() if key in self.policy.request_keys else value.clone()
            else:
                found[key] = value[index]
        return found


def _flatten(outputs: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in outputs.items():
        if isinstance(value, Mapping):
            flat.update({f"{name}.{inner}": entry for inner, entry in _flatten(value).items()})
        else:
            flat[name] = value
    return flat


def _ranges(positions: Sequence[int]) -> tuple[TokenRange, ...]:
    ranges: list[TokenRange] = []
    for position in positions:
        if ranges and ranges[-1][1] == position:
            ranges[-1] = (ranges[-1][0], position + 1)
        else:
            ranges.append((position, position + 1))
    return tuple(ranges)
