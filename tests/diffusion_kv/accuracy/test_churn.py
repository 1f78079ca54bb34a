# SPDX-License-Identifier: Apache-2.0
"""Many random requests through a pool that holds little more than one: every picture right, no page lost.

What each page holds after every single step is looked at by tests/diffusion_kv/fuzz, with NaN in all free ones.
"""

import random

import numpy as np
import pytest
from diffusion_kv.accuracy.stages import asked, generate, opened, relative_error

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]

PAGE_BYTES = 2 * 2 * 2 * 16 * 32 * 4
"""Layers, keys and values, heads, tokens, head size, float32, of the debug layout."""
USABLE_PAGES = 25
PICTURES = tuple(np.random.default_rng(number).integers(0, 256, (64, 64, 3), np.uint8) for number in range(4))


def random_request(draw, name):
    return asked(
        name,
        prompt=draw.choice(("a fox", "a fix", "b fox")),
        references=tuple(draw.choices(PICTURES, k=2)),
        seed=draw.choice((1, 2)),
    )


@pytest.mark.parametrize(
    ("owner", "num_requests"),
    [("gathered", 120), ("kernel", 120), pytest.param("kernel", 2000, marks=pytest.mark.slow)],
)
def test_no_picture_is_wrong_and_no_page_is_lost(owner, num_requests):
    draw = random.Random(3)
    wanted = {}
    with (
        opened("dense", layout="debug") as dense,
        opened(owner, layout="debug", block_size=16, kv_cache_memory_bytes=(USABLE_PAGES + 1) * PAGE_BYTES) as engine,
    ):
        for number in range(num_requests):
            request = random_request(draw, f"request {number}")
            key = (request.prompt, tuple(id(picture) for picture in request.references), request.seed)
            if key not in wanted:
                wanted[key] = generate(dense, request)[0].latents
            (finished,) = generate(engine, request)
            assert relative_error(finished.latents, wanted[key]) <= 1e-5
            kv = engine.stats().kv
            assert (kv.free_pages, kv.total_pages) == (USABLE_PAGES, USABLE_PAGES)
    assert kv.requests == num_requests
    assert kv.hit_tokens > 0.1 * kv.queried_tokens
    assert kv.evicted_pages > num_requests
