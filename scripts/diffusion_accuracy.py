# SPDX-License-Identifier: Apache-2.0
"""Runs the accuracy protocol of tests/diffusion_kv/accuracy and writes scores and heat maps of differences.

    PYTHONPATH=tests python scripts/diffusion_accuracy.py [--layout big] [--owner kernel] [--write-golden]

`--write-golden` first makes the dense float32 picture the golden of the layout. Scores go to
docs/measurements/diffusion-accuracy/LAYOUT.md, heat maps beside them: black where a pixel is the golden's, white where
a channel differs by 8 levels or more.
"""

import argparse
from pathlib import Path

import numpy as np
from diffusion_kv.accuracy import protocol
from PIL import Image

REPOSITORY = Path(__file__).parents[1]
OUT = REPOSITORY / "docs" / "measurements" / "diffusion-accuracy"
WHITE_AT_LEVELS = 8


def heat_map(picture: np.ndarray, golden: np.ndarray) -> Image.Image:
    """The largest difference of a pixel's channels, as grey."""
    difference = np.abs(picture.astype(np.int16) - golden.astype(np.int16)).max(axis=2)
    return Image.fromarray((np.minimum(difference, WHITE_AT_LEVELS) * 255 // WHITE_AT_LEVELS).astype(np.uint8))


def table(layout: str, owner: str, scored: list, golden: np.ndarray) -> str:
    """The scores in Markdown."""
    lines = [
        f"# Accuracy of tiny-hunyuan, layout `{layout}`, float32, attention owner `{owner}`, CPU",
        "",
        f"50 steps, guidance 2.5, seed 42, two references; another prompt warmed the cache. Written by "
        f"`scripts/diffusion_accuracy.py --layout {layout} --owner {owner}`.",
        "",
        "| Mode | Request | Hit tokens | First-step tokens | PSNR, dB | SSIM | Pixels that differ |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for one in scored:
        differing = int((one.picture != golden).any(axis=2).sum())
        psnr_db = one.psnr_db(golden)
        shown = "equal" if np.isinf(psnr_db) else f"{psnr_db:.1f}"
        lines.append(
            f"| {one.mode} | {one.name} | {one.hit_tokens} | {one.first_step_tokens} | {shown} | "
            f"{one.ssim(golden):.6f} | {differing} of {golden.shape[0] * golden.shape[1]} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run, score, write."""
    parser = argparse.ArgumentParser(description="Score every mode of a diffusion stage against the golden.")
    parser.add_argument("--layout", choices=sorted(protocol.FULL_HIT), default="big")
    parser.add_argument("--owner", choices=("gathered", "kernel"), default="kernel")
    parser.add_argument("--write-golden", action="store_true", help="make the dense picture the golden first")
    arguments = parser.parse_args()
    scored = protocol.run(arguments.layout, owner=arguments.owner)
    if arguments.write_golden:
        protocol.FIXTURES.mkdir(parents=True, exist_ok=True)
        Image.fromarray(scored[0].picture).save(protocol.FIXTURES / f"golden-{arguments.layout}.png")
    golden = protocol.golden(arguments.layout)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"{arguments.layout}.md").write_text(table(arguments.layout, arguments.owner, scored, golden), "utf-8")
    for one in scored:
        name = f"{arguments.layout}-{one.mode}-{one.name}".replace(" ", "-")
        heat_map(one.picture, golden).save(OUT / f"{name}.png")


if __name__ == "__main__":
    main()
