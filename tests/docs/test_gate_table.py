# SPDX-License-Identifier: Apache-2.0
"""The gate's table in the documentation is rendered from the rules that decide."""

import importlib.util
import re
from pathlib import Path

import pytest

from omni_core.prefix_cache.gate import GATE_RULES, GateStatus

REPOSITORY = Path(__file__).parents[2]
HOW_TO = "run `python scripts/render_gate.py`"


@pytest.fixture(scope="module")
def renderer():
    spec = importlib.util.spec_from_file_location("render_gate", REPOSITORY / "scripts" / "render_gate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def page(renderer):
    return renderer.PAGE.read_text(encoding="utf-8")


def test_the_page_has_the_rules_as_they_are(renderer, page):
    assert renderer.rendered(page) == page, HOW_TO


def test_a_rule_that_was_changed_on_the_page_is_noticed(renderer, page):
    stale = page.replace(f"| `{GATE_RULES[1].name}` |", "| `another` |", 1)
    assert stale != page
    assert renderer.rendered(stale) == page


def test_a_page_without_a_place_for_the_table_is_an_error(renderer):
    with pytest.raises(ValueError, match=r"support\.md has 0 places"):
        renderer.rendered("# What is supported\n")


def test_every_rule_is_told_in_order_with_what_to_change(renderer):
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in renderer.table().splitlines()[2:]]
    assert [re.sub("`", "", row[0]) for row in rows] == [rule.name for rule in GATE_RULES]
    assert all(when for _, _, when, _ in rows)
    for rule, row in zip(GATE_RULES, rows, strict=True):
        assert (row[3] == "nothing") == (not rule.remedy), rule.name


def test_each_answer_is_explained_above_the_table(page):
    explained = re.findall(r"^- \*\*([a-z ]+)\*\*", page.partition("<!-- generated: gate -->")[0], re.MULTILINE)
    assert explained == [status.value for status in GateStatus]
