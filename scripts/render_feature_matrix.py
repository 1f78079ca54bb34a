# SPDX-License-Identifier: Apache-2.0
"""Writes docs/feature-matrix.md and README's table from results of the feature tests.

    PYTHONPATH=tests/engine/features python scripts/render_feature_matrix.py [--results DIRECTORY]

With `--results` the committed figures are replaced by those a run of `make matrix` left in the directory. Without, the
page is written again from the committed figures. `tests/docs` compares page, README and figures.
"""

import argparse
import json
from pathlib import Path

from catalogue import FEATURES, Feature
from marked_block import with_block

REPOSITORY = Path(__file__).parents[1]
FIGURES = REPOSITORY / "docs" / "measurements" / "feature-matrix.json"
PAGE = REPOSITORY / "docs" / "feature-matrix.md"
README = REPOSITORY / "README.md"
WORDS = {"right": "right", "refused": "refused at start", "left alone": "no use for a cache: left alone"}


def collect(results: Path) -> None:
    """Take over what the tests left in a folder; features without a result there keep their figures."""
    figures = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {}
    for path in sorted(results.glob("*.json")):
        figures[path.stem] = json.loads(path.read_text(encoding="utf-8"))
    unknown = sorted(figures.keys() - FEATURES.keys())
    if unknown:
        raise SystemExit(f"results of features that are not in the catalogue: {', '.join(unknown)}")
    FIGURES.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def page(figures: dict[str, dict]) -> str:
    """The text of docs/feature-matrix.md."""
    lines = [
        "# Feature matrix",
        "",
        "One line per feature of vLLM, written by `make matrix` from the results of the engine tests.",
        "",
        "*Right* means: with the feature on, a real vLLM 0.32 on CPU ran with prefix caching and Omni Core; every",
        "row of every finished request was delivered once and labelled with its token; and each equals, bit for",
        "bit, a row that this run computed for that token prefix. An independent tap of the forwards says so.",
        "*Also equal to cache off* means: rows and generated tokens equal, bit for bit, those of the same engine",
        "without prefix caching. Rows *from the cache* are those that vLLM alone would not have given.",
        "",
        "| Feature | Switched on by | Rows | Also equal to cache off | Rows judged | From the cache | Shown by |",
        "|---|---|---|---|---:|---:|---|",
        *(_line(FEATURES[name], figures[name]) for name in FEATURES if name in figures),
        "",
        "## What refused stages are told",
        "",
    ]
    for name, feature in FEATURES.items():
        if feature.expected == "refused" and name in figures:
            lines += [f"- {feature.title}: {figures[name]['detail']}"]
    return "\n".join(lines) + "\n"


def readme_table(figures: dict[str, dict]) -> str:
    """The block of README between its two marks."""
    lines = ["| Feature | Rows |", "|---|---|"]
    lines += [f"| {FEATURES[name].title} | {WORDS[figures[name]['status']]} |" for name in FEATURES if name in figures]
    return "\n".join(lines)


def _line(feature: Feature, figure: dict) -> str:
    served = figure["status"] == "right"
    exact = "yes" if feature.exact and served else ""
    rows = f"{figure['rows']:,}" if served else ""
    hits = f"{figure['rows_from_hits']:,}" if served else ""
    cells = [feature.title, feature.how, WORDS[figure["status"]], exact, rows, hits, f"`{feature.shown_by}`"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write the feature matrix from test results.")
    parser.add_argument("--results", type=Path, help="folder a run of the feature tests left its results in")
    chosen = parser.parse_args()
    if chosen.results is not None:
        collect(chosen.results)
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    PAGE.write_text(page(figures), encoding="utf-8")
    readme = README.read_text(encoding="utf-8")
    README.write_text(with_block(readme, "feature matrix", readme_table(figures)), encoding="utf-8")


if __name__ == "__main__":
    main()
