# SPDX-License-Identifier: Apache-2.0
"""The forward of tiny-hunyuan: what makes its prefix reusable, first-step slicing, CFG, random numbers, refusals."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusion_kv.plain_owner import PlainOwner, row_keys, run
from diffusion_kv.tiny_requests import debug_pipeline, picture, relative_error, request

from omni_core.diffusion_kv.errors import DiffusionKVError, PagedAttentionError
from omni_core.diffusion_kv.tiny_hunyuan import TinyHunyuanOptions, TinyHunyuanPipeline
from omni_core.diffusion_kv.tiny_hunyuan.encoders import EncodedReference, latent_noise
from omni_core.diffusion_kv.tiny_hunyuan.layouts import Grid
from omni_core.diffusion_kv.tiny_hunyuan.patch_codec import PatchCodec
from omni_core.diffusion_kv.tiny_hunyuan.pictures import fitted

PREFIX, TOTAL = 91, 110
FIRST_REFERENCE_END = 11 + 26
BEHIND_THE_REFERENCES = 11 + 26 + 7 + 26


def kept_prefix(pipeline, one_request, *, first_token=0, steps=1):
    """Keys and values of the prefix from `first_token` on, all rows and layers."""
    owner = PlainOwner()
    run(pipeline, [one_request], owner, steps=steps)
    return torch.stack([kept[:, first_token:PREFIX] for kept in owner.kept.values()])


def test_prefix_keys_do_not_depend_on_anything_of_the_target():
    """Properties 1 and 2: not on the timestep, the noise, the steps, nor what the target became."""
    pipeline = debug_pipeline()
    expected = kept_prefix(pipeline, request())
    assert torch.isfinite(expected).all()
    owner = PlainOwner()
    run(pipeline, [request()], owner)
    assert torch.equal(torch.stack([kept[:, :PREFIX] for kept in owner.kept.values()]), expected)

    recomputed = PlainOwner(recompute=True)  # the prefix again at other noise levels and latents
    run(pipeline, [request()], recomputed)
    assert torch.equal(torch.stack([kept[:, :PREFIX] for kept in recomputed.kept.values()]), expected)

    no_picture = kept_prefix(pipeline, request(references=(), seed=1))[:, :, :32]
    assert torch.equal(kept_prefix(pipeline, request(references=(), seed=2, steps=7))[:, :, :32], no_picture)


def test_prefix_keys_depend_on_everything_of_the_prefix():
    pipeline = debug_pipeline()
    expected = kept_prefix(pipeline, request(), first_token=BEHIND_THE_REFERENCES)
    for other in (request(prompt="a dog"), request(references=(1, 3)), request(references=(2, 1)), request(seed=43)):
        found = kept_prefix(pipeline, other, first_token=BEHIND_THE_REFERENCES)
        assert relative_error(found, expected) > 1e-2


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("hit_tokens", [1, 16, FIRST_REFERENCE_END - 5, 48, BEHIND_THE_REFERENCES, 80, PREFIX])
def test_a_sliced_first_step_is_the_unsliced_one(dtype, hit_tokens):
    pipeline = debug_pipeline(dtype=dtype)
    cold = PlainOwner()
    expected = run(pipeline, [request()], cold)[0].latents
    found = run(pipeline, [request()], PlainOwner(hit_tokens=hit_tokens).take_over(cold))[0].latents
    assert relative_error(found, expected) <= {"float64": 1e-13, "float32": 1e-5}[dtype]


def test_keeping_keys_is_the_same_as_computing_them_at_every_step():
    pipeline = debug_pipeline()
    expected = run(pipeline, [request(steps=20)], PlainOwner(recompute=True))[0].latents
    assert relative_error(run(pipeline, [request(steps=20)], PlainOwner())[0].latents, expected) <= 1e-13


@pytest.mark.parametrize("other", [{"seed": 43}, {"references": (3, 2)}, {"references": (1, 3)}, {"prompt": "a dog"}])
def test_reusing_the_wrong_prefix_shows(other):
    """A control: were the model blind to its prefix, every comparison of this suite would pass."""
    pipeline = debug_pipeline()
    cold = PlainOwner()
    run(pipeline, [request(**other)], cold)
    expected = run(pipeline, [request()], PlainOwner())[0].latents
    found = run(pipeline, [request()], PlainOwner(hit_tokens=80).take_over(cold))[0].latents
    assert relative_error(found, expected) > 1e-2


def test_the_full_size_layout_slices_exactly_too():
    pipeline = TinyHunyuanPipeline(TinyHunyuanOptions(layout="small", num_layers=2))
    cold = PlainOwner()
    one = request(references=(1,), steps=2)
    expected = run(pipeline, [one], cold)[0].latents
    for hit_tokens in (480, 512):
        found = run(pipeline, [one], PlainOwner(hit_tokens=hit_tokens).take_over(cold))[0].latents
        assert relative_error(found, expected) <= 1e-5


class AbsentEncoder:
    """Encoders skipped, as a hit tempts one to; with or without the draw they owe."""

    def __init__(self, options, *, draws):
        self.options = options
        self.draws = draws

    def encode(self, reference, generator):
        slots, dim = self.options.slots, self.options.transformer.dim
        if self.draws:
            latent_noise(slots.vae_grid, generator)
        return EncodedReference(
            torch.zeros(slots.vae_grid.tokens, dim, dtype=torch.float64),
            torch.zeros(slots.vit_grid.tokens, dim, dtype=torch.float64),
        )


def test_a_skipped_encoder_must_still_draw():
    options = TinyHunyuanOptions(layout="debug", dtype="float64")
    cold = PlainOwner()
    pipeline = TinyHunyuanPipeline(options)
    run(pipeline, [request()], cold)

    def warm(running):
        return run(running, [request()], PlainOwner(hit_tokens=80).take_over(cold))[0].latents

    expected = warm(pipeline)
    drawing = TinyHunyuanPipeline(options, encoders=AbsentEncoder(options, draws=True))
    assert torch.equal(warm(drawing), expected)
    silent = TinyHunyuanPipeline(options, encoders=AbsentEncoder(options, draws=False))
    assert relative_error(warm(silent), expected) > 1e-2


def test_the_first_picture_is_encoded_alike_whatever_follows_it():
    """The random state of image i is the seed and the draws before it: what per-image digests rest on."""
    pipeline = debug_pipeline()
    first = [
        kept_prefix(pipeline, request(references=references))[:, :, :FIRST_REFERENCE_END]
        for references in ((1, 2), (1, 3), (2, 1))
    ]
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])


def test_equal_requests_give_equal_pictures():
    pictures = []
    for seed in (5, 5, 6):
        pipeline = debug_pipeline(dtype="float32")
        before = torch.get_rng_state()
        state = run(pipeline, [request(seed=seed)], PlainOwner())[0]
        assert torch.equal(torch.get_rng_state(), before)
        pictures.append(pipeline.decode(state))
    assert pictures[0].shape == (64, 64, 3)
    assert pictures[0].dtype == np.uint8
    np.testing.assert_array_equal(pictures[0], pictures[1])
    assert (pictures[0] != pictures[2]).any()


def test_other_weights_give_other_pictures():
    one, other = (run(debug_pipeline(weight_seed=seed), [request()], PlainOwner())[0].latents for seed in (0, 1))
    assert relative_error(other, one) > 1e-2


def test_guidance_moves_the_prediction_away_from_the_unconditional_row():
    """The velocity is linear in the scale; at 1.0 it is the conditional row's, run alone."""
    pipeline = debug_pipeline()
    alone, near, far, none = (
        run(pipeline, [request(guidance_scale=scale, steps=1)], PlainOwner())[0].latents
        for scale in (1.0, 1.0 + 1e-12, 3.0, 0.0)
    )
    torch.testing.assert_close(near, alone, rtol=0, atol=1e-10)
    torch.testing.assert_close(far, none + 3.0 * (alone - none), rtol=0, atol=1e-10)
    assert relative_error(far, alone) > 1e-2


def test_requests_in_one_wave_are_each_as_if_alone():
    pipeline = debug_pipeline()
    wave = [
        request("a", references=(1, 2), seed=1),
        request("b", references=(3, 4), seed=2, prompt="a dog", guidance_scale=1.0),
        request("c", references=(5, 6), seed=3, guidance_scale=4.0),
    ]
    together = run(pipeline, wave, PlainOwner())
    for state, one in zip(together, wave, strict=True):
        assert relative_error(state.latents, run(pipeline, [one], PlainOwner())[0].latents) <= 1e-13


def test_many_steps_stay_well_conditioned():
    pipeline = debug_pipeline(dtype="float32")
    cold = PlainOwner()
    state = run(pipeline, [request(steps=50)], cold)[0]
    warm = run(pipeline, [request(steps=50)], PlainOwner(hit_tokens=48).take_over(cold))[0]
    exact = run(debug_pipeline(), [request(steps=50)], PlainOwner())[0]
    assert relative_error(warm.latents, state.latents) <= 1e-5
    assert relative_error(state.latents.double(), exact.latents) <= 1e-4
    assert 0.1 < state.latents.std() < 3.0


def test_the_decoder_shows_what_latents_hold():
    """A picture with broad areas and soft edges comes back recognisable; a finished one is not grey."""
    across, down = np.meshgrid(np.linspace(0, 3, 64), np.linspace(0, 2, 64))
    waves = np.stack((np.sin(across), np.cos(down), np.sin(across + down)), axis=-1)
    original = fitted((127.5 + 100 * waves).astype(np.uint8), Grid(4, 4))
    codec = PatchCodec(torch.float64, torch.device("cpu"))
    found = codec.decode(codec.encode(original)).float()
    assert float((found - original).square().mean()) < 0.01 * float(original.var())

    pipeline = debug_pipeline()
    assert pipeline.decode(run(pipeline, [request(steps=1)], PlainOwner())[0]).std() > 10


def test_the_time_of_the_encoders_is_kept_apart():
    pipeline = debug_pipeline()
    assert pipeline.start(pipeline.preprocess(request())).encoder_s > 0.0


class Misfit:
    """An attention whose window or rows are not the forward's."""

    def __init__(self, step, **changes):
        self.rows = changes.get("rows", step.rows)
        self.query_start_tokens = changes.get("query_start_tokens", step.query_start_tokens)
        self.num_query_tokens = changes.get("num_query_tokens", step.num_query_tokens)
        self.attend = step.attend


@pytest.mark.parametrize(
    ("step_index", "changes"),
    [
        (0, {"query_start_tokens": -1, "num_query_tokens": TOTAL + 1}),
        (0, {"query_start_tokens": PREFIX + 1, "num_query_tokens": TOTAL - PREFIX - 1}),  # a target cut short
        (0, {"query_start_tokens": 16, "num_query_tokens": TOTAL - 17}),  # a trailer cut off
        (0, {"query_start_tokens": 16}),
        (1, {"query_start_tokens": 16, "num_query_tokens": TOTAL - 16}),
        (1, {"query_start_tokens": PREFIX, "num_query_tokens": TOTAL - PREFIX}),
    ],
)
def test_a_window_the_model_cannot_compute_is_refused_and_nothing_changes(step_index, changes):
    pipeline = debug_pipeline()
    owner = PlainOwner()
    states = run(pipeline, [request()], owner, steps=step_index)
    step = owner.first_step(row_keys(states), states[0].prepared.rows[0].layout)
    before = states[0].latents.clone()
    with pytest.raises(PagedAttentionError, match=f"step {step_index} was asked for the tokens"):
        pipeline.denoise(states, step_index, Misfit(step, **changes))
    assert torch.equal(states[0].latents, before)
    assert states[0].next_step_index == step_index


def test_rows_of_another_order_are_refused():
    pipeline = debug_pipeline()
    states = [pipeline.start(pipeline.preprocess(request()))]
    step = PlainOwner().first_step(row_keys(states), states[0].prepared.rows[0].layout)
    with pytest.raises(PagedAttentionError, match="the attention is for the rows"):
        pipeline.denoise(states, 0, Misfit(step, rows=step.rows[::-1]))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"references": (1,)}, "'other' has another row layout than 'one'"),
        ({"steps": 4}, "'other' has another number of steps than 'one'"),
    ],
)
def test_requests_that_cannot_share_a_forward_are_refused(other, message):
    with pytest.raises(DiffusionKVError, match=message):
        run(debug_pipeline(), [request(), request("other", **other)], PlainOwner())


def test_steps_go_in_order_and_only_a_finished_picture_is_decoded():
    pipeline = debug_pipeline()
    states = run(pipeline, [request(steps=2)], PlainOwner(), steps=1)
    step = PlainOwner().first_step(row_keys(states), states[0].prepared.rows[0].layout)
    with pytest.raises(DiffusionKVError, match="step 0 was asked for; of 2 steps 1 are done"):
        pipeline.denoise(states, 0, step)
    with pytest.raises(DiffusionKVError, match="1 of 2 steps are done"):
        pipeline.decode(states[0])
    with pytest.raises(DiffusionKVError, match="without a request"):
        pipeline.denoise([], 0, step)


def test_a_reference_may_be_any_picture():
    pipeline = debug_pipeline()
    one = replace(request(steps=1), references=(picture(1, 3, 70), picture(2, 70, 1)))
    assert torch.isfinite(run(pipeline, [one], PlainOwner())[0].latents).all()
