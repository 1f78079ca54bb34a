# SPDX-License-Identifier: Apache-2.0
"""Adapters of tiny-hunyuan: made by seed, found by path, loaded per epoch, and never half fitting."""

import sys

import pytest
import torch
from diffusion_kv.plain_owner import PlainOwner, run
from diffusion_kv.test_tiny_hunyuan_parallel import OPTIONS, on_ranks
from diffusion_kv.tiny_requests import debug_pipeline, relative_error, request

from omni_core.diffusion_kv.errors import DiffusionKVError, RequestRefusedError
from omni_core.diffusion_kv.parallel import Ranks
from omni_core.diffusion_kv.pipeline import LoRARequest
from omni_core.diffusion_kv.tiny_hunyuan import TinyHunyuanPipeline, make_adapter


@pytest.fixture
def adapter_file(tmp_path):
    path = tmp_path / "style.safetensors"
    make_adapter(path, OPTIONS.transformer, rank=4, seed=1)
    return path


def adapted(path, *, scale=1.0, load_epoch=0, request_id="one"):
    return request(request_id, lora=LoRARequest("style", 1, str(path), load_epoch, scale))


def latents(pipeline, one_request, owner=None):
    return run(pipeline, [one_request], owner or PlainOwner())[0].latents


def test_an_adapter_alters_the_picture_by_its_scale(adapter_file):
    pipeline = debug_pipeline()
    bare = latents(pipeline, request())
    found = {scale: latents(pipeline, adapted(adapter_file, scale=scale)) for scale in (0.0, 0.5, 1.0)}
    assert torch.equal(found[0.0], bare)
    assert relative_error(found[1.0], bare) > 1e-2
    assert relative_error(found[0.5], found[1.0]) > 1e-2
    assert torch.equal(latents(pipeline, request()), bare)


def test_an_adapter_alters_every_key_of_the_prefix(adapter_file):
    """Why it stands in the identity of each block."""
    pipeline = debug_pipeline()
    bare, other = PlainOwner(), PlainOwner()
    latents(pipeline, request(), bare)
    latents(pipeline, adapted(adapter_file), other)
    for key, kept in bare.kept.items():
        different = (other.kept[key][:, :91] != kept[:, :91]).flatten(2).any(dim=-1).any(dim=0)
        assert different.all()


def test_other_weights_under_one_path_need_a_new_load_epoch(adapter_file):
    pipeline = debug_pipeline()
    first = latents(pipeline, adapted(adapter_file))
    make_adapter(adapter_file, OPTIONS.transformer, rank=4, seed=2)
    assert torch.equal(latents(pipeline, adapted(adapter_file)), first)
    second = latents(pipeline, adapted(adapter_file, load_epoch=1))
    assert relative_error(second, first) > 1e-2


def test_tensor_parallel_ranks_share_an_adapter(adapter_file):
    def work(group):
        return latents(TinyHunyuanPipeline(OPTIONS, Ranks(tensor=group)), adapted(adapter_file))

    _, results = on_ranks(2, work)
    expected = latents(debug_pipeline(), adapted(adapter_file))
    for found in results:
        assert relative_error(found, expected) <= 1e-13


@pytest.mark.parametrize("scale", [0.5, None])
def test_two_adapters_never_share_a_forward(adapter_file, scale):
    other = request("other") if scale is None else adapted(adapter_file, scale=scale, request_id="other")
    with pytest.raises(DiffusionKVError, match="'other' has another adapter than 'one'"):
        run(debug_pipeline(), [adapted(adapter_file), other], PlainOwner())


def test_an_adapter_that_does_not_fit_is_refused_before_the_worker(tmp_path, adapter_file):
    pipeline = debug_pipeline()
    (tmp_path / "text.safetensors").write_text("no tensors here")
    with pytest.raises(RequestRefusedError, match=r"text.safetensors cannot be read"):
        pipeline.preprocess(adapted(tmp_path / "text.safetensors"))
    with pytest.raises(RequestRefusedError, match=r"there is no file .*gone.safetensors"):
        pipeline.preprocess(adapted(tmp_path / "gone.safetensors"))
    with pytest.raises(RequestRefusedError, match="does not fit a model of 3 layers"):
        debug_pipeline(num_layers=3).preprocess(adapted(adapter_file))
    wide = tmp_path / "wide.safetensors"
    make_adapter(wide, TinyHunyuanPipeline(OPTIONS).options.transformer, rank=4, seed=1)
    full_size = type(OPTIONS)(layout="small", num_layers=2)
    with pytest.raises(RequestRefusedError, match=r"layer 0 q_proj has the shapes \(4, 64\) and \(128, 4\)"):
        TinyHunyuanPipeline(full_size).preprocess(
            request(references=(1,), lora=LoRARequest("wide", 1, str(wide), 0, 1.0))
        )
    with pytest.raises(RequestRefusedError, match="scale nan"):
        pipeline.preprocess(adapted(adapter_file, scale=float("nan")))


def test_an_adapter_gone_after_preprocessing_refuses_its_request_alone(adapter_file):
    pipeline = debug_pipeline()
    prepared = pipeline.preprocess(adapted(adapter_file))
    adapter_file.unlink()
    with pytest.raises(RequestRefusedError, match="there is no file"):
        pipeline.start(prepared)


def test_an_adapter_without_safetensors_refuses_its_request_alone(adapter_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    pipeline = debug_pipeline()
    with pytest.raises(RequestRefusedError, match=r"needs safetensors; pip install 'omni-core\[diffusion\]'"):
        pipeline.preprocess(adapted(adapter_file))
    assert len(pipeline.preprocess(request()).rows) == 2
