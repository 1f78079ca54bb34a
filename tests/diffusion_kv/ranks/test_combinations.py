# SPDX-License-Identifier: Apache-2.0
"""Every combination of the compatibility page, on one rank or two processes over gloo, against one dense rank."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusion_kv.ranks.combinations import COMBINATIONS, Combination
from diffusion_kv.ranks.served import serve

from omni_core.diffusion_kv.deploy import parse_deploy
from omni_core.diffusion_kv.errors import DiffusionKVConfigError
from omni_core.diffusion_kv.parallel import Ranks

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]

TESTS = Path(__file__).parents[2]
GATES = {"bfloat16": 5e-2}  # two ways to attend, in bfloat16
BITWISE = ("paged", "gathered")
TWO_RANKS = [name for name, combination in COMBINATIONS.items() if combination.num_ranks == 2]


def record(name, **found):
    """Leave the result for the compatibility page, if a run asks for it."""
    folder = os.environ.get("DIFFUSION_COMPATIBILITY_FOLDER")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, f"{name}.json").write_text(json.dumps(found), encoding="utf-8")


@pytest.fixture(scope="module")
def dense():
    """What one dense rank gives, by the model's options."""
    given = {}

    def of(settings):
        options = settings.get("model_options")
        key = repr(options)
        if key not in given:
            alone = Combination("", {} if options is None else {"model_options": options})
            given[key] = serve(alone, Ranks())
        return given[key]

    return of


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What both processes found, by combination and rank."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(Path(__file__).with_name("rank_process.py"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS / "support")))}
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(folder), *TWO_RANKS],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=250)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    return {
        name: [torch.load(folder / f"{name}.{rank}.pt", weights_only=False) for rank in range(2)] for name in TWO_RANKS
    }


def relative_error(ours, reference):
    return float((ours.double() - reference.double()).norm() / reference.double().norm())


def judge(name, found, wanted):
    """The pictures are those of one dense rank, and hits are as long as they can be.

    The prompts differ from token 70 on, the second picture's last; 64 lies within that picture, and all before it too.
    """
    combination = COMBINATIONS[name]
    errors = [
        relative_error(ours["latents"], reference["latents"]) for ours, reference in zip(found, wanted, strict=True)
    ]
    gate = 0.0 if name in BITWISE else GATES.get(name, 1e-5)
    assert max(errors) <= gate
    hits = [one["hit_tokens"] for one in found]
    partial, full = (0 if name == "span_safe" else 64, 80) if combination.caches else (0, 0)
    assert hits == [0, partial, full]
    assert [one["first_step_tokens"] for one in found] == [2 * (110 - hit) for hit in hits]
    return max(errors), hits


@pytest.mark.parametrize(
    "name", [name for name in COMBINATIONS if COMBINATIONS[name].num_ranks == 1 and not COMBINATIONS[name].refused]
)
def test_one_rank_gives_the_dense_pictures(name, dense):
    error, hits = judge(name, serve(COMBINATIONS[name], Ranks()), dense(COMBINATIONS[name].settings))
    record(name, status="right", relative_error=error, hit_tokens=hits)


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks_give_the_dense_pictures(name, two_ranks, dense):
    error, hits = judge(name, two_ranks[name][0], dense(COMBINATIONS[name].settings))
    for first, second in zip(*two_ranks[name], strict=True):
        assert torch.equal(first["latents"], second["latents"])
        assert np.array_equal(first["picture"], second["picture"])
        assert first["hit_tokens"] == second["hit_tokens"]
    record(name, status="right", relative_error=error, hit_tokens=hits)


@pytest.mark.parametrize("name", [name for name in COMBINATIONS if COMBINATIONS[name].refused])
def test_what_is_not_built_is_refused_at_the_start(name):
    with pytest.raises(DiffusionKVConfigError) as refusal:
        parse_deploy(COMBINATIONS[name].deploy()).stage()
    changed = [key for key in COMBINATIONS[name].settings if key in str(refusal.value)]
    assert changed, refusal.value
    record(name, status="refused", detail=str(refusal.value))
