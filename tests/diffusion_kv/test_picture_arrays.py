# SPDX-License-Identifier: Apache-2.0
"""A client's picture may be an array that nobody may write to, such as a view of a decoder's own memory."""

import numpy as np
import torch

from omni_core.diffusion_kv.pipeline import DiffusionRequest
from omni_core.diffusion_kv.tiny_hunyuan import TinyHunyuanOptions, TinyHunyuanPipeline


def test_a_read_only_picture_is_taken_and_left_as_it_is():
    pipeline = TinyHunyuanPipeline(TinyHunyuanOptions(layout="debug"))
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    read_only = np.frombuffer(pixels.tobytes(), np.uint8).reshape(8, 8, 3)
    (of_pixels,) = pipeline.preprocess(DiffusionRequest("a", "a fox", (pixels,))).references
    (of_read_only,) = pipeline.preprocess(DiffusionRequest("a", "a fox", (read_only,))).references
    assert torch.equal(of_pixels.vae_pixels, of_read_only.vae_pixels)
    assert read_only.tobytes() == pixels.tobytes()
