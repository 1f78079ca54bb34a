# SPDX-License-Identifier: Apache-2.0
"""The gate's table in the documentation is rendered from the rules that decide."""

import re

import pytest
import render_gate

from omni_core.prefix_cache.gate import GATE_RULES, GateStatus

HOW_TO = "run `python scripts/render_gate.py`"


@pytest.fixture(scope="module")
def page():
    return render_gate.PAGE.read_text(encoding="utf-8")


def test_the_page_has_the_rules_as_they_are(page):
    assert render_gate.rendered(page) == page, HOW_TO


def test_a_rule_that_was_changed_on_the_page_is_noticed(page):
    stale = page.replace(f"| `{GATE_RULES[1].name}` |", "| `another` |", 1)
    assert stale != page
    assert render_gate.rendered(stale) == page


def test_a_page_without_a_place_for_the_table_is_an_error():
    with pytest.raises(ValueError, match="0 places marked <!-- generated: gate -->"):
        render_gate.rendered("# What is supported\n")


def test_every_rule_is_told_in_order_with_what_to_change():
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in render_gate.table().splitlines()[2:]]
    assert [re.sub("`", "", row[0]) for row in rows] == [rule.name for rule in GATE_RULES]
    assert all(when for _, _, when, _ in rows)
    for rule, row in zip(GATE_RULES, rows, strict=True):
        assert (row[3] == "nothing") == (not rule.remedy), rule.name


def test_each_answer_is_explained_above_the_table(page):
    explained = re.findall(r"^- \*\*([a-z ]+)\*\*", page.partition("<!-- generated: gate -->")[0], re.MULTILINE)
    assert explained == [status.value for status in GateStatus]
