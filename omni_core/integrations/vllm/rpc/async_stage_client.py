# SPDX-License-Identifier: Apache-2.0
"""Flush, rows and reports of an engine that serves others meanwhile. The only module that runs on an asyncio loop.

For vLLM's `AsyncLLM`, data parallel or not, and, with the functions that end in `_through`, for whatever else calls its
workers, such as `POST /collective_rpc`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from omni_core.integrations.vllm.errors import FlushTimeoutError
from omni_core.integrations.vllm.rpc.rows_over_rpc import (
    RowsEncoding,
    WorkerCall,
    contents,
    flush_call,
    reports_from_flush,
    reports_from_replies,
    taking,
)
from omni_core.integrations.vllm.session import DEFAULT_FLUSH_TIMEOUT_S
from omni_core.integrations.vllm.versions import collective_rpc_of_every_engine
from omni_core.sinks.errors import RequestNotEndedError
from omni_core.sinks.rows import StoredRequest

T = TypeVar("T")

CallWorkers = Callable[[WorkerCall], Awaitable[Sequence[Any]]]
"""Calls every worker of every engine; their answers, one after another, always in the same order."""

_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.1


async def flush_stage_async(engine: Any, timeout_s: float = DEFAULT_FLUSH_TIMEOUT_S) -> None:
    """Hand every row an `AsyncLLM` has computed to its sinks, on every data-parallel engine. Ends no request.

    No engine waits for its sink: this asks again and again how far it is. Rows that are computed meanwhile are not
    waited for.

    Raises:
        FlushTimeoutError: not done in time; may be repeated.
    """
    await flush_through(_workers_of(engine), timeout_s)


async def take_rows_async(
    engine: Any, request_id: str, timeout_s: float = DEFAULT_FLUSH_TIMEOUT_S
) -> list[StoredRequest]:
    """The rows of a finished request of an `AsyncLLM`, whose memory sinks forget them; see `take_rows_through`.

    Asks every data-parallel engine, also for samples of one request (`n > 1`) that ran in several of them.
    """
    return await take_rows_through(_workers_of(engine), request_id, timeout_s, encoding=RowsEncoding.BYTES)


async def stage_reports_async(engine: Any) -> list[dict[str, Any]]:
    """The report of each rank of each data-parallel engine of an `AsyncLLM`; see `StageSession.report`.

    Raises:
        IntegrationError: a rank cannot make its report; says why.
    """
    return reports_from_replies(await collective_rpc_of_every_engine(engine, "omni_core_report", ()))


async def reset_stage_async(engine: Any) -> list[dict[str, Any]]:
    """`stage_client.reset_stage` for an `AsyncLLM`, on every data-parallel engine.

    Raises:
        IntegrationError: a rank was not reset; says why.
    """
    return contents(await collective_rpc_of_every_engine(engine, "omni_core_reset", ()), "reset")


async def bump_stage_version_async(engine: Any, adapter_id: int | None = None) -> list[dict[str, Any]]:
    """`stage_client.bump_stage_version` for an `AsyncLLM`, on every data-parallel engine.

    Raises:
        RpcArgumentError, IntegrationError: a rank could not do it; says why.
    """
    return contents(await collective_rpc_of_every_engine(engine, "omni_core_bump", (adapter_id,)), "version")


async def flush_through(call_workers: CallWorkers, timeout_s: float = DEFAULT_FLUSH_TIMEOUT_S) -> list[dict[str, Any]]:
    """As `flush_stage_async`, through any way to call the workers; the reports of the ranks.

    Raises:
        FlushTimeoutError: not done in time; may be repeated.
    """
    call = flush_call(wait_s=0.0)

    async def asked() -> list[dict[str, Any]]:
        return reports_from_flush(await call_workers(call))

    return await _repeated(asked, while_raises=FlushTimeoutError, timeout_s=timeout_s)


async def take_rows_through(
    call_workers: CallWorkers,
    request_id: str,
    timeout_s: float = DEFAULT_FLUSH_TIMEOUT_S,
    *,
    encoding: RowsEncoding = RowsEncoding.BASE64,
) -> list[StoredRequest]:
    """The rows of a request whose last token the client has; the memory sinks forget them.

    Waits for rows computed before to reach the sinks, then for the engine's news of the request's end, which comes with
    a step that may still be under way. Each call that this makes of the workers is short, however many rows there are.

    Args:
        call_workers: how the workers are called.
        request_id: the client's id of the request, or the engine's internal one.
        timeout_s: for both waits together.
        encoding: `BASE64` where answers are JSON, as over HTTP.

    Returns and errors are those of `stage_client.take_rows`. Two who take one request at once may both get it.
    """
    now_s = asyncio.get_running_loop().time
    began_s = now_s()
    await flush_through(call_workers, timeout_s)
    return await _repeated(
        lambda: _taken(call_workers, request_id, encoding),
        while_raises=RequestNotEndedError,
        timeout_s=timeout_s - (now_s() - began_s),
    )


async def _repeated(attempt: Callable[[], Awaitable[T]], *, while_raises: type[Exception], timeout_s: float) -> T:
    now_s = asyncio.get_running_loop().time
    deadline_s = now_s() + timeout_s
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return await attempt()
        except while_raises:
            if now_s() >= deadline_s:
                raise
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _workers_of(engine: Any) -> CallWorkers:
    return lambda call: collective_rpc_of_every_engine(engine, call.method, call.args)


async def _taken(call_workers: CallWorkers, request_id: str, encoding: RowsEncoding) -> list[StoredRequest]:
    steps = taking(request_id, encoding)
    call = next(steps)
    while True:
        try:
            call = steps.send(await call_workers(call))
        except StopIteration as end:
            taken: list[StoredRequest] = end.value
            return taken
