# SPDX-License-Identifier: Apache-2.0
"""Turns steps of the cache into deliveries of requests, and the engine's news into last words."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from omni_core.integrations.vllm.delivery.built_step import BuiltStep, StartedRequest, StepSource
from omni_core.integrations.vllm.delivery.delivery_log import Count, DeliveryLog, error_text
from omni_core.integrations.vllm.delivery.ledger import RequestLedger
from omni_core.integrations.vllm.delivery.pieces import before_position, pieces_of
from omni_core.integrations.vllm.delivery.sink_feeder import FedStep, SinkFeeder
from omni_core.integrations.vllm.request_ids import ClientRequest
from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.outputs import RequestRows
from omni_core.sinks.base import RequestEnd, SinkDelivery, SinkRequestEnd

_MAX_REMEMBERED_IDS = 65536
"""Most ended ids whose number of uses is remembered; as many as a `RequestJoiner` remembers."""


class DeliveryAssembler:
    """Keeps a ledger per open request and feeds the sink's queue. Builder thread only, but for `num_open_requests`.

    An error that concerns one request, whatever its class, costs that request and nothing else: it ends as failed, and
    no call raises it.
    """

    def __init__(
        self,
        source: StepSource,
        feeder: SinkFeeder,
        log: DeliveryLog,
        *,
        client_request_of: Callable[[str], ClientRequest | None],
        whole_prefix: bool,
        ids_repeat: bool,
    ) -> None:
        """Start without any request.

        Args:
            source: the cache.
            feeder: takes deliveries and last words.
            log: told what failed.
            client_request_of: from an internal request id to the client's, if known.
            whole_prefix: whether rows are owed for the tokens the engine skipped.
            ids_repeat: whether two requests may have one internal id, one after the other.
        """
        self._source = source
        self._feeder = feeder
        self._log = log
        self._client_request_of = client_request_of
        self._whole_prefix = whole_prefix
        self._ids_repeat = ids_repeat
        self._ledgers: dict[str, RequestLedger] = {}
        self._uses: dict[str, int] = {}
        # Requests whose last token was seen: a step that was begun before may still bring rows, and none is missed.
        self._ended_by_token: dict[str, None] = {}

    @property
    def num_open_requests(self) -> int:
        """Requests that started and have not ended. Any thread."""
        return len(self._ledgers)

    def start(self, started: StartedRequest) -> None:
        """The engine scheduled a request for the first time, or announced more of its prompt."""
        with self._costs_only(started.req_id):
            ledger = self._ledgers.get(started.req_id)
            if ledger is not None:
                ledger.note_prompt(started.prompt_token_ids)
                ledger.end = None
                return
            self._ledgers[started.req_id] = RequestLedger(
                started.req_id,
                self._client_request_of(started.req_id),
                started.prompt_token_ids,
                started.num_skipped_tokens,
                use=self._uses.get(started.req_id, 0),
                output_end=started.output_end,
            )

    def note_tokens(self, step: BuiltStep) -> None:
        """A step computed these tokens; they label its rows, whenever those come."""
        for index, req_id in enumerate(step.req_ids):
            ledger = self._ledgers.get(req_id)
            if ledger is not None:
                with self._costs_only(req_id):
                    if step.sampled is not None:
                        ledger.note_sampled(int(step.sampled.first_positions[index]), step.sampled.token_ids[index])
                    run = slice(int(step.starts[index]), int(step.starts[index + 1]))
                    ledger.note_run(
                        step.positions[run], step.token_ids[run], keep_known_tokens=step.sampled is not None
                    )

    def deliver(self, step: BuiltStep) -> None:
        """Read a step's rows and queue them for the sink. Blocks until the cache has them, in bounded time."""
        try:
            outputs = self._source.materialize(step.step_id, step.req_ids, step.sampled_counts)
        except BaseException as error:
            for req_id in step.req_ids:
                self._fail(req_id, f"step {step.step_id} could not be read: {error_text(error)}")
            self._log.stage_failed(f"step {step.step_id} could not be read: {error_text(error)}")
            return
        deliveries: list[SinkDelivery] = []
        try:
            for req_id, failure in outputs.failed.items():
                self._fail(req_id, str(failure))
            for req_id, rows in outputs.items():
                with self._costs_only(req_id):
                    deliveries.extend(self._deliveries_of(step.step_id, req_id, rows))
        finally:
            # A last word queued above is before these rows, and of a request that has none among them.
            if deliveries:
                self._feeder.feed(FedStep(tuple(deliveries), outputs.release))
            else:
                outputs.release()
        self._log.count(Count.STEPS_DELIVERED)

    def end(self, req_id: str) -> None:
        """The engine says that a request ended; it does not say whether it was aborted.

        One that ends before its prompt was computed cannot have finished.
        """
        ledger = self._ledgers.get(req_id)
        if ledger is not None:
            with self._costs_only(req_id):
                self._end(ledger, RequestEnd.FINISHED if ledger.prompt_computed else RequestEnd.ABORTED)
            self._forget(ledger)

    def flush_requests(self, keep: Collection[str]) -> None:
        """End every open request but those to keep."""
        for req_id, ledger in list(self._ledgers.items()):
            if req_id not in keep:
                with self._costs_only(req_id):
                    self._end(ledger, RequestEnd.FLUSHED)
                self._forget(ledger)

    def fail_requests(self, req_ids: Sequence[str], reason: str) -> None:
        """These requests fail; they end when the engine says so."""
        for req_id in req_ids:
            self._fail(req_id, reason)

    def fail_open_requests(self, reason: str) -> None:
        """Every open request fails, and ends. The reason is in the log already."""
        for req_id, ledger in list(self._ledgers.items()):
            if ledger.failure is None:
                self._log.request_failed_with_stage(req_id, reason)
                self._end_as_failed(ledger, reason)
            self._forget(ledger)

    def _deliveries_of(self, step_id: int, req_id: str, rows: RequestRows) -> list[SinkDelivery]:
        ledger = self._ledgers.get(req_id)
        if ledger is None:
            if not self._log.has_failure(req_id) and req_id not in self._ended_by_token:
                self._log.request_failed(
                    req_id,
                    f"rows at {list(rows.ranges)} came when it was not open: a flush without it in still_running had "
                    "ended it, or its start was lost in an overrun of the builder's queue",
                )
            return []
        if ledger.failure is not None:
            return []
        # A step that only computed rows again, after a preemption, has no piece to deliver.
        pieces = pieces_of(rows)
        if ledger.end is not None and rows.ranges and rows.ranges[-1][1] > ledger.end:
            # The engine ran a step of a request that had ended, before it knew.
            wanted = [piece for piece in pieces if piece.ranges and piece.ranges[0][0] < ledger.end]
            pieces = [before_position(piece, ledger.end) for piece in wanted]
        pieces = [piece for piece in pieces if piece.ranges or piece.leftovers]
        deliveries = [
            SinkDelivery(
                req_id=req_id,
                client_req_id=ledger.client_req_id,
                step_id=step_id,
                ranges=piece.ranges,
                rows=piece.rows,
                token_ids=ledger.token_ids(piece.ranges),
                leftovers=piece.leftovers,
                sample=ledger.sample,
                use=ledger.use,
            )
            for piece in pieces
        ]
        for piece in pieces:
            ledger.note_fed(piece.ranges, with_hidden=HIDDEN_KEY in piece.rows)
        return deliveries

    def _end(self, ledger: RequestLedger, end: RequestEnd) -> None:
        if ledger.failure is None and not ledger.rows_fed and ledger.missing(whole_prefix=self._whole_prefix):
            self._fail(ledger.req_id, "no row of it was delivered: its steps were given up or could not be read")
        if ledger.failure is None and ledger.rows_fed:
            self._feeder.end(self._last_word(ledger, end))
            if end is RequestEnd.ABORTED:
                self._log.count(Count.REQUESTS_ABORTED)

    def _forget(self, ledger: RequestLedger) -> None:
        if self._ledgers.pop(ledger.req_id, None) is None:
            return
        self._log.count(Count.REQUESTS_ENDED)
        if ledger.end is not None:
            self._ended_by_token[ledger.req_id] = None
            if len(self._ended_by_token) > _MAX_REMEMBERED_IDS:
                del self._ended_by_token[next(iter(self._ended_by_token))]
        if self._ids_repeat:
            self._uses.pop(ledger.req_id, None)
            self._uses[ledger.req_id] = ledger.use + 1
            if len(self._uses) > _MAX_REMEMBERED_IDS:
                del self._uses[next(iter(self._uses))]

    def _fail(self, req_id: str, reason: str) -> None:
        ledger = self._ledgers.get(req_id)
        if ledger is None:
            if not self._log.has_failure(req_id):
                self._log.request_failed(req_id, reason)
        elif ledger.failure is None:
            self._log.request_failed(req_id, reason)
            self._end_as_failed(ledger, reason)

    def _end_as_failed(self, ledger: RequestLedger, reason: str) -> None:
        ledger.failure = reason
        last_word = self._last_word(ledger, RequestEnd.FAILED)
        if ledger.rows_fed:
            self._feeder.end(last_word)
        else:
            self._feeder.end_rowless(last_word)

    def _last_word(self, ledger: RequestLedger, end: RequestEnd) -> SinkRequestEnd:
        return SinkRequestEnd(
            req_id=ledger.req_id,
            client_req_id=ledger.client_req_id,
            end=end,
            missing=ledger.missing(whole_prefix=self._whole_prefix),
            error=ledger.failure,
            sample=ledger.sample,
            use=ledger.use,
        )

    @contextmanager
    def _costs_only(self, req_id: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._fail(req_id, f"the builder could not deal with it: {error_text(error)}")
