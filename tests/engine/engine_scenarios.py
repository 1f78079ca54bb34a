# SPDX-License-Identifier: Apache-2.0
"""Runs one scenario in this process, with Omni Core and then without prefix caching, and writes what was seen.

    python engine_scenarios.py SCENARIO RESULT.json

Run by the tests in a process of its own, because importing vllm changes torch for the whole process.
"""

import json
import random
import sys
import tempfile
from pathlib import Path

import exact_rows  # first: sets the environment vllm reads when it is imported
from engine_workload import Engine
from tiny_model import CODES_KEY, VOCAB_SIZE, save_tiny_model

from omni_core.integrations.vllm.errors import GateRefusedError
from omni_core.integrations.vllm.rpc.stage_client import flush_stage
from omni_core.prefix_cache.config import HIDDEN_KEY

KEYS = (HIDDEN_KEY, CODES_KEY)


class Prompts:
    """Random prompts, the same in every run; those of one family share a long system prompt."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)
        self._families: dict[str, list[int]] = {}

    def tokens(self, count: int) -> list[int]:
        return [self._random.randrange(2, VOCAB_SIZE) for _ in range(count)]

    def wave(self, name: str, family: str, count: int, *, shared: int, own: int) -> dict[str, list[int]]:
        system = self._families.setdefault(family, self.tokens(shared))
        return {f"{name}-{index}": system + self.tokens(own + 5 * index) for index in range(count)}


def delivered(engine: Engine) -> dict[str, dict]:
    """Per request: what reached the sink, held against the tap of the same run."""
    flush_stage(engine.llm)
    engine.session.cache.flush(10.0)
    tap, sink = engine.session.tap, engine.session.sink
    seen = {}
    for request_id, request in engine.requests.items():
        stored = sink.requests_of_client(request_id)
        record = {
            "prompt_tokens": len(request.prompt),
            "output_tokens": len(request.output),
            "done": request.done,
            "delivered": bool(stored),
        }
        if stored:
            kept = stored[0]
            tapped = tap.requests[kept.req_id]
            record |= {
                "end": kept.end.value,
                "ranges": [list(one) for one in kept.ranges],
                "missing": [list(one) for one in kept.missing],
                "tokens_agree": kept.token_ids.tolist() == tapped.token_ids[: kept.num_rows],
                "client_tokens_agree": kept.token_ids.tolist() == request.tokens[:-1],
                "computed": tapped.computed_tokens,
                "skipped": tapped.skipped_tokens,
                "rows": {key: len(kept.rows[key]) for key in KEYS},
                "shapes": {key: list(kept.rows[key].shape[1:]) for key in KEYS},
                "equal_to_tap": {key: int(tap.equal_rows(tapped.token_ids, kept.rows[key], key).sum()) for key in KEYS},
                "notes": sorted(set(kept.leftovers.get("note", ()))),
            }
        seen[request_id] = record
    return seen


def hold_against(seen: dict[str, dict], with_cache: Engine, without: Engine) -> None:
    """Adds how many delivered rows equal those of the run without prefix caching, and whether the outputs agree."""
    tap = without.session.tap
    for request_id, record in seen.items():
        request, control = with_cache.requests[request_id], without.requests[request_id]
        record["outputs_agree"] = request.output == control.output[: len(request.output)]
        if record["delivered"]:
            rows = with_cache.session.sink.requests_of_client(request_id)[0].rows
            record["equal_to_cache_off"] = {
                key: int(tap.equal_rows(control.tokens, rows[key], key).sum()) for key in KEYS
            }


def summary(engine: Engine) -> dict:
    return {
        "report": engine.llm.collective_rpc("omni_core_report")[0],
        "rows_hit": engine.history.rows_hit,
        "preemptions": engine.history.preemptions,
        "forwards": engine.session.tap.num_forwards,
    }


def waves(model: str) -> dict:
    """Waves of five families through a small KV cache, so that blocks are used again; one client's sink fails."""
    prompts = Prompts(1)
    families = ["a", "b", "c", "d", "e", "a"]
    plan = []
    for turn, family in enumerate(families):
        plan.append(("cold", prompts.wave(f"cold{turn}", family, 5, shared=100, own=20)))
        plan.append(("warm", prompts.wave(f"warm{turn}", family, 5, shared=100, own=12)))
    repeated = {f"again-{name}": prompt for name, prompt in plan[-1][1].items()}
    plan.append(("warm", repeated))
    aligned = {"aligned-0": prompts.tokens(96)}
    plan += [("cold", aligned), ("warm", {"aligned-1": aligned["aligned-0"]})]
    crowd = {f"crowd-{index}": prompts.tokens(100) for index in range(4)}
    options = {"block_size": 32, "num_blocks": 40}

    with Engine(model, cache=True, **options) as engine:
        accept = engine.session.sink.accept

        def picky(delivery):
            if delivery.client_req_id == "cold1-2":
                raise OSError("no space left for this client")
            accept(delivery)

        engine.session.sink.accept = picky
        engine.llm.llm_engine.model_executor.execute_dummy_batch()
        for _, wave in plan[:-1]:
            engine.wave(wave)
        for request_id, prompt in plan[-1][1].items():
            engine.add(request_id, prompt)
        engine.step(4)
        flush_stage(engine.llm)  # in the middle of a request: it must go on unharmed
        engine.run()
        engine.wave(crowd, max_tokens=260)  # more tokens than the KV cache holds
        seen = delivered(engine)
        result = {"kinds": {name: kind for kind, wave in plan for name in wave}, **summary(engine)}
        with_cache = engine
    with Engine(model, cache=False, **options) as engine:
        for _, wave in plan:
            engine.wave(wave)
        engine.wave(crowd, max_tokens=260)
        hold_against(seen, with_cache, engine)
        result["report_cache_off"] = engine.llm.collective_rpc("omni_core_report")[0]
    return {**result, "requests": seen}


def chunked(model: str) -> dict:
    """Prompts longer than a step, aborts before, during and after prefill, then followers on what the aborted left."""
    prompts = Prompts(2)
    first = prompts.wave("first", "a", 3, shared=160, own=60)
    early = {"early": prompts.tokens(200)}
    aborted = prompts.wave("mid", "b", 1, shared=200, own=60) | prompts.wave("late", "c", 1, shared=200, own=30)
    followers = prompts.wave("mid-follower", "b", 2, shared=200, own=10) | prompts.wave(
        "late-follower", "c", 2, shared=200, own=10
    )
    second = prompts.wave("second", "a", 3, shared=160, own=25)
    options = {"block_size": 64, "num_blocks": 60, "max_num_batched_tokens": 96, "max_num_seqs": 8}

    settings = {"sink_options": {"keep_aborted": True}}
    with Engine(model, cache=True, settings=settings, **options) as engine:
        engine.wave(first)
        engine.add("early", early["early"])
        engine.abort("early")
        engine.add("mid-0", aborted["mid-0"])
        engine.step(2)  # 192 of its 260 tokens
        engine.abort("mid-0")
        engine.add("late-0", aborted["late-0"])
        engine.step(6)  # three steps of prefill, three tokens sampled after the first
        engine.abort("late-0")
        engine.wave(followers)
        engine.wave(second)
        seen = delivered(engine)
        result = summary(engine)
        with_cache = engine
    with Engine(model, cache=False, **options) as engine:
        engine.wave(first | early | aborted | followers | second)
        hold_against(seen, with_cache, engine)
    try:
        Engine(model, cache=True, **options, scheduling_policy="priority")
        result["refusal"] = None
    except GateRefusedError as refusal:
        result["refusal"] = str(refusal)
    return {**result, "requests": seen}


SCENARIOS = {"waves": waves, "chunked": chunked}

if __name__ == "__main__":
    exact_rows.make_rows_exact()
    with tempfile.TemporaryDirectory() as directory:
        outcome = SCENARIOS[sys.argv[1]](save_tiny_model(Path(directory)))
    Path(sys.argv[2]).write_text(json.dumps(outcome, indent=1))
