# SPDX-License-Identifier: Apache-2.0
"""Compares every delivered row, bit for bit, with the row the model has for that prefix, position and key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from device_check.traffic import Traffic, TrafficStep

_MOST_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class DeliveredRows:
    """What one step delivered to one request, copied out."""

    positions: np.ndarray
    rows: Mapping[str, torch.Tensor]


@dataclass(slots=True)
class Judgement:
    """What was compared."""

    rows_compared: int = 0
    rows_from_hits: int = 0
    """Of those, rows that no forward of their step computed."""
    rows_wrong: int = 0
    examples: list[str] = field(default_factory=list)
    """The first wrong rows, in words."""

    @property
    def ok(self) -> bool:
        """Whether rows were compared and none was wrong."""
        return self.rows_compared > 0 and not self.examples

    def complain(self, text: str) -> None:
        """Note something wrong."""
        if len(self.examples) < _MOST_EXAMPLES:
            self.examples.append(text)


class Judge:
    """Judges one run of a traffic. One thread."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._delivered: dict[str, list[np.ndarray]] = {}
        self.judgement = Judgement()

    def check(self, number: int, step: TrafficStep, delivered: Mapping[str, DeliveredRows]) -> None:
        """Judge what a step delivered to its requests."""
        tracks = {run.req_id: run for run in step.runs}
        for req_id, got in delivered.items():
            run = tracks[req_id]
            self._delivered.setdefault(req_id, []).append(got.positions)
            self.judgement.rows_from_hits += int((got.positions < run.start).sum())
            for key in self._traffic.model.all_keys:
                if len(got.positions):
                    expected = self._traffic.model.rows(key, run.track, got.positions)
                    self._compare(f"step {number}, request {req_id!r}, key {key.name!r}", expected, got, key.name)

    def finish(self) -> Judgement:
        """Judge that each request got each row once, and a finished one all of them."""
        for req_id, pieces in self._delivered.items():
            positions = np.sort(np.concatenate(pieces))
            wanted = self._traffic.finished.get(req_id, len(positions))
            if not np.array_equal(positions, np.arange(wanted)):
                self.judgement.complain(f"request {req_id!r}: {len(positions)} of {wanted} rows, or one of them twice")
        return self.judgement

    def _compare(self, where: str, expected: torch.Tensor, got: DeliveredRows, key: str) -> None:
        rows = got.rows[key]
        if rows.shape != expected.shape or rows.dtype != expected.dtype:
            self.judgement.complain(f"{where}: {tuple(rows.shape)} {rows.dtype}, not {tuple(expected.shape)}")
            return
        wrong = (_bytes(rows) != _bytes(expected)).any(dim=1)
        self.judgement.rows_compared += len(rows)
        self.judgement.rows_wrong += int(wrong.sum())
        for index in wrong.nonzero().flatten().tolist()[:1]:
            self.judgement.complain(f"{where}: the row of position {got.positions[index]} is another's or garbage")


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous().view(rows.shape[0], -1).view(torch.uint8)
