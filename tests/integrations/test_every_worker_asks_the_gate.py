# SPDX-License-Identifier: Apache-2.0
"""Every worker class asks the gate: before its model is loaded and again when its KV cache is made, in one place.

The set is read from the source tree, so a worker class that is added is in it.
"""

import ast
import logging
from pathlib import Path
from types import SimpleNamespace

import fake_runner as fake
import pytest
import torch
from worker_classes import WorkerClass, loaded, worker_classes

from omni_core.integrations.vllm import stage as stage_module
from omni_core.integrations.vllm.errors import GateRefusedError
from omni_core.prefix_cache.gate import GateStatus
from omni_core.prefix_cache.gate_platforms import PLATFORM_RUNNERS

INTEGRATIONS = Path(__file__).parents[2] / "omni_core" / "integrations"
WORKERS = worker_classes(INTEGRATIONS, "omni_core.integrations")
KIND = "full_attention"


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    """What the stage asks of vLLM itself, of which there is none here."""
    answers = {
        "engine_version": lambda: "0.32.0",
        "engine_lacks": lambda device_type, uses_v2_runner: (),
        "is_output_rank": lambda: True,
        "attention_group_kinds": lambda config: tuple(group.kind for group in config.kv_cache_groups),
        "request_ids_are_randomised": lambda: True,
        "engine_stop_rule": lambda: fake.ends,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(stage_module, name, answer)
    log = logging.getLogger("omni_core")
    monkeypatch.setattr(log, "parent", log.parent)  # a worker hangs it below vLLM's


def vllm_config(*, enabled=True, kv_role=None, max_model_len=fake.MAX_LEN):
    transfer = None if kv_role is None else SimpleNamespace(kv_role=kv_role, kv_connector="MooncakeConnector")
    return SimpleNamespace(
        additional_config={"omni_core": {"enabled": enabled}},
        cache_config=SimpleNamespace(enable_prefix_caching=True, kv_sharing_fast_prefill=False),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, data_parallel_size_local=1
        ),
        scheduler_config=SimpleNamespace(policy="fcfs", max_num_batched_tokens=64, async_scheduling=False),
        kv_transfer_config=transfer,
        speculative_config=None,
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: False)),
        device_config=SimpleNamespace(device_type="cpu"),
        model_config=SimpleNamespace(
            runner_type="generate",
            dtype=torch.float32,
            get_hidden_size=lambda: fake.HIDDEN_SIZE,
            max_model_len=max_model_len,
        ),
    )


def kv_cache_config(kind=KIND):
    group = SimpleNamespace(kind=kind, kv_cache_spec=SimpleNamespace(block_size=fake.BLOCK_SIZE))
    return SimpleNamespace(num_blocks=16, kv_cache_groups=[group], cache_hit_alignment_tokens=fake.BLOCK_SIZE)


def start(worker_class, config, kind=KIND, model=None):
    """A worker as the engine brings it up, with what ran of vLLM's own so far in `ran`."""
    worker = worker_class(config, fake.FakeRunner(model))
    worker.init_device()
    worker.load_model()
    worker.initialize_from_config(kv_cache_config(kind))
    return worker


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def refused_before_anything_is_loaded(worker_class):
    worker = worker_class(vllm_config(kv_role="kv_consumer"), fake.FakeRunner())
    with pytest.raises(GateRefusedError, match=r"\(kv_consumer\): kv_role='kv_consumer'.*; turn the cache off"):
        worker.init_device()
    assert worker.ran == []


def refused_when_the_kv_cache_is_made(worker_class):
    with pytest.raises(GateRefusedError, match=r"\(no_full_attention\).*sliding_window"):
        start(worker_class, vllm_config(), kind="sliding_window")


@pytest.fixture(params=WORKERS, ids=lambda worker: worker.name)
def worker_class(request):
    with loaded(request.param) as found:
        yield found


def test_the_workers_for_cpu_cuda_and_npu_are_those_found():
    assert [f"{worker.module}.{worker.name}" for worker in WORKERS] == sorted({one.worker for one in PLATFORM_RUNNERS})


def test_what_the_configuration_says_is_refused_before_a_worker_loads_anything(worker_class):
    refused_before_anything_is_loaded(worker_class)


def test_what_the_kv_cache_says_is_refused_when_it_is_made(worker_class):
    refused_when_the_kv_cache_is_made(worker_class)


def test_a_stage_that_is_let_through_gets_its_cache_when_the_kv_cache_is_made(worker_class):
    worker = start(worker_class, vllm_config())
    try:
        assert worker.ran == ["init_device", "load_model", "initialize_from_config"]
        assert worker.omni_core_session.decision.status is GateStatus.SUPPORTED
        assert worker.omni_core_session.cache is not None
    finally:
        worker.shutdown()
    assert worker.ran[-1] == "shutdown"
    assert worker.omni_core_session.report()["closed"]


@pytest.mark.parametrize(
    ("kind", "status"), [("codec_decoder", GateStatus.ADVISED_OFF), ("diffusion", GateStatus.IGNORED)]
)
def test_what_the_model_declares_of_its_stage_is_asked_about(worker_class, kind, status):
    model = fake.FakeModel()
    model.omni_cache_policy = {"stage_kind": kind}
    session = start(worker_class, vllm_config(), kind="sliding_window", model=model).omni_core_session
    assert (session.decision.status, session.decision.rule) == (status, kind)
    assert session.cache is None
    assert session.report()["gate"]["status"] == status.value


def test_what_vllm_runs_to_warm_up_is_none_of_a_clients(worker_class):
    worker = start(worker_class, vllm_config())

    def warm_up():
        worker.model_runner.execute_model(fake.scheduled(new=[("_warmup_0_", [5, 6], [1], 0, 2)]))
        worker.model_runner.sample_tokens({})
        worker.model_runner.execute_model(fake.scheduled(finished=["_warmup_0_"]))
        return "compilation times"

    worker.warm_up = warm_up
    assert worker.compile_or_warm_up_model() == "compilation times"
    saved = worker.omni_core_session.cache.stats().steps_saved
    worker.shutdown()
    assert saved == 0


def test_a_policy_without_hidden_rows_is_told_to_the_gate(worker_class):
    model = fake.FakeModel()
    model.omni_cache_policy = {"needs_full_hidden_states": False, "deferred_keys": {"codes"}}
    worker = start(worker_class, vllm_config(), model=model)
    worker.shutdown()
    decision = worker.omni_core_session.decision
    assert (decision.status, decision.rule) == (GateStatus.SUPPORTED, "no_hidden_rows")
    assert "1 of those declared deferred" in decision.reason


@pytest.mark.parametrize("max_model_len", [fake.BLOCK_SIZE, fake.BLOCK_SIZE + 1])
def test_a_stage_that_can_never_hit_is_warned_of_once_at_start_or_with_its_first_prompt(
    worker_class, max_model_len, caplog
):
    worker = start(worker_class, vllm_config(max_model_len=max_model_len))
    at_start = len(warnings_of(caplog))
    for req_id, block, ended in (("a-00000001", 1, []), ("b-00000002", 2, ["a-00000001"])):
        new = (req_id, [5, 6, 7, 8], [block], 0, 4)
        worker.model_runner.execute_model(fake.scheduled(new=[new], finished=ended))
        worker.model_runner.sample_tokens({})
    worker.shutdown()
    assert at_start == (max_model_len == fake.BLOCK_SIZE)
    assert len(warnings_of(caplog)) == 1


def test_a_stage_that_did_not_ask_is_left_alone_whatever_its_model_declares(worker_class):
    model = fake.FakeModel()
    model.omni_cache_policy = {"no_such_field": 1}
    worker = start(worker_class, vllm_config(enabled=False, kv_role="kv_consumer"), model=model)
    assert worker.omni_core_session.decision.rule == "not_enabled"
    assert type(worker.model_runner) is fake.FakeRunner


WITHOUT_THE_GATE = """
from vllm_ascend.worker.worker import NPUWorker
import vllm.v1.worker.gpu_worker as gpu
from omni_core.integrations.vllm.stage import check_stage
from omni_core.integrations.vllm.stage_worker import StageWorkerMixin

class Half(NPUWorker):
    def init_device(self):
        super().init_device()

class Whole(StageWorkerMixin, gpu.Worker):
    pass

class Grandchild(Half):
    pass

class NoWorker(dict):
    pass
"""


@pytest.fixture
def planted(tmp_path, monkeypatch):
    (tmp_path / "planted_worker.py").write_text(WITHOUT_THE_GATE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return worker_classes(tmp_path, "")


def test_every_worker_class_of_a_source_tree_is_found_and_no_other(planted):
    assert planted == [WorkerClass("planted_worker", name) for name in ("Grandchild", "Half", "Whole")]


@pytest.mark.parametrize("name", ["Half", "Grandchild"])
def test_a_worker_that_does_not_ask_is_noticed(planted, name):
    [worker] = [one for one in planted if one.name == name]
    with loaded(worker) as found:
        for check in (refused_before_anything_is_loaded, refused_when_the_kv_cache_is_made):
            with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
                check(found)


def test_a_worker_with_the_shared_part_in_front_asks(planted):
    [worker] = [one for one in planted if one.name == "Whole"]
    with loaded(worker) as found:
        refused_before_anything_is_loaded(found)
        refused_when_the_kv_cache_is_made(found)


def test_the_gate_is_asked_for_a_worker_in_one_place():
    callers = {
        path.name
        for path in INTEGRATIONS.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("check_stage", "open_stage")
    }
    assert callers == {"stage_worker.py"}
