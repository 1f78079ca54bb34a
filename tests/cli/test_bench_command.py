# SPDX-License-Identifier: Apache-2.0
"""`omni-core bench`: what it prints and writes. A few rounds each; no figure is looked at but for its form."""

import io
import json
from contextlib import redirect_stdout

import pytest
import torch

from omni_core.cli.bench.benchmarks import BENCHMARKS
from omni_core.cli.bench.plots import can_plot
from omni_core.cli.main import main

NAMES = [benchmark.name for benchmark in BENCHMARKS]
FAST = [name for name in NAMES if name not in ("diffusion", "instructions", "vllm")]
FACTS = {
    "cpu_model",
    "cores",
    "memory_bytes",
    "kernel",
    "governor",
    "load_average",
    "python",
    "torch",
    "numpy",
    "omni_core",
}


@pytest.fixture(scope="module")
def documents():
    """Every fast benchmark once, as the command prints it."""
    return {name: json.loads(printed(name, "--quick", "--format", "json")) for name in FAST}


def printed(*arguments):
    """What the command prints, run here: every process of its own takes seconds to import torch."""
    threads = torch.get_num_threads()
    with redirect_stdout(io.StringIO()) as stdout:
        status = main(["bench", *arguments])
    torch.set_num_threads(threads)
    assert status == 0
    return stdout.getvalue()


@pytest.mark.parametrize("name", FAST)
def test_the_document_has_machine_facts_rows_and_targets(documents, name):
    document = documents[name]
    assert document["benchmark"] == name
    assert document["machine"].keys() >= FACTS
    assert document["machine"]["device"].startswith("CPU")
    assert document["rows"]
    assert all(row["benchmark"] == name for row in document["rows"])
    (benchmark,) = [benchmark for benchmark in BENCHMARKS if benchmark.name == name]
    assert [target["name"] for target in document["targets"]] == [target.name for target in benchmark.targets]


@pytest.mark.parametrize("name", FAST)
def test_every_interval_contains_its_figure(documents, name):
    intervals = [
        (row, figure.removesuffix("_ci95") if figure != "ci95" else "ratio", interval)
        for row in documents[name]["rows"]
        for figure, interval in row.items()
        if figure.endswith("ci95")
    ]
    assert intervals
    for row, figure, (low, high) in intervals:
        assert low <= row[figure] <= high, (row, figure)


def test_a_quick_run_gives_no_verdict_and_says_so(documents):
    for name, document in documents.items():
        assert {target["verdict"] for target in document["targets"]} <= {"not measured"}
        assert any("figures mean nothing" in note for note in document["notes"])
        beside_peer = name in ("engine-step", "deferred", "hit-read", "first-save")
        assert any("the peer was not measured" in note for note in document["notes"]) == beside_peer


def test_rows_of_an_engine_step(documents):
    rows = documents["engine-step"]["rows"]
    steps = [row for row in rows if row["what"] == "engine step"]
    assert [row["requests"] for row in steps] == [1, 4]
    for row in steps:
        assert row.keys() >= {"requests", "ours_ms", "floor_ms", "ratio", "ci95", "staging_full", "committer_cpu_us"}
        assert row["ratio"] == pytest.approx(row["ours_ms"] / row["floor_ms"])
    assert {row["what"] for row in rows} == {
        "engine step",
        "engine step, others at rest",
        "materialize",
        "waking two threads",
        "slope",
        "profile",
    }
    (waking,) = [row for row in rows if row["what"] == "waking two threads"]
    assert waking["floor_ms"] > 0


def test_the_profile_of_a_small_step_shares_its_time_among_modules(documents):
    whole, *modules = [row for row in documents["engine-step"]["rows"] if row["what"] == "profile"]
    assert whole["module"] == "the whole step"
    assert {"prefix_cache.step_saver", "prefix_cache.step_intake", "cli.bench.stage"} <= {
        row["module"] for row in modules
    }
    assert sum(row["share_percent"] for row in modules) <= 100.0
    for row in modules:
        assert row["us"] == pytest.approx(whole["us"] * row["share_percent"] / 100)


def test_the_conditions_of_the_other_benchmarks(documents):
    def values(name, field):
        return list(dict.fromkeys(row[field] for row in documents[name]["rows"]))

    assert values("hit-read", "what") == ["cold", "warm, release()", "warm, no release()", "outputs held"]
    assert values("deferred", "budget") == ["no pressure", "budget of 100 steps"]
    assert values("deferred", "what") == ["step", "finish"]
    assert values("scale", "what") == ["num_blocks", "live requests not in the step", "pending reads"]
    assert values("contention", "builders") == list(range(len(documents["contention"]["rows"])))
    assert values("first-save", "side") == ["ours"]


def test_text_and_files(tmp_path):
    out = tmp_path / "figures"
    text = printed("contention", "--quick", "--out", str(out))
    assert text.startswith("contention: CPU figures, ")
    assert "builders" in text
    assert json.loads((out / "contention.json").read_text())["benchmark"] == "contention"
    page = (out / "index.md").read_text()
    assert "## contention" in page
    assert "device figures: not measured" in page
    assert "| builders | requests |" in page
    if can_plot():
        assert (out / "contention.png").read_bytes().startswith(b"\x89PNG")
        assert "![contention](contention.png)" in page


def test_a_page_is_made_of_earlier_runs_too(tmp_path):
    for name in ("first-save", "contention", "first-save"):
        printed(name, "--quick", "--out", str(tmp_path))
    page = (tmp_path / "index.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("## ")] == ["## first-save", "## contention"]


def test_all_runs_each_in_a_process_of_its_own(tmp_path, monkeypatch):
    """Warnings are errors in those, too."""
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    skipped = [option for name in NAMES if name not in ("contention", "first-save") for option in ("--skip", name)]
    document = json.loads(printed("all", "--quick", "--format", "json", "--out", str(tmp_path), *skipped))
    assert [each["benchmark"] for each in document["benchmarks"]] == ["first-save", "contention"]
    assert (tmp_path / "index.md").read_text().count("\n## ") == 2


@pytest.mark.parametrize("arguments", [["bench"], ["bench", "no-such-benchmark"], ["bench", "all", "--skip", "x"]])
def test_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: omni-core bench" in capsys.readouterr().err


def test_a_peer_that_cannot_be_had_is_status_1(capsys, monkeypatch):
    from omni_core.cli.bench.peer.install import PeerError

    def refuse(home):
        raise PeerError("pip could not install it")

    monkeypatch.setattr("omni_core.cli.bench.command.install_peer", refuse)
    assert main(["bench", "scale", "--quick", "--peer", "--format", "json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"ok": False, "error": "pip could not install it"}


def test_a_folder_that_cannot_be_written_is_status_1_before_anything_is_measured(capsys, tmp_path):
    (tmp_path / "file").touch()
    assert main(["bench", "contention", "--quick", "--out", str(tmp_path / "file")]) == 1
    said = capsys.readouterr()
    assert "omni-core bench: " in said.err
    assert str(tmp_path / "file") in said.err
    assert said.out == ""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_instructions_are_counted_or_the_report_says_why_not():
    document = json.loads(printed("instructions", "--quick", "--format", "json"))
    if document["rows"]:
        (row,) = document["rows"]
        assert row["instructions"] > 10_000
    else:
        assert any("valgrind is not installed" in note for note in document["notes"])
