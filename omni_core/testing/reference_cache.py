# SPDX-License-Identifier: Apache-2.0
"""The simplest cache that is right: dictionaries of single rows, everything done at once, nothing fast.

It gives the judge something to judge when the real cache is in doubt, and tests break it on purpose, one method at a
time, to show that the oracle notices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from omni_core.prefix_cache.config import HIDDEN_KEY, Delivery, PrefixCacheConfig
from omni_core.prefix_cache.errors import ContentReplacedError, HitRowsAbsentError, RequestError
from omni_core.prefix_cache.events import StepEvents, StepLayout
from omni_core.prefix_cache.outputs import PartialRequest, RequestRows, StageCacheOutputs
from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.testing.reference_blocks import ReferenceBlocks
from omni_core.testing.reference_request import LiveRequest, Rows, Share, owe_again, ranges_of


class ReferenceCache(ReferenceBlocks):
    """A `StageCache`. One thread at a time.

    Args:
        config: geometry, and when a row counts as delivered.
        policy: `token_keys` (or `deferred_keys`) and `request_keys` must be declared.
        layout_source: as the real cache's.
    """

    def __init__(
        self, config: PrefixCacheConfig, policy: ModelCachePolicy, layout_source: Callable[[], StepLayout]
    ) -> None:
        super().__init__(config)
        self.policy = policy
        self._layout_source = layout_source
        self._specs: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._steps: dict[int, list[Share]] = {}
        self._next_step_id = 0

    def new_step_starts(self, events: StepEvents) -> None:
        """Take in ends, contents, tables, tenancies and block copies."""
        self.take_events(events)

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
        token_keys = self.policy.token_keys | self.policy.deferred_keys | {HIDDEN_KEY}
        tokens = {key: self.snapshot(rows) for key, rows in outputs.items() if key in token_keys}
        for key, rows in tokens.items():
            self._specs[key] = (rows.shape[1:], rows.dtype)
        bounds, positions = layout.starts.tolist(), layout.positions.tolist()
        for index, req_id in enumerate(layout.req_ids):
            self.settle_drafts(self.live[req_id], positions[bounds[index]])
        for row, slot in enumerate(layout.slots.tolist()):
            if slot >= 0:
                self.write(slot, {key: rows[row] for key, rows in tokens.items()})
        shares = []
        for index, req_id in enumerate(layout.req_ids):
            span = range(bounds[index], bounds[index + 1])
            computed = {positions[row]: {key: rows[row] for key, rows in tokens.items()} for row in span}
            drafts = 0 if layout.num_draft_tokens is None else int(layout.num_draft_tokens[index])
            leftovers = self._leftovers(outputs, set(tokens), index)
            shares.append(self._share(self.live[req_id], computed, drafts, leftovers))
        self.step_is_over()
        self._steps[self._next_step_id] = shares
        self._next_step_id += 1
        return self._next_step_id - 1

    def _share(
        self, request: LiveRequest, computed: dict[int, Rows], num_drafts: int, leftovers: dict[str, Any]
    ) -> Share:
        stop = max(computed) + 1
        wanted = self.wanted(request, stop)
        rows = {position: computed[position] for position in wanted if position in computed}
        rows.update(self.read_stored(request, [position for position in wanted if position not in computed]))
        request.promised.update(range(stop))
        request.owed.difference_update(rows)
        request.computed_upto, request.has_drafts = stop, num_drafts > 0
        return Share(request, stop, num_drafts, rows, leftovers, request.error)

    def wanted(self, request: LiveRequest, stop: int) -> list[int]:
        """Positions below `stop` that a step delivers: never promised before, or owed."""
        return [position for position in range(stop) if position not in request.promised or position in request.owed]

    def snapshot(self, rows: torch.Tensor) -> torch.Tensor:
        """Copy an output, which the engine may overwrite as soon as the save returns."""
        return rows.clone()

    def read_stored(self, request: LiveRequest, positions: Sequence[int]) -> dict[int, Rows]:
        """Stored rows of a request; a position without a hidden row fails it."""
        found = {}
        for position in positions:
            found[position] = self.row_of(request, position)
            if HIDDEN_KEY not in found[position] and request.error is None:
                request.error = HitRowsAbsentError(request.req_id, f"no hidden row at position {position}")
        return found

    def materialize(
        self, step_id: int, req_ids: Sequence[str], sampled_counts: Mapping[str, int] | None = None
    ) -> StageCacheOutputs:
        """Deliver a step; what was not asked is owed to later steps."""
        served: dict[str, RequestRows] = {}
        failed: dict[str, RequestError] = {}
        handed_over: dict[str, Share] = {}
        for share in self._consume(step_id, sampled_counts):
            req_id = share.request.req_id
            error = self.failure(share)
            if req_id not in req_ids:
                self.owe(share.request, share.rows)
            elif error is not None:
                failed[req_id] = error
            else:
                served[req_id] = self.join(share)
                handed_over[req_id] = share
        if self.config.delivery is Delivery.ON_MATERIALIZE:
            handed_over.clear()

        def release() -> None:
            for share in handed_over.values():
                self.owe(share.request, share.rows)

        return StageCacheOutputs(
            step_id, served, failed, release, lambda req_ids: self.acknowledge(handed_over, req_ids)
        )

    def acknowledge(self, handed_over: dict[str, Share], req_ids: Iterable[str] | None) -> None:
        """These requests' rows have arrived (`None`: all)."""
        for req_id in list(handed_over) if req_ids is None else req_ids:
            handed_over.pop(req_id, None)

    def discard_step(self, step_id: int, sampled_counts: Mapping[str, int] | None = None) -> None:
        """Give a step up; its rows are owed to later steps."""
        for share in self._consume(step_id, sampled_counts):
            self.owe(share.request, share.rows)

    def failure(self, share: Share) -> RequestError | None:
        """Why a request's part of a step cannot be served, if so."""
        if share.error is None and share.request.replaced:
            return ContentReplacedError(share.request.req_id, "its content was replaced since")
        return share.error

    def owe(self, request: LiveRequest, rows: Mapping[int, Rows]) -> None:
        """Keep undelivered rows for a later step."""
        owe_again(request, rows)

    def join(self, share: Share) -> RequestRows:
        """Put a request's rows in the order of their positions; zeros where a further key was never stored."""
        positions, rows = sorted(share.rows), share.rows
        joined, zeros = {}, {}
        for key in sorted({key for row in rows.values() for key in row}):
            shape, dtype = self._specs[key]
            zero = torch.zeros(shape, dtype=dtype)
            joined[key] = torch.stack([rows[position].get(key, zero) for position in positions])
            absent = [position for position in positions if key not in rows[position]]
            if absent:
                zeros[key] = ranges_of(absent)
        return RequestRows(
            share.request.req_id, ranges_of(positions), joined, zero_ranges=zeros, leftovers=share.leftovers
        )

    def take_partial_requests(self) -> tuple[PartialRequest, ...]:
        """Ended requests with rows still owed."""
        partial = []
        for request in self.ended:
            if request.owed and request.error is None:
                partial.append(PartialRequest(request.req_id, ranges_of(sorted(request.owed))))
                request.owed = set()
        return tuple(partial)

    def clip(self, share: Share, count: int | None) -> None:
        """Drop the rows of rejected drafts."""
        share.clip(count)

    def _consume(self, step_id: int, sampled_counts: Mapping[str, int] | None) -> list[Share]:
        shares = self._steps.pop(step_id)
        for share in shares:
            self.clip(share, (sampled_counts or {}).get(share.request.req_id))
        return shares

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
