# SPDX-License-Identifier: Apache-2.0
"""Whole stages of tiny-hunyuan, opened as a deploy file opens them, and what their requests are compared by."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from omni_core.diffusion_kv.deploy import parse_deploy
from omni_core.diffusion_kv.pipeline import DiffusionRequest
from omni_core.diffusion_kv.tiny_hunyuan import TinyHunyuanOptions
from omni_core.integrations.diffusion.assembly import open_engine

PICTURE = np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8)
"""As large as the small layout's VAE takes it, so that a pixel belongs to one token."""
KV_BYTES = {"debug": 2**22, "small": 2**26, "big": 2**28}


@contextmanager
def opened(owner="dense", *, layout="small", model=None, pipeline=None, **settings):
    """An engine; `owner` is `dense`, or who attends over pages. With pages, prefix caching is on unless told.

    `pipeline` makes one of the options, in place of the model's own.
    """
    paged = (
        {}
        if owner == "dense"
        else {
            "diffusion_kv_mode": "paged_scheduler",
            "attention_owner": owner,
            "diffusion_kv_max_rows_per_request": 2,
            "enable_prefix_caching": True,
            "kv_cache_memory_bytes": KV_BYTES[layout],
        }
    )
    stage = {"stage_id": 0, "model_options": {"layout": layout, **(model or {})}, **paged, **settings}
    config = parse_deploy({"pipeline": "tiny_hunyuan_dit", "stages": [stage]}).stage()
    made = None if pipeline is None else pipeline(TinyHunyuanOptions.from_mapping(stage["model_options"]))
    with open_engine(config, pipeline=made) as engine:
        yield engine


def asked(request_id="a", **changes):
    request = DiffusionRequest(
        request_id, "a boat", references=(PICTURE,), seed=42, guidance_scale=2.5, num_inference_steps=2
    )
    return replace(request, **changes)


def generate(engine, *requests):
    """The finished requests, one after the other; each has its picture."""
    finished = []
    for request in requests:
        finished += engine.generate([request])
        finished[-1].picture()
    return finished


def hits(finished):
    return [one.kv.cached_prefix_tokens for one in finished]


def relative_error(ours, reference):
    return float((ours.double() - reference.double()).norm() / reference.double().norm())
