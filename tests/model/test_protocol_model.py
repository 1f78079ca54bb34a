# SPDX-License-Identifier: Apache-2.0
"""The cache's protocol over every interleaving of small worlds: its rules hold, and every wrong one is found out."""

from pathlib import Path

import pytest

from .catalogue import FINAL_DELIVERY, FINAL_STORAGE, FREE_CHOICES, WRONG_DELIVERY, WRONG_STORAGE, Search
from .delivery_rules import Change as DeliveryChange
from .storage_rules import Change as StorageChange

FINAL = (*FINAL_STORAGE, *FINAL_DELIVERY)
WRONG = (*WRONG_STORAGE, *WRONG_DELIVERY)
README_ROWS = frozenset(Path(__file__).with_name("README.md").read_text(encoding="utf-8").splitlines())


def name_of(search: Search) -> str:
    return search.name


@pytest.mark.parametrize("search", [search for search in FINAL if search.is_small], ids=name_of)
def test_the_rules_hold_in_small_worlds(search):
    check_rules_hold(search)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("search", [search for search in FINAL if not search.is_small], ids=name_of)
def test_the_rules_hold_in_large_worlds(search):
    check_rules_hold(search)


def check_rules_hold(search):
    verdict = search.run()
    assert verdict.holds, str(verdict)
    assert search.row(verdict) in README_ROWS, "put the tables of `python -m tests.model --tables` into the README"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("search", WRONG, ids=name_of)
def test_a_wrong_rule_is_found_out_by_its_shortest_counterexample(search):
    verdict = search.run()
    assert verdict.kind == search.violated, str(verdict)
    assert search.row(verdict) in README_ROWS, str(verdict)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("search", FREE_CHOICES, ids=name_of)
def test_a_free_choice_is_free(search):
    verdict = search.run()
    assert verdict.holds, str(verdict)
    assert search.row(verdict) in README_ROWS


def test_every_change_of_the_rules_is_tried():
    tried = {search.change for search in (*WRONG, *FREE_CHOICES)}
    assert tried == {*StorageChange, *DeliveryChange}
