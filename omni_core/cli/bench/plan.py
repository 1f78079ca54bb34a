# SPDX-License-Identifier: Apache-2.0
"""What a run of a benchmark is given: how many rounds, and whether the peer is measured beside it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from omni_core.cli.bench.engine_batch import StageShape
from omni_core.cli.bench.peer.package import PeerPackage
from omni_core.cli.bench.peer.stage import PeerMode, PeerStage
from omni_core.cli.bench.stage import OurStage, Stage
from omni_core.cli.bench.threads import MeteredRuntime

QUICK = "a quick run: it shows the form, its figures mean nothing"
NO_PEER = "the peer was not measured (no --peer)"


@dataclass(frozen=True, slots=True)
class Plan:
    """How a benchmark is to run."""

    quick: bool = False
    """A few rounds, which show that it runs and what it prints. Its figures mean nothing."""
    peer: PeerPackage | None = None
    limit_s: float = 2400.0
    """Most seconds for a benchmark that goes on until its interval is narrow."""
    model: Path | None = None
    """The model directory of benchmarks that run an engine; `None`: the demo's."""
    config: Path | None = None
    """The JSON file of `diffusion`; `None`: as it is published."""

    def rounds(self, full: int, quick: int) -> int:
        """A number of rounds, for a full run or for a quick one."""
        return quick if self.quick else full

    @property
    def peer_names(self) -> tuple[str, ...]:
        """The sides of the peer that are measured."""
        return () if self.peer is None else tuple(mode.value for mode in PeerMode)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of any figure must know of this run."""
        return (QUICK,) if self.quick else ()

    @property
    def notes_beside_peer(self) -> tuple[str, ...]:
        """The same, where the peer could have been measured."""
        return self.notes if self.peer is not None else (*self.notes, NO_PEER)

    @contextmanager
    def sides(self, shape: StageShape, runtime: MeteredRuntime, *, deliver_all: bool = True) -> Iterator[list[Stage]]:
        """Our cache and those of the peer, built for one stage and closed at the end."""
        makers: list[Callable[[], Stage]] = [partial(OurStage, shape, runtime, deliver_all=deliver_all)]
        if self.peer is not None:
            package = self.peer
            makers.extend(partial(PeerStage, package, shape, mode) for mode in PeerMode)
        with ExitStack() as stack:
            sides: list[Stage] = []
            for make in makers:
                sides.append(make())
                stack.callback(sides[-1].close)
            yield sides


def say(text: str) -> None:
    """Tell the operator what is being measured."""
    print(text, file=sys.stderr, flush=True)
