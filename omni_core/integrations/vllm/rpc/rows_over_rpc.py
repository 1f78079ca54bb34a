# SPDX-License-Identifier: Apache-2.0
"""How a client asks an engine's workers for flushes and rows, and reads their answers. Imports no vllm, calls nobody.

A client says what to call and is handed the answers, so that the same lines serve an `LLM`, an `AsyncLLM` with several
engines, and HTTP. What the workers do is in `worker_calls`.
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from omni_core.integrations.vllm.delivery.delivery_log import error_text
from omni_core.integrations.vllm.errors import (
    FlushTimeoutError,
    IntegrationError,
    RowsNotKeptError,
    RpcArgumentError,
    StageNotFoundError,
)
from omni_core.sinks.base import PossibleSample
from omni_core.sinks.errors import InvalidRequestFileError, RequestNotEndedError, UnknownRequestError
from omni_core.sinks.found_request import FoundRequest, RequestState, requests_meant
from omni_core.sinks.request_content import read_request_bytes
from omni_core.sinks.rows import StoredRequest

DEFAULT_RPC_FLUSH_WAIT_S = 0.1
"""How long a flush call waits for the sink, and holds up the engine's next step, if nothing else is said."""
MAX_RPC_FLUSH_WAIT_S = 0.5
"""The longest a flush call may wait."""
MAX_PIECE_BYTES = 1 << 20
"""The most bytes of rows in one answer, before they are encoded."""

_ERRORS: Mapping[str, type[Exception]] = {
    known.__name__: known for known in (FlushTimeoutError, RowsNotKeptError, RpcArgumentError)
}


class RowsEncoding(Enum):
    """How a piece of a request's file travels."""

    BASE64 = "base64"
    """As text: the answer is JSON, for `POST /collective_rpc`."""
    BYTES = "bytes"
    """As it is: for `LLM.collective_rpc` and `AsyncLLM`."""


@dataclass(frozen=True, slots=True)
class WorkerCall:
    """A method that every worker of every engine is to be called with."""

    method: str
    args: tuple[Any, ...]
    """Plain values that JSON takes."""


Taking = Generator[WorkerCall, Sequence[Any], list[StoredRequest]]
"""Yields a call and is sent the workers' answers to it, one after another; returns the rows."""


def flush_call(*, wait_s: float, still_running: Sequence[str] | None = None) -> WorkerCall:
    """A flush with a name of its own: the same call again asks whether it is done and begins no other.

    Args:
        wait_s: how long each call waits for the sink, up to `MAX_RPC_FLUSH_WAIT_S`; the engine's next step waits too.
        still_running: `None` ends no request; a list of internal ids ends every request that is not in it.
    """
    arguments: tuple[Any, ...] = (uuid.uuid4().hex, wait_s)
    return WorkerCall("omni_core_flush", arguments if still_running is None else (*arguments, still_running))


def reports_from_flush(replies: Iterable[Any]) -> list[dict[str, Any]]:
    """The reports in the workers' answers to `omni_core_flush`, one per rank. Any thread.

    Raises:
        FlushTimeoutError: a worker is not done yet; ask again.
        RpcArgumentError: an argument was wrong.
    """
    answers = checked_answers(replies, "done")
    waits_for = [str(answer["waits_for"]) for answer in answers if not answer["done"]]
    if waits_for:
        raise FlushTimeoutError(f"flush: not done yet: {'; '.join(waits_for)}")
    return [dict(answer["report"]) for answer in answers]


def reports_from_replies(replies: Iterable[Any]) -> list[dict[str, Any]]:
    """The reports in the workers' answers to `omni_core_report`, one per rank. Any thread.

    Raises:
        IntegrationError: a rank cannot make its report; says why.
    """
    reports = [dict(reply) for reply in replies]
    _raise_told(reports)
    return reports


def taking(request_id: str, encoding: RowsEncoding) -> Taking:
    """Take a request's rows out of the workers' memory sinks: all of the request, from whichever engines have it.

    First asks where the request is, then reads its rows piece by piece, and has them forgotten once all are here. What
    goes wrong in between leaves them where they are. Rows computed before must have been flushed.

    Args:
        request_id: the engine's internal id or the client's.
        encoding: how rows travel.

    Returns:
        One entry, or one per sample of a request with `n > 1`, in the order of the samples.

    Raises:
        RequestNotEndedError: a part of it goes on, in any engine; nothing was taken.
        UnknownRequestError: no worker has the rows; says why for each.
        RowsNotKeptError, StageNotFoundError: the sink keeps no rows; no worker has a cache.
        InvalidRequestFileError: an answer is not that of a worker of Omni Core.
    """
    places = _places(request_id, checked_answers((yield WorkerCall("omni_core_find", (request_id,))), "requests"))
    taken: dict[_Place, StoredRequest] = {}
    for place in places:
        taken[place] = read_request_bytes((yield from _reading(place, encoding)))
    for key in dict.fromkeys((place.req_id, place.use) for place in places):
        checked_answers((yield WorkerCall("omni_core_forget", key)), "forgotten")
    return list(taken.values())


def contents(replies: Iterable[Any], name: str) -> list[dict[str, Any]]:
    """What the workers with a cache answered under this name.

    Raises:
        RpcArgumentError, IntegrationError, InvalidRequestFileError: as for `checked_answers`.
    """
    return [dict(one[name]) for one in checked_answers(replies, name) if one[name] is not None]


def checked_answers(replies: Iterable[Any], content: str) -> list[Mapping[str, Any]]:
    """The workers' answers, each of which has this content.

    Raises:
        RowsNotKeptError, RpcArgumentError, IntegrationError: a worker told an error; with the text of all.
        InvalidRequestFileError: an answer is not that of a worker of Omni Core.
    """
    answers = list(replies)
    for reply in answers:
        if not isinstance(reply, Mapping) or (content not in reply and not reply.get("error")):
            raise InvalidRequestFileError(
                f"{str(reply)[:200]!r} is not the answer of a worker of Omni Core: no 'error' or {content!r} is in it"
            )
    _raise_told(answers)
    return answers


def _raise_told(answers: Iterable[Mapping[str, Any]]) -> None:
    errors = [answer["error"] for answer in answers if answer.get("error")]
    if errors:
        raised = _ERRORS.get(errors[0]["type"], IntegrationError)
        raise raised("; ".join(dict.fromkeys(error["message"] for error in errors)))


def error_for_answer(failure: Exception) -> dict[str, str]:
    """An error as a worker's answer tells it: `type` and `message`."""
    name = type(failure).__name__
    return {"type": name, "message": str(failure) if name in _ERRORS else error_text(failure)}


@dataclass(frozen=True, slots=True)
class _Place:
    worker: int
    """Which of the answers is that worker's."""
    req_id: str
    use: int


def _places(request_id: str, answers: Sequence[Mapping[str, Any]]) -> list[_Place]:
    if not any(answer["has_cache"] for answer in answers):
        raise StageNotFoundError(
            f"none of the {len(answers)} workers has a cache; the gate in their reports (omni_core_report) says why"
        )
    found = [(worker, _found(one)) for worker, answer in enumerate(answers) for one in answer["requests"]]
    meant = requests_meant(request_id, [one for _, one in found])
    for one in meant:
        if one.state is RequestState.RUNNING:
            raise RequestNotEndedError(f"request {one.req_id!r} has not ended; ask again after its end")
    ended = [(worker, one) for worker, one in found if one in meant and one.state is RequestState.ENDED]
    if not ended:
        raise UnknownRequestError(_why_unknown(request_id, meant, answers))
    ended.sort(key=lambda place: 0 if place[1].sample is None else place[1].sample.index)
    return [_Place(worker, one.req_id, one.use) for worker, one in ended]


def _why_unknown(request_id: str, meant: Sequence[FoundRequest], answers: Sequence[Mapping[str, Any]]) -> str:
    if meant:
        return "; ".join(f"request {one.req_id!r} has no rows: {one.no_rows_because}" for one in meant)
    ids_kept = [req_id for answer in answers for req_id in answer["ids_kept"]]
    return f"no request {request_id!r}; newest ids kept: {', '.join(map(repr, ids_kept)) or 'none'}"


def _reading(place: _Place, encoding: RowsEncoding) -> Generator[WorkerCall, Sequence[Any], bytes]:
    content = bytearray()
    while True:
        arguments = (place.req_id, place.use, len(content), MAX_PIECE_BYTES, encoding.value)
        answer = checked_answers((yield WorkerCall("omni_core_read", arguments)), "piece")[place.worker]
        piece = answer["piece"]
        if piece is None:
            raise UnknownRequestError(
                f"request {place.req_id!r}: its rows were taken or dropped while they were read; if they were dropped, "
                "the memory sink needs a higher max_bytes or max_requests"
            )
        content += base64.b64decode(piece) if isinstance(piece, str) else piece
        if len(content) >= answer["nbytes"] or not piece:
            return bytes(content)


def _found(told: Mapping[str, Any]) -> FoundRequest:
    sample = told["sample"]
    return FoundRequest(
        **{
            **told,
            "sample": None if sample is None else PossibleSample(**sample),
            "state": RequestState(told["state"]),
        }
    )
