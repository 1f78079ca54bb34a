# SPDX-License-Identifier: Apache-2.0
"""Writes docs/diffusion-kv-compatibility.md from what tests/diffusion_kv/ranks found.

    DIFFUSION_COMPATIBILITY_FOLDER=DIRECTORY python -m pytest tests/diffusion_kv/ranks
    PYTHONPATH=tests python scripts/render_diffusion_compatibility.py [--results DIRECTORY]

With `--results` the committed results are replaced by those the tests left in the directory. Without, the page is
written again from the committed ones. `tests/docs` compares page, results and combinations.
"""

import argparse
import json
from pathlib import Path

from diffusion_kv.ranks.combinations import COMBINATIONS

REPOSITORY = Path(__file__).parents[1]
RESULTS = REPOSITORY / "docs" / "measurements" / "diffusion-compatibility.json"
PAGE = REPOSITORY / "docs" / "diffusion-kv-compatibility.md"


def collect(folder: Path) -> None:
    """Take over what the tests left."""
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    if results.keys() != COMBINATIONS.keys():
        raise SystemExit(f"not the results of every combination: {sorted(results.keys() ^ COMBINATIONS.keys())}")
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def page(results: dict[str, dict]) -> str:
    """The text of docs/diffusion-kv-compatibility.md."""
    lines = [
        "# What a diffusion stage can be combined with",
        "",
        "Written by `scripts/render_diffusion_compatibility.py` from the results of `tests/diffusion_kv/ranks`:",
        "tiny-hunyuan in its smallest layout on a CPU, on one rank or on two processes over gloo. Three requests with",
        "two reference pictures are served one after the other: another prompt, one that hits its pictures, the same",
        "again. *Right* means that all three pictures' latents are those of one dense rank within the error given; 0",
        "is bit for bit. bfloat16 is compared with dense bfloat16. No combination was run on a CUDA device or an NPU.",
        "",
        "| Combination | Result | Largest relative error | Tokens hit |",
        "|---|---|---:|---|",
    ]
    for name, combination in COMBINATIONS.items():
        result = results[name]
        if result["status"] == "right":
            hits = ", ".join(map(str, result["hit_tokens"]))
            lines.append(f"| {combination.title} | right | {result['relative_error']:.1e} | {hits} |")
        else:
            lines.append(f"| {combination.title} | refused at start | | |")
    lines += ["", "## What refused stages are told", ""]
    lines += [
        f"- {combination.title}: {results[name]['detail']}"
        for name, combination in COMBINATIONS.items()
        if results[name]["status"] == "refused"
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Take over results if told to, and write the page."""
    parser = argparse.ArgumentParser(description="Write the compatibility page of diffusion stages.")
    parser.add_argument("--results", type=Path, help="a folder the tests left results in")
    folder = parser.parse_args().results
    if folder is not None:
        collect(folder)
    PAGE.write_text(page(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
