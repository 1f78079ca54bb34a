# SPDX-License-Identifier: Apache-2.0
"""The feature matrix in docs and README says what the committed results say, and leaves no feature out."""

import importlib.util
import json
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def renderer():
    spec = importlib.util.spec_from_file_location(
        "render_feature_matrix", REPOSITORY / "scripts" / "render_feature_matrix.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def figures(renderer):
    return json.loads(renderer.FIGURES.read_text(encoding="utf-8"))


def test_every_feature_of_the_catalogue_has_a_result_as_expected(renderer, figures):
    expected = {name: feature.expected for name, feature in renderer.FEATURES.items()}
    assert {name: figure["status"] for name, figure in figures.items()} == expected


def test_every_result_judged_rows_or_tells_why_it_was_refused(figures):
    for name, figure in figures.items():
        assert figure["rows"] > 100 if figure["status"] == "right" else figure["detail"], name


def test_the_page_is_rendered_from_the_results(renderer, figures):
    assert renderer.PAGE.read_text(encoding="utf-8") == renderer.page(figures)


def test_readme_shows_the_same_results(renderer, figures):
    readme = renderer.README.read_text(encoding="utf-8")
    table = renderer.readme_table(figures)
    assert table in readme
    assert renderer.with_table(readme, table) == readme
