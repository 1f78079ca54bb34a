# SPDX-License-Identifier: Apache-2.0
"""One engine that runs loads: `python -m omni_core.integrations.vllm.bench.serve JOB COMMANDS RESULTS`.

COMMANDS and RESULTS are open file descriptors. A line of JSON on the first is a load, and is answered by a line on the
second; the end of the first ends the process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omni_core.integrations.vllm.bench.loads import EngineKind, Load, LoadResult
from omni_core.integrations.vllm.session import StageSession, stage_session

WORKER_CLASS = "omni_core.integrations.vllm.cpu_worker.OmniCpuWorker"
BLOCK_SIZE_TOKENS = 32
MAX_MODEL_LEN_TOKENS = 512


@dataclass(frozen=True, slots=True)
class EngineJob:
    """The engine of one process."""

    kind: EngineKind
    model: str
    """Directory of the model."""
    dtype: str
    rows_directory: str
    """Where the safetensors sink writes."""


@dataclass(slots=True)
class _Request:
    sent_s: float
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    num_tokens: int = 0
    cached_tokens: int = 0


def build_engine(job: EngineJob) -> Any:
    """An `LLM` of that kind; without Omni Core it has vLLM's own worker. Needs vLLM; slow."""
    from vllm import LLM

    options: dict[str, Any] = {}
    if job.kind in (EngineKind.MEMORY, EngineKind.FILES):
        stage: dict[str, Any] = {"enabled": True, "sink": "memory"}
        if job.kind is EngineKind.FILES:
            stage |= {"sink": "safetensors", "sink_options": {"directory": job.rows_directory}}
        options = {"worker_cls": WORKER_CLASS, "additional_config": {"omni_core": stage}}
    return LLM(
        model=job.model,
        dtype=job.dtype,
        enable_prefix_caching=job.kind is not EngineKind.OFF,
        block_size=BLOCK_SIZE_TOKENS,
        max_model_len=MAX_MODEL_LEN_TOKENS,
        enforce_eager=True,
        skip_tokenizer_init=True,
        seed=0,
        **options,
    )


def run_load(llm: Any, load: Load, vocab_size: int) -> LoadResult:
    """Send the requests, so many at a time, and step the engine until all have ended. Blocks for its whole length."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=load.output_tokens, ignore_eos=True, detokenize=False)
    prompts = load.prompts(vocab_size)
    waiting = list(enumerate(prompts, start=load.first_request))[::-1]
    requests: dict[str, _Request] = {}
    began_s = time.perf_counter()
    running = 0
    while waiting or running:
        while waiting and running < load.concurrency:
            number, token_ids = waiting.pop()
            name = f"{load.kind.name}-{load.concurrency}-{load.number}-{number}".lower()
            requests[name] = _Request(time.perf_counter())
            engine.add_request(name, {"prompt_token_ids": token_ids}, params)
            running += 1
        outputs = engine.step()
        now_s = time.perf_counter()
        for output in outputs:
            request = requests[output.request_id]
            num_tokens = len(output.outputs[0].token_ids)
            if num_tokens and not request.num_tokens:
                request.first_token_s = now_s
                request.cached_tokens = output.num_cached_tokens or 0
            request.num_tokens, request.last_token_s = num_tokens, now_s
            running -= output.finished
    ended = list(requests.values())
    return LoadResult(
        wall_s=time.perf_counter() - began_s,
        first_token_s=[one.first_token_s - one.sent_s for one in ended],
        per_token_s=[(one.last_token_s - one.first_token_s) / max(1, one.num_tokens - 1) for one in ended],
        end_to_end_s=[one.last_token_s - one.sent_s for one in ended],
        prefill_tokens=sum(map(len, prompts)) - sum(one.cached_tokens for one in ended),
        output_tokens=sum(one.num_tokens for one in ended),
    )


def _session(llm: Any, job: EngineJob) -> StageSession | None:
    return stage_session(llm) if job.kind in (EngineKind.MEMORY, EngineKind.FILES) else None


def main(arguments: Sequence[str]) -> int:
    """Build the engine, then answer loads until there are no more."""
    document, commands, results = arguments
    values = json.loads(document)
    job = EngineJob(EngineKind(values["kind"]), values["model"], values["dtype"], values["rows_directory"])
    vocab_size = int(json.loads(Path(job.model, "config.json").read_text(encoding="utf-8"))["vocab_size"])
    llm = build_engine(job)
    session = _session(llm, job)
    rows_expected = 0
    with os.fdopen(int(commands), encoding="utf-8") as lines, os.fdopen(int(results), "w", encoding="utf-8") as answers:
        for line in lines:
            load = Load.from_document(json.loads(line))
            result = run_load(llm, load, vocab_size)
            if session is not None:
                # What is left to other threads must not slow the next engine's load down.
                session.flush(still_running=())
                rows_expected += load.num_rows
                _check_delivered(session, rows_expected)
            answers.write(json.dumps(asdict(result)) + "\n")
            answers.flush()
    if session is not None:
        session.close()
    return 0


def _check_delivered(session: StageSession, rows_expected: int) -> None:
    """An engine whose rows do not arrive would be measured without the work."""
    cache = session.cache
    delivered = 0 if cache is None else cache.stats().rows_delivered
    if delivered != rows_expected:
        raise RuntimeError(f"{delivered} rows were delivered, not {rows_expected}: {session.report()}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
