# SPDX-License-Identifier: Apache-2.0
"""`omni-core diffuse`: pictures from prompts and reference pictures, on the diffusion stage of a deploy file."""

from __future__ import annotations

import argparse
from pathlib import Path

from omni_core.cli.diffuse.arguments import lora_argument, make_requests, output_paths
from omni_core.cli.diffuse.pictures import (
    PictureError,
    check_pillow,
    check_writable,
    read_picture,
    write_picture,
)
from omni_core.cli.diffuse.report import Drawn, as_document, render_text
from omni_core.cli.numbers import at_least
from omni_core.cli.tables import JSON, add_format_argument, print_failure, print_json
from omni_core.cli.vllm_logging import keep_vllm_quiet
from omni_core.diffusion_kv.deploy import StageConfig, load_deploy
from omni_core.diffusion_kv.errors import DiffusionKVConfigError, DiffusionKVError
from omni_core.diffusion_kv.pipeline import Pixels
from omni_core.integrations.diffusion.assembly import open_engine
from omni_core.integrations.diffusion.results import EngineStats

EXIT_FAILED = 1
EXIT_USAGE = 2


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to argparse's subparsers."""
    parser = subparsers.add_parser(
        "diffuse",
        help="run a diffusion stage on prompts and reference pictures, and say what its prefix cache saved",
        description="Run the diffusion stage of a deploy file: dense, paged, or paged with prefix caching, as the file "
        "says. Every prompt is a request with all reference pictures; the requests run at once, as far as the stage's "
        "max_num_seqs lets them. Exit status 0 if every request has its picture, 1 if not, 2 for wrong arguments.",
    )
    parser.add_argument("--deploy", type=Path, required=True, metavar="FILE", help="the deploy file, in YAML")
    parser.add_argument("--stage", type=at_least(0), metavar="ID", help="which stage_id of it (the only one)")
    parser.add_argument(
        "--prompt", action="append", required=True, metavar="TEXT", help="what to draw; again for further requests"
    )
    parser.add_argument(
        "--reference",
        action="extend",
        nargs="+",
        type=Path,
        default=[],
        metavar="IMG",
        help="pictures every request refers to, in order",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("image.png"),
        metavar="IMG",
        help="the picture to write (%(default)s); with several requests NAME-1, NAME-2, and so on",
    )
    parser.add_argument("--seed", type=at_least(0), default=42, metavar="N", help="of every request (%(default)s)")
    parser.add_argument("--steps", type=at_least(1), default=8, metavar="N", help="denoise steps (%(default)s)")
    parser.add_argument(
        "--guidance", type=float, default=2.5, metavar="X", help="CFG scale; 1 runs one row (%(default)s)"
    )
    parser.add_argument("--lora", type=lora_argument, metavar="NAME=PATH[:SCALE]", help="an adapter for every request")
    parser.add_argument("--repeat", type=at_least(1), default=1, metavar="N", help="each prompt so often (%(default)s)")
    add_format_argument(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Draw; 0 if every request has its picture, 1 if not, 2 for arguments that name what cannot be used."""
    try:
        check_pillow()
        check_writable(args.out)
        references = [read_picture(path) for path in args.reference]
        stage = load_deploy(args.deploy).stage(args.stage)
    except (PictureError, DiffusionKVConfigError, OSError) as error:
        print_failure("diffuse", args.format, str(error))
        return EXIT_USAGE
    keep_vllm_quiet()
    try:
        drawn, stats = _draw(args, stage, references)
    except (PictureError, DiffusionKVError, OSError) as error:
        print_failure("diffuse", args.format, str(error))
        return EXIT_FAILED
    if args.format == JSON:
        print_json(as_document(stage, drawn, stats))
    else:
        print(render_text(stage, drawn, stats))
    return 0 if all(one.path is not None for one in drawn) else EXIT_FAILED


def _draw(args: argparse.Namespace, stage: StageConfig, references: list[Pixels]) -> tuple[list[Drawn], EngineStats]:
    with open_engine(stage) as engine:
        if args.lora is not None:
            engine.loras.load(args.lora.name, str(args.lora.path))
        finished = engine.generate(make_requests(args, references, engine.loras.request))
        stats = engine.stats()
    drawn = []
    for one, path in zip(finished, output_paths(args.out, len(finished)), strict=True):
        if one.image is not None:
            write_picture(one.image, path)
        drawn.append(Drawn(one, None if one.image is None else path))
    return drawn, stats
