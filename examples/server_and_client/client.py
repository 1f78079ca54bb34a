# SPDX-License-Identifier: Apache-2.0
"""Asks a server several prompts at once, then takes every row of each request over HTTP.

    python client.py --url http://127.0.0.1:8000

Needs Omni Core with its `sinks` extra and httpx, but no vLLM.
"""

import argparse
import asyncio
import uuid
from typing import Any

import httpx

from omni_core.integrations.vllm.rpc.async_stage_client import take_rows_through
from omni_core.integrations.vllm.rpc.rows_over_rpc import WorkerCall
from omni_core.sinks.rows import StoredRequest

SHARED = (
    "The lighthouse keeper wrote down the weather every evening: the wind, the height of the waves, the ships that "
    "passed and the colour of the sky. "
)
PROMPTS = [SHARED + end for end in ("That night", "In the morning", "His daughter")]
END_TIMEOUT_S = 30.0


async def complete(http: httpx.AsyncClient, prompt: str) -> str:
    """Let the server complete a prompt; the id under which its rows are asked for."""
    body = {"model": "example", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    answer = await http.post("/v1/completions", json=body, headers={"X-Request-Id": uuid.uuid4().hex})
    answer.raise_for_status()
    return f"{answer.json()['id']}-0"  # the request's first, and here only, prompt


async def take_rows(http: httpx.AsyncClient, request_id: str) -> list[StoredRequest]:
    """Take a request's rows, once they and the news of its end have reached the sink."""

    async def call_workers(call: WorkerCall) -> list[Any]:
        answer = await http.post("/collective_rpc", json={"method": call.method, "args": call.args})
        answer.raise_for_status()
        return list(answer.json()["results"])

    return await take_rows_through(call_workers, request_id, timeout_s=END_TIMEOUT_S)


async def run(url: str) -> None:
    """Ask all prompts at once and print what came of each."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        request_ids = await asyncio.gather(*(complete(http, prompt) for prompt in PROMPTS))
        for request_id in request_ids:
            for request in await take_rows(http, request_id):
                print(
                    f"request {request_id}: {tuple(request.hidden_states.shape)} {request.hidden_states.dtype}, "
                    f"positions {list(request.ranges)}, complete {request.complete}"
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the server is (%(default)s)")
    asyncio.run(run(parser.parse_args().url))
