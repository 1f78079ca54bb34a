# SPDX-License-Identifier: Apache-2.0
"""What a worker answers to flush and take-rows calls, and how a client reads it. Neither side imports vllm.

A worker's method must not raise. vLLM's `MultiprocExecutor.collective_rpc` (0.32) stops at the first worker that failed
and leaves the others' answers in their queues, where the engine's next step takes them for its own. So an error is part
of the answer, and the client raises it.

An answer is a dict of plain values that msgpack takes; with the encoding `base64` JSON takes it too. The rows of one
request travel as the content of the file that the safetensors sink would have written for it.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

from omni_core.integrations.vllm.errors import (
    FlushTimeoutError,
    IntegrationError,
    RowsNotKeptError,
    RpcArgumentError,
    StageNotFoundError,
)
from omni_core.integrations.vllm.session import StageSession
from omni_core.sinks.errors import InvalidRequestFileError, RequestNotEndedError, UnknownRequestError
from omni_core.sinks.request_content import read_request_bytes, request_file_bytes
from omni_core.sinks.rows import StoredRequest

DEFAULT_RPC_FLUSH_TIMEOUT_S = 5.0
"""How long a flush over RPC may hold up the engine's next step if nothing else is said."""

_ERRORS: Mapping[str, type[Exception]] = {
    known.__name__: known
    for known in (FlushTimeoutError, RequestNotEndedError, RowsNotKeptError, RpcArgumentError, UnknownRequestError)
}


class RowsEncoding(Enum):
    """How the content of a request's file travels."""

    BASE64 = "base64"
    """As text: the answer is JSON, for `POST /collective_rpc`."""
    BYTES = "bytes"
    """As it is: for `LLM.collective_rpc` and `AsyncLLM`."""


def flush_reply(session: StageSession | None, still_running: Any, timeout_s: Any) -> dict[str, Any]:
    """Flush a worker's session. Engine thread, between steps; waits up to `timeout_s` and never raises.

    Args:
        session: the worker's; `None` before the KV cache is made.
        still_running: `None` ends no request. A list of internal ids ends every request that is not in it: only for a
            client that knows every request of the engine.
        timeout_s: seconds, above 0; a number as text too, because HTTP brings text only.

    Returns:
        `error` (`None`, or `type` and `message`) and `report`, which is the session's.
    """
    error: dict[str, str] | None = None
    try:
        seconds, kept = _seconds("timeout_s", timeout_s), _request_ids("still_running", still_running)
        if session is not None:
            session.flush(seconds, kept)
    except Exception as failure:
        error = _told(failure)
    return {"error": error, "report": {} if session is None else session.report()}


def take_rows_reply(session: StageSession | None, request_id: Any, encoding: Any) -> dict[str, Any]:
    """Take a request's rows out of a worker's memory sink. Engine thread, between steps; never raises or waits.

    Args:
        session: the worker's; `None` before the KV cache is made.
        request_id: the engine's internal id or the client's.
        encoding: a value of `RowsEncoding`.

    Returns:
        `error` (`None`, or `type` and `message`) and `requests`: for each request behind the id `req_id`,
        `client_req_id`, `end`, `complete`, `ranges`, `missing` and `safetensors`, the content of a request's file.
        Empty on a rank without a cache.
    """
    try:
        form = _encoding(encoding)
        if not isinstance(request_id, str):
            raise RpcArgumentError(f"request_id={request_id!r}: must be text, the engine's id or the client's")
        taken = () if session is None else session.take(request_id)
        return {"error": None, "requests": [_packed(stored, form) for stored in taken]}
    except Exception as failure:
        return {"error": _told(failure), "requests": []}


def rows_from_replies(replies: Iterable[Any]) -> list[StoredRequest]:
    """The requests in the workers' answers to `omni_core_take_rows`, in either encoding. Any thread.

    Args:
        replies: what `collective_rpc` returned, or `results` of the JSON that `POST /collective_rpc` returned; answers
            of several engines may follow one another.

    Raises:
        UnknownRequestError, RequestNotEndedError, RowsNotKeptError: no worker has the rows; says why for each.
        StageNotFoundError: no worker has a cache.
        InvalidRequestFileError: an answer holds something else than requests.
    """
    answers = [_checked_reply(reply, "requests") for reply in replies]
    packed = [one for answer in answers for one in answer["requests"]]
    if not packed:
        errors = [answer["error"] for answer in answers if answer["error"] is not None]
        if not errors:
            raise StageNotFoundError(
                f"none of the {len(answers)} workers has a cache; the gate in their reports (omni_core_report) says why"
            )
        raise_told(errors)
    return [_unpacked(one) for one in packed]


def reports_from_flush(replies: Iterable[Any]) -> list[dict[str, Any]]:
    """The reports in the workers' answers to `omni_core_flush`, one per rank.

    Raises:
        FlushTimeoutError: a worker was not done in time; the call may be repeated.
        RpcArgumentError: an argument was wrong.
    """
    answers = [_checked_reply(reply, "report") for reply in replies]
    errors = [answer["error"] for answer in answers if answer["error"] is not None]
    if errors:
        raise_told(errors)
    return [dict(answer["report"]) for answer in answers]


def raise_told(errors: Sequence[Mapping[str, str]]) -> None:
    """Raise the first of the errors that workers told, with the text of all. One that goes on comes first."""
    ordered = sorted(errors, key=lambda error: error["type"] != RequestNotEndedError.__name__)
    raised = _ERRORS.get(ordered[0]["type"], IntegrationError)
    raise raised("; ".join(dict.fromkeys(error["message"] for error in ordered)))


def _told(failure: Exception) -> dict[str, str]:
    name = type(failure).__name__
    return {"type": name, "message": str(failure) if name in _ERRORS else f"{name}: {failure}"}


def _packed(stored: StoredRequest, encoding: RowsEncoding) -> dict[str, Any]:
    content = request_file_bytes(stored)
    return {
        "req_id": stored.req_id,
        "client_req_id": stored.client_req_id,
        "end": stored.end.value,
        "complete": stored.complete,
        "ranges": [list(one) for one in stored.ranges],
        "missing": [list(one) for one in stored.missing],
        "safetensors": content if encoding is RowsEncoding.BYTES else base64.b64encode(content).decode("ascii"),
    }


def _unpacked(packed: Mapping[str, Any]) -> StoredRequest:
    content = packed["safetensors"]
    return read_request_bytes(base64.b64decode(content) if isinstance(content, str) else bytes(content))


def _checked_reply(reply: Any, content: str) -> Mapping[str, Any]:
    if not isinstance(reply, Mapping) or "error" not in reply or content not in reply:
        raise InvalidRequestFileError(
            f"{str(reply)[:200]!r} is not the answer of a worker of Omni Core: it has no 'error' and {content!r}"
        )
    return reply


def _encoding(value: Any) -> RowsEncoding:
    try:
        return RowsEncoding(value)
    except ValueError:
        choices = " or ".join(repr(one.value) for one in RowsEncoding)
        raise RpcArgumentError(f"encoding={value!r}: must be {choices}") from None


def _seconds(name: str, value: Any) -> float:
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise RpcArgumentError(f"{name}={value!r}: must be a positive, finite number of seconds")
    return seconds


def _request_ids(name: str, value: Any) -> Sequence[str] | None:
    if value is None:
        return None
    if isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
        return value
    raise RpcArgumentError(
        f"{name}={value!r}: must be None, which ends no request, or the list of all internal ids that go on"
    )
