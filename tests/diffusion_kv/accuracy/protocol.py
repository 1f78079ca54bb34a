# SPDX-License-Identifier: Apache-2.0
"""The accuracy protocol: another prompt warms the cache, then the original hits it in part and, repeatedly, in full.

Two reference pictures, guidance 2.5, 50 steps, seed 42, dense, paged, and paged with prefix caching. Only pictures of
the original prompt are scored, against a golden: the picture of a dense run, committed beside the tests.
"""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from diffusion_kv.accuracy.stages import asked, generate, opened
from PIL import Image
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from omni_core.diffusion_kv.tiny_hunyuan import TinyHunyuanPipeline

FIXTURES = Path(__file__).parents[2] / "fixtures" / "diffusion"
EXAMPLES = Path(__file__).parents[3] / "examples" / "diffusion"
OTHER = "other prompt"
STEPS = 50
PAGE_SIZE = {"debug": 16, "big": 32}
FULL_HIT = {"debug": 80, "big": 1632}
PARTIAL_HIT = {"debug": 64, "big": 1504}
"""Both reach into the second picture, [44, 70) and [782, 1507)."""
FIRST_STEP_TOKENS = {
    "debug": {0: 220, 64: 92, 80: 60},
    "big": {0: 4074, 1504: 1066, 1632: 810},
}


@dataclass(frozen=True)
class Scored:
    """One picture of the original prompt."""

    mode: str
    name: str
    picture: np.ndarray
    hit_tokens: int
    first_step_tokens: int
    """What the scheduler left to the first step."""
    computed: tuple[tuple[int, int], ...]
    """Per step, the first token the model computed of each row, and how many."""

    def psnr_db(self, golden):
        """Infinite for equal pictures."""
        if np.array_equal(golden, self.picture):
            return float("inf")
        return float(peak_signal_noise_ratio(golden, self.picture))

    def ssim(self, golden):
        return float(structural_similarity(golden, self.picture, channel_axis=2))


class WatchedPipeline(TinyHunyuanPipeline):
    """Writes down what the model computes of each row."""

    def __init__(self, options):
        super().__init__(options)
        self.computed = defaultdict(list)

    def denoise(self, states, step_index, attention):
        super().denoise(states, step_index, attention)
        (name,) = {row.request_id for row in attention.rows}
        self.computed[name].append((attention.query_start_tokens, attention.num_query_tokens))


def golden(layout):
    return np.asarray(Image.open(FIXTURES / f"golden-{layout}.png").convert("RGB"))


def references():
    return tuple(np.asarray(Image.open(EXAMPLES / name).convert("RGB")) for name in ("lighthouse.png", "boat.png"))


def run(layout, *, owner="kernel", dtype="float32"):
    """Every scored picture; the first is the dense one."""

    def ask(name, prompt="a boat at sea"):
        return asked(name, prompt=prompt, references=references(), guidance_scale=2.5, num_inference_steps=STEPS)

    scored = []
    for mode, settings, requests in (
        ("dense", {"owner": "dense"}, [ask("dense")]),
        ("paged", {"owner": owner, "enable_prefix_caching": False}, [ask("no cache")]),
        (
            "paged with prefix caching",
            {"owner": owner},
            [ask(OTHER, prompt="a red house"), ask("partial hit"), ask("full hit"), ask("full hit again")],
        ),
    ):
        pipelines = []

        def watched(options, made=pipelines):
            made.append(WatchedPipeline(options))
            return made[0]

        with opened(
            layout=layout, model={"dtype": dtype}, pipeline=watched, block_size=PAGE_SIZE[layout], **settings
        ) as engine:
            finished = generate(engine, *requests)
        scored += [
            Scored(
                mode=mode,
                name=one.request_id,
                picture=one.image,
                hit_tokens=one.kv.cached_prefix_tokens,
                first_step_tokens=one.first_step_tokens,
                computed=tuple(pipelines[0].computed[one.request_id]),
            )
            for one in finished
            if one.request_id != OTHER
        ]
    return scored
