# SPDX-License-Identifier: Apache-2.0
"""What must equal what, and how exactly, at the small layout: prefix 543, two rows of 802 tokens, pages of 32."""

from dataclasses import replace

import pytest
import torch
from diffusion_kv.accuracy.stages import PICTURE, asked, generate, hits, opened, relative_error
from diffusion_kv.plain_owner import PlainOwner, run

from omni_core.diffusion_kv.tiny_hunyuan import TinyHunyuanOptions, TinyHunyuanPipeline, make_adapter
from omni_core.diffusion_kv.tiny_hunyuan.layouts import PRESETS

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]

OTHER_PROMPT = asked("other prompt", prompt="a goat")
PARTIAL, FULL = 480, 512
"""480 lies inside the picture, [37, 490)."""


@pytest.fixture(scope="module")
def dense():
    with opened("dense") as engine:
        yield generate(engine, asked())[0].latents


@pytest.fixture(scope="module")
def served():
    """By owner: the request without caching; and after another prompt, cold there, then a partial and two full hits."""
    given = {}

    def by(owner):
        if owner not in given:
            with opened(owner, enable_prefix_caching=False) as engine:
                (off,) = generate(engine, asked())
            with opened(owner) as engine:
                cold = generate(engine, asked("cold"))[0]
                assert engine.reset_prefix_cache()
                _, partial, full, again = generate(
                    engine, OTHER_PROMPT, asked("partial"), asked("full"), asked("again")
                )
            given[owner] = {"off": off, "cold": cold, "partial": partial, "full": full, "again": again}
        return given[owner]

    return by


def test_dense_keys_and_values_give_what_recomputing_every_step_gives(dense):
    pipeline = TinyHunyuanPipeline(TinyHunyuanOptions(layout="small"))
    (state,) = run(pipeline, [asked()], PlainOwner(recompute=True))
    assert relative_error(dense, state.latents) <= 1e-5


def test_gathered_pages_are_dense_bit_for_bit(served, dense):
    assert torch.equal(served("gathered")["off"].latents, dense)


def test_the_kernel_is_dense_within_rounding(served, dense):
    assert relative_error(served("kernel")["off"].latents, dense) <= 1e-5


@pytest.mark.parametrize("owner", ["gathered", "kernel"])
class TestHits:
    def test_they_are_as_long_as_they_can_be(self, served, owner):
        given = served(owner)
        assert hits(given.values()) == [0, 0, PARTIAL, FULL, FULL]
        assert [one.first_step_tokens for one in given.values()] == [1604, 1604, 644, 580, 580]

    def test_caching_that_finds_nothing_changes_no_bit(self, served, owner):
        assert torch.equal(served(owner)["cold"].latents, served(owner)["off"].latents)

    @pytest.mark.parametrize("hit", ["partial", "full"])
    def test_a_hit_gives_what_no_cache_gives(self, served, owner, hit):
        assert relative_error(served(owner)[hit].latents, served(owner)["off"].latents) <= 1e-5

    def test_two_hits_at_one_boundary_are_equal_bit_for_bit(self, served, owner):
        full, again = served(owner)["full"], served(owner)["again"]
        assert torch.equal(full.latents, again.latents)
        assert (full.image == again.image).all()


def test_a_prefix_of_whole_pages_is_hit_whole_with_an_odd_number_of_queries():
    with opened("gathered", model={"prefix_tokens": 544}) as engine:
        cold, warm = generate(engine, asked("cold"), asked("warm"))
    assert hits([cold, warm]) == [0, 544]
    assert relative_error(warm.latents, cold.latents) <= 1e-5


@pytest.mark.parametrize(
    ("dtype", "owner", "gate"),
    [("float64", "gathered", 1e-13), ("bfloat16", "kernel", 2e-2), ("bfloat16", "gathered", 2e-2)],
)
def test_a_hit_in_other_types(dtype, owner, gate):
    with opened(owner, model={"dtype": dtype}) as engine:
        cold, warm = generate(engine, asked("cold"), asked("warm"))
    assert hits([cold, warm]) == [0, FULL]
    assert relative_error(warm.latents, cold.latents) <= gate


def test_guidance_1_has_one_row_and_hits_the_conditional_row_of_others(dense):
    one_row = asked("one row", guidance_scale=1.0)
    with opened("dense") as engine:
        (wanted,) = generate(engine, one_row)
    with opened("gathered") as engine:
        _, warm = generate(engine, asked("two rows"), one_row)
    assert hits([warm]) == [FULL]
    assert warm.first_step_tokens == 802 - FULL
    assert relative_error(warm.latents, wanted.latents) <= 1e-5
    assert relative_error(warm.latents, dense) > 1e-2


def test_an_adapter_hits_its_own_pages_and_no_others(tmp_path):
    path = tmp_path / "brush.safetensors"
    make_adapter(path, PRESETS["small"].transformer, rank=2, seed=5)
    pictures = {}
    for owner in ("dense", "gathered"):
        with opened(owner) as engine:
            engine.loras.load("brush", str(path))
            lora = engine.loras.request("brush")
            pictures[owner] = generate(engine, asked("plain"), asked("cold", lora=lora), asked("warm", lora=lora))
    plain, cold, warm = pictures["gathered"]
    assert hits([plain, cold, warm]) == [0, 0, FULL]
    for ours, wanted in zip(pictures["gathered"], pictures["dense"], strict=True):
        assert relative_error(ours.latents, wanted.latents) <= 1e-5
    assert relative_error(cold.latents, plain.latents) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("owner", ["gathered", "kernel"])
def test_the_big_layout(owner):
    """Two pictures, prefix 1,634, two rows of 2,037 tokens; 1,504 lies inside the second picture."""
    ours, other = (asked(name, references=(PICTURE, PICTURE[::-1].copy())) for name in ("ours", "other"))
    with opened("dense", layout="big") as engine:
        (wanted,) = generate(engine, ours)
    with opened(owner, layout="big", enable_prefix_caching=False) as engine:
        (off,) = generate(engine, ours)
    with opened(owner, layout="big") as engine:
        warm = generate(engine, replace(other, prompt="a goat"), ours, ours, ours)
    assert hits(warm) == [0, 1504, 1632, 1632]
    assert [one.first_step_tokens for one in warm] == [4074, 1066, 810, 810]
    assert torch.equal(off.latents, wanted.latents) or owner == "kernel"
    for one in (off, *warm[1:]):
        assert relative_error(one.latents, wanted.latents) <= 1e-5
    assert torch.equal(warm[2].latents, warm[3].latents)
