# SPDX-License-Identifier: Apache-2.0
"""A long run of a real vLLM under a random mix of its features, every row judged.

    python tests/engine/soak/engine_soak.py [--minutes 30] [--round-seconds 150] [--seed 1] [--out REPORT.json]

Every round starts an engine of its own with drawn options, in a process of its own. Exit status 1 if a row was wrong or
missing, a request not delivered, or anything was left behind.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
MODULES = os.pathsep.join([str(HERE.parent), str(HERE.parent / "features"), os.environ.get("PYTHONPATH", "")])
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
MAX_GROWTH_BYTES = 24 << 20
"""Least growth of resident memory that counts: the allocator's arenas and the interpreter's caches move by less."""


def draw_round(draw, number, seconds):
    """The model of one round, its engine's options and its mix of requests."""
    model = draw.choice(["llama", "llama", "llama", "gemma3", "qwen3_next"])
    options = {
        "max_model_len": 512,
        "max_num_seqs": draw.choice([4, 8, 16]),
        "max_num_batched_tokens": draw.choice([64, 128, 512, 1024]),
    }
    structured, model_options = False, {}
    if model == "llama":
        options |= {"block_size": draw.choice([32, 64]), "num_blocks": draw.choice([18, 26, 60])}
        if draw.random() < 0.5:
            options["speculative_config"] = NGRAM
            model_options["attention_scale"] = 0.01  # its outputs fall into loops, which the drafter guesses
        if draw.random() < 0.4:
            options |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
        structured = draw.random() < 0.5
        options["skip_tokenizer_init"] = not structured
    elif model == "gemma3":
        options |= {"num_blocks": draw.choice([90, 300])}
    else:
        options |= {"dtype": "bfloat16", "num_blocks": draw.choice([40, 120]), "max_num_batched_tokens": 1024}
    return {
        "seed": number * 1000 + draw.randrange(1000),
        "model": model,
        "model_options": model_options,
        "options": options,
        "settings": {
            "sink": draw.choice(["memory", "safetensors"]),
            "on_slow_sink": draw.choice(["skip", "wait"]),
            "on_error": draw.choice(["isolate", "raise"]),
        },
        "mix": {"max_prompt": 300, "max_output": 90, "structured": structured},
        "epoch_requests": 24,
        "seconds": seconds,
    }


def run_round(plan):
    """The round's result, or what its process said when it broke."""
    with tempfile.TemporaryDirectory() as directory:
        given, result = Path(directory) / "round.json", Path(directory) / "result.json"
        given.write_text(json.dumps(plan))
        run = subprocess.run(
            [sys.executable, str(HERE / "soak_round.py"), str(given), str(result)],
            capture_output=True,
            text=True,
            timeout=plan["seconds"] * 3 + 300,
            check=False,
            env=os.environ | {"PYTHONWARNINGS": "default", "PYTHONPATH": MODULES},
        )
        if run.returncode or not result.exists():
            return {"broke": f"exit status {run.returncode}: {run.stderr[-3000:]}"}
        return json.loads(result.read_text())


def complaints(outcome):
    """What is wrong with a round, in words."""
    if "broke" in outcome:
        return [outcome["broke"]]
    found = list(outcome["wrong"])
    found += [f"thread left behind: {name}" for name in outcome["threads_left"]]
    states = outcome["states"]
    found += [
        f"epoch {index}: {one['blocks_in_use']} blocks in use"
        for index, one in enumerate(states)
        if one["blocks_in_use"]
    ]
    found += [
        f"epoch {index}: {one['partial_files']} partial files"
        for index, one in enumerate(states)
        if one["partial_files"]
    ]
    settled = states[len(states) // 3 :]
    for name in ("threads", "files"):
        if settled[-1][name] > settled[0][name]:
            found.append(f"{name} grew from {settled[0][name]} to {settled[-1][name]}")
    if outcome["growth_beyond_control_bytes"] > MAX_GROWTH_BYTES:
        found.append(
            f"resident memory grew by {outcome['growth_beyond_control_bytes']} bytes more than without Omni Core"
        )
    return found


def growth_beyond_control_bytes(plan, states):
    """How much more resident memory grew than that of the same engine, under the same requests, without Omni Core.

    vLLM's own kernels keep something for every shape of a batch they meet, so memory rises for the first thousands of
    steps with or without us. The control is run only where a round grew.
    """
    grown = growth_bytes(states)
    if grown <= MAX_GROWTH_BYTES:
        return grown
    control = run_round(plan | {"num_epochs": len(states)})
    return grown if "broke" in control else grown - growth_bytes(control["states"])


def growth_bytes(states):
    """How far the least resident memory of the last third of the epochs lies above that of the middle third."""
    third = max(len(states) // 3, 1)
    resident = [one["resident_bytes"] for one in states]
    return min(resident[-third:]) - min(resident[third : 2 * third] or resident)


def tell(text):
    """One line for whoever watches."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main():
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--round-seconds", type=float, default=150.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    draw = random.Random(chosen.seed)
    started = time.monotonic()
    report = {"seed": chosen.seed, "rounds": [], "complaints": []}
    while time.monotonic() - started < chosen.minutes * 60:
        plan = draw_round(draw, len(report["rounds"]), chosen.round_seconds)
        outcome = run_round(plan)
        if outcome.get("states"):
            outcome["growth_beyond_control_bytes"] = growth_beyond_control_bytes(plan, outcome["states"])
        found = complaints(outcome)
        report["rounds"].append(
            {
                "model": plan["model"],
                "options": plan["options"],
                "settings": plan["settings"],
                "epochs": len(outcome.get("states", [])),
                "growth_bytes": growth_bytes(outcome["states"]) if outcome.get("states") else None,
                "growth_beyond_control_bytes": outcome.get("growth_beyond_control_bytes"),
                **outcome.get("total", {}),
                "complaints": found,
            }
        )
        report["complaints"] += [f"round {len(report['rounds']) - 1}: {one}" for one in found]
        tell(json.dumps(report["rounds"][-1]))
    summed = (
        "requests",
        "rows",
        "rows_from_hits",
        "steps",
        "aborts",
        "resets",
        "preemptions",
        "accepted_drafts",
        "rejected_drafts",
    )
    report["total"] = {name: sum(one.get(name, 0) for one in report["rounds"]) for name in summed}
    report["minutes"] = round((time.monotonic() - started) / 60, 1)
    tell(json.dumps({name: report[name] for name in ("total", "minutes", "complaints")}, indent=1))
    if chosen.out:
        chosen.out.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if report["complaints"] or not report["total"]["rows"] else 0


if __name__ == "__main__":
    sys.exit(main())
