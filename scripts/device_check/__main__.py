# SPDX-License-Identifier: Apache-2.0
"""`scripts/device_check.sh [--backend NAME] [--out FILE] ...`: runs the parts and writes one JSON report.

The report is written anew after each part: what was found outlives a part that hangs or kills the process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from device_check.backends import BACKENDS, CheckedBackend, choose
from device_check.bandwidth import measure_bandwidth
from device_check.races import DeviceLoad, HostLoad
from device_check.replay import Disturbance, ReplayReport, Undisturbed, replay
from device_check.step_gap import measure_step_gap
from device_check.step_graphs import make_graphs
from device_check.traffic import Traffic, TrafficConfig, record_traffic
from omni_core.backend.conformance import run_conformance
from omni_core.runtime import ThreadingRuntime

PARTS = ("conformance", "graphs", "races", "bandwidth", "step_gap")
_BUSY_ROUNDS = 20
_CHECK_LIMIT_S = 60.0
_RUNS_PER_TRAFFIC = 4
"""Runs of the race hunt over the same steps, each with other load: deciding steps takes longer than running them."""


class DeviceCheck:
    """The parts, for one backend."""

    def __init__(self, checked: CheckedBackend, args: argparse.Namespace) -> None:
        self._checked = checked
        self._args = args
        self._runtime = ThreadingRuntime()
        backend = checked.make(self._runtime)
        backend.bind_thread()
        info = backend.device_info()
        self.device = torch.device(info.device)
        self.facts = {
            "backend": checked.name,
            "device": info.name,
            "total_memory_bytes": info.total_memory_bytes,
            "software": dict(info.software),
            "capabilities": asdict(backend.capabilities),
            "torch": torch.__version__,
            "python": sys.version.split()[0],
        }
        backend.close()

    def parts(self) -> Mapping[str, Callable[[], dict[str, Any]]]:
        """What to run, by name."""
        return {
            "conformance": self.conformance,
            "graphs": self.graphs,
            "races": self.races,
            "bandwidth": self.bandwidth,
            "step_gap": self.step_gap,
        }

    def conformance(self) -> dict[str, Any]:
        """Every check of the suite."""
        results = run_conformance(self._checked.make, limit_s=_CHECK_LIMIT_S)
        failed = {result.check.name: str(result.error) for result in results if result.error is not None}
        slowest = max(results, key=lambda result: result.seconds)
        return {
            "ok": not failed,
            "checks": len(results),
            "failed": failed,
            "slowest": f"{slowest.check.name}, {slowest.seconds:.1f} s",
        }

    def graphs(self) -> dict[str, Any]:
        """The cache under captured graphs: static buffers, padded steps, every row compared bit for bit."""
        traffic = record_traffic(TrafficConfig(self._args.steps, hidden_size=self._args.hidden_size))
        return _replay_as_json(self._replay(traffic, self._checked.make, lambda device: Undisturbed()))

    def races(self) -> dict[str, Any]:
        """The same under load, with one seed after the other until the time is used."""
        started_s, runs = self._runtime.monotonic_s(), []
        seed = self._args.seed
        while not runs or self._runtime.monotonic_s() - started_s < self._args.race_s:
            if len(runs) % _RUNS_PER_TRAFFIC == 0:
                config = TrafficConfig(self._args.race_steps, hidden_size=self._args.hidden_size, seed=seed)
                traffic = record_traffic(config)

            def load(device: torch.device, seed: int = seed) -> Disturbance:
                if device.type == "cpu":
                    return HostLoad(seed, self._runtime)
                return DeviceLoad(seed, self._runtime, torch.get_device_module(device.type), device)

            report = self._replay(traffic, self._checked.make_for_races, load)
            runs.append({"seed": seed, "traffic_seed": traffic.config.seed, **_replay_as_json(report)})
            if not report.judgement.ok:
                break
            seed += 1
        return {
            "ok": all(run["ok"] for run in runs),
            "seeds": len(runs),
            "steps": sum(run["steps"] for run in runs),
            "rows_compared": sum(run["rows_compared"] for run in runs),
            "wrong": [run for run in runs if not run["ok"]],
        }

    def bandwidth(self) -> dict[str, Any]:
        """Copies to the host, beside torch's own."""
        return measure_bandwidth(self._checked, self.device, self._args.copy_mib)

    def step_gap(self) -> dict[str, Any]:
        """A decode step with and without the cache."""
        config = TrafficConfig(
            self._args.gap_steps, hidden_size=self._args.hidden_size, prompt_tokens=(8, 32), output_tokens=(200, 400)
        )
        return measure_step_gap(self._checked, self.device, record_traffic(config), self._args.busy_rounds)

    def _replay(
        self, traffic: Traffic, make: Callable[..., Any], load: Callable[[torch.device], Disturbance]
    ) -> ReplayReport:
        return replay(traffic, make, lambda device: make_graphs(self._checked, device, traffic, _BUSY_ROUNDS), load)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; 0 if all are fine, else 1."""
    args = _parser().parse_args(argv)
    check = DeviceCheck(choose(args.backend), args)
    report: dict[str, Any] = {"ok": False, **check.facts, "parts": {}}
    clock = ThreadingRuntime()
    for name, part in check.parts().items():
        if name not in args.parts:
            continue
        started_s = clock.monotonic_s()
        try:
            found = part()
        except Exception as error:  # the other parts are told all the same
            found = {"ok": False, "error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        report["parts"][name] = {**found, "seconds": round(clock.monotonic_s() - started_s, 1)}
        report["ok"] = all(one["ok"] for one in report["parts"].values())
        _write(args.out, report)
        _say(f"{name}: {'ok' if found['ok'] else 'NOT OK'} ({report['parts'][name]['seconds']} s)")
    _say(f"report: {args.out}")
    return 0 if report["ok"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/device_check.sh", description=__doc__)
    parser.add_argument("--backend", choices=[backend.name for backend in BACKENDS], help="default: the first there is")
    out = Path(os.environ.get("OUT", "."), "device-check.json")
    parser.add_argument("--out", type=Path, default=out, help="the report (default: device-check.json, in $OUT if set)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument("--steps", type=int, default=1000, help="of the part graphs")
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--race-s", type=float, default=60.0, help="least seconds of the race hunt")
    parser.add_argument("--race-steps", type=int, default=200, help="steps per seed of the race hunt")
    parser.add_argument("--seed", type=int, default=1, help="first seed of the race hunt")
    parser.add_argument("--gap-steps", type=int, default=300, help="of the part step_gap")
    parser.add_argument("--busy-rounds", type=int, nargs="+", default=[0, 200], help="lengths of its forwards")
    parser.add_argument("--copy-mib", type=int, nargs="+", default=[1, 16, 256], help="sizes of the part bandwidth")
    return parser


def _replay_as_json(report: ReplayReport) -> dict[str, Any]:
    judgement = report.judgement
    return {
        "ok": judgement.ok,
        "steps": report.num_steps,
        "tokens": report.num_tokens,
        "padded_steps": report.padded_steps,
        "eager_steps": report.eager_steps,
        "run_s": round(report.seconds, 2),
        "rows_compared": judgement.rows_compared,
        "rows_from_hits": judgement.rows_from_hits,
        "rows_wrong": judgement.rows_wrong,
        "examples": judgement.examples,
    }


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _write(path: Path, report: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    fresh.replace(path)


if __name__ == "__main__":
    sys.exit(main())
