# SPDX-License-Identifier: Apache-2.0
"""Flush, rows and reports of an `AsyncLLM`, data parallel or not. The only module that runs on an asyncio loop."""

from __future__ import annotations

import asyncio
from typing import Any

from omni_core.integrations.vllm.errors import FlushTimeoutError
from omni_core.integrations.vllm.rows_over_rpc import RowsEncoding, reports_from_flush, rows_from_replies
from omni_core.integrations.vllm.session import DEFAULT_FLUSH_TIMEOUT_S
from omni_core.integrations.vllm.versions import collective_rpc_of_every_engine
from omni_core.sinks.errors import RequestNotEndedError
from omni_core.sinks.rows import StoredRequest

_FLUSH_SLICE_S = 0.5
"""How long one call may hold up an engine that serves others; a longer wait is made of several."""

_POLL_S = 0.02


async def flush_stage_async(engine: Any, timeout_s: float = DEFAULT_FLUSH_TIMEOUT_S) -> None:
    """Hand every row an `AsyncLLM` has computed to its sinks, on every data-parallel engine. Ends no request.

    Each engine is held up by half a second at a time at most, so other requests go on.

    Raises:
        FlushTimeoutError: not done in time; may be repeated.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    arguments = (None, min(_FLUSH_SLICE_S, timeout_s))
    while True:
        replies = await collective_rpc_of_every_engine(engine, "omni_core_flush", arguments)
        try:
            reports_from_flush(replies)
        except FlushTimeoutError:
            if asyncio.get_running_loop().time() >= deadline:
                raise
            await asyncio.sleep(_POLL_S)
        else:
            return


async def take_rows_async(
    engine: Any, request_id: str, timeout_s: float = DEFAULT_FLUSH_TIMEOUT_S
) -> list[StoredRequest]:
    """The rows of a finished request of an `AsyncLLM`, whose memory sinks forget them.

    Asks every data-parallel engine; waits up to `timeout_s` for the engine's news of the request's end, which comes
    with a step that may still be under way when the client has its last token.

    Args, returns and errors are those of `stage_client.take_rows`.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    arguments = (request_id, RowsEncoding.BYTES.value)
    while True:
        await flush_stage_async(engine, max(_POLL_S, deadline - asyncio.get_running_loop().time()))
        replies = await collective_rpc_of_every_engine(engine, "omni_core_take_rows", arguments)
        try:
            return rows_from_replies(replies)
        except RequestNotEndedError:
            if asyncio.get_running_loop().time() >= deadline:
                raise
            await asyncio.sleep(_POLL_S)


async def stage_reports_async(engine: Any) -> list[dict[str, Any]]:
    """The report of each rank of each data-parallel engine of an `AsyncLLM`; see `StageSession.report`."""
    return await collective_rpc_of_every_engine(engine, "omni_core_report", ())
