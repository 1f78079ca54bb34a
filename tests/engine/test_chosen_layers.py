# SPDX-License-Identifier: Apache-2.0
"""Layers of a real vLLM with prefix caching on: right to the bit, whole on a hit, and numbered as transformers does.

Each scenario runs once, in a process of its own.
"""

from pathlib import Path

import pytest
from engine_program import run_engine_program
from results import record

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
HIDDEN = "__hidden_states__"
LAYER_KEYS = [f"hidden_states.layer_{layer}" for layer in (0, 1, 2)]
KEYS = sorted([HIDDEN, *LAYER_KEYS])
RELATIVE_TOLERANCE = 1e-4


def run_scenario(name, directory, program="layer_scenarios.py"):
    modules = (HERE, HERE / "ways_to_run")
    return run_engine_program(HERE / program, name, directory / f"{name}.json", modules=modules)


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    return run_scenario("layers", tmp_path_factory.mktemp("layers"))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return run_scenario("compiled", tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="module")
def extracted(tmp_path_factory):
    return run_scenario("extracted", tmp_path_factory.mktemp("extracted"))


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    return run_scenario("refused", tmp_path_factory.mktemp("refused"))


@pytest.fixture(params=["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def scenario(request):
    return request.getfixturevalue(request.param)


def test_every_row_of_every_layer_is_one_this_run_computed(scenario):
    assert scenario["tap_keys"] == KEYS
    assert len(scenario["requests"]) == 8
    for name, seen in scenario["requests"].items():
        assert seen["equal_to_tap"] == dict.fromkeys(KEYS, seen["fed_tokens"]), name
    rows = sum(seen["fed_tokens"] * len(KEYS) for seen in scenario["requests"].values())
    record("chosen_layers", status="right", rows=rows, rows_from_hits=scenario["report"]["cache"]["rows_from_hits"])


def test_every_layer_comes_whole_with_its_tokens_and_positions(scenario):
    for name, seen in scenario["requests"].items():
        assert seen["complete"], name
        assert seen["rows"] == {key: [seen["fed_tokens"], 128] for key in KEYS}, name
        assert seen["fed_tokens"] > seen["prompt_tokens"]
        assert seen["tokens_agree"], name
        assert seen["positions_agree"], name


def test_rows_were_hit_in_the_step_that_computes_them_and_stored(scenario):
    assert scenario["rows_hit"]["in the step that computes them"] >= 96
    assert scenario["rows_hit"]["stored"] >= 4 * 96
    assert sum(seen["skipped"] == 96 for seen in scenario["requests"].values()) >= 7


def test_a_layers_number_is_the_one_of_transformers(scenario):
    for name, seen in scenario["requests"].items():
        assert seen["embeddings_equal"], name
        assert set(seen["off_reference"]) == set(KEYS)
        assert max(seen["off_reference"].values()) <= RELATIVE_TOLERANCE, name


def test_the_last_layer_is_taken_before_the_final_norm(scenario):
    assert all(seen["last_layer_against_normed"] > 0.1 for seen in scenario["requests"].values())


def test_the_layers_are_part_of_the_compile_cache_key(scenario):
    assert len(set(scenario["compile_cache_keys"].values())) == 3


def test_nothing_was_given_up_or_failed(scenario):
    delivery = scenario["report"]["delivery"]
    assert (delivery["requests_ended"], delivery["requests_failed"], delivery["failures"]) == (8, 0, {})
    assert scenario["report"]["off_reason"] is None


@pytest.mark.slow
def test_prompt_rows_equal_those_vllm_extracts(extracted):
    """vLLM's `extract_hidden_states` with its example connector, prefix caching on, same layers."""
    assert len(extracted) == 8
    for name, seen in extracted.items():
        assert seen["tokens_agree"], name
        assert seen["equal_rows"] == dict.fromkeys(LAYER_KEYS, seen["prompt_tokens"]), name
        assert seen["prompt_tokens"] >= 120, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("out of range", "layers=[1, 3]: the model has 2 decoder layers"),
        ("speculation with layers of its own", "'extract_hidden_states' chooses the model's auxiliary layers itself"),
        ("no interface", "layers=[1]: GPT2LMHeadModel cannot hand out its layers"),
    ],
)
def test_what_cannot_be_captured_is_refused_at_start(refused, case, named):
    assert named in (refused[case] or "the engine started")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor_parallel", "pipeline_parallel"])
def test_two_ranks_give_the_layers_of_one_and_only_one_rank_keeps_them(kind, tmp_path):
    """With two pipeline ranks, layers 0 and 1 are computed by the one without a cache."""
    seen = run_scenario(kind, tmp_path, "layers_on_two_ranks.py")
    [kept] = [of_rank for of_rank in seen["checked"] if of_rank]
    assert len(kept) == len(seen["off_reference"]) == 8
    for req_id, request in kept.items():
        assert request["complete"], req_id
        assert sorted(request["rows"]) == KEYS
        assert request["equal_to_tap"] == request["rows"], req_id
        assert request["tokens_agree"], req_id
        assert max(seen["off_reference"][req_id].values()) <= RELATIVE_TOLERANCE, req_id
    assert sum(request["skipped"] == 96 for request in kept.values()) >= 7
