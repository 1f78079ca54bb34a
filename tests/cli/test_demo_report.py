# SPDX-License-Identifier: Apache-2.0
"""The demo's table and its verdict: exit status 0 needs every row delivered, equal to the tap and within the bound."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from omni_core.cli.demo.report import as_document, make_report, render_text
from omni_core.integrations.vllm.demo.job import (
    ComparedRequest,
    DeliveredRequest,
    DemoJob,
    DemoPrompt,
    Message,
    Phase,
    PhaseResult,
    ServedRequest,
    WaveTime,
)

SERVED = ServedRequest("chat-02", "cold", 165, 8, 128, 44, "At ten.")
DELIVERED = DeliveredRequest("chat-02", "/rows/req-2.safetensors", 172, 172)
COMPARED = ComparedRequest("chat-02", 3e-6, 17, 4e-6)


SUPPORTED = {"gate": {"status": "supported", "reason": "one full-attention group"}}


def report_of(served=SERVED, delivered=DELIVERED, compared=COMPARED, stage_report=None, dtype="float32"):
    on = PhaseResult(
        (WaveTime("cold", 1, 0.5), WaveTime("warm", 0, 0.0)),
        (served,),
        (delivered,),
        (),
        SUPPORTED | (stage_report or {}),
    )
    off = PhaseResult((WaveTime("cold", 1, 2.25), WaveTime("warm", 0, 0.0)), (served,), (), (compared,))
    return make_report("/models/SmolLM2-135M-Instruct", dtype, Path("/rows"), on, off)


def test_a_right_run_shows_every_column_and_one_summary_line():
    report = report_of()
    assert report.ok
    lines = render_text(report).splitlines()
    row = next(line for line in lines if line.startswith("chat-02"))
    assert row.split() == ["chat-02", "cold", "165", "128", "44", "172", "yes", "3.0e-06", "4.0e-06"]
    assert lines[-1] == (
        "every row delivered and right; prefill: cold wave 2.25 s off, 0.50 s on; safetensors files in /rows"
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"delivered": replace(DELIVERED, rows=171, rows_equal_to_tap=171)}, "171 rows delivered, 172 expected"),
        ({"delivered": replace(DELIVERED, rows=173, rows_equal_to_tap=173)}, "173 rows delivered, 172 expected"),
        ({"delivered": replace(DELIVERED, rows_equal_to_tap=171)}, "1 rows were computed by no forward of this run"),
        ({"delivered": replace(DELIVERED, problem="the file's token ids are not")}, "token ids are not"),
        ({"delivered": DeliveredRequest("chat-02", problem="no file was written")}, "no file was written"),
        ({"compared": replace(COMPARED, largest_difference=1.01e-5)}, "position 17 differs from the cache-off run"),
        ({"compared": ComparedRequest("chat-02", problem="no file to compare")}, "no file to compare"),
        ({"served": replace(SERVED, computed_rows=45)}, "vLLM computed 45 rows"),
        ({"served": replace(SERVED, skipped_tokens=96)}, "says that it skipped 96"),
        ({"served": replace(SERVED, name="chat-03")}, "not checked"),
    ],
)
def test_anything_wrong_makes_the_verdict_no_and_is_said(changes, why):
    report = report_of(**changes)
    assert not report.ok
    text = render_text(report)
    assert any(line.startswith("WRONG chat-0") and why in line for line in text.splitlines())
    assert text.splitlines()[-1].startswith("WRONG: 1 of 1 requests; prefill: ")
    assert any(why in problem for problem in as_document(report)["requests"][0]["problems"])


def test_the_stages_own_reason_stands_beside_a_missing_request():
    report = report_of(
        delivered=DeliveredRequest("chat-02", problem="no file was written"),
        stage_report={
            "delivery": {
                "failures": {"chat-02-81bdb22f": "rows of block 5 are absent"},
                "sink_errors": {"x-1": "a stranger's"},
            }
        },
    )
    assert "WRONG chat-02: rows of block 5 are absent" in render_text(report)
    assert "stranger" not in render_text(report)


@pytest.mark.parametrize(
    ("stage_report", "why"),
    [
        ({"gate": {"status": "ignored", "reason": "a pooling stage"}}, "the stage has no cache: a pooling stage"),
        ({"off_reason": "a key changed its width"}, "the cache was turned off: a key changed its width"),
        ({"delivery": {"stage_errors": ["closing the sink: disk full"]}}, "closing the sink: disk full"),
    ],
)
def test_what_went_wrong_with_the_stage_is_said_and_is_not_ok(stage_report, why):
    report = report_of(stage_report=stage_report)
    assert not report.ok
    assert f"WRONG stage: {why}" in render_text(report).splitlines()
    assert as_document(report)["stage_problems"] == [why]


def test_the_table_fits_an_80_column_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert all(len(line) <= 80 for line in render_text(report_of()).splitlines()[:-1])


def test_the_bound_depends_on_the_dtype():
    coarse = replace(COMPARED, largest_difference=1.9e-2)
    assert not report_of(compared=coarse).ok
    assert report_of(compared=coarse, dtype="bfloat16").ok
    assert not report_of(compared=replace(coarse, largest_difference=2.1e-2), dtype="bfloat16").ok


def test_a_run_without_requests_proves_nothing():
    empty = PhaseResult(stage_report=SUPPORTED)
    assert not make_report("/m", "float32", Path("/rows"), empty, empty).ok


def test_the_document_is_plain_json_with_a_number_per_column():
    document = json.loads(json.dumps(as_document(report_of()), allow_nan=False))
    assert document["ok"] is True
    assert document["bound"] == 1e-5
    assert document["waves"][0] == {
        "name": "cold", "requests": 1, "prefill_s_cache_off": 2.25, "prefill_s_cache_on": 0.5,
    }  # fmt: skip
    assert document["requests"] == [
        {
            "name": "chat-02",
            "wave": "cold",
            "prompt_tokens": 165,
            "generated_tokens": 8,
            "skipped_tokens": 128,
            "rows_vllm_alone": 44,
            "rows_expected": 172,
            "rows_delivered": 172,
            "rows_equal_to_tap": 172,
            "largest_difference_to_cache_off": 3e-6,
            "largest_difference_at_position": 17,
            "cache_off_twice_difference": 4e-6,
            "file": "/rows/req-2.safetensors",
            "text": "At ten.",
            "problems": [],
        }
    ]


def test_jobs_and_results_survive_the_way_through_a_file(tmp_path):
    job = DemoJob(
        phase=Phase.CACHE_OFF,
        model="/models/m",
        dtype="bfloat16",
        prompts=(DemoPrompt("a", (Message("user", "hé"),)), DemoPrompt("b", text="once")),
        max_tokens=3,
        rows_directory="/rows",
    )
    job.save(tmp_path / "job")
    assert DemoJob.load(tmp_path / "job") == job
    result = PhaseResult((WaveTime("cold", 1, 0.5),), (SERVED,), (DELIVERED,), (COMPARED,), {"gate": {"rule": "x"}})
    result.save(tmp_path / "result")
    assert PhaseResult.load(tmp_path / "result") == result
