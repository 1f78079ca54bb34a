# SPDX-License-Identifier: Apache-2.0
"""The command's arguments to requests: every prompt with every picture, several times over if asked."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from omni_core.diffusion_kv.pipeline import DiffusionRequest, LoRARequest, Pixels


@dataclass(frozen=True, slots=True)
class LoRAArgument:
    """`NAME=PATH` or `NAME=PATH:SCALE`."""

    name: str
    path: Path
    scale: float


def lora_argument(text: str) -> LoRAArgument:
    """Parse `--lora`. What follows the last colon is a scale if it is a number, and part of the path if not."""
    name, equals, rest = text.partition("=")
    if not name or not equals or not rest:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH or NAME=PATH:SCALE")
    path, colon, scale = rest.rpartition(":")
    if colon and path:
        try:
            return LoRAArgument(name, Path(path), float(scale))
        except ValueError:
            pass
    return LoRAArgument(name, Path(rest), 1.0)


def make_requests(
    args: argparse.Namespace, references: Sequence[Pixels], lora_request: Callable[[str, float], LoRARequest]
) -> list[DiffusionRequest]:
    """One request per prompt and repetition, prompts in turn: `1`, `2`, … are their ids."""
    lora = None if args.lora is None else lora_request(args.lora.name, args.lora.scale)
    prompts = [prompt for _ in range(args.repeat) for prompt in args.prompt]
    return [
        DiffusionRequest(
            request_id=str(number),
            prompt=prompt,
            references=tuple(references),
            seed=args.seed,
            guidance_scale=args.guidance,
            num_inference_steps=args.steps,
            lora=lora,
        )
        for number, prompt in enumerate(prompts, 1)
    ]


def output_paths(out: Path, count: int) -> list[Path]:
    """`out` for one picture, `NAME-1.png`, `NAME-2.png`, … for several."""
    return [out] if count == 1 else [out.with_stem(f"{out.stem}-{number}") for number in range(1, count + 1)]
