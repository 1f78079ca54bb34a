# SPDX-License-Identifier: Apache-2.0
"""A deploy file says what its stages run; what it cannot mean is refused with the stage and the way out."""

import sys
import textwrap

import pytest

from omni_core.diffusion_kv.config import DiffusionKVConfig
from omni_core.diffusion_kv.deploy import ARStageConfig, DeployConfig, StageConfig, load_deploy, parse_deploy
from omni_core.diffusion_kv.errors import DiffusionKVConfigError, DiffusionKVConfigTypeError

STAGE = {"stage_id": 0, "model": "tiny-hunyuan"}


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "deploy.yaml"
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    return write


def deploy(*stages, **deployment):
    return parse_deploy({"pipeline": "mine", "stages": list(stages), **deployment})


def test_the_smallest_file_runs_a_known_pipeline_with_its_two_rows(written):
    path = written("""
        pipeline: tiny_hunyuan_dit
        stages:
          - stage_id: 0
            diffusion_kv_mode: paged_scheduler
            enable_prefix_caching: true
    """)
    kv = DiffusionKVConfig(
        diffusion_kv_mode="paged_scheduler", enable_prefix_caching=True, diffusion_kv_max_rows_per_request=2
    )
    assert load_deploy(path) == DeployConfig(
        pipeline="tiny_hunyuan_dit", stages=(StageConfig(stage_id=0, model="tiny-hunyuan", kv=kv),)
    )


def test_what_a_stage_says_wins_over_its_pipelines_rows():
    parsed = parse_deploy(
        {"pipeline": "tiny_hunyuan_dit", "stages": [{"stage_id": 0, "diffusion_kv_max_rows_per_request": 1}]}
    )
    assert parsed.stage().kv.max_rows == 1


def test_model_options_reach_the_model_untouched():
    options = {"layout": "debug", "weight_seed": 7}
    assert deploy({**STAGE, "model_options": options}).stage().model_options == options


# --- one stage's flag is not another's


def test_prefix_caching_of_the_deployment_never_reaches_a_diffusion_stage():
    parsed = deploy({"stage_id": 0, "stage_type": "llm"}, {**STAGE, "stage_id": 1}, enable_prefix_caching=True)
    assert parsed.stage(1).kv == DiffusionKVConfig()
    assert parsed.ar_stages == (ARStageConfig(stage_id=0, enable_prefix_caching=True),)


def test_an_autoregressive_stages_own_flag_wins_over_the_deployments():
    parsed = deploy({"stage_id": 0, "stage_type": "llm", "enable_prefix_caching": False}, enable_prefix_caching=True)
    assert parsed.ar_stages[0].enable_prefix_caching is False


def test_an_autoregressive_stages_settings_pass_through():
    parsed = deploy(
        {"stage_id": 0, "stage_type": "llm", "max_num_seqs": 64, "enforce_eager": True}, STAGE | {"stage_id": 1}
    )
    assert parsed.ar_stages[0].settings == {"max_num_seqs": 64, "enforce_eager": True}
    assert parsed.ar_stages[0].enable_prefix_caching is None


def test_one_of_two_diffusion_stages_is_cached():
    cached = {"diffusion_kv_mode": "paged_scheduler", "diffusion_kv_max_rows_per_request": 2}
    parsed = deploy(STAGE, {**STAGE, **cached, "stage_id": 1, "enable_prefix_caching": True})
    assert [stage.kv.enable_prefix_caching for stage in parsed.stages] == [False, True]


# --- other names


@pytest.mark.parametrize(
    ("alias", "name", "value"),
    [
        ("diffusion_kv_max_sequences_per_request", "diffusion_kv_max_rows_per_request", 2),
        ("gpu_memory_utilisation", "gpu_memory_utilization", 0.5),
    ],
)
def test_a_renamed_setting_keeps_its_old_name(alias, name, value):
    assert deploy({**STAGE, alias: value}).stage() == deploy({**STAGE, name: value}).stage()
    with pytest.raises(DiffusionKVConfigError, match=rf"stage 0: {name} is given twice, as \w+ and as \w+; keep one"):
        deploy({**STAGE, alias: value, name: value})


def test_an_attention_backend_by_vllm_omnis_name_is_told_those_with_pages():
    with pytest.raises(DiffusionKVConfigError, match=r"stage 0: attention_owner='FLASH_ATTN' is none of kernel"):
        deploy({**STAGE, "diffusion_attention_backend": "FLASH_ATTN"})


def test_settings_may_stand_in_groups():
    grouped = {"parallel_config": {"tensor_parallel_size": 2}, "engine_extras": {"diffusion_kv_mode": "dense_legacy"}}
    assert deploy({**STAGE, **grouped}).stage().kv == DiffusionKVConfig(tensor_parallel_size=2)
    with pytest.raises(DiffusionKVConfigError, match=r"given twice, as parallel_config\.tensor_parallel_size and as"):
        deploy({**STAGE, **grouped, "tensor_parallel_size": 2})


# --- mistakes


@pytest.mark.parametrize(
    ("mistaken", "told"),
    [
        ({"stages": [STAGE]}, "names its pipeline"),
        ({"pipeline": "mine"}, "names its stages"),
        ({"pipeline": "mine", "stages": []}, "stages is empty"),
        ({"pipeline": "mine", "stages": [STAGE], "stage": 1}, "no setting 'stage'; did you mean 'stages'"),
        ({"pipeline": "mine", "stages": [{"model": "x"}]}, r"stages\[0\] has no stage_id"),
        ({"pipeline": "mine", "stages": [STAGE, STAGE]}, "stage_id=0 stands at 2 stages"),
        ({"pipeline": "mine", "stages": [{"stage_id": -1, "model": "x"}]}, "stage_id=-1 is negative"),
        ({"pipeline": "mine", "stages": [{"stage_id": 0}]}, "stage 0: there is no model.*pipeline='mine'.*set model"),
        ({"pipeline": "mine", "stages": [{"stage_id": 0, "model": ""}]}, "stage 0: model is empty"),
        ({"pipeline": "mine", "stages": [STAGE | {"stage_type": "vae"}]}, "stage_type='vae' is none of diffusion, llm"),
        ({"pipeline": "mine", "stages": [STAGE | {"kv": {}}]}, "stage 0: a diffusion stage has no setting 'kv'"),
        (
            {"pipeline": "mine", "stages": [STAGE | {"enable_prefix_cachin": True}]},
            "stage 0: .*'enable_prefix_cachin'; did you mean 'enable_prefix_caching'",
        ),
        (
            {"pipeline": "mine", "stages": [STAGE | {"engine_extras": {"block_sise": 16}}]},
            "'block_sise'; did you mean 'block_size'",
        ),
    ],
)
def test_refused(mistaken, told):
    with pytest.raises(DiffusionKVConfigError, match=told):
        parse_deploy(mistaken)


@pytest.mark.parametrize(
    ("mistaken", "told"),
    [
        ({"pipeline": 1, "stages": [STAGE]}, "pipeline=1 is a int; str is wanted"),
        ({"pipeline": "mine", "stages": {"0": STAGE}}, "stages=.*a list is wanted"),
        ({"pipeline": "mine", "stages": ["x"]}, r"stages\[0\]='x' is a str; a mapping is wanted"),
        ({"pipeline": "mine", "stages": [{"stage_id": True}]}, "stage_id=True is a bool; int is wanted"),
        ({"pipeline": "mine", "stages": [STAGE], "enable_prefix_caching": 1}, "enable_prefix_caching=1 is a int"),
        ({"pipeline": "mine", "stages": [STAGE | {"model_options": [1]}]}, r"stage 0: model_options=\[1\] is a list"),
        ({"pipeline": "mine", "stages": [STAGE | {"parallel_config": 2}]}, "parallel_config=2 is a int; a mapping"),
        ({"pipeline": "mine", "stages": [STAGE | {"enable_prefix_caching": 1}]}, "stage 0: enable_prefix_caching=1 is"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_as_one(mistaken, told):
    with pytest.raises(DiffusionKVConfigTypeError, match=told):
        parse_deploy(mistaken)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("pipeline: a\npipeline: b\nstages: []", r"deploy\.yaml: 'pipeline' stands at line 1 and at line 2; keep one"),
        (
            "pipeline: a\nstages:\n  - stage_id: 0\n    model: x\n    stage_id: 1\n",
            r"deploy\.yaml: 'stage_id' stands at line 3 and at line 5",
        ),
        ("- a\n- b\n", r"deploy\.yaml: holds a list; a mapping is wanted"),
        ("", r"deploy\.yaml: holds a NoneType"),
        ("pipeline: [a", r"deploy\.yaml: is no YAML"),
        ("{? [1] : 2}", r"deploy\.yaml: line 1: a key is a sequence"),
        ("pipeline: !!python/object/apply:os.getcwd []\nstages: []", r"deploy\.yaml: is no YAML"),
    ],
)
def test_a_file_that_says_nothing_sure_is_refused(written, text, told):
    with pytest.raises(DiffusionKVConfigError, match=told):
        load_deploy(written(text))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DiffusionKVConfigError, match=r"absent\.yaml: cannot be read"):
        load_deploy(tmp_path / "absent.yaml")


def test_anchors_and_merges_are_yaml_as_ever(written):
    path = written("""
        pipeline: mine
        stages:
          - &first {stage_id: 0, model: tiny-hunyuan, block_size: 16}
          - {<<: *first, stage_id: 1}
    """)
    assert [stage.kv.block_size for stage in load_deploy(path).stages] == [16, 16]


def test_without_pyyaml_the_extra_is_named(written, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(DiffusionKVConfigError, match=r"PyYAML is not installed.*pip install 'omni-core\[diffusion\]'"):
        load_deploy(written("pipeline: a"))


def test_the_stage_that_is_asked_for_is_there_or_the_stages_are_told():
    parsed = deploy(STAGE, {**STAGE, "stage_id": 4})
    assert parsed.stage(4).stage_id == 4
    with pytest.raises(DiffusionKVConfigError, match="'mine': diffusion stage 1 is wanted; there is 0, 4"):
        parsed.stage(1)
    with pytest.raises(DiffusionKVConfigError, match="'mine': one diffusion stage is wanted; there is 0, 4"):
        parsed.stage()
