# SPDX-License-Identifier: Apache-2.0
"""`omni-core simulate`: the story is told right, fits the page, and says so when a row is wrong."""

import functools
import json

import pytest

from omni_core.cli.main import main
from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.testing.reference_cache import ReferenceCache
from omni_core.testing.stories import SCENARIOS, record_story


@pytest.fixture(scope="module")
def told():
    return {scenario.name: record_story(scenario) for scenario in SCENARIOS}


def simulate(capsys, *arguments):
    status = main(["simulate", *arguments])
    return status, capsys.readouterr().out


def deliveries(document):
    return {
        delivery["request"]: delivery
        for scenario in document["scenarios"]
        for step in scenario["steps"]
        for delivery in step["deliveries"]
    }


def test_text_draws_every_scenario_in_100_columns(capsys):
    status, out = simulate(capsys)
    assert status == 0
    assert [line for line in out.splitlines() if len(line) > 100] == []
    assert [line for line in out.splitlines() if line.startswith("Scenario ")] == [
        f"Scenario {scenario.name}: {scenario.title}" for scenario in SCENARIOS
    ]
    assert out.count("each equal bit for bit") == len(SCENARIOS)


def test_fox_draws_the_block_table_and_the_hit(capsys):
    status, out = simulate(capsys, "--scenario", "fox")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert status == 0
    assert "1 The quick brown fox A computed and stored" in lines
    assert "3 beneath the shady tree A computed and stored" in lines
    assert "1 The quick brown fox HIT by B: rows read from here" in lines
    assert "4 jumped over the dog B computed and stored" in lines
    assert "B: 8 tokens = 4 skipped by the engine + 4 computed by the forward" in lines
    assert "B gets 8 rows: 4 from the cache + 4 from the forward" in lines


def test_fox_joins_the_hit_in_front_of_the_forward(capsys):
    status, out = simulate(capsys, "--scenario", "fox", "--format", "json")
    found = deliveries(json.loads(out))
    assert status == 0
    assert (found["A"]["rows_without_cache"], found["A"]["rows_delivered"]) == (12, 12)
    assert (found["B"]["rows_without_cache"], found["B"]["rows_delivered"]) == (4, 8)
    assert [row["from"] for row in found["B"]["rows"]] == ["cache"] * 4 + ["forward"] * 4
    assert [row["token"] for row in found["B"]["rows"]] == [
        *("The", "quick", "brown", "fox"),
        *("jumped", "over", "the", "dog"),
    ]
    for row_of_a, row_of_b in zip(found["A"]["rows"][:4], found["B"]["rows"], strict=False):
        assert row_of_a["values"] == row_of_b["values"]
        assert len(row_of_b["values"][HIDDEN_KEY]) == 2
        assert len(row_of_b["values"]["mm_feature"]) == 16
    the, the_again = found["B"]["rows"][0], found["B"]["rows"][6]
    assert the["values"] != the_again["values"]


def test_image_shares_whole_blocks_of_the_same_picture_only(told):
    a, b, c = (step.deliveries[0] for step in told["image"].steps)
    assert (a.hit_tokens, b.hit_tokens, c.hit_tokens) == (0, 4, 0)
    assert [row.word for row in b.rows] == ["Im0", "Im1", "Im2", "Im3", "Im4", "Im5", "bar", "baz"]
    assert [row.values for row in b.rows[:6]] == [row.values for row in a.rows[:6]]
    assert all(row.values != other.values for row, other in zip(b.rows, c.rows, strict=True))
    assert not told["image"].steps[0].blocks[2].can_be_hit


def test_chat_delivers_165_rows_where_the_engine_gives_37(told):
    first, second = told["chat"].steps
    burst = {delivery.req_id: delivery for delivery in first.deliveries}
    assert {row.source.value for row in burst["B"].rows[:128]} == {"same step"}
    (c,) = second.deliveries
    assert (c.prompt_tokens, c.hit_tokens, c.computed_rows, len(c.rows)) == (165, 128, 37, 165)


class OffByOne(ReferenceCache):
    def row_of(self, request, position):
        return super().row_of(request, max(position - 1, 0))


@pytest.mark.parametrize("output_format", ["text", "json"])
def test_a_wrong_row_is_status_1_and_is_named(output_format, capsys, monkeypatch):
    broken = functools.partial(record_story, make_cache=OffByOne)
    monkeypatch.setattr("omni_core.cli.simulate.record_story", broken)
    status, out = simulate(capsys, "--scenario", "fox", "--format", output_format)
    assert status == 1
    assert "request 'B', key '__hidden_states__', position 1: wrong row" in out
    assert "it is the row of position 0 of request 'A'" in out


def test_an_unknown_scenario_is_wrong_usage(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "--scenario", "ox"])
    assert ended.value.code == 2
    assert "'fox', 'image', 'chat'" in capsys.readouterr().err
