# SPDX-License-Identifier: Apache-2.0
"""Flush, rows and reports of an engine, asked for where its `LLM` or `AsyncLLM` lives; workers may be elsewhere."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from omni_core.integrations.vllm.errors import FlushTimeoutError
from omni_core.integrations.vllm.rows_over_rpc import RowsEncoding, reports_from_flush, rows_from_replies
from omni_core.integrations.vllm.session import DEFAULT_FLUSH_TIMEOUT_S
from omni_core.integrations.vllm.versions import collective_rpc_of_every_engine, unfinished_request_ids
from omni_core.sinks.errors import RequestNotEndedError
from omni_core.sinks.rows import StoredRequest

_FLUSH_SLICE_S = 0.5
"""How long one call may hold up an engine that serves others; a longer wait is made of several."""

_POLL_S = 0.02


def flush_stage(llm: Any, timeout_s: float = DEFAULT_FLUSH_TIMEOUT_S) -> None:
    """Hand every row an `LLM` has computed to its sinks and end its finished requests there.

    Called between the `LLM`'s own calls; requests it has not finished go on. Ending is needed because the engine's news
    of an end comes with its next step, and after the last request of an in-process `LLM` there is none.

    Raises:
        FlushTimeoutError: not done in time; may be repeated.
    """
    reports_from_flush(llm.collective_rpc("omni_core_flush", args=(unfinished_request_ids(llm), timeout_s)))


def take_rows(llm: Any, request_id: str, timeout_s: float = DEFAULT_FLUSH_TIMEOUT_S) -> list[StoredRequest]:
    """The rows of a finished request of an `LLM`, whose memory sinks forget them; blocks up to `timeout_s`.

    Flushes first, as `flush_stage` does.

    Args:
        llm: vLLM's `LLM` with one of Omni Core's workers; its engine may run in processes of its own.
        request_id: `RequestOutput.request_id`, or the engine's internal id.
        timeout_s: for the flush.

    Returns:
        One entry, or one per sample of a request with `n > 1`, in the order they ended; `sample.index` says which.
        Rows are CPU tensors in the dtype the engine computed.

    Raises:
        RequestNotEndedError, UnknownRequestError: there is nothing to take (yet); says why.
        RowsNotKeptError: the sink keeps no rows.
        StageNotFoundError: no worker has a cache.
        FlushTimeoutError: rows already computed did not reach the sink in time.
    """
    flush_stage(llm, timeout_s)
    return rows_from_replies(llm.collective_rpc("omni_core_take_rows", args=(request_id, RowsEncoding.BYTES.value)))


def stage_reports(llm: Any) -> list[dict[str, Any]]:
    """The report of each rank of an `LLM`; see `StageSession.report`."""
    return list(llm.collective_rpc("omni_core_report"))


async def flush_stage_async(engine: Any, timeout_s: float = DEFAULT_FLUSH_TIMEOUT_S) -> None:
    """Hand every row an `AsyncLLM` has computed to its sinks, on every data-parallel engine. Ends no request.

    Each engine is held up by half a second at a time at most, so other requests go on.

    Raises:
        FlushTimeoutError: not done in time; may be repeated.
    """
    deadline = time.monotonic() + timeout_s
    arguments = (None, min(_FLUSH_SLICE_S, timeout_s))
    while True:
        replies = await collective_rpc_of_every_engine(engine, "omni_core_flush", arguments)
        try:
            reports_from_flush(replies)
        except FlushTimeoutError:
            if time.monotonic() >= deadline:
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

    Args, returns and errors are those of `take_rows`.
    """
    deadline = time.monotonic() + timeout_s
    arguments = (request_id, RowsEncoding.BYTES.value)
    while True:
        await flush_stage_async(engine, max(_POLL_S, deadline - time.monotonic()))
        replies = await collective_rpc_of_every_engine(engine, "omni_core_take_rows", arguments)
        try:
            return rows_from_replies(replies)
        except RequestNotEndedError:
            if time.monotonic() >= deadline:
                raise
            await asyncio.sleep(_POLL_S)


async def stage_reports_async(engine: Any) -> list[dict[str, Any]]:
    """The report of each rank of each data-parallel engine of an `AsyncLLM`; see `StageSession.report`."""
    return await collective_rpc_of_every_engine(engine, "omni_core_report", ())
