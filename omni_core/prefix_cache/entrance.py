# SPDX-License-Identifier: Apache-2.0
"""Lets requests in: those that start, those that come back, and those whose content was replaced."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from omni_core.prefix_cache.errors import (
    ContentReplacedError,
    LifecycleError,
    RequestError,
    RequestEventError,
    RequestNotStartedError,
)
from omni_core.prefix_cache.event_digest import EnteringRequest
from omni_core.prefix_cache.events import RequestEventKind
from omni_core.prefix_cache.owed import Positions
from omni_core.prefix_cache.progress import UNKNOWN
from omni_core.prefix_cache.reads import ReadRequest
from omni_core.prefix_cache.refusals import RequestRefusals
from omni_core.prefix_cache.requests import RequestTable
from omni_core.prefix_cache.slot_table import NO_ADAPTER, SlotTable
from omni_core.prefix_cache.step_context import OpenSteps


class RequestEntrance:
    """Decides which rows of its hit an entering request still has to get. Every method needs the state lock.

    vLLM announces a preempted request that comes back in two ways: as resumed (V1 runner), or as new while it is live
    (V2 runner). The next chunk of a streamed prompt comes the second way, too, with its own tokens as its hit. All are
    one case here: what was promised before is not promised again.
    """

    def __init__(self, table: SlotTable, requests: RequestTable, refusals: RequestRefusals, steps: OpenSteps) -> None:
        self._table = table
        self._requests = requests
        self._refusals = refusals
        self._steps = steps

    def enter(self, request: EnteringRequest) -> ReadRequest | None:
        """Take the request in; returns what has to be read for it, if anything."""
        req_id = request.req_id
        adapter_id = request.adapter_id
        if adapter_id != NO_ADAPTER or self._table.any_adapter:
            adapter_id = self._adapter_of(request)
        known_withheld = self._requests.withheld_blocks(req_id) if req_id in self._requests else {}
        withheld = self._withheld(request, known_withheld, adapter_id)
        if request.kind is RequestEventKind.REPLACED:
            self._expire_rest(request)
            if req_id in self._requests:
                self._drop_version(req_id)
        if req_id in self._requests:
            return self._resume(request, withheld)
        if request.kind is RequestEventKind.RESUMED:
            self._refusals.refuse(
                RequestNotStartedError(
                    req_id, "was resumed, but was never started (or was forgotten by reset); run it again"
                )
            )
            return None
        self._requests.start(req_id, request.block_ids, request.hit, self._table.last_id, withheld, adapter_id)
        return self._read(request, np.arange(request.hit, dtype=np.int64))

    def fill_blocks(self, request: EnteringRequest) -> None:
        """Note which adapter fills the request's own blocks. Call it for all of a step before any of them enters.

        The block that its hit ends inside is its to fill, too: another adapter's rows cannot stay there.
        """
        adapter_id = self._adapter_of(request)
        self._table.set_adapter(request.own_blocks, adapter_id)
        if request.hit % self._table.block_size:
            block = request.hit_slots[-1:] // self._table.block_size
            if self._table.of_other_adapter(block, adapter_id).any():
                self._table.start_tenancies(block)
                self._table.set_adapter(block.tolist(), adapter_id)

    def _adapter_of(self, request: EnteringRequest) -> int:
        if request.req_id in self._requests:
            return self._requests.adapters.get(request.req_id, NO_ADAPTER)
        return request.adapter_id

    def _expire_rest(self, request: EnteringRequest) -> None:
        """What lies behind the kept prefix in its last block is of the old content, even if the new never comes."""
        size = self._table.block_size
        if request.hit % size:
            first = int(request.hit_slots[-1]) + 1
            self._table.expire(np.arange(first, -(-first // size) * size, dtype=np.int64))

    def expire_drafts(self, req_id: str, entering: EnteringRequest | None = None) -> None:
        """A request ends or enters right after a run with drafts: rows that may be of rejected ones are nobody's.

        The block they lie in may be found later: the engine hashes a block when it schedules its last token, and that
        run may never come. Call it before any tenancy of the step begins.
        """
        row = self._requests.row(req_id)
        if row == UNKNOWN or not self._requests.progress.has_unsettled_drafts(row):
            return
        drafted = self._requests.progress.unsettled(row)
        first = drafted.start
        if entering is not None and entering.kind is not RequestEventKind.REPLACED:
            first = max(first, entering.num_known_tokens - 1)
        positions = np.arange(first, drafted.stop, dtype=np.int64)
        if entering is not None and entering.kind is RequestEventKind.REPLACED:
            # Rows that stay where they are, in the prefix it keeps, are of accepted drafts.
            slots, _ = self._requests.slots(req_id, positions)
            kept = positions < entering.hit
            kept[kept] = entering.hit_slots[positions[kept]] == slots[kept]
            positions = positions[~kept]
        self.expire_rows(req_id, positions)

    def expire_rows(self, req_id: str, positions: Positions) -> None:
        """Rows at these positions of a live request are of content that is gone; those of later tenancies are not."""
        if self._requests.row(req_id) != UNKNOWN:
            slots = self._table.still_held(*self._requests.slots(req_id, positions))
            self._table.expire(slots[slots >= 0])

    def _drop_version(self, req_id: str) -> None:
        serial = self._requests.serial(req_id)
        for context in self._steps.with_request(req_id):
            if int(context.serials[context.req_ids.index(req_id)]) == serial:
                context.failed[req_id] = ContentReplacedError(
                    req_id,
                    f"{context.label} computed rows of a content that was replaced since; they are dropped, "
                    "the new version's rows come with its own steps",
                )
        self._requests.replace(req_id)

    def _resume(self, request: EnteringRequest, withheld: npt.NDArray[np.bool_]) -> ReadRequest | None:
        req_id, hit = request.req_id, request.hit
        error = self._contradiction(request)
        if error is not None:
            self._refusals.refuse(error)
            return None
        progress, row = self._requests.progress, self._requests.row(req_id)
        if progress.has_unsettled_drafts(row):
            progress.settle_drafts(row, request.num_known_tokens - 1)
        promised = self._requests.promised_upto(req_id)
        self._requests.resume(req_id, request.block_ids, hit, self._table.last_id, withheld)
        # Rows of its new hit must not wait for a delivery, even if the step that reads them is lost.
        self._requests.missing.delivered((req_id,))
        if hit <= promised or self._requests.error(req_id) is not None:
            return None
        positions = np.arange(promised, hit, dtype=np.int64)
        if req_id in self._requests.missing.due():
            positions = np.concatenate((self._requests.missing.take_below(req_id, promised), positions))
        return self._read(request, positions)

    def _contradiction(self, request: EnteringRequest) -> RequestError | None:
        if not request.block_ids:
            return RequestEventError(
                request.req_id, "entered again while live without a block list; announce its whole block table"
            )
        row = self._requests.row(request.req_id)
        if self._requests.progress.has_unsettled_drafts(row) and request.num_known_tokens == 0:
            return LifecycleError(
                request.req_id,
                "was resumed right after a step with draft tokens, and its event does not say how many of them were "
                "accepted; give num_known_tokens",
            )
        return None

    def _read(self, request: EnteringRequest, positions: Positions) -> ReadRequest | None:
        if len(positions) == 0:
            return None
        slots = self._table.still_held(*self._requests.slots(request.req_id, positions))
        return ReadRequest(request.req_id, positions, slots, request.num_scheduled_tokens)

    def _withheld(self, request: EnteringRequest, known: Mapping[int, int], adapter_id: int) -> npt.NDArray[np.bool_]:
        """For each block of its hit, whether the rows there may be of another content, or adapter, than the request's.

        A block in which the request found other rows before (`known`) has them still, whatever digest it is told to
        get when the request fills it.
        """
        first_slots = request.hit_slots[:: self._table.block_size]
        blocks = first_slots // self._table.block_size
        withheld = self._table.withheld(blocks, request.hit_digests, self._requests.life(request.req_id))
        if self._table.any_adapter:
            withheld = withheld | self._table.of_other_adapter(blocks, adapter_id)
        if known:
            since = np.array([known.get(block, -1) for block in blocks.tolist()], np.int64)
            withheld = withheld | (self._table.still_held(first_slots, since) >= 0)
        return withheld
