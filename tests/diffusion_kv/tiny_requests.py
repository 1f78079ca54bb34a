# SPDX-License-Identifier: Apache-2.0
"""Pictures and requests for tests of tiny-hunyuan."""

import numpy as np

from omni_core.diffusion_kv.pipeline import DiffusionRequest
from omni_core.diffusion_kv.tiny_hunyuan import TinyHunyuanOptions, TinyHunyuanPipeline


def picture(number, height=70, width=90):
    """A picture with its own colours everywhere: no two numbers share a patch."""
    coarse = np.random.default_rng(number).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    return np.ascontiguousarray(np.kron(coarse, np.ones((10, 10, 1), dtype=np.uint8))[:height, :width])


def request(request_id="one", *, references=(1, 2), prompt="a cat", seed=42, guidance_scale=2.5, steps=3, lora=None):
    return DiffusionRequest(
        request_id=request_id,
        prompt=prompt,
        references=tuple(picture(number) for number in references),
        seed=seed,
        guidance_scale=guidance_scale,
        num_inference_steps=steps,
        lora=lora,
    )


def debug_pipeline(*, dtype="float64", **options):
    return TinyHunyuanPipeline(TinyHunyuanOptions(layout="debug", dtype=dtype, **options))


def relative_error(found, expected):
    return float((found - expected).norm() / expected.norm())
