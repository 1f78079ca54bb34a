# SPDX-License-Identifier: Apache-2.0
"""Flush, rows and reports of an engine, asked for where its `LLM` lives; its workers may be in other processes."""

from __future__ import annotations

from typing import Any

from omni_core.integrations.vllm.errors import FlushTimeoutError
from omni_core.integrations.vllm.rpc.rows_over_rpc import (
    DEFAULT_RPC_FLUSH_WAIT_S,
    RowsEncoding,
    WorkerCall,
    contents,
    flush_call,
    reports_from_flush,
    reports_from_replies,
    taking,
)
from omni_core.integrations.vllm.session import DEFAULT_FLUSH_TIMEOUT_S
from omni_core.integrations.vllm.versions import unfinished_request_ids
from omni_core.runtime import ThreadingRuntime
from omni_core.sinks.rows import StoredRequest


def flush_stage(llm: Any, timeout_s: float = DEFAULT_FLUSH_TIMEOUT_S) -> None:
    """Hand every row an `LLM` has computed to its sinks and end its finished requests there.

    Called between the `LLM`'s own calls; requests it has not finished go on. Ending is needed because the engine's news
    of an end comes with its next step, and after the last request of an in-process `LLM` there is none.

    Raises:
        FlushTimeoutError: not done in time; may be repeated.
    """
    clock = ThreadingRuntime()
    deadline_s = clock.monotonic_s() + timeout_s
    wait_s = min(DEFAULT_RPC_FLUSH_WAIT_S, timeout_s)
    call = flush_call(wait_s=wait_s, still_running=unfinished_request_ids(llm))
    while True:
        try:
            reports_from_flush(_replies(llm, call))
            return
        except FlushTimeoutError:
            if clock.monotonic_s() >= deadline_s:
                raise


def take_rows(llm: Any, request_id: str, timeout_s: float = DEFAULT_FLUSH_TIMEOUT_S) -> list[StoredRequest]:
    """The rows of a finished request of an `LLM`, whose memory sinks forget them; blocks up to `timeout_s`.

    Flushes first, as `flush_stage` does.

    Args:
        llm: vLLM's `LLM` with one of Omni Core's workers; its engine may run in processes of its own.
        request_id: `RequestOutput.request_id`, or the engine's internal id.
        timeout_s: for the flush.

    Returns:
        One entry, or one per sample of a request with `n > 1`, in the order of the samples; `sample.index` says which.
        Rows are CPU tensors in the dtype the engine computed.

    Raises:
        RequestNotEndedError, UnknownRequestError: there is nothing to take (yet); says why.
        RowsNotKeptError: the sink keeps no rows.
        StageNotFoundError: no worker has a cache.
        FlushTimeoutError: rows already computed did not reach the sink in time.
    """
    flush_stage(llm, timeout_s)
    steps = taking(request_id, RowsEncoding.BYTES)
    call = next(steps)
    while True:
        try:
            call = steps.send(_replies(llm, call))
        except StopIteration as end:
            taken: list[StoredRequest] = end.value
            return taken


def reset_stage(llm: Any) -> list[dict[str, Any]]:
    """Have an `LLM`'s caches forget every row, every request and any failure; what each cleared (`ResetReport`).

    Requests that run get no more rows. vLLM's own prefix cache is not touched: call `LLM.reset_prefix_cache` too, or
    requests that hit it have no rows.

    Raises:
        IntegrationError: a rank was not reset; says why.
    """
    return contents(llm.collective_rpc("omni_core_reset"), "reset")


def bump_stage_version(llm: Any, adapter_id: int | None = None) -> list[dict[str, Any]]:
    """Tell an `LLM`'s caches that the weights, or an adapter, have changed; what became absent (`VersionReport`).

    Only needed where vLLM's worker does not hear of it, such as a function given to `collective_rpc`.

    Args:
        llm: vLLM's `LLM` with one of Omni Core's workers.
        adapter_id: `LoRARequest.lora_int_id`; `None`: the weights.

    Raises:
        RpcArgumentError, IntegrationError: a rank could not do it; says why.
    """
    return contents(llm.collective_rpc("omni_core_bump", args=(adapter_id,)), "version")


def stage_reports(llm: Any) -> list[dict[str, Any]]:
    """The report of each rank of an `LLM`; see `StageSession.report`.

    Raises:
        IntegrationError: a rank cannot make its report; says why.
    """
    return reports_from_replies(llm.collective_rpc("omni_core_report"))


def _replies(llm: Any, call: WorkerCall) -> list[Any]:
    return list(llm.collective_rpc(call.method, args=call.args))
