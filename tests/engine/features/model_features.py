# SPDX-License-Identifier: Apache-2.0
"""Kinds of models."""

import numpy as np
from feature_models import deepseek_v2, gemma3, idefics3, mistral_sliding_window, qwen3_next
from scenario import Prompts, hits, refuse, serve


def _two_waves(seed, *, shared, turns=2):
    prompts = Prompts(seed)
    waves = [prompts.named(f"wave{turn}", "a", 3, shared=shared, own=20) for turn in range(turns)]

    def drive(engine):
        for wave in waves:
            engine.wave(wave, max_tokens=20)

    return drive


def sliding_window_only(folder):
    return refuse(mistral_sliding_window(folder), "sliding_window")


def sliding_and_full(folder):
    return serve(gemma3(folder), _two_waves(31, shared=200), lambda one: hits(one, 5 * 192), num_blocks=400)


def sliding_and_full_in_one_group(folder):
    return serve(
        gemma3(folder),
        _two_waves(32, shared=200),
        lambda one: hits(one, 5 * 192),
        disable_hybrid_kv_cache_manager=True,
    )


def linear_attention_and_full(folder):
    # Not exact: a hit of 544 tokens ends inside one of the kernel's chunks of 64, which then lie elsewhere.
    return serve(
        qwen3_next(folder),
        _two_waves(33, shared=600),
        lambda one: hits(one, 3 * 544),
        exact=False,
        dtype="bfloat16",
        num_blocks=400,
    )


def latent_attention(folder):
    # Not exact: what the CPU kernel computes for a row depends on how many stand beside it.
    return serve(
        deepseek_v2(folder), _two_waves(36, shared=200), lambda one: hits(one, 5 * 192), exact=False, dtype="bfloat16"
    )


def hits_inside_a_block(folder):
    return serve(
        qwen3_next(folder),
        _two_waves(34, shared=700),
        lambda one: hits(one, 2 * 672),
        exact=False,
        dtype="bfloat16",
        num_blocks=400,
        prefix_match_unit=32,
    )


def pictures(folder):
    random = np.random.default_rng(35)
    cat, dog = (random.integers(0, 256, (96, 96, 3), np.uint8) for _ in range(2))
    text = "What stands here? <image> Tell me all that you can see of it."
    short, two = "Now <image>!", "First <image> and then <image> there."

    def drive(engine):
        asked = [(text, [cat]), (text, [cat]), (text, [dog]), (two, [cat, dog]), (two, [cat, dog]), (two, [cat, cat])]
        asked += [(short, [cat]), (short, [cat])]
        for index, (prompt, shown) in enumerate(asked):
            engine.add(f"picture-{index}", {"prompt": prompt, "multi_modal_data": {"image": shown}})
            engine.run()

    def shown(engine):
        cached = [engine.requests[f"picture-{index}"].num_cached_tokens for index in range(8)]
        inside = sum(_ends_inside_a_picture(engine, f"picture-{index}") for index in range(8))
        return hits(engine, 96) | {
            "hits that end inside a picture": (inside, 2),
            "another picture hits no row of the first": (int(cached[2] < cached[1]), 1),
        }

    return serve(
        idefics3(folder), drive, shown, skip_tokenizer_init=False, limit_mm_per_prompt={"image": 2}, num_blocks=400
    )


def _ends_inside_a_picture(engine, request_id):
    tapped = engine.session.tap.requests[engine.internal_ids(request_id)[0]]
    cached = engine.requests[request_id].num_cached_tokens
    return bool(cached) and cached - 1 in tapped.pictures and cached in tapped.pictures
