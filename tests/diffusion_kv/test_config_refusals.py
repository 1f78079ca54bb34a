# SPDX-License-Identifier: Apache-2.0
"""Every setting a stage cannot run with is refused before anything starts: its name, its value, what to do."""

import pytest

from omni_core.diffusion_kv.config import DiffusionKVConfig, DiffusionKVMode
from omni_core.diffusion_kv.deploy import StageConfig, parse_deploy
from omni_core.diffusion_kv.errors import DiffusionKVConfigError, DiffusionKVConfigTypeError
from omni_core.diffusion_kv.refusals import REFUSALS

PAGED = {"diffusion_kv_mode": "paged_scheduler", "diffusion_kv_max_rows_per_request": 2}
CACHED = {**PAGED, "enable_prefix_caching": True}
CONNECTOR = {"kv_transfer_config": {"kv_connector": "Mooncake"}}

REFUSED = {  # the refusal's name -> what an operator sets, and what they are told
    "worker_local_mode": (
        {"diffusion_kv_mode": "paged_worker_local"},
        r"mode=paged_worker_local.*reserved",
    ),
    "prefix_caching_without_pages": (
        {"enable_prefix_caching": True},
        r"enable_prefix_caching=True with diffusion_kv_mode=dense_legacy.*set diffusion_kv_mode=paged_scheduler",
    ),
    "prefix_caching_with_sleep_mode": (
        {**CACHED, "enable_sleep_mode": True},
        r"enable_prefix_caching=True with enable_sleep_mode=True.*set one of the two to False",
    ),
    "prefix_caching_with_kv_transfer": (
        {**CACHED, **CONNECTOR},
        r"enable_prefix_caching=True with kv_transfer_config=.*Mooncake.*no identity.*unset kv_transfer_config",
    ),
    "pages_without_max_rows": (
        {"diffusion_kv_mode": "paged_scheduler"},
        r"paged_scheduler without diffusion_kv_max_rows_per_request.*2 for plain CFG",
    ),
    "diffusion_kv_max_rows_per_request": (
        {**PAGED, "diffusion_kv_max_rows_per_request": 0},
        r"diffusion_kv_max_rows_per_request=0; the CFG rows.*at least 1",
    ),
    "kv_transfer_without_pages": (CONNECTOR, r"kv_transfer_config=.*diffusion_kv_mode=dense_legacy.*there are none"),
    "kv_transfer_with_sleep_mode": (
        {**PAGED, **CONNECTOR, "enable_sleep_mode": True},
        r"kv_transfer_config=.*with enable_sleep_mode=True.*enable_sleep_mode=False",
    ),
    "kv_transfer_with_need_recv_cache": (
        {**PAGED, **CONNECTOR, "need_recv_cache": True},
        r"kv_transfer_config=.*with need_recv_cache=True.*unset both",
    ),
    "kv_transfer_with_need_send_cache": (
        {**PAGED, **CONNECTOR, "need_send_cache": True},
        r"kv_transfer_config=.*with need_send_cache=True.*unset both",
    ),
    "kv_transfer_with_async_chunk": (
        {**PAGED, **CONNECTOR, "async_chunk": True},
        r"kv_transfer_config=.*with async_chunk=True.*unset both",
    ),
    "pages_with_need_recv_cache": (
        {**PAGED, "need_recv_cache": True},
        r"paged_scheduler with need_recv_cache=True.*set need_recv_cache=False",
    ),
    "kv_transfer": ({**PAGED, **CONNECTOR}, r"kv_transfer_config=.*no connector.*unset kv_transfer_config"),
    "need_recv_cache": ({"need_recv_cache": True}, r"need_recv_cache=True: this stage receives no"),
    "need_send_cache": ({**PAGED, "need_send_cache": True}, r"need_send_cache=True: this stage sends no"),
    "async_chunk": ({"async_chunk": True}, r"async_chunk=True.*whole requests"),
    "kv_cache_memory_bytes": ({**PAGED, "kv_cache_memory_bytes": -1}, r"kv_cache_memory_bytes=-1 holds no page"),
    "gpu_memory_utilization": ({**PAGED, "gpu_memory_utilization": 1.01}, r"gpu_memory_utilization=1\.01.*at most 1"),
    "max_model_len": ({**PAGED, "max_model_len": 0}, r"max_model_len=0; .*or -1 to take what fits"),
    "ring": ({"sequence_parallel_kind": "ring"}, r"sequence_parallel_kind=ring.*use tensor_parallel_size"),
    "hybrid": ({"sequence_parallel_kind": "hybrid"}, r"sequence_parallel_kind=hybrid.*use tensor_parallel_size"),
    "all_gather": ({"sequence_parallel_kind": "all_gather"}, r"sequence_parallel_kind=all_gather.*no rank keeps them"),
    "ulysses_uneven": ({"sequence_parallel_kind": "ulysses_uneven"}, r"kind=ulysses_uneven.*different sizes"),
    "ulysses": ({"sequence_parallel_kind": "ulysses"}, r"kind=ulysses is not built; use tensor_parallel_size"),
    "sequence_parallel_size": ({"sequence_parallel_size": 2}, r"sequence_parallel_size=2: no kind.*set it to 1"),
    "tensor_parallel_size": ({"tensor_parallel_size": 0}, r"tensor_parallel_size=0; .*at least 1"),
    "cfg_parallel_size": ({"cfg_parallel_size": 0}, r"cfg_parallel_size=0; .*at least 1"),
    "cfg_rows": (
        {**PAGED, "cfg_parallel_size": 3},
        r"cfg_parallel_size=3 with diffusion_kv_max_rows_per_request=2.*make them equal",
    ),
    "step_execution": ({**PAGED, "step_execution": True}, r"step_execution=True.*set step_execution=False"),
    "continuous_batching": ({**PAGED, "continuous_batching": True}, r"continuous_batching=True.*joins a wave"),
    "cache_backend": ({**PAGED, "cache_backend": "tea_cache"}, r"cache_backend='tea_cache'.*step 0"),
    "quantization": ({**PAGED, "quantization": "fp8"}, r"quantization='fp8'.*never shown exact"),
    "enable_cpu_offload": ({**PAGED, "enable_cpu_offload": True}, r"enable_cpu_offload=True.*moves weights"),
    "block_size": ({**PAGED, "block_size": 0}, r"block_size=0; the tokens of a page, at least 1"),
    "max_num_seqs": ({"max_num_seqs": 0}, r"max_num_seqs=0; .*at least 1"),
    "max_wave_requests": ({"max_wave_requests": 0}, r"max_wave_requests=0; .*at least 1"),
    "max_wave_requests_above_max_num_seqs": (
        {"max_num_seqs": 2, "max_wave_requests": 3},
        r"max_wave_requests=3 is above max_num_seqs=2",
    ),
    "span_safe_hits_without_prefix_caching": (
        {**PAGED, "span_safe_hits": True},
        r"span_safe_hits=True with enable_prefix_caching=False",
    ),
}


def in_a_deploy_file(settings):
    parse_deploy({"pipeline": "mine", "stages": [{"stage_id": 0, "model": "tiny-hunyuan", **settings}]})


WAYS_IN = (lambda settings: DiffusionKVConfig(**settings), DiffusionKVConfig.from_mapping, in_a_deploy_file)


@pytest.mark.parametrize("way_in", WAYS_IN, ids=["python", "mapping", "deploy"])
@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_its_own_words(name, way_in):
    settings, told = REFUSED[name]
    with pytest.raises(DiffusionKVConfigError, match=told):
        way_in(settings)


def test_every_refusal_has_its_test_and_its_own_words():
    assert [refusal.name for refusal in REFUSALS] == list(REFUSED)
    assert len({refusal.message for refusal in REFUSALS}) == len(REFUSALS)


@pytest.mark.parametrize("value", [1, 0, "true", None, 1.0])
def test_prefix_caching_is_a_real_bool(value):
    with pytest.raises(DiffusionKVConfigTypeError, match=r"enable_prefix_caching=.*; bool is wanted") as caught:
        DiffusionKVConfig(**{**CACHED, "enable_prefix_caching": value})
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("value", [True, 2.0, "2"])
def test_rows_are_a_plain_int(value):
    with pytest.raises(DiffusionKVConfigTypeError, match=r"diffusion_kv_max_rows_per_request=.*int or null is wanted"):
        DiffusionKVConfig(**{**PAGED, "diffusion_kv_max_rows_per_request": value})


def test_an_unknown_mode_is_told_the_modes():
    with pytest.raises(DiffusionKVConfigError, match=r"diffusion_kv_mode='paged' is none of dense_legacy, paged_sch"):
        DiffusionKVConfig(diffusion_kv_mode="paged")


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TORCH_SDPA"])
def test_an_attention_backend_without_pages_is_told_those_with(backend):
    with pytest.raises(DiffusionKVConfigError, match=rf"attention_owner='{backend}' is none of kernel, gathered: no"):
        DiffusionKVConfig(**PAGED, attention_owner=backend)


@pytest.mark.parametrize("share", [0, -0.5, float("nan"), float("inf")])
def test_a_share_of_memory_is_above_0_and_at_most_1(share):
    with pytest.raises(DiffusionKVConfigError, match=r"gpu_memory_utilization="):
        DiffusionKVConfig(gpu_memory_utilization=share)


@pytest.mark.parametrize("length", [-2, -32, 0])
def test_only_minus_one_is_auto_fit(length):
    with pytest.raises(DiffusionKVConfigError, match=rf"max_model_len={length}; "):
        DiffusionKVConfig(max_model_len=length)
    assert DiffusionKVConfig(max_model_len=-1).max_model_len == -1


def test_an_unknown_setting_is_told_the_nearest():
    with pytest.raises(DiffusionKVConfigError, match=r"no setting 'enable_prefix_cache'; did you mean 'enable_prefix"):
        DiffusionKVConfig.from_mapping({"enable_prefix_cache": True})
    with pytest.raises(DiffusionKVConfigError, match=r"no setting 'zzz'; there is diffusion_kv_mode, "):
        DiffusionKVConfig.from_mapping({"zzz": 1})


def test_the_defaults_are_dense_and_uncached():
    config = DiffusionKVConfig()
    assert (config.diffusion_kv_mode, config.enable_prefix_caching) == (DiffusionKVMode.DENSE_LEGACY, False)
    assert not config.paged


def test_sleep_mode_is_let_through_where_nothing_is_cached():
    assert DiffusionKVConfig(**PAGED, enable_sleep_mode=True).enable_sleep_mode


def test_each_row_of_a_request_is_a_sequence_to_vllm():
    assert DiffusionKVConfig(**PAGED, max_num_seqs=3).native_max_num_seqs == 6
    with pytest.raises(DiffusionKVConfigError, match="diffusion_kv_max_rows_per_request is not set"):
        _ = DiffusionKVConfig().native_max_num_seqs


def test_a_wave_holds_all_running_requests_unless_told_otherwise():
    assert DiffusionKVConfig(max_num_seqs=4).wave_requests == 4
    assert DiffusionKVConfig(max_num_seqs=4, max_wave_requests=2).wave_requests == 2


def test_a_stage_in_python_says_what_its_file_says():
    written = parse_deploy({"pipeline": "mine", "stages": [{"stage_id": 3, "model": "tiny-hunyuan", **CACHED}]})
    assert written.stages == (StageConfig(stage_id=3, model="tiny-hunyuan", kv=DiffusionKVConfig(**CACHED)),)
