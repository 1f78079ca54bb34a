# SPDX-License-Identifier: Apache-2.0
"""The compatibility page of diffusion stages says what the committed results say, and leaves no combination out."""

import json

import pytest
import render_diffusion_compatibility
from diffusion_kv.ranks.combinations import COMBINATIONS


@pytest.fixture(scope="module")
def results():
    return json.loads(render_diffusion_compatibility.RESULTS.read_text(encoding="utf-8"))


def test_every_combination_has_a_result_as_expected(results):
    expected = {name: "refused" if combination.refused else "right" for name, combination in COMBINATIONS.items()}
    assert {name: result["status"] for name, result in results.items()} == expected


def test_the_page_is_rendered_from_the_results(results):
    page = render_diffusion_compatibility.page(results)
    assert render_diffusion_compatibility.PAGE.read_text(encoding="utf-8") == page
