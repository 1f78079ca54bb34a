# SPDX-License-Identifier: Apache-2.0
"""The device check runs whole on a CPU, with small numbers, and notices a backend that is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from device_check.__main__ import PARTS, main
from device_check.backends import BACKENDS, CheckedBackend, choose
from device_check.judge import DeliveredRows, Judge
from device_check.races import DeviceLoad
from device_check.replay import Undisturbed, replay
from device_check.step_graphs import DeviceGraphs, EmulatedGraphs
from device_check.traffic import TrafficConfig, record_traffic
from omni_core_cpu_sim import CpuSimBackend
from torch.utils._python_dispatch import TorchDispatchMode

from omni_core.backend.observer import DeviceObserver, ObservedCopy
from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.runtime import Runtime, ThreadingRuntime

REPOSITORY = Path(__file__).parents[2]
SMALL = ["--steps", "60", "--race-s", "0", "--race-steps", "40", "--gap-steps", "25", "--hidden-size", "32"]
SMALL += ["--copy-mib", "1", "--busy-rounds", "0"]


def test_the_script_runs_every_part_on_the_simulator(tmp_path):
    report_path = tmp_path / "reports" / "report.json"
    command = [REPOSITORY / "scripts/device_check.sh", "--backend", "cpu_sim", "--out", report_path, *SMALL]
    done = subprocess.run(
        command, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(report_path.read_text())
    assert (report["ok"], report["backend"], report["torch"]) == (True, "cpu_sim", torch.__version__)
    assert tuple(report["parts"]) == PARTS
    assert report["parts"]["conformance"]["failed"] == {}
    graphs = report["parts"]["graphs"]
    assert graphs["steps"] == 60
    assert graphs["rows_wrong"] == 0
    # What makes graphs hard is in the traffic: padded steps, steps without a graph, rows that come from hits.
    assert min(graphs["padded_steps"], graphs["eager_steps"], graphs["rows_from_hits"]) > 0
    assert report["parts"]["races"]["rows_compared"] > 0
    assert [line["mib"] for line in report["parts"]["bandwidth"]["copies"]] == [1]
    assert report["parts"]["step_gap"]["forwards"][0]["step_with_cache_ms"] > 0


@pytest.mark.parametrize("missing", ["torch", "stevedore"])
def test_an_interpreter_without_a_package_is_named_with_what_to_do(tmp_path, missing):
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/sh
[ "$2" = "import {missing}" ] || exec {sys.executable} "$@"
echo "Traceback (most recent call last):" >&2
echo "ModuleNotFoundError: No module named '{missing}'" >&2
exit 1
""")
    python.chmod(0o755)
    done = subprocess.run(
        [REPOSITORY / "scripts/device_check.sh", "--help"],
        env=os.environ | {"PYTHON": str(python)},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert f"{python} cannot import {missing}: ModuleNotFoundError: No module named '{missing}'" in done.stderr
    assert "Set PYTHON" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_report_goes_where_the_device_machine_looks_for_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OUT", str(tmp_path))
    assert main(["--backend", "cpu_sim", "--parts", "bandwidth", "--copy-mib", "1"]) == 0
    assert json.loads((tmp_path / "device-check.json").read_text())["parts"].keys() == {"bandwidth"}
    assert "bandwidth: ok" in capsys.readouterr().out


def test_a_part_that_raises_is_told_and_the_others_run(tmp_path, capsys):
    out = tmp_path / "report.json"
    parts = ["--parts", "graphs", "bandwidth", "--copy-mib", "1"]
    assert main(["--backend", "cpu_sim", "--out", str(out), *parts, "--hidden-size", "0"]) == 1
    report = json.loads(out.read_text())
    assert not report["ok"]
    assert "rows of shape (0,) hold nothing" in report["parts"]["graphs"]["error"]
    assert report["parts"]["bandwidth"]["ok"]
    assert "graphs: NOT OK" in capsys.readouterr().out


class LateSnapshots(CpuSimBackend):
    """It clones a step's rows when their copy begins: by then the next steps' graphs have overwritten them."""

    def __init__(self, runtime: Runtime) -> None:
        taken: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._taken = taken

        class CloneNow(DeviceObserver):
            def copy_begins(self, copy: ObservedCopy) -> None:
                runtime.sleep(0.02)
                while taken:
                    clone, tensor = taken.pop(0)
                    clone.copy_(tensor)

        super().__init__(runtime, observer=CloneNow())

    def refresh_snapshot(self, clone: torch.Tensor, tensor: torch.Tensor) -> None:
        self._taken.append((clone, tensor))


def replayed(make_backend, traffic):
    report = replay(traffic, make_backend, lambda device: EmulatedGraphs(traffic), lambda device: Undisturbed())
    return report.judgement


def test_rows_of_another_step_are_noticed():
    traffic = record_traffic(TrafficConfig(40, hidden_size=32))
    assert replayed(CpuSimBackend, traffic).ok
    wrong = replayed(LateSnapshots, traffic)
    assert not wrong.ok
    assert wrong.rows_wrong > 0
    assert "is another's or garbage" in wrong.examples[0]


class RecordedGraph(TorchDispatchMode):
    """Captures as a device's graph does: the operations, on the tensors they were captured with."""

    def __init__(self):
        super().__init__()
        self._operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._operations.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def replay(self):
        for func, args, kwargs in self._operations:
            func(*args, **kwargs)


class HostStream:
    def synchronize(self):
        return None


HOST_MODULE = SimpleNamespace(
    CUDAGraph=RecordedGraph,
    graph=lambda graph: graph,
    Stream=HostStream,
    stream=lambda stream: nullcontext(),
    current_stream=HostStream,
    synchronize=lambda: None,
)
"""The part of `torch.cuda` that the check uses, on the host. Nothing is asynchronous here but the backend's copies."""


@pytest.mark.parametrize("waits", [False, True], ids=["as on CUDA", "as on NPU"])
def test_captured_graphs_give_the_rows_that_the_model_has(waits, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    checked = CheckedBackend("cpu_sim", "", "", "CUDAGraph", synchronizes_before_replay=waits)
    traffic = record_traffic(TrafficConfig(40, hidden_size=32))
    report = replay(
        traffic,
        CpuSimBackend,
        lambda device: DeviceGraphs(checked, HOST_MODULE, device, traffic, busy_rounds=0),
        lambda device: DeviceLoad(7, ThreadingRuntime(), HOST_MODULE, device, busy_size=32),
    )
    assert report.judgement.ok, report.judgement.examples
    assert min(report.padded_steps, report.eager_steps) > 0


def judged(spoil):
    """What a judge says of a traffic that was delivered at once and right, but for what `spoil` does to a delivery."""
    traffic = record_traffic(TrafficConfig(5, hidden_size=8, prompt_tokens=(4, 4), output_tokens=(1, 1)))
    judge = Judge(traffic)
    for number, step in enumerate(traffic.steps):
        delivered = {}
        for run in step.runs:
            positions = np.arange(run.stop)
            rows = {key.name: traffic.model.rows(key, run.track, positions) for key in traffic.model.all_keys}
            delivered[run.req_id] = DeliveredRows(positions, rows)
        if number == 0:
            first = step.runs[0].req_id
            delivered[first] = spoil(delivered[first])
        judge.check(number, step, delivered)
    return judge.finish()


def test_right_rows_are_right():
    judgement = judged(lambda got: got)
    assert judgement.ok
    assert judgement.rows_compared > 0


def test_one_wrong_bit_is_noticed():
    def spoil(got):
        got.rows[HIDDEN_KEY].view(torch.int16)[2, 3] ^= 1
        return got

    judgement = judged(spoil)
    assert judgement.rows_wrong == 1
    assert "the row of position 2 is another's or garbage" in judgement.examples[0]


def test_a_missing_row_is_noticed():
    judgement = judged(
        lambda got: DeliveredRows(got.positions[:-1], {key: rows[:-1] for key, rows in got.rows.items()})
    )
    assert not judgement.ok
    assert "3 of 4 rows, or one of them twice" in judgement.examples[0]


def test_a_backend_that_the_machine_has_not_is_refused_with_its_reason(monkeypatch):
    gone = BACKENDS[0]
    monkeypatch.setattr(gone.load(), "unavailable_reason", lambda: "the last device was taken out")
    with pytest.raises(SystemExit, match=f"no backend to check. {gone.name}: the last device was taken out"):
        choose(gone.name)


def test_without_a_name_the_first_that_can_run_is_checked():
    runnable = [backend.name for backend in BACKENDS if backend.load().unavailable_reason() is None]
    assert choose(None).name == runnable[0]
