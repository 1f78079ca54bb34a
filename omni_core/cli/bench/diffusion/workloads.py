# SPDX-License-Identifier: Apache-2.0
"""The requests of a run: pictures drawn by arithmetic, prompts that are equal or not."""

from __future__ import annotations

import numpy as np

from omni_core.cli.bench.diffusion.config import DiffusionBenchConfig, Workload
from omni_core.diffusion_kv.pipeline import DiffusionRequest, Pixels

SHARED_PROMPT = "fox"
"""Short: the smallest layout's prompts are a few bytes."""


def picture(number: int, side: int) -> Pixels:
    """A square of coloured rings; every number has its own."""
    place = np.linspace(-1.0, 1.0, side)
    x, y = place[None, :] - 0.3 * np.cos(number), place[:, None] - 0.3 * np.sin(number)
    ring = np.hypot(x, y) * (6 + number)
    planes = [np.sin(ring + phase + number) for phase in (0.0, 2.1, 4.2)]
    return (np.stack(planes, axis=-1) * 127.5 + 127.5).astype(np.uint8)


class RequestMaker:
    """Makes the requests of one workload; the same ones for every mode."""

    def __init__(self, config: DiffusionBenchConfig, workload: Workload) -> None:
        self._config = config
        self._workload = workload
        self._pictures = tuple(picture(number, config.picture_pixels) for number in range(config.references))

    def request(self, number: int, steps: int) -> DiffusionRequest:
        """The request of one round; rounds of warm-ups have negative numbers."""
        prompt = SHARED_PROMPT if self._workload is Workload.SHARED else f"{number + self._config.warmups:03d}"
        return DiffusionRequest(
            request_id=f"{self._workload.value} {steps} steps {number}",
            prompt=prompt,
            references=self._pictures,
            seed=self._config.seed,
            guidance_scale=self._config.guidance_scale,
            num_inference_steps=steps,
        )
