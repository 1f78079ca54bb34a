# SPDX-License-Identifier: Apache-2.0
"""Runs one way of having an engine's workers in other processes, and writes what was seen.

    python run_way.py WAY RESULT.json

Run by the tests in a process of its own: importing vllm changes torch for the whole process.
"""

import asyncio
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"

from row_digests import digests_of
from tiny_model import VOCAB_SIZE, register_tiny_model, save_tiny_model
from vllm import LLM, AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from omni_core.integrations.vllm.rpc.async_stage_client import flush_stage_async, stage_reports_async, take_rows_async
from omni_core.integrations.vllm.rpc.stage_client import flush_stage, stage_reports, take_rows
from omni_core.integrations.vllm.versions import collective_rpc_of_every_engine
from omni_core.prefix_cache.config import HIDDEN_KEY

register_tiny_model()  # also where this program is imported again: with two pipeline ranks the engine core asks for it

MEMORY_SHARE = 0.2  # by default vLLM wants 92 % of the machine's memory to be free
CHECKING_WORKER = "checking_worker.OmniCheckingCpuWorker"
PIPELINE_WORKER = "pipeline_worker.OmniCheckingPipelineCpuWorker"


def engine_options(model: str, *, worker: str = CHECKING_WORKER, **options) -> dict:
    return {
        "model": model,
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        "block_size": 32,
        "num_gpu_blocks_override": 60,
        "gpu_memory_utilization": MEMORY_SHARE,
        "enable_prefix_caching": True,
        "worker_cls": worker,
        "additional_config": {"omni_core": {"enabled": True, "sink": "memory", "tap": True}},
    } | options


def prompts_with_one_prefix(count: int, seed: int = 1) -> list[list[int]]:
    source = random.Random(seed)
    tokens = [source.randrange(2, VOCAB_SIZE) for _ in range(100 + 11 * count)]
    return [tokens[:100] + tokens[100 + 11 * index :][: 5 + index] for index in range(count)]


def greedy(max_tokens: int = 6, **options) -> SamplingParams:
    return SamplingParams(
        **{"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "detokenize": False} | options
    )


def as_prompts(prompts: list[list[int]]) -> list[dict]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def client_view(request_id: str, prompt: list[int], outputs: list[list[int]], taken: list) -> dict:
    """What a client has of one request: the tokens, and the rows it took."""
    return {
        "request_id": request_id,
        "fed": [len(prompt) + len(output) - 1 for output in outputs],
        "taken": [
            {
                "req_id": one.req_id,
                "client_req_id": one.client_req_id,
                "complete": one.complete,
                "ranges": [list(span) for span in one.ranges],
                "dtype": str(one.rows[HIDDEN_KEY].dtype),
                "digests": digests_of(one),
                "tokens_are_the_clients": one.token_ids.tolist() in [(prompt + output)[:-1] for output in outputs],
            }
            for one in taken
        ],
    }


def refusal_of(call) -> str | None:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def waves(llm: LLM, prompts: list[list[int]]) -> dict:
    """Two waves of the same prompts, checked in the worker, then taken by the client."""
    answered = [*llm.generate(as_prompts(prompts), greedy()), *llm.generate(as_prompts(prompts), greedy())]
    flush_stage(llm)
    checked = llm.collective_rpc("check_rows")
    unknown = refusal_of(lambda: take_rows(llm, "nobody"))
    views = [
        client_view(
            answer.request_id,
            list(answer.prompt_token_ids),
            [list(one.token_ids) for one in answer.outputs],
            take_rows(llm, answer.request_id),
        )
        for answer in answered
    ]
    again = refusal_of(lambda: take_rows(llm, answered[0].request_id))
    wrong_calls = [
        *llm.collective_rpc("omni_core_find"),
        *llm.collective_rpc("omni_core_report", args=("all",)),
        *llm.collective_rpc("omni_core_flush", kwargs={"timeout_s": 5}),
    ]
    [after] = llm.generate(as_prompts(prompts[:1]), greedy())
    return {
        "checked": checked,
        "requests": views,
        "unknown": unknown,
        "taken_twice": again,
        "wrong_calls": [reply["error"]["type"] for reply in wrong_calls],
        "outputs_after_refusals_agree": after.outputs[0].token_ids == answered[0].outputs[0].token_ids,
        "reports": stage_reports(llm),
    }


def own_process(model: str) -> dict:
    """The engine core and its worker in processes of their own, in bfloat16; a flush while a request runs; n = 2."""
    llm = LLM(**engine_options(model, dtype="bfloat16"))
    prompts = prompts_with_one_prefix(4)
    seen = waves(llm, prompts)

    llm.llm_engine.add_request("long", {"prompt_token_ids": prompts[0]}, greedy(40))
    for _ in range(5):
        llm.llm_engine.step()
    [during] = llm.collective_rpc("omni_core_flush")
    running = refusal_of(lambda: take_rows(llm, "long"))
    outputs: list[int] = []
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            outputs = list(output.outputs[0].token_ids)
    several = SamplingParams(n=2, temperature=1.0, seed=7, max_tokens=6, ignore_eos=True, detokenize=False)
    [sampled] = llm.generate(as_prompts(prompts[1:2]), several)
    flush_stage(llm)
    [checked] = llm.collective_rpc("check_rows")
    bad_flush = llm.collective_rpc("omni_core_flush", args=("f", 0, "long"))[0]["error"]
    seen["long"] = client_view("long", prompts[0], [outputs], take_rows(llm, "long"))
    seen["sampled"] = client_view(
        sampled.request_id,
        prompts[1],
        [list(one.token_ids) for one in sampled.outputs],
        take_rows(llm, sampled.request_id),
    )
    return seen | {
        "checked_later": checked,
        "running": running,
        "open_during_flush": during["report"]["delivery"]["requests_open"],
        "flush_of_text": bad_flush,
    }


def tensor_parallel(model: str) -> dict:
    return waves(LLM(**engine_options(model, tensor_parallel_size=2)), prompts_with_one_prefix(4))


def pipeline_parallel(model: str) -> dict:
    options = engine_options(model, pipeline_parallel_size=2, worker=PIPELINE_WORKER)
    return waves(LLM(**options), prompts_with_one_prefix(4))


def data_parallel(model: str) -> dict:
    """Two engines behind one `AsyncLLM`; each request pinned to one of them."""
    return asyncio.run(_data_parallel(model))


async def _data_parallel(model: str) -> dict:

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_options(model, data_parallel_size=2)))
    try:
        prompts = prompts_with_one_prefix(4)

        async def ask(request_id: str, prompt: list[int], rank: int) -> list[int]:
            params = greedy(output_kind=RequestOutputKind.FINAL_ONLY)
            stream = engine.generate({"prompt_token_ids": prompt}, params, request_id, data_parallel_rank=rank)
            return [list(output.outputs[0].token_ids) async for output in stream][-1]

        asked = {
            f"{wave}-{rank}-{i}": (prompt, rank)
            for wave in (0, 1)
            for rank in (0, 1)
            for i, prompt in enumerate(prompts)
        }
        outputs: dict[str, list[int]] = {}
        for wave in ("0", "1"):
            names = [name for name in asked if name.startswith(wave)]
            answers = await asyncio.gather(*(ask(name, *asked[name]) for name in names))
            outputs |= dict(zip(names, answers, strict=True))
        await flush_stage_async(engine)
        views, checked = [], await _settled_check(engine, len(asked))
        for name, (prompt, _) in asked.items():
            views.append(client_view(name, prompt, [outputs[name]], await take_rows_async(engine, name)))
        try:
            await take_rows_async(engine, "nobody")
            unknown = None
        except Exception as error:
            unknown = f"{type(error).__name__}: {error}"
        several = greedy(temperature=1.0, seed=7, n=4, output_kind=RequestOutputKind.FINAL_ONLY)
        stream = engine.generate({"prompt_token_ids": prompts[0]}, several, "sampled")
        outputs_of_samples = [[list(one.token_ids) for one in output.outputs] async for output in stream][-1]
        await flush_stage_async(engine)
        found = await collective_rpc_of_every_engine(engine, "omni_core_find", ("sampled",))
        sampled = client_view("sampled", prompts[0], outputs_of_samples, await take_rows_async(engine, "sampled"))
        reports = await stage_reports_async(engine)
        first_only = await engine.collective_rpc("omni_core_report")
    finally:
        engine.shutdown()
    return {
        "checked": checked,
        "requests": views,
        "unknown": unknown,
        "sampled": sampled,
        "samples_in_each_engine": [len(reply["requests"]) for reply in found],
        "reports": reports,
        "answers_of_plain_collective_rpc": len(first_only),
    }


async def _settled_check(engine: AsyncLLM, count: int) -> list[dict]:
    """The check once every end has reached its sink: the engines' news of it comes a step after the last token."""

    while True:
        await flush_stage_async(engine)
        checked = await collective_rpc_of_every_engine(engine, "check_rows", ())
        if sum(map(len, checked)) >= count:
            return checked
        await asyncio.sleep(0.05)


WAYS = {way.__name__: way for way in (own_process, tensor_parallel, pipeline_parallel, data_parallel)}

if __name__ == "__main__":
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        outcome = WAYS[sys.argv[1]](save_tiny_model(Path(directory)))
    outcome["wall_s"] = round(time.monotonic() - began, 1)
    Path(sys.argv[2]).write_text(json.dumps(outcome, indent=1))
