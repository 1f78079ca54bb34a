# SPDX-License-Identifier: Apache-2.0
"""One round of the soak: an engine with drawn options, under a drawn mix of requests, until its time is over.

    PYTHONPATH=tests/engine:tests/engine/features python soak_round.py ROUND.json RESULT.json

The round works in epochs. At the end of each no request runs, every row is judged, and everything is forgotten, so that
what an epoch leaves behind can be seen: blocks, slots, threads, files, memory.
"""

import gc
import json
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

import exact_rows  # first: sets the environment vllm reads when it is imported
import feature_models
from feature_engine import FeatureEngine
from scenario import Prompts
from verdict import faults, judge

from omni_core.sinks.safetensors_files import SafetensorsSink, request_files

OMNI_THREADS = "omni-core"


class Mix:
    """Draws requests: shared beginnings, all kinds of sampling, adapters, salts, aborts."""

    def __init__(self, seed, *, adapters, max_prompt, max_output, structured):
        self._random = random.Random(seed)
        self._prompts = Prompts(seed)
        self._adapters = [None, *adapters]
        self._max_prompt = max_prompt
        self._max_output = max_output
        self._structured = structured
        self._families = [self._prompts.tokens(self._random.randrange(20, max_prompt // 2)) for _ in range(6)]
        self._count = 0

    def chance(self, share):
        return self._random.random() < share

    def pick(self, options):
        return self._random.choice(options)

    def add(self, engine):
        """Give the engine one drawn request; returns its id."""
        draw = self._random
        own = draw.randrange(1, max(2, self._max_prompt // 3))
        tail = self._prompts.repetitive(own) if draw.random() < 0.4 else self._prompts.tokens(own)
        given = {"prompt_token_ids": [*draw.choice(self._families), *tail]}
        if draw.random() < 0.15:
            given["cache_salt"] = draw.choice(["a", "b"])
        sampling = {}
        kind = draw.random()
        if kind < 0.15:
            # Without a seed: vLLM 0.32 on CPU fails on a seeded request whose prompt comes in chunks.
            sampling = {"num_samples": draw.randrange(2, 5), "temperature": 1.0}
        elif kind < 0.25:
            sampling = {"logprobs": 3}
        elif kind < 0.3 and len(self._adapters) == 1:
            # Not beside adapters: vLLM 0.32 on CPU fails on the two together.
            sampling = {"prompt_logprobs": 1}
        elif kind < 0.35:
            sampling = {"skip_reading_prefix_cache": True}
        elif kind < 0.45:
            sampling = {"ignore_eos": False, "stop_token_ids": self._prompts.tokens(30)}
        elif kind < 0.5 and self._structured:
            from vllm.sampling_params import StructuredOutputsParams

            sampling = {
                "structured_outputs": StructuredOutputsParams(regex="(yes|no) [0-9]{4,12}"),
                "ignore_eos": False,
            }
        self._count += 1
        name = f"request-{self._count}"
        output = draw.randrange(1, self._max_output)
        engine.add(name, given, output, lora_request=draw.choice(self._adapters), **sampling)
        return name


def run_epoch(engine, mix, num_requests):
    """Requests come while others run; some are aborted, and now and then the prefix cache is reset under them."""
    left, open_requests, counts = num_requests, [], {"aborts": 0, "resets": 0}
    while left or engine.llm.llm_engine.has_unfinished_requests():
        while left and mix.chance(0.5):
            open_requests.append(mix.add(engine))
            left -= 1
        engine.step()
        open_requests = [name for name in open_requests if not engine.requests[name].done]
        if open_requests and mix.chance(0.01):
            victim = mix.pick(open_requests)
            open_requests.remove(victim)
            engine.abort(victim)
            counts["aborts"] += 1
        if mix.chance(0.003):
            counts["resets"] += bool(engine.reset_prefix_cache(reset_running_requests=True))
    return counts


def resident_bytes():
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def state(engine, rows):
    """What must not grow from epoch to epoch."""
    pool = engine.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    return {
        "blocks_in_use": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "partial_files": len(list(rows.glob(".partial-*"))),
        "resident_bytes": resident_bytes(),
    }


def forget(engine):
    engine.reset_prefix_cache()
    sink = engine.session.sink
    if isinstance(sink, SafetensorsSink):
        for path in request_files(sink.directory):
            path.unlink()
    elif sink is not None:
        for req_id in sink.request_ids():
            sink.take(req_id)
    engine.session.tap.forget()
    engine.requests.clear()


def omni_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(OMNI_THREADS)]


def judged_epoch(engine, mix, num_requests, total):
    """Run one epoch and judge every row; returns what is wrong."""
    counts = run_epoch(engine, mix, num_requests)
    engine.flush()
    verdict = judge(engine)
    for name in ("requests", "rows"):
        total[name] += verdict[name]
    for name, count in counts.items():
        total[name] += count
    for name in ("rows_from_hits", "steps"):
        total[name] = verdict[name]
    return [f"{name}: {count}" for name, count in faults(verdict).items()]


def run_round(plan, folder):
    """A round; with `num_epochs` in its plan a control: as many epochs of the same engine without Omni Core."""
    model = getattr(feature_models, plan["model"])(folder / "model", **plan["model_options"])
    adapters = []
    if plan["options"].get("enable_lora"):
        from vllm.lora.request import LoRARequest

        paths = {number: feature_models.lora_adapter(folder / f"adapter-{number}", number) for number in (1, 2)}
        adapters = [LoRARequest(f"adapter-{number}", number, path) for number, path in paths.items()]
    mix = Mix(plan["seed"], adapters=adapters, **plan["mix"])
    total = {"requests": 0, "rows": 0, "rows_from_hits": 0, "steps": 0, "aborts": 0, "resets": 0}
    wrong, states = [], []
    settings, control = dict(plan["settings"]), plan.get("num_epochs")
    if control:
        settings["enabled"] = False
    elif settings["sink"] == "safetensors":
        settings["sink_options"] = {"directory": str(folder / "rows"), "keep_aborted": True}
    deadline = time.monotonic() + plan["seconds"]
    with FeatureEngine(model, cache=True, settings=settings, **plan["options"]) as engine:
        while len(states) < control if control else time.monotonic() < deadline:
            if control:
                run_epoch(engine, mix, plan["epoch_requests"])
            else:
                found = judged_epoch(engine, mix, plan["epoch_requests"], total)
                wrong += [f"epoch {len(states)}: {one}" for one in found]
            forget(engine)
            states.append(state(engine, folder / "rows"))
        total["preemptions"] = engine.num_preemptions
        total["accepted_drafts"] = engine.num_drafts_accepted
        total["rejected_drafts"] = engine.num_drafts - engine.num_drafts_accepted
        engine.session.close(30.0)
        left = omni_threads()
    return {"total": total, "wrong": wrong, "states": states, "threads_left": left}


if __name__ == "__main__":
    exact_rows.make_rows_exact()
    with tempfile.TemporaryDirectory() as directory:
        outcome = run_round(json.loads(Path(sys.argv[1]).read_text()), Path(directory))
    Path(sys.argv[2]).write_text(json.dumps(outcome, indent=1))
