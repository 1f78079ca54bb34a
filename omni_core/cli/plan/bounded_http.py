# SPDX-License-Identifier: Apache-2.0
"""One HTTP question to one server, bounded as a whole: in time, whatever the server does, and in bytes read."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit

from omni_core.cli.plan.errors import NoAnswerError, PlanInputError
from omni_core.runtime import Runtime

MAX_ANSWER_BYTES = 16 << 20
"""No metrics page and no report is nearly as large."""
_CONNECTIONS: dict[str, Callable[..., HTTPConnection]] = {"http": HTTPConnection, "https": HTTPSConnection}


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server is."""

    scheme: str
    host: str
    port: int | None
    """`None`: the scheme's."""
    path: str
    """Of the server's root, without a slash at the end."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. Redirects are not followed."""

    status: int
    body: bytes


def parse_address(url: str) -> ServerAddress:
    """The address that a URL names.

    Raises:
        PlanInputError: it names none.
    """
    rule = "must be http://HOST:PORT or https://HOST:PORT"
    try:
        parts = urlsplit(url)
        address = ServerAddress(parts.scheme, parts.hostname or "", parts.port, parts.path.rstrip("/"))
    except ValueError as error:
        raise PlanInputError(f"--server {url}: {error}; {rule}") from error
    if address.scheme not in _CONNECTIONS or not address.host or "@" in parts.netloc or parts.query or parts.fragment:
        raise PlanInputError(f"--server {url}: {rule}")
    return address


def ask(runtime: Runtime, address: ServerAddress, path: str, timeout_s: float, call: bytes | None = None) -> Answer:
    """Ask once. Blocks for at most `timeout_s`, from the look-up of the name to the last byte; no proxy is used.

    Args:
        runtime: where the thread comes from that waits for the server.
        address: the server.
        path: below the server's root.
        timeout_s: for all of it.
        call: a JSON document to POST; `None`: GET.

    Raises:
        NoAnswerError: there is none in time, it is no HTTP, or it is longer than `MAX_ANSWER_BYTES`.
    """
    question = _Question(address, path, timeout_s, call)
    if not runtime.spawn(f"ask {path}", question.run).join(timeout_s):
        question.give_up()
        raise NoAnswerError(
            f"no whole answer within {timeout_s:g} s; is it the port of vLLM? or raise --server-timeout-s"
        )
    if isinstance(question.outcome, Answer):
        return question.outcome
    raise NoAnswerError(_told(question.outcome)) from question.outcome


class _Question:
    """`run` belongs to a thread of its own; its `outcome` may be read when that thread has ended."""

    def __init__(self, address: ServerAddress, path: str, timeout_s: float, call: bytes | None) -> None:
        self._address = address
        self._path = f"{address.path}{path}"
        self._timeout_s = timeout_s
        self._call = call
        self._socket: socket.socket | None = None
        self.outcome: Answer | Exception = NoAnswerError("it was not asked")

    def run(self) -> None:
        """Ask, and keep what comes."""
        try:
            self.outcome = self._ask()
        except (OSError, HTTPException, ValueError) as error:
            self.outcome = error

    def give_up(self) -> None:
        """End a `run` that waits for the server. Any thread."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _ask(self) -> Answer:
        address = self._address
        connection = _CONNECTIONS[address.scheme](address.host, address.port, timeout=self._timeout_s)
        try:
            connection.connect()
            self._socket = connection.sock
            method = "GET" if self._call is None else "POST"
            connection.request(method, self._path, self._call, {"Content-Type": "application/json"})
            with connection.getresponse() as response:
                body = response.read(MAX_ANSWER_BYTES + 1)
                missing_bytes = response.length
        finally:
            connection.close()
        if len(body) > MAX_ANSWER_BYTES:
            raise ValueError(f"its answer has more than {MAX_ANSWER_BYTES:,} bytes, which no vLLM server's has")
        if missing_bytes:
            raise ValueError(f"its answer ended {missing_bytes:,} bytes too early")
        return Answer(response.status, body)


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
