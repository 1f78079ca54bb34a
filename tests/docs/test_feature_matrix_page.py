# SPDX-License-Identifier: Apache-2.0
"""The feature matrix in docs and README says what the committed results say, and leaves no feature out."""

import json

import pytest
import render_feature_matrix
from marked_block import with_block


@pytest.fixture(scope="module")
def figures():
    return json.loads(render_feature_matrix.FIGURES.read_text(encoding="utf-8"))


def test_every_feature_of_the_catalogue_has_a_result_as_expected(figures):
    expected = {name: feature.expected for name, feature in render_feature_matrix.FEATURES.items()}
    assert {name: figure["status"] for name, figure in figures.items()} == expected


def test_every_result_judged_rows_or_tells_why_it_was_refused(figures):
    for name, figure in figures.items():
        assert figure["rows"] > 100 if figure["status"] == "right" else figure["detail"], name


def test_the_page_is_rendered_from_the_results(figures):
    assert render_feature_matrix.PAGE.read_text(encoding="utf-8") == render_feature_matrix.page(figures)


def test_readme_shows_the_same_results(figures):
    readme = render_feature_matrix.README.read_text(encoding="utf-8")
    table = render_feature_matrix.readme_table(figures)
    assert table in readme
    assert with_block(readme, "feature matrix", table) == readme
