# SPDX-License-Identifier: Apache-2.0
"""The tests' stand-ins for vLLM's runners have what the contract names, and nothing public that the real ones lack.

So a test that passes on a stand-in reads what is there on a device too. The real ones are read, not imported.
"""

import importlib.util
import inspect
from pathlib import Path
from types import SimpleNamespace

import async_runner
import fake_runner as fake
import fake_runner_v2
import pytest
from worker_classes import EngineWorker

from omni_core.integrations.vllm.releases.engine_contract import ENGINE_CONTRACT, EngineFact, FactKind
from omni_core.integrations.vllm.releases.engine_sources import EngineSources
from omni_core.integrations.vllm.releases.v2_contract import V2_CONTRACT

A = "a-00000001"
STEP = fake.scheduled(new=[(A, [1, 2, 3, 4, 5], [1, 2], 0, 5)])
FACTS = {(fact.module, fact.owner, fact.name, fact.kind): fact for fact in (*ENGINE_CONTRACT, *V2_CONTRACT)}

V1_RUNNER, V1_BATCH, V1_TABLE = (
    "v1/worker/gpu_model_runner.py",
    "v1/worker/gpu_input_batch.py",
    "v1/worker/block_table.py",
)
V2_RUNNER, V2_BATCH, V2_TABLES = (
    "v1/worker/gpu/model_runner.py",
    "v1/worker/gpu/input_batch.py",
    "v1/worker/gpu/block_table.py",
)
OUTPUT = "v1/core/sched/output.py"
OURS = {
    "adapters_loaded",
    "copy_error",
    "dummy_run",
    "forwards",
    "loaded_adapters",
    "on_device",
    "row_offset",
    "slots_on_device",
    "waiting",
    "asked",
    "ran",
    "warm_up",
    "model",
}
"""What a test asks of a stand-in that the real one need not have."""
NOT_NEEDED_BY_TESTS = {
    "V1 runner": {"use_aux_hidden_state_outputs", "parallel_config"},
    "V1 async runner": {"use_aux_hidden_state_outputs", "parallel_config"},
    "V2 runner": {"parallel_config"},
    "worker": {"sleep", "wake_up"},
}
"""Read in tests of their own, with stand-ins of their own."""
BASES = {
    "GPUModelRunner": ("LoRAModelRunnerMixin",),
    "Worker": ("WorkerBase",),
}
"""Where a class has what its base or mixin brings."""


def after_a_step(runner):
    runner.execute_model(STEP)
    return runner


def parts():
    """Each part of each stand-in, with the class it stands for."""
    v1, late, v2 = map(after_a_step, (fake.FakeRunner(), async_runner.AsyncFakeRunner(), fake_runner_v2.FakeRunnerV2()))
    for name, runner in (("V1", v1), ("V1 async", late)):
        yield f"{name} runner", runner, V1_RUNNER, "GPUModelRunner"
        yield f"{name} batch", runner.input_batch, V1_BATCH, "InputBatch"
        yield f"{name} table", runner.input_batch.block_table[0], V1_TABLE, "BlockTable"
        yield f"{name} state", runner.execute_model_state, V1_RUNNER, "ExecuteModelState"
        yield f"{name} request", runner.requests[A], V1_BATCH, "CachedRequestState"
    yield "V2 runner", v2, V2_RUNNER, "GPUModelRunner"
    yield "V2 tables", v2.block_tables, V2_TABLES, "BlockTables"
    yield "V2 state", v2.execute_model_state, V2_RUNNER, "ExecuteModelState"
    yield "V2 batch", v2.execute_model_state.input_batch, V2_BATCH, "InputBatch"
    yield "scheduler output", STEP, OUTPUT, "SchedulerOutput"
    yield "new request", STEP.scheduled_new_reqs[0], OUTPUT, "NewRequestData"
    yield "cached requests", STEP.scheduled_cached_reqs, OUTPUT, "CachedRequestData"
    params = STEP.scheduled_new_reqs[0].sampling_params
    yield "sampling parameters", params, "sampling_params.py", "SamplingParams"
    yield "V1 async output", late.sample_tokens({}), V1_RUNNER, "AsyncGPUModelRunnerOutput"
    yield "V2 output", v2.sample_tokens({}), "v1/worker/gpu/async_utils.py", "AsyncOutput"
    yield "output", v2.waiting[0].get_output(), "v1/outputs.py", "ModelRunnerOutput"
    yield "worker", EngineWorker(SimpleNamespace(), None), "v1/worker/gpu_worker.py", "Worker"


PARTS = {name: part for name, *part in parts()}


@pytest.fixture(scope="module")
def sources():
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vllm is not installed")
    return EngineSources(Path(spec.submodule_search_locations[0]))


def public_names(part):
    return {name for name in dir(part) if not name.startswith("_")} - OURS


@pytest.mark.parametrize("name", PARTS)
def test_a_stand_in_has_what_the_contract_names(name):
    part, module, owner = PARTS[name]
    members = [fact.name for fact in FACTS.values() if (fact.module, fact.owner) == (module, owner)]
    assert members, "the contract says nothing of what this stands for"
    lacking = {
        fact.name
        for fact in FACTS.values()
        if (fact.module, fact.owner, fact.kind) == (module, owner, FactKind.MEMBER) and not hasattr(part, fact.name)
    }
    assert lacking <= NOT_NEEDED_BY_TESTS.get(name, set())


@pytest.mark.parametrize("name", PARTS)
def test_a_stand_in_has_nothing_that_the_real_one_lacks(name, sources):
    part, module, owner = PARTS[name]
    own = [EngineFact(module, owner, one) for one in sorted(public_names(part))]
    assert own, "an empty stand-in says nothing"
    inherited = {fact.name for fact in FACTS.values() if fact.owner in BASES.get(owner, ())}
    lacking = {fact.name for fact in sources.lacking(own)} - inherited
    assert lacking == set()


@pytest.mark.parametrize("name", PARTS)
def test_the_methods_of_a_stand_in_take_what_the_contract_says(name):
    part, module, owner = PARTS[name]
    for fact in FACTS.values():
        if (fact.module, fact.owner, fact.kind) == (module, owner, FactKind.CALL) and hasattr(part, fact.name):
            taken = tuple(inspect.signature(getattr(part, fact.name)).parameters)
            assert taken[: len(fact.detail)] == fact.detail, fact
