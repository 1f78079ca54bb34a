# SPDX-License-Identifier: Apache-2.0
"""Runs waves of requests on one of vLLM's model runners, with or without asynchronous scheduling, on the CPU.

    RUNNER=V1|V2 python late_tokens.py drafts|async RESULT.json

Run by the tests in a process of its own, first with Omni Core and then on an engine without prefix caching. vLLM turns
asynchronous scheduling off on the CPU, which has no use for it; here it is turned on again.
"""

import json
import sys
import tempfile
from pathlib import Path

import runner_choice  # first: sets the environment vllm reads when it is imported
from engine_scenarios import Prompts, delivered, hold_against, summary
from engine_workload import Engine
from tiny_model import save_tiny_model
from vllm.platforms.cpu import CpuPlatform

NGRAM = {"method": "ngram_gpu", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
WAYS = {"drafts": {"speculative_config": NGRAM}, "async": {}}
STOP_AFTER = 3
FEW_TOKENS = [7, 8]
"""Of so few a text repeats itself, and n-gram drafts are accepted."""


def schedule_asynchronously():
    """Undo what vLLM's CPU platform does to the setting."""
    check = CpuPlatform.check_and_update_config.__func__

    def checked(cls, vllm_config):
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(checked)


def run(model: str, way: str) -> dict:
    """Waves that hit, a request that a stop token ends, more than the KV cache holds, and an abort."""
    prompts = Prompts(3)
    waves = []
    for family in ("a", "b", "a"):
        for name in ("cold", "warm"):
            waves.append(prompts.wave(f"{name}{len(waves)}", family, 3, shared=70, own=9))
    repeated = {f"again-{name}": prompt for name, prompt in waves[-1].items()}
    crowd = {f"crowd-{index}": prompts.tokens(60) for index in range(4)}
    drafty = {f"drafty-{index}": prompts.tokens(6) * 8 for index in range(2)}
    aborted = {"aborted": prompts.tokens(60)}
    options = {"block_size": 32, "num_blocks": 18, "max_num_seqs": 6, **WAYS[way]}
    with Engine(model, cache=True, **options) as engine:
        engine.llm.llm_engine.model_executor.execute_dummy_batch()
        for wave in (*waves, repeated):
            engine.wave(wave, max_tokens=12)
        engine.wave(drafty, max_tokens=24, allowed_token_ids=FEW_TOKENS)
        engine.add("aborted", aborted["aborted"], max_tokens=40)
        engine.step(6)
        engine.abort("aborted")
        engine.wave(crowd, max_tokens=70)
        longest = engine.requests["again-warm5-0"]
        stopped = {"stopped": longest.prompt}
        engine.wave(stopped, max_tokens=12, stop_token_ids=[longest.output[STOP_AFTER]])
        engine.wave({"after": prompts.tokens(40)})
        seen = delivered(engine)
        runner = engine.runner
        tokens = sum(len(request.output) - 1 for request in engine.requests.values())
        result = summary(engine) | {
            "runner": type(runner).__mro__[2].__module__,
            "async_scheduling": engine.llm.llm_engine.vllm_config.scheduler_config.async_scheduling,
            "tap_failure": engine.session.tap.failure,
            "drafts": engine.history.drafts,
            "drafts_accepted": tokens - engine.history.decode_runs,
            "drafts_replaced": sum(one.num_drafts_replaced for one in engine.session.tap.requests.values()),
        }
        with_cache = engine
    with Engine(model, cache=False, **options) as engine:
        for wave in (*waves, repeated, aborted):
            engine.wave(wave, max_tokens=12)
        engine.wave(drafty, max_tokens=24, allowed_token_ids=FEW_TOKENS)
        engine.wave(crowd, max_tokens=70)
        engine.wave(stopped, max_tokens=12)
        engine.wave({"after": with_cache.requests["after"].prompt})
        hold_against(seen, with_cache, engine)
    return {**result, "requests": seen}


if __name__ == "__main__":
    runner_choice.make_rows_exact()
    if sys.argv[1] == "async":
        schedule_asynchronously()
    with tempfile.TemporaryDirectory() as directory:
        outcome = run(save_tiny_model(Path(directory)), sys.argv[1])
    Path(sys.argv[2]).write_text(json.dumps(outcome, indent=1))
