# SPDX-License-Identifier: Apache-2.0
"""Many random requests of 16 pages through a pool of 25: every picture right, no foreign page written, none lost.

After each request every page that no later one may read is filled with NaN, vLLM's null page too. What each page holds
after every single step, also of requests that run at once, is looked at by tests/diffusion_kv/fuzz.
"""

import random

import numpy as np
import pytest
import torch
from diffusion_kv.accuracy.stages import asked, generate, opened, relative_error
from diffusion_kv.accuracy.watched_pages import opened_in_view

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]

MODEL = {"layout": "debug", "model": {"prefix_tokens": 97}}
"""Two rows of 116 tokens: 8 pages of 16 each, 6 of them full prefix pages."""
PAGES_PER_REQUEST = 16
PAGE_BYTES = 2 * 2 * 2 * 16 * 32 * 4
"""Layers, keys and values, heads, tokens, head size, float32, of the debug layout."""
USABLE_PAGES = 25
FULL_HIT = 96
PICTURES = tuple(np.random.default_rng(number).integers(0, 256, (64, 64, 3), np.uint8) for number in range(4))


def random_request(draw, name):
    return asked(
        name,
        prompt=draw.choice(("a fox", "a fix", "b fox")),
        references=tuple(draw.choices(PICTURES, k=2)),
        seed=draw.choice((1, 2)),
    )


def tight(owner, monkeypatch):
    return opened_in_view(
        owner, monkeypatch, block_size=16, kv_cache_memory_bytes=(USABLE_PAGES + 1) * PAGE_BYTES, **MODEL
    )


@pytest.mark.parametrize(
    ("owner", "num_requests"),
    [("gathered", 120), ("kernel", 120), pytest.param("kernel", 2000, marks=pytest.mark.slow)],
)
def test_no_picture_is_wrong_and_no_page_is_lost(owner, num_requests, monkeypatch):
    draw = random.Random(3)
    wanted = {}
    with opened("dense", **MODEL) as dense, tight(owner, monkeypatch) as (engine, pages):
        pages.poison()
        for number in range(num_requests):
            request = random_request(draw, f"request {number}")
            key = (request.prompt, tuple(id(picture) for picture in request.references), request.seed)
            if key not in wanted:
                wanted[key] = generate(dense, request)[0].latents
            before, published = pages.content(), pages.readable()
            (finished,) = generate(engine, request)
            hit, own = pages.hit_and_own()
            assert torch.isfinite(finished.latents).all()
            assert relative_error(finished.latents, wanted[key]) <= 1e-5
            assert len(own) == PAGES_PER_REQUEST - 2 * finished.kv.cached_prefix_tokens // 16
            assert hit.isdisjoint(own)
            changed = pages.changed_since(before)
            assert changed <= own
            assert own - changed <= published  # an evicted page may be given what it held
            kv = engine.stats().kv
            assert (kv.free_pages, kv.total_pages) == (USABLE_PAGES, USABLE_PAGES)
            pages.poison()
    assert kv.requests == num_requests
    assert kv.hit_tokens > 0.05 * kv.queried_tokens
    assert kv.evicted_pages > num_requests


@pytest.mark.parametrize("owner", ["gathered", "kernel"])
def test_a_hit_page_that_was_spoilt_shows(owner, monkeypatch):
    """So the poison is one: what a request does read, it is hurt by."""
    with tight(owner, monkeypatch) as (engine, pages):
        generate(engine, asked("cold", references=PICTURES[:2]))
        spoilt = min(pages.readable())
        for layer in pages.layers:
            layer[spoilt] = torch.nan
        (warm,) = generate(engine, asked("warm", references=PICTURES[:2]))
    assert warm.kv.cached_prefix_tokens == FULL_HIT
    assert spoilt in pages.hit_and_own()[0]
    assert not torch.isfinite(warm.latents).all()
