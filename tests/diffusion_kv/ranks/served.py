# SPDX-License-Identifier: Apache-2.0
"""The requests every combination serves: another prompt, then one that hits its pictures, then the same again."""

import numpy as np
from diffusion_kv.recorded_parts import request

from omni_core.diffusion_kv.deploy import parse_deploy
from omni_core.integrations.diffusion.assembly import open_engine

PICTURES = tuple(np.random.default_rng(number).integers(0, 256, (40, 30, 3), np.uint8) for number in range(2))


def serve(combination, ranks):
    """Latents, hits and pictures of three requests, the first of another prompt."""
    requests = [
        request(name, prompt=prompt, references=PICTURES, seed=42)
        for name, prompt in (("other prompt", "a goat"), ("partial hit", "a boat"), ("full hit", "a boat"))
    ]
    with open_engine(parse_deploy(combination.deploy()).stage(), ranks=ranks) as engine:
        finished = [engine.generate([one])[0] for one in requests]
        return [
            {
                "latents": one.latents,
                "picture": one.picture(),
                "first_step_tokens": one.first_step_tokens,
                "hit_tokens": 0 if one.kv is None else one.kv.cached_prefix_tokens,
            }
            for one in finished
        ]
