# SPDX-License-Identifier: Apache-2.0
"""tiny-hunyuan alone, under the plainest owner of keys and values: rows, slicing, draws, guidance, adapters, ranks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusion_kv.plain_owner import PlainOwner, row_keys, run

from omni_core.diffusion_kv.errors import (
    DiffusionKVConfigError,
    DiffusionKVConfigTypeError,
    DiffusionKVError,
    PagedAttentionError,
    RequestRefusedError,
)
from omni_core.diffusion_kv.parallel import Ranks
from omni_core.diffusion_kv.pipeline import DiffusionRequest, LoRARequest
from omni_core.diffusion_kv.tiny_hunyuan import TinyHunyuanOptions, TinyHunyuanPipeline, make_adapter
from omni_core.diffusion_kv.tiny_hunyuan.encoders import TinyEncoders
from omni_core.diffusion_kv.tiny_hunyuan.layouts import PRESETS
from omni_core.diffusion_kv.tiny_hunyuan.opening import open_tiny_hunyuan
from omni_core.diffusion_kv.tiny_hunyuan.patch_codec import PatchCodec
from omni_core.diffusion_kv.tiny_hunyuan.weights import WeightSource

PICTURES = tuple(np.random.default_rng(number).integers(0, 256, (60, 80, 3), np.uint8) for number in range(3))
DEBUG = TinyHunyuanOptions(layout="debug")
PREFIX, TOTAL, TARGET_END = 91, 110, 108
IN_TEXT, IN_SPAN = 80, 48


def request(request_id="a", **changes):
    settings = {
        "prompt": "a boat",
        "references": PICTURES[:2],
        "seed": 42,
        "guidance_scale": 2.5,
        "num_inference_steps": 3,
    }
    return DiffusionRequest(request_id, **{**settings, **changes})


@pytest.fixture(scope="module")
def pipeline():
    return TinyHunyuanPipeline(DEBUG)


def latents(pipeline, one, owner=None, **how):
    (state,) = run(pipeline, [one], PlainOwner() if owner is None else owner, **how)
    return state.latents


def relative_error(ours, reference):
    return float((ours.double() - reference.double()).norm() / reference.double().norm())


class TestRows:
    @pytest.mark.parametrize(
        ("layout", "references", "geometry", "spans"),
        [
            ("small", 1, (543, 257, 802), [(37, 490), (544, 800)]),
            ("big", 2, (1634, 401, 2037), [(37, 762), (782, 1507), (1635, 2035)]),
            ("debug", 2, (91, 17, 110), [(11, 37), (44, 70), (92, 108)]),
        ],
    )
    def test_a_row_is_text_pictures_text_target_and_trailer(self, layout, references, geometry, spans):
        options = TinyHunyuanOptions(layout=layout)
        row = options.slots.row_layout(references, options.prefix_tokens_with(references))
        lengths = row.geometry
        assert (lengths.prefix_tokens, lengths.target_tokens, lengths.total_tokens) == geometry
        assert [(span.start, span.end) for span in row.spans] == spans

    @pytest.mark.parametrize("prefix", [512, 543, 544])
    def test_a_deployment_may_set_the_prefix(self, prefix):
        rows = open_tiny_hunyuan({"layout": "small", "prefix_tokens": prefix, "num_layers": 1}, Ranks())
        prepared = rows.preprocess(request(references=PICTURES[:1]))
        assert [row.layout.geometry.prefix_tokens for row in prepared.rows] == [prefix, prefix]

    def test_the_unconditional_row_has_the_pictures_and_not_the_prompt(self, pipeline):
        conditional, unconditional = pipeline.preprocess(request()).rows
        assert conditional.layout == unconditional.layout
        assert len(conditional.token_ids) == len(unconditional.token_ids) == TOTAL
        differing = [
            i
            for i, pair in enumerate(zip(conditional.token_ids, unconditional.token_ids, strict=True))
            if pair[0] != pair[1]
        ]
        pictures = {i for span in conditional.layout.spans for i in range(span.start, span.end)}
        assert differing
        assert not pictures.intersection(differing)
        assert max(differing) < PREFIX

    def test_guidance_1_has_one_row(self, pipeline):
        (row,) = pipeline.preprocess(request(guidance_scale=1.0)).rows
        assert row == pipeline.preprocess(request()).rows[0]

    def test_another_prompt_changes_only_its_own_tokens(self, pipeline):
        boat, goat = (pipeline.preprocess(request(prompt=prompt)).rows[0].token_ids for prompt in ("a boat", "a goat"))
        assert sum(ours != other for ours, other in zip(boat, goat, strict=True)) == 1


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"references": PICTURES}, "3 reference pictures; this deployment takes 2"),
            ({"prompt": "x" * 100}, "prompt"),
            ({"num_inference_steps": 0}, "num_inference_steps=0 is no int between 1"),
            ({"num_inference_steps": True}, "num_inference_steps=True is no int"),
            ({"guidance_scale": float("nan")}, "guidance_scale=nan is no finite number"),
            ({"seed": -1}, "seed=-1 is no int between 0"),
            ({"references": (PICTURES[0].astype(np.float32),)}, "reference picture 0"),
            ({"references": (PICTURES[0][:, :0],)}, "reference picture 0"),
        ],
    )
    def test_a_request_the_model_does_not_take(self, pipeline, changes, message):
        with pytest.raises(RequestRefusedError, match=message) as refusal:
            pipeline.preprocess(request(**changes))
        assert refusal.value.request_id == "a"

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"layuot": "big"}, DiffusionKVConfigError, "no option 'layuot'; it has layout"),
            ({"layout": "huge"}, DiffusionKVConfigError, "layout='huge' is none of small, big, debug"),
            ({"num_layers": True}, DiffusionKVConfigTypeError, "num_layers=True is a bool"),
            ({"dtype": "float8"}, DiffusionKVConfigError, "dtype='float8' is none of"),
            ({"prefix_tokens": 5}, DiffusionKVConfigError, "prefix_tokens=5 is not between"),
            ({"timestep_shift": 0.0}, DiffusionKVConfigError, "timestep_shift=0.0 is not a positive number"),
        ],
    )
    def test_options_that_make_no_model(self, options, error, message):
        with pytest.raises(error, match=message):
            open_tiny_hunyuan(options, Ranks())


class TestSlicing:
    """`4.6` item 9: the model's slice against the whole row."""

    @pytest.mark.parametrize("hit", [1, IN_SPAN, IN_TEXT, PREFIX])
    def test_a_first_step_behind_a_hit_gives_the_picture_of_the_whole_row(self, pipeline, hit):
        whole = PlainOwner()
        wanted = latents(pipeline, request("a"), whole)
        sliced = PlainOwner(hit_tokens=hit).take_over(whole)
        assert relative_error(latents(pipeline, request("a"), sliced), wanted) <= 1e-5

    @pytest.mark.parametrize("hit", [IN_SPAN, IN_TEXT])
    def test_in_float64_to_the_last_digits(self, hit):
        pipeline, whole = TinyHunyuanPipeline(replace(DEBUG, dtype="float64")), PlainOwner()
        wanted = latents(pipeline, request("a"), whole)
        sliced = PlainOwner(hit_tokens=hit).take_over(whole)
        assert relative_error(latents(pipeline, request("a"), sliced), wanted) <= 1e-13

    def test_a_hit_after_the_prefix_is_refused(self, pipeline):
        state = pipeline.start(pipeline.preprocess(request()))
        step = PlainOwner(hit_tokens=PREFIX + 1).first_step(row_keys([state]), state.prepared.rows[0].layout)
        before = state.latents
        with pytest.raises(PagedAttentionError, match="step 0 was asked for the tokens"):
            pipeline.denoise([state], 0, step)
        assert state.latents is before
        assert state.next_step_index == 0

    def test_recomputing_every_step_gives_the_same_picture(self, pipeline):
        wanted = latents(pipeline, request())
        assert relative_error(latents(pipeline, request(), PlainOwner(recompute=True)), wanted) <= 1e-5


class TestWhatThePrefixDependsOn:
    """The two properties that make a prefix reusable (section 1.1), and what must be in its identity."""

    def prefix(self, pipeline, one, steps=1):
        owner = PlainOwner()
        run(pipeline, [one], owner, steps=steps)
        return torch.stack([kept[:, :PREFIX] for _, kept in sorted(owner.kept.items())])

    def test_not_on_timesteps_targets_noise_or_guidance(self, pipeline):
        wanted = self.prefix(pipeline, request())
        for changes in ({"num_inference_steps": 7}, {"guidance_scale": 4.0}):
            assert torch.equal(self.prefix(pipeline, request(**changes)), wanted)
        assert torch.equal(self.prefix(pipeline, request(), steps=3), wanted)

    def test_text_before_the_first_picture_is_shared_by_all(self, pipeline):
        first = PRESETS["debug"].slots.head_tokens
        wanted = self.prefix(pipeline, request())
        for changes in ({"seed": 7}, {"references": PICTURES[1:]}, {"prompt": "a goat"}):
            assert torch.equal(self.prefix(pipeline, request(**changes))[:, :, :first], wanted[:, :, :first])

    def test_a_picture_is_its_content_and_the_generator_from_its_first_token_on(self, pipeline):
        start = PRESETS["debug"].slots.head_tokens
        wanted = self.prefix(pipeline, request())[:, :, start]
        changed_last_pixels = PICTURES[0].copy()
        changed_last_pixels[-20:, -20:] ^= 255
        for changes in ({"seed": 7}, {"references": (changed_last_pixels, PICTURES[1])}):
            assert relative_error(self.prefix(pipeline, request(**changes))[:, :, start], wanted) > 1e-4


class TestTheGenerator:
    def encoders(self, *, draws):
        source = WeightSource(DEBUG.weight_seed, DEBUG.torch_dtype, torch.device("cpu"))
        codec = PatchCodec(DEBUG.latent_dtype, torch.device("cpu"))
        own = TinyEncoders(DEBUG.transformer, codec, DEBUG.slots.vit_grid, source)
        return _RememberedEncoders(own, draws=draws)

    def test_skipping_an_encoder_without_its_draw_changes_the_picture(self):
        for draws, same in ((True, True), (False, False)):
            encoders = self.encoders(draws=draws)
            pipeline = TinyHunyuanPipeline(DEBUG, encoders=encoders)
            encoded = latents(pipeline, request("a"))
            encoders.skip = True
            remembered = latents(pipeline, request("a"))
            assert torch.equal(encoded, remembered) == same
            assert same or relative_error(remembered, encoded) > 0.1

    def test_one_seed_is_one_picture_and_another_is_another(self, pipeline):
        wanted = latents(pipeline, request())
        assert torch.equal(latents(TinyHunyuanPipeline(DEBUG), request()), wanted)
        assert relative_error(latents(pipeline, request(seed=43)), wanted) > 0.1

    def test_without_a_seed_no_two_pictures_are_equal(self, pipeline):
        assert not torch.equal(latents(pipeline, request(seed=None)), latents(pipeline, request(seed=None)))

    def test_torchs_own_generator_is_left_alone(self, pipeline):
        before = torch.get_rng_state()
        pipeline.decode(run(pipeline, [request()], PlainOwner())[0])
        assert torch.equal(torch.get_rng_state(), before)


class _RememberedEncoders:
    """Encoders that may give what they gave before, with or without drawing as they did."""

    def __init__(self, own, *, draws):
        self.own, self.draws, self.skip, self.given = own, draws, False, {}

    def encode(self, reference, generator):
        key = reference.vae_pixels.sum().item()
        if self.skip:
            if self.draws:
                self.own.encode(reference, generator)
            return self.given[key]
        self.given[key] = self.own.encode(reference, generator)
        return self.given[key]


class TestWaves:
    def test_requests_in_one_forward_get_their_own_pictures(self, pipeline):
        wanted = [latents(pipeline, request(name, seed=seed)) for name, seed in (("a", 1), ("b", 2))]
        states = run(pipeline, [request("a", seed=1), request("b", seed=2)], PlainOwner())
        for state, alone in zip(states, wanted, strict=True):
            assert relative_error(state.latents, alone) <= 1e-5
        assert relative_error(wanted[0], wanted[1]) > 0.1

    @pytest.mark.parametrize(
        ("changes", "what"),
        [({"references": PICTURES[:1]}, "row layout"), ({"num_inference_steps": 4}, "number of steps")],
    )
    def test_requests_that_do_not_belong_together(self, pipeline, changes, what):
        states = [pipeline.start(pipeline.preprocess(one)) for one in (request("a"), request("b", **changes))]
        step = PlainOwner().first_step(row_keys(states), states[0].prepared.rows[0].layout)
        with pytest.raises(DiffusionKVError, match=f"'b' has another {what} than 'a'"):
            pipeline.denoise(states, 0, step)

    def test_a_step_out_of_turn(self, pipeline):
        state = pipeline.start(pipeline.preprocess(request()))
        step = PlainOwner().first_step(row_keys([state]), state.prepared.rows[0].layout)
        with pytest.raises(DiffusionKVError, match="step 1 was asked for; of 3 steps 0 are done"):
            pipeline.denoise([state], 1, step)
        with pytest.raises(DiffusionKVError, match="0 of 3 steps are done; only a finished picture is decoded"):
            pipeline.decode(state)


class TestAdapters:
    def lora(self, tmp_path, *, scale=1.0, seed=5, epoch=1):
        path = tmp_path / f"adapter-{seed}.safetensors"
        make_adapter(path, DEBUG.transformer, rank=2, seed=seed)
        return LoRARequest("brush", 1, str(path), epoch, scale)

    def test_an_adapter_alters_the_picture_as_strongly_as_its_scale(self, pipeline, tmp_path):
        plain = latents(pipeline, request())
        weak, strong = (
            relative_error(latents(pipeline, request(lora=self.lora(tmp_path, scale=scale))), plain)
            for scale in (0.1, 1.0)
        )
        assert 1e-4 < weak < strong

    def test_scale_0_changes_nothing(self, pipeline, tmp_path):
        one = request(lora=self.lora(tmp_path, scale=0.0))
        assert torch.equal(latents(pipeline, one), latents(pipeline, request()))

    def test_other_weights_under_one_path_are_read_when_the_load_epoch_grows(self, pipeline, tmp_path):
        first = self.lora(tmp_path)
        wanted = latents(pipeline, request(lora=first))
        make_adapter(first.path, DEBUG.transformer, rank=2, seed=6)
        assert torch.equal(latents(pipeline, request(lora=first)), wanted)
        assert not torch.equal(latents(pipeline, request(lora=replace(first, load_epoch=2))), wanted)

    def test_a_file_that_is_none(self, pipeline, tmp_path):
        missing = LoRARequest("brush", 1, str(tmp_path / "none.safetensors"), 1, 1.0)
        with pytest.raises(RequestRefusedError, match="adapter 'brush': there is no file"):
            pipeline.preprocess(request(lora=missing))
        text = tmp_path / "text.safetensors"
        text.write_text("no tensors")
        with pytest.raises(RequestRefusedError, match="cannot be read"):
            pipeline.preprocess(request(lora=replace(missing, path=str(text))))

    def test_an_adapter_of_another_model(self, tmp_path):
        lora = self.lora(tmp_path)
        pipeline = TinyHunyuanPipeline(replace(DEBUG, num_layers=1))
        with pytest.raises(RequestRefusedError, match="does not fit a model of 1 layers"):
            pipeline.preprocess(request(lora=lora))


def test_a_picture_is_rgb_of_the_targets_size(pipeline):
    (state,) = run(pipeline, [request()], PlainOwner())
    picture = pipeline.decode(state)
    assert picture.shape == (64, 64, 3)
    assert picture.dtype == np.uint8
    assert picture.std() > 5


def test_the_full_model_has_the_size_it_says():
    pipeline = TinyHunyuanPipeline(TinyHunyuanOptions(layout="small"))
    shape = pipeline.kv_shape
    assert (shape.num_layers, shape.num_query_heads, shape.num_kv_heads, shape.head_size) == (6, 6, 2, 64)
