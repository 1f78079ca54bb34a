# SPDX-License-Identifier: Apache-2.0
"""One mutant, tried: its detectors are asked in turn until one notices. And the unchanged source, which none may."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from mutants.model import Mutant, OutOfDateError, Tests, Workloads
from mutants.sandbox import Finding, Verdict, ask, check_origin, sandbox

LIMIT_S = 180.0
"""How long one detector may take. A mutant that is still running then hangs, which counts as noticed."""
UNCHANGED_LIMIT_S = 900.0


class Outcome(Enum):
    """What became of a mutant."""

    KILLED = "killed"
    SURVIVED = "survived"
    """No detector noticed: a hole in the tests."""
    BROKEN = "broken"
    """It could not be tried: it is out of date, or a detector could not run."""


@dataclass(frozen=True)
class Result:
    """One mutant's fate."""

    mutant: Mutant
    outcome: Outcome
    caught_by: str = ""
    """The test or workload that noticed."""
    evidence: str = ""
    """The first line it said, or what is broken."""
    seconds: float = 0.0


def try_mutant(mutant: Mutant, source: Path) -> Result:
    """Put the mutant into a copy of `source` and ask its detectors. Blocks until one notices, or all are asked."""
    began_s = time.monotonic()

    def result(outcome: Outcome, finding: Finding) -> Result:
        return Result(mutant, outcome, finding.where, finding.what, time.monotonic() - began_s)

    with sandbox(source) as root:
        try:
            mutant.apply(root)
        except OutOfDateError as error:
            return Result(mutant, Outcome.BROKEN, evidence=str(error))
        for detector in mutant.detectors:
            finding = ask(detector, root, LIMIT_S)
            if finding.verdict is Verdict.CAUGHT:
                return result(Outcome.KILLED, finding)
            if finding.verdict is Verdict.BROKEN:
                return result(Outcome.BROKEN, finding)
    return result(Outcome.SURVIVED, Finding(Verdict.NOTHING))


def complaint_about_unchanged(mutants: Iterable[Mutant], source: Path) -> str | None:
    """Ask all these mutants' detectors about the unchanged source: what one of them says, which none should."""
    detectors = {detector: None for mutant in mutants for detector in mutant.detectors}
    paths = {path: None for detector in detectors if isinstance(detector, Tests) for path in detector.paths}
    tests = [Tests(tuple(paths))] if paths else []
    workloads = [detector for detector in detectors if isinstance(detector, Workloads)]
    with sandbox(source) as root:
        check_origin(root)
        for detector in (*tests, *workloads):
            finding = ask(detector, root, UNCHANGED_LIMIT_S)
            if finding.verdict is not Verdict.NOTHING:
                return f"the unchanged source does not pass: {finding.where}: {finding.what}"
    return None
