# SPDX-License-Identifier: Apache-2.0
"""Changes weights or adapters under one engine in this process, and writes what became of each request.

    python changed_weights_run.py weights|adapters RESULT.json

The tap forgets everything at each change, so a row that it knows was computed by the weights of its own phase.
"""

import dataclasses
import json
import shutil
import sys
import tempfile
from pathlib import Path

import exact_rows  # first: sets the environment vllm reads when it is imported
import torch
from feature_engine import FeatureEngine
from feature_models import llama, lora_adapter
from scenario import Prompts
from vllm.lora.request import LoRARequest

from omni_core.integrations.vllm.rpc.stage_client import bump_stage_version, reset_stage
from omni_core.sinks.errors import UnknownRequestError

ADAPTER_ID = 1


@dataclasses.dataclass
class Phase:
    """A prompt asked for twice, one after the other, under weights of its own."""

    cached_tokens: list[int]
    rows: list[int]
    wrong_rows: list[int]
    refused: list[str]


def run_phase(engine, name, prompt, *, times=2, forget=True, **options):
    if forget:
        engine.session.tap.forget()
    for turn in range(times):
        engine.add(f"{name}-{turn}", prompt, **options)
        engine.run()
    return judged(engine, [f"{name}-{turn}" for turn in range(times)])


def judged(engine, names):
    engine.flush()
    phase = Phase([], [], [], [])
    for name in names:
        [req_id] = engine.internal_ids(name).values()
        phase.cached_tokens.append(engine.requests[name].num_cached_tokens)
        try:
            stored = engine.session.sink.request_by_internal_id(req_id)
        except UnknownRequestError as error:
            phase.refused.append(str(error))
            continue
        tapped = engine.session.tap.requests[req_id]
        assert stored.num_rows == engine.requests[name].num_rows(0), (name, stored.num_rows)
        known = engine.session.tap.equal_rows_at(tapped.digests, stored.hidden_states)
        phase.rows.append(stored.num_rows)
        phase.wrong_rows.append(int((~known).sum()))
    return phase


def hidden_of(engine, name):
    [stored] = engine.session.sink.requests_of_client(name)
    return stored.hidden_states


def halve_weights(worker):
    for parameter in worker.model_runner.get_model().parameters():
        parameter.data.mul_(0.5)


def weights(folder):
    first, second = llama(folder / "first"), llama(folder / "second", attention_scale=0.5)
    prompt = Prompts(5).tokens(110)
    seen = {}
    with FeatureEngine(first, cache=True) as engine:
        llm, cache = engine.llm, engine.session.cache

        def reload(path):
            llm.collective_rpc("reload_weights", kwargs={"weights_path": path})

        seen["first"] = run_phase(engine, "first", prompt)
        reload(second)
        seen["kept KV cache"] = run_phase(engine, "kept", prompt, times=1)
        seen["reset"] = engine.reset_prefix_cache()
        seen["reloaded"] = run_phase(engine, "reloaded", prompt)
        llm.collective_rpc(halve_weights)
        [report] = bump_stage_version(llm)
        seen["rows absent"] = report["rows_absent"]["__hidden_states__"]
        engine.reset_prefix_cache()
        seen["changed in place"] = run_phase(engine, "in-place", prompt)
        for level in (1, 2):
            llm.sleep(level=level)
            seen[f"versions asleep at {level}"] = cache.stats().weight_version
            llm.wake_up()
            reload(first)
            seen[f"slept at {level}"] = run_phase(engine, f"slept{level}", prompt)
        seen["versions"] = cache.stats().weight_version
        # While a request runs: preempted and computed again, by other weights.
        engine.add("running", prompt[::-1], max_tokens=40)
        engine.step(6)
        reload(second)
        seen["forced"] = engine.reset_prefix_cache(reset_running_requests=True)
        engine.run()
        seen["across a change"] = judged(engine, ["running"])
        seen["after it"] = run_phase(engine, "after", prompt[::-1], forget=False)
        engine.reset_prefix_cache()
        seen["afresh"] = run_phase(engine, "afresh", prompt[::-1])
        seen["hits of the new weights"] = torch.equal(hidden_of(engine, "after-0"), hidden_of(engine, "afresh-0"))
        # An operator begins again in the middle of a request.
        engine.add("doomed", prompt, max_tokens=40)
        engine.step(6)
        [report] = reset_stage(llm)
        seen["requests forgotten"] = report["requests_forgotten"]
        engine.run()
        seen["doomed"] = judged(engine, ["doomed"])
        engine.reset_prefix_cache()
        seen["begun again"] = run_phase(engine, "again", prompt)
        seen["off_reason"] = engine.session.report()["off_reason"]
        seen["tap_failure"] = engine.session.tap.failure
    return seen


def adapters(folder):
    model, path = llama(folder / "model"), Path(lora_adapter(folder / "adapter", 1))
    prompt = Prompts(6).tokens(110)
    held, in_place = (
        LoRARequest("voice", ADAPTER_ID, str(path), load_inplace=load_inplace) for load_inplace in (False, True)
    )
    renamed = LoRARequest("voice", ADAPTER_ID + 1, str(path))
    seen = {}
    with FeatureEngine(model, cache=True, enable_lora=True, max_loras=2, max_lora_rank=8) as engine:
        lora = engine.llm.llm_engine

        def exchange_files(seed):
            other = lora_adapter(folder / f"adapter-{seed}", seed)
            for file in Path(other).iterdir():
                shutil.copyfile(file, path / file.name)

        def versions():
            return engine.session.cache.stats().adapter_versions.get(ADAPTER_ID, 0)

        seen["base"] = run_phase(engine, "base", prompt)
        seen["first"] = run_phase(engine, "first", prompt, lora_request=held)
        seen["another id"] = run_phase(engine, "renamed", prompt, times=1, lora_request=renamed)
        exchange_files(2)
        lora.add_lora(in_place)
        seen["loaded in place"] = versions()
        seen["kept KV cache"] = run_phase(engine, "kept", prompt, times=1, lora_request=in_place)
        seen["base again"] = run_phase(engine, "base-again", prompt, times=1).cached_tokens
        seen["base rows again"] = torch.equal(hidden_of(engine, "base-again-0"), hidden_of(engine, "base-0"))
        engine.reset_prefix_cache()
        # Each of these steps reads the same files again.
        seen["reloaded"] = run_phase(engine, "reloaded", prompt, lora_request=in_place)
        seen["read in steps"] = versions()
        exchange_files(3)
        seen["other files in a step"] = run_phase(engine, "files", prompt, times=1, lora_request=in_place)
        seen["versions"] = versions()
        lora.remove_lora(ADAPTER_ID)
        engine.reset_prefix_cache()
        seen["removed"] = run_phase(engine, "removed", prompt, lora_request=held)
        seen["off_reason"] = engine.session.report()["off_reason"]
        seen["tap_failure"] = engine.session.tap.failure
    return seen


if __name__ == "__main__":
    exact_rows.make_rows_exact()
    with tempfile.TemporaryDirectory() as directory:
        told = {"weights": weights, "adapters": adapters}[sys.argv[1]](Path(directory))
    plain = {name: dataclasses.asdict(one) if isinstance(one, Phase) else one for name, one in told.items()}
    Path(sys.argv[2]).write_text(json.dumps(plain, indent=1))
