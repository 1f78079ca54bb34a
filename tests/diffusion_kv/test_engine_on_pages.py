# SPDX-License-Identifier: Apache-2.0
"""The whole engine on vLLM's KV manager: what concurrent requests hit, and that nobody's picture changes by it."""

import numpy as np
import pytest
import torch
from diffusion_kv.recorded_parts import request

from omni_core.diffusion_kv.deploy import parse_deploy
from omni_core.diffusion_kv.tiny_hunyuan import TinyHunyuanOptions, make_adapter
from omni_core.integrations.diffusion.assembly import open_engine
from omni_core.integrations.diffusion.results import Outcome

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]

OWNERS = ("gathered", "kernel")
PREFIX, TOTAL, BLOCK = 91, 110, 16
HIT = PREFIX // BLOCK * BLOCK
PICTURES = tuple(np.random.default_rng(number).integers(0, 256, (40, 30, 3), np.uint8) for number in range(2))


def opened(owner="gathered", **settings):
    mode = {} if owner == "dense" else {"diffusion_kv_mode": "paged_scheduler", "attention_owner": owner}
    pages = {} if owner == "dense" else {"kv_cache_memory_bytes": 2**22, "enable_prefix_caching": True}
    entry = {
        "stage_id": 0,
        "model_options": {"layout": "debug"},
        "block_size": BLOCK,
        "max_num_seqs": 4,
        **mode,
        **pages,
        **settings,
    }
    return open_engine(parse_deploy({"pipeline": "tiny_hunyuan_dit", "stages": [entry]}).stage())


def asked(request_id="a", **changes):
    return request(request_id, **{"references": PICTURES, **changes})


@pytest.fixture(scope="module")
def dense():
    """Latents of any request, computed densely and alone."""
    engine = opened("dense")

    def latents(one):
        (finished,) = engine.generate([one])
        finished.picture()
        return finished.latents

    yield latents
    engine.close()


def hits(finished):
    return {one.request_id: one.kv.cached_prefix_tokens for one in finished}


@pytest.mark.parametrize("caching", [False, True])
def test_gathered_pages_give_the_dense_latents_bit_for_bit(dense, caching):
    with opened(enable_prefix_caching=caching) as engine:
        for name in ("cold", "warm"):
            (finished,) = engine.generate([asked(name)])
            assert torch.equal(finished.latents, dense(asked(name)))
            assert finished.kv.cached_prefix_tokens == (HIT if caching and name == "warm" else 0)
            assert finished.first_step_tokens == 2 * (TOTAL - finished.kv.cached_prefix_tokens)


def test_the_kernel_gives_the_dense_latents_within_rounding(dense):
    with opened("kernel") as engine:
        cold, warm, again = engine.generate([asked("cold"), asked("warm"), asked("again")])
    wanted = dense(asked())
    for finished in (cold, warm, again):
        assert (finished.latents - wanted).norm() <= 1e-5 * wanted.norm()
    assert torch.equal(warm.latents, again.latents)
    assert hits([cold, warm, again]) == {"cold": 0, "warm": HIT, "again": HIT}


@pytest.mark.parametrize("owner", OWNERS)
def test_a_request_hits_what_a_running_one_published_after_its_first_step(owner):
    with opened(owner) as engine:
        engine.add_request(asked("first", num_inference_steps=6))
        engine.step()
        engine.add_request(asked("second", num_inference_steps=2))
        engine.step()
        stats = engine.stats()
        assert (stats.running_waves, stats.kv.hit_tokens) == (2, 2 * HIT)
        finished = engine.run()
    assert [one.request_id for one in finished] == ["second", "first"]
    assert hits(finished) == {"first": 0, "second": HIT}


def test_of_equal_requests_that_come_together_one_computes_the_prefix(dense):
    with opened() as engine:
        finished = engine.generate([asked(name) for name in "abcd"])
        assert engine.stats().forwards == 2 * 3  # the first alone, then the others in one wave
    assert hits(finished) == {"a": 0, "b": HIT, "c": HIT, "d": HIT}
    for one in finished:
        assert torch.equal(one.latents, dense(asked()))


def test_requests_of_one_wave_that_share_less_than_a_page_start_together():
    with opened(block_size=128, kv_cache_memory_bytes=2**23) as engine:
        engine.generate([asked("a"), asked("b")])
        assert engine.stats().forwards == 3


def test_another_prompt_hits_the_pictures_and_keeps_its_own_latents(dense):
    with opened() as engine:
        engine.generate([asked("warms", prompt="another")])
        (partial,) = engine.generate([asked("partial")])
    assert 0 < partial.kv.cached_prefix_tokens < HIT
    assert torch.equal(partial.latents, dense(asked()))


def test_an_abort_after_step_0_leaves_its_prefix_to_others(dense):
    with opened() as engine:
        engine.add_request(asked("gone"))
        engine.step()
        engine.abort("gone")
        (gone,) = engine.step()
        (finished,) = engine.generate([asked("gone")])  # the same id, another generation
        assert engine.stats().kv.free_pages == engine.stats().kv.total_pages
    assert gone.outcome is Outcome.ABORTED
    assert finished.kv.cached_prefix_tokens == HIT
    assert torch.equal(finished.latents, dense(asked()))


def test_aborts_at_any_moment_leave_every_page_free():
    with opened(max_num_seqs=2) as engine:
        for name in "abcdef":
            engine.add_request(asked(name, prompt=name))
        for victim in ("f", "a", "c"):  # waiting, running, wherever it is
            engine.abort(victim)
            engine.step()
        ended = engine.run()
        stats = engine.stats()
    assert {one.request_id for one in ended if one.outcome is Outcome.COMPLETED} <= {"b", "d", "e"}
    assert stats.completed_requests + stats.aborted_requests == 6
    assert stats.kv.free_pages == stats.kv.total_pages


def test_without_guidance_one_row_runs_and_hits(dense):
    single = asked(guidance_scale=1.0)
    with opened() as engine:
        cold, warm = engine.generate([single, asked("warm", guidance_scale=1.0)])
        (both,) = engine.generate([asked("both")])
    assert (cold.rows, cold.first_step_tokens, warm.first_step_tokens) == (1, TOTAL, TOTAL - HIT)
    for finished in (cold, warm):
        assert torch.equal(finished.latents, dense(single))
    assert both.kv.cached_prefix_tokens == 0  # its unconditional row is new, and both rows start at one token
    assert torch.equal(both.latents, dense(asked()))


def test_adapters_share_no_pages_and_no_forward(dense, tmp_path):
    path = str(tmp_path / "ink.safetensors")
    make_adapter(path, TinyHunyuanOptions(layout="debug").transformer, rank=2, seed=1)
    with opened() as engine:
        engine.loras.load("ink", path)
        half, whole = engine.loras.request("ink", 0.5), engine.loras.request("ink")
        plain = [asked("plain"), asked("half", lora=half), asked("whole", lora=whole)]
        finished = engine.generate(plain)
        assert hits(finished) == {"plain": 0, "half": 0, "whole": 0}
        assert hits(engine.generate([asked("whole again", lora=whole)])) == {"whole again": HIT}
        engine.loras.load("ink", path)  # the same file, perhaps with other weights in it
        (reloaded,) = engine.generate([asked("reloaded", lora=engine.loras.request("ink"))])
    assert reloaded.kv.cached_prefix_tokens == 0
    for one, given in zip(finished, plain, strict=True):
        assert torch.equal(one.latents, dense(given))
    assert torch.equal(reloaded.latents, finished[2].latents)


def test_a_reset_forgets_and_new_weights_are_never_hit():
    with opened() as engine:
        engine.generate([asked("a")])
        assert engine.reset_prefix_cache()
        assert hits(engine.generate([asked("b")])) == {"b": 0}
        engine.update_weights(lambda: None)
        assert hits(engine.generate([asked("c")])) == {"c": 0}
        assert hits(engine.generate([asked("d")])) == {"d": HIT}


def test_without_a_seed_no_picture_is_shared():
    with opened() as engine:
        engine.generate([asked("a", seed=None)])
        (finished,) = engine.generate([asked("b", seed=None)])
    assert finished.kv.cached_prefix_tokens < 11 + BLOCK  # the text before the first picture at most


def test_a_small_pool_serves_one_after_the_other_and_evicts(dense):
    needed = 2 * -(-TOTAL // BLOCK)
    page_bytes = 2 * 2 * 2 * 32 * BLOCK * 4  # layers, keys and values, heads, head size, tokens, float32
    with opened(kv_cache_memory_bytes=(needed + 2) * page_bytes) as engine:
        prompts = [asked(str(number), prompt=str(number % 3), seed=number % 2) for number in range(8)]
        finished = engine.generate(prompts)
        stats = engine.stats().kv
    assert stats.total_pages < needed + 3
    assert stats.evicted_pages > 0
    for one, given in zip(finished, prompts, strict=True):
        assert torch.equal(one.latents, dense(given))
