# SPDX-License-Identifier: Apache-2.0
"""What a worker answers to flush, find, read, forget and report calls. Imports no vllm.

A worker's method must not raise. vLLM's `MultiprocExecutor.collective_rpc` (0.32) stops at the first worker that failed
and leaves the others' answers in their queues, where the engine's next step takes them for its own. So an error is part
of the answer, also one about the arguments, and `rows_over_rpc` raises it where the client is.

The engine's next step waits while a call runs. So every call is short: a flush waits half a second at most, and rows
are read a MiB at a time.
"""

from __future__ import annotations

import base64
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from omni_core.integrations.vllm.errors import RpcArgumentError
from omni_core.integrations.vllm.rpc.rows_over_rpc import (
    DEFAULT_RPC_FLUSH_WAIT_S,
    MAX_PIECE_BYTES,
    MAX_RPC_FLUSH_WAIT_S,
    RowsEncoding,
    error_for_answer,
)
from omni_core.integrations.vllm.session import StageSession
from omni_core.sinks.found_request import FoundRequest
from omni_core.sinks.request_content import request_file_piece

_MAX_FLUSHES_REMEMBERED = 1024
_MAX_IDS_TOLD = 20


def answer(call: Callable[..., dict[str, Any]], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Call a method of `WorkerCalls`; whatever it raises, and arguments it does not take, are the answer's `error`."""
    try:
        return call(*_bound(call, args, kwargs).args)
    except Exception as failure:
        return {"error": error_for_answer(failure)}


class WorkerCalls:
    """One worker's methods for `collective_rpc`, to be called through `answer`. Engine thread, between steps.

    Every answer is a dict of plain values that msgpack takes; JSON takes them too, if rows are encoded as `base64`.
    Numbers may come as text, because that is all that vLLM promises to bring over HTTP.
    """

    def __init__(self, session: StageSession | None) -> None:
        """Answer for a session; `None` before the KV cache is made."""
        self._session = session
        self._tickets: dict[str, int] = {}

    def flush(
        self, flush_id: Any = None, wait_s: Any = DEFAULT_RPC_FLUSH_WAIT_S, still_running: Any = None
    ) -> dict[str, Any]:
        """Begin to hand everything computed so far to the sink, or ask how far that is.

        Args:
            flush_id: the client's name for this flush, as text. Asking again under the same name begins nothing: it
                tells whether what was asked for the first time is done. Without a name a flush begins.
            wait_s: how long to wait for the sink, from 0 to `MAX_RPC_FLUSH_WAIT_S` seconds.
            still_running: `None` ends no request. A list of internal ids ends every request that is not in it: only for
                a client that knows every request of the engine. Looked at when a flush begins.

        Returns:
            `error` (`None`), `done`, `waits_for` (text, while not done) and `report`, which is the session's.

        Raises:
            RpcArgumentError: an argument is wrong; nothing was begun.
        """
        seconds = _number("wait_s", wait_s, at_most=MAX_RPC_FLUSH_WAIT_S)
        kept = _request_ids("still_running", still_running)
        name = None if flush_id is None else _text("flush_id", flush_id)
        if self._session is None:
            return {"error": None, "done": True, "waits_for": None, "report": {}}
        ticket = self._ticket(self._session, name, kept)
        done = self._session.wait_flushed(ticket, seconds)
        return {
            "error": None,
            "done": done,
            "waits_for": None if done else self._session.flush_waits_for(ticket),
            "report": self._session.report(),
        }

    def find(self, request_id: Any) -> dict[str, Any]:
        """Which requests of this worker an id may stand for. Takes nothing.

        Args:
            request_id: the engine's internal id or the client's.

        Returns:
            `error` (`None`), `has_cache`, `requests` (the fields of `FoundRequest`) and, if there are none, `ids_kept`.

        Raises:
            RpcArgumentError: not text.
            RowsNotKeptError: the sink keeps no rows.
        """
        asked = _text("request_id", request_id)
        sink = None if self._session is None else self._session.memory_sink()
        if sink is None:
            return {"error": None, "has_cache": False, "requests": [], "ids_kept": []}
        requests = [_plain_found(one) for one in sink.find(asked)]
        ids_kept = [] if requests else list(sink.request_ids()[-_MAX_IDS_TOLD:])
        return {"error": None, "has_cache": True, "requests": requests, "ids_kept": ids_kept}

    def read(
        self,
        req_id: Any,
        use: Any = 0,
        offset: Any = 0,
        max_bytes: Any = MAX_PIECE_BYTES,
        encoding: Any = RowsEncoding.BASE64.value,
    ) -> dict[str, Any]:
        """A piece of the file that the safetensors sink would have written for a request; the rows stay here.

        Args:
            req_id: the engine's internal id, as `find` tells it.
            use: as `find` tells it.
            offset: first byte of the piece.
            max_bytes: the most bytes of it, from 1 to `MAX_PIECE_BYTES`, before they are encoded.
            encoding: a value of `RowsEncoding`.

        Returns:
            `error` (`None`), `nbytes` of the whole file and the `piece`; both `None` where the request's rows are not.

        Raises:
            RpcArgumentError: an argument is wrong.
            RowsNotKeptError: the sink keeps no rows.
        """
        key = _text("req_id", req_id), _integer("use", use)
        first, most = _integer("offset", offset), _integer("max_bytes", max_bytes, at_least=1, at_most=MAX_PIECE_BYTES)
        form = _choice("encoding", encoding, RowsEncoding)
        sink = None if self._session is None else self._session.memory_sink()
        stored = None if sink is None else sink.kept(key)
        if stored is None:
            return {"error": None, "nbytes": None, "piece": None}
        piece, nbytes = request_file_piece(stored, first, most)
        encoded = piece if form is RowsEncoding.BYTES else base64.b64encode(piece).decode("ascii")
        return {"error": None, "nbytes": nbytes, "piece": encoded}

    def forget(self, req_id: Any, use: Any = 0) -> dict[str, Any]:
        """Forget an ended request.

        Args:
            req_id: the engine's internal id, as `find` tells it.
            use: as `find` tells it.

        Returns:
            `error` (`None`) and `forgotten`: whether its rows were here.

        Raises:
            RpcArgumentError: an argument is wrong.
            RowsNotKeptError: the sink keeps no rows.
        """
        key = _text("req_id", req_id), _integer("use", use)
        sink = None if self._session is None else self._session.memory_sink()
        return {"error": None, "forgotten": sink is not None and sink.forget(key)}

    def reset(self) -> dict[str, Any]:
        """`StageSession.reset`: forget every row and request, and any failure.

        Returns:
            `error` (`None`) and `reset`: the fields of `ResetReport`, `None` on a worker without a cache.
        """
        return {"error": None, "reset": None if self._session is None else self._session.reset()}

    def bump(self, adapter_id: Any = None) -> dict[str, Any]:
        """`StageSession.bump_version`: the weights, or an adapter, have changed.

        Args:
            adapter_id: `lora_int_id` of the adapter; `None`: the weights.

        Returns:
            `error` (`None`) and `version`: the fields of `VersionReport`, `None` on a worker without a cache.

        Raises:
            RpcArgumentError: `adapter_id` is no adapter's.
        """
        adapter = None if adapter_id is None else _integer("adapter_id", adapter_id, at_least=1)
        return {"error": None, "version": None if self._session is None else self._session.bump_version(adapter)}

    def report(self) -> dict[str, Any]:
        """`StageSession.report`, without an `error`; empty before the KV cache is made."""
        return {} if self._session is None else self._session.report()

    def _ticket(self, session: StageSession, name: str | None, kept: Sequence[str] | None) -> int:
        if name is None:
            return session.begin_flush(kept)
        if name not in self._tickets:
            self._tickets[name] = session.begin_flush(kept)
            if len(self._tickets) > _MAX_FLUSHES_REMEMBERED:
                del self._tickets[next(iter(self._tickets))]
        return self._tickets[name]


def _bound(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
    signature = inspect.signature(call)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "no arguments"
        raise RpcArgumentError(f"arguments of omni_core_{call.__name__}: {error}; it takes {takes}") from None
    bound.apply_defaults()
    return bound


def _plain_found(found: FoundRequest) -> dict[str, Any]:
    return asdict(found) | {"state": found.state.value}


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RpcArgumentError(f"{name}={value!r}: must be text")
    return value


def _choice(name: str, value: Any, kind: type[RowsEncoding]) -> RowsEncoding:
    try:
        return kind(value)
    except ValueError:
        choices = " or ".join(repr(one.value) for one in kind)
        raise RpcArgumentError(f"{name}={value!r}: must be {choices}") from None


def _number(name: str, value: Any, *, at_most: float) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number <= at_most:
        raise RpcArgumentError(
            f"{name}={value!r}: must be a number of seconds from 0 to {at_most:g}, because the engine waits; to wait "
            "longer, ask again with the same flush_id"
        )
    return number


def _integer(name: str, value: Any, *, at_least: int = 0, at_most: int | None = None) -> int:
    try:
        number = int(value) if isinstance(value, int | str) and not isinstance(value, bool) else -1
    except ValueError:
        number = -1
    if number < at_least or (at_most is not None and number > at_most):
        bound = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        raise RpcArgumentError(f"{name}={value!r}: must be a whole number {bound}")
    return number


def _request_ids(name: str, value: Any) -> Sequence[str] | None:
    if value is None:
        return None
    if isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
        return value
    raise RpcArgumentError(
        f"{name}={value!r}: must be None, which ends no request, or the list of all internal ids that go on"
    )
