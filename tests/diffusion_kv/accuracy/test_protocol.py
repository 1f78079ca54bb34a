# SPDX-License-Identifier: Apache-2.0
"""50 steps against the committed golden: every mode, a partial hit and repeated full ones.

Thresholds. In float32 only rounding differs, and rounding moves a few pixels by one level of 255: a picture in which
every pixel is off by one has 48.1 dB, so 50 dB allows fewer than two thirds of them. In bfloat16 the golden is still
that of float32, and 50 steps carry its rounding along.
"""

from dataclasses import replace

import numpy as np
import pytest
from diffusion_kv.accuracy.protocol import FIRST_STEP_TOKENS, FULL_HIT, PARTIAL_HIT, STEPS, golden, run

from omni_core.diffusion_kv.tiny_hunyuan.layouts import PRESETS

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]

THRESHOLDS = {"float32": (50.0, 0.999), "bfloat16": (25.0, 0.90)}
"""By dtype: PSNR in dB and SSIM."""


def computed_tokens(layout, hit_tokens):
    """Of each row: everything behind the hit, then the target alone, as if there had been none."""
    slots = PRESETS[layout].slots
    geometry = slots.row_layout(2, slots.tokens_before_tail(2) + slots.tail_tokens).geometry
    first = (hit_tokens, geometry.total_tokens - hit_tokens)
    return (first, *[(geometry.prefix_tokens, geometry.target_tokens)] * (STEPS - 1))


@pytest.mark.parametrize("layout", ["debug", "big"])
def test_both_hits_reach_into_both_pictures(layout):
    """The partial one stops inside the second."""
    slots = PRESETS[layout].slots
    start = slots.reference_starts(2)[1]
    assert start < PARTIAL_HIT[layout] < start + slots.reference_tokens < FULL_HIT[layout]


@pytest.mark.parametrize(
    ("layout", "owner", "dtype"),
    [
        ("debug", "gathered", "float32"),
        ("debug", "kernel", "float32"),
        ("debug", "kernel", "bfloat16"),
        pytest.param("big", "kernel", "float32", marks=pytest.mark.slow),
        pytest.param("big", "gathered", "float32", marks=pytest.mark.slow),
    ],
)
def test_every_mode_gives_the_golden_picture(layout, owner, dtype):
    wanted = golden(layout)
    least_psnr_db, least_ssim = THRESHOLDS[dtype]
    scored = run(layout, owner=owner, dtype=dtype)
    assert [one.hit_tokens for one in scored] == [0, 0, PARTIAL_HIT[layout], FULL_HIT[layout], FULL_HIT[layout]]
    for one in scored:
        assert one.first_step_tokens == FIRST_STEP_TOKENS[layout][one.hit_tokens]
        assert one.computed == computed_tokens(layout, one.hit_tokens)
        assert one.psnr_db(wanted) >= least_psnr_db, (one.mode, one.name)
        assert one.ssim(wanted) >= least_ssim, (one.mode, one.name)
    full, again = scored[-2:]
    assert np.array_equal(full.picture, again.picture)


def test_the_scores_tell_another_picture_apart():
    """So the thresholds can fail: an inverted corner, and a picture moved by one pixel."""
    wanted = golden("debug")
    (dense, *_) = run("debug", owner="gathered")
    corner = dense.picture.copy()
    corner[:16, :16] ^= 255
    for wrong in (corner, np.roll(dense.picture, 1, axis=1)):
        other = replace(dense, picture=wrong)
        assert other.psnr_db(wanted) < 25.0
        assert other.ssim(wanted) < 0.99
