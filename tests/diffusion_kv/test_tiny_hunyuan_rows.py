# SPDX-License-Identifier: Apache-2.0
"""What tiny-hunyuan makes of a request before any weight is touched: rows, token ids, pictures, refusals."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusion_kv.tiny_requests import debug_pipeline, picture, request

from omni_core.diffusion_kv.errors import DiffusionKVConfigError, DiffusionKVConfigTypeError, RequestRefusedError
from omni_core.diffusion_kv.pipeline import LoRARequest
from omni_core.diffusion_kv.rows import BidirectionalSpan
from omni_core.diffusion_kv.tiny_hunyuan import TinyHunyuanOptions, TinyHunyuanPipeline
from omni_core.diffusion_kv.tiny_hunyuan.preprocessing import prepare
from omni_core.diffusion_kv.tiny_hunyuan.tokenizer import SpecialToken, ratio_token, size_token


def prepared(options, **settings):
    return prepare(request(**settings), options, cfg_ranks=1)


def lengths(options, **settings):
    geometry = prepared(options, **settings).rows[0].layout.geometry
    return geometry.prefix_tokens, geometry.target_tokens, geometry.trailer_tokens, geometry.total_tokens


@pytest.mark.parametrize(
    ("options", "references", "expected"),
    [
        (TinyHunyuanOptions(layout="small"), 1, (543, 257, 2, 802)),
        (TinyHunyuanOptions(layout="small"), 0, (90, 257, 2, 349)),
        (TinyHunyuanOptions(layout="small", max_references=2), 2, (1016, 257, 2, 1275)),
        (TinyHunyuanOptions(layout="small", prefix_tokens=512), 1, (512, 257, 2, 771)),
        (TinyHunyuanOptions(layout="small", prefix_tokens=544), 0, (544, 257, 2, 803)),
        (TinyHunyuanOptions(layout="big"), 2, (1634, 401, 2, 2037)),
        (TinyHunyuanOptions(layout="big"), 1, (889, 401, 2, 1292)),
        (TinyHunyuanOptions(layout="debug"), 2, (91, 17, 2, 110)),
    ],
)
def test_the_layouts_have_the_specified_lengths(options, references, expected):
    assert lengths(options, references=range(references)) == expected


def test_the_spans_are_the_references_and_the_target_image():
    layout = prepared(TinyHunyuanOptions(layout="big")).rows[0].layout
    assert layout.spans == (
        BidirectionalSpan(37, 37 + 725),
        BidirectionalSpan(37 + 725 + 20, 37 + 725 + 20 + 725),
        BidirectionalSpan(1634 + 1, 1634 + 401),
    )


def test_the_full_model_has_ten_million_parameters():
    size = TinyHunyuanOptions(layout="small").transformer
    attention = size.dim * size.head_size * (2 * size.num_query_heads + 2 * size.num_kv_heads)
    of_layers = size.num_layers * (attention + 3 * size.dim * size.mlp_dim)
    assert (size.num_layers, size.dim, size.num_query_heads, size.num_kv_heads, size.head_size) == (6, 384, 6, 2, 64)
    assert 9e6 < of_layers < 11e6


def test_the_unconditional_row_keeps_pictures_and_special_tokens_and_loses_the_text():
    conditional, unconditional = prepared(TinyHunyuanOptions(layout="debug")).rows
    assert conditional.layout == unconditional.layout
    assert len(conditional.token_ids) == len(unconditional.token_ids) == conditional.layout.geometry.total_tokens
    for ours, theirs in zip(conditional.token_ids, unconditional.token_ids, strict=True):
        is_text = ours <= SpecialToken.PAD
        assert theirs == (SpecialToken.CFG if is_text else ours)
    assert bytes(i for i in conditional.token_ids if i < 256).endswith(b"a cat")
    reference = conditional.layout.spans[0]
    assert set(conditional.token_ids[reference.start : reference.end]) == {SpecialToken.IMAGE, SpecialToken.SEPARATOR}


def test_the_prompt_stands_behind_the_references():
    options = TinyHunyuanOptions(layout="debug")
    cat, dog = (prepared(options, prompt=prompt).rows[0] for prompt in ("a cat", "a dog"))
    different = [i for i, (a, b) in enumerate(zip(cat.token_ids, dog.token_ids, strict=True)) if a != b]
    assert different
    assert min(different) >= cat.layout.spans[1].end


def test_the_row_tells_the_size_of_the_target():
    for layout in ("small", "big", "debug"):
        options = TinyHunyuanOptions(layout=layout)
        row = prepared(options, references=()).rows[0]
        prefix = row.layout.geometry.prefix_tokens
        grid = options.slots.target_grid
        assert row.token_ids[prefix - 3 : prefix] == (size_token(grid), ratio_token(grid), SpecialToken.BEGIN_IMAGE)
        assert row.token_ids[prefix] == SpecialToken.TIMESTEP
        assert row.token_ids[-2:] == (SpecialToken.END_IMAGE, SpecialToken.END_ROW)


def test_a_short_prompt_is_padded_and_a_long_one_is_refused():
    options = TinyHunyuanOptions(layout="debug")
    assert lengths(options, prompt="") == lengths(options, prompt="x" * 17)
    with pytest.raises(RequestRefusedError, match="the prompt has 18 bytes; this layout leaves 17 with 2 references"):
        prepared(options, prompt="x" * 18)
    with pytest.raises(RequestRefusedError, match="the prompt has 18 bytes"):
        prepared(options, prompt="é" * 9)  # bytes count, not letters


def test_guidance_one_runs_the_conditional_row_alone():
    options = TinyHunyuanOptions(layout="debug")
    two, one = prepared(options), prepared(options, guidance_scale=1.0)
    assert len(two.rows) == 2
    assert one.rows == two.rows[:1]


def test_a_request_without_a_seed_gets_one_of_its_own():
    options = TinyHunyuanOptions(layout="debug")
    assert prepared(options, seed=7).seed == 7
    assert prepared(options, seed=None).seed != prepared(options, seed=None).seed
    assert prepared(options, seed=None).request.seed is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"references": (picture(1),) * 3}, "3 reference pictures; this deployment takes 2"),
        ({"references": (np.zeros((0, 5, 3), dtype=np.uint8),)}, "reference picture 0 is empty: 0 x 5 pixels"),
        ({"references": (picture(1), np.zeros((5, 5), dtype=np.uint8))}, "reference picture 1 is uint8 "),
        ({"references": (picture(1).astype(np.float32),)}, "reference picture 0 is float32 "),
        ({"num_inference_steps": 0}, "num_inference_steps=0"),
        ({"num_inference_steps": True}, "num_inference_steps=True"),
        ({"guidance_scale": float("nan")}, "guidance_scale=nan"),
        ({"seed": -1}, "seed=-1"),
        ({"lora": LoRARequest("style", 1, "/nowhere/a.safetensors", 0, 1.0)}, "there is no file /nowhere/a"),
    ],
)
def test_a_request_the_model_cannot_serve_is_refused_by_name(changes, message):
    with pytest.raises(RequestRefusedError, match=message) as refusal:
        prepare(replace(request("unfit"), **changes), TinyHunyuanOptions(layout="debug"), cfg_ranks=1)
    assert refusal.value.request_id == "unfit"


def test_one_row_cannot_be_shared_by_two_cfg_ranks():
    with pytest.raises(RequestRefusedError, match="2 CFG-parallel ranks need one each"):
        prepare(request(guidance_scale=1.0), TinyHunyuanOptions(layout="debug"), cfg_ranks=2)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (64, 64), (300, 40), (37, 500)])
def test_pictures_of_any_size_are_fitted(height, width):
    options = TinyHunyuanOptions(layout="debug")
    grey = np.full((height, width, 3), 200, dtype=np.uint8)
    reference = prepare(replace(request(), references=(grey,)), options, cfg_ranks=1).references[0]
    assert reference.vae_pixels.shape == (3, 64, 64)
    assert reference.vit_pixels.shape == (3, 48, 48)
    torch.testing.assert_close(reference.vae_pixels, torch.full((3, 64, 64), 200 / 127.5 - 1))


def test_the_profile_request_is_the_largest_the_deployment_accepts():
    pipeline = debug_pipeline()
    profile = pipeline.preprocess(pipeline.profile_request())
    assert len(profile.rows) == 2
    assert profile.rows[0].layout.geometry.total_tokens == 110
    assert len(profile.references) == 2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"layuot": "small"}, DiffusionKVConfigError, "has no option 'layuot'; it has layout, "),
        ({"layout": "huge"}, DiffusionKVConfigError, "layout='huge' is none of small, big, debug"),
        ({"dtype": "float16"}, DiffusionKVConfigError, "dtype='float16' is none of"),
        ({"num_layers": 0}, DiffusionKVConfigError, "num_layers=0 is not between 1 and"),
        ({"num_layers": True}, DiffusionKVConfigTypeError, "num_layers=True is a bool; int or null is wanted"),
        ({"weight_seed": "1"}, DiffusionKVConfigTypeError, "weight_seed='1' is a str; int is wanted"),
        ({"max_references": 3}, DiffusionKVConfigError, "max_references=3 is not between 0 and 2"),
        ({"prefix_tokens": 497}, DiffusionKVConfigError, "prefix_tokens=497 is not between 498 and"),
        ({"device": "toaster"}, DiffusionKVConfigError, "device='toaster'"),
        ({"timestep_shift": 0.0}, DiffusionKVConfigError, "timestep_shift=0.0"),
    ],
)
def test_options_of_a_deploy_file_are_checked(options, error, message):
    with pytest.raises(error, match=message):
        TinyHunyuanOptions.from_mapping(options)


def test_options_of_a_deploy_file_are_the_options_in_python():
    assert TinyHunyuanOptions.from_mapping({}) == TinyHunyuanOptions()
    mapping = {"layout": "debug", "dtype": "bfloat16", "num_layers": 3, "max_references": 1, "timestep_shift": 2}
    assert TinyHunyuanOptions.from_mapping(mapping) == TinyHunyuanOptions(**mapping)
    shape = TinyHunyuanPipeline(TinyHunyuanOptions.from_mapping(mapping)).kv_shape
    assert (shape.num_layers, shape.num_query_heads, shape.num_kv_heads, shape.head_size) == (3, 4, 2, 32)
    assert shape.dtype == torch.bfloat16
