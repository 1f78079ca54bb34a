# SPDX-License-Identifier: Apache-2.0
"""A copy of the source that a mutant may change, and the running of detectors in it."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from mutants.model import Detector

REPOSITORY = Path(__file__).parents[2]
_COPIED = ("omni_core", "backends", "tests", "pyproject.toml")
_IMPORT_ROOTS = ("", "backends/cpu_sim", "backends/cuda", "backends/npu", "tests")
_PATIENCE = ("tests/support/controlled_runtime.py", "PATIENCE_S = 30.0", "PATIENCE_S = 8.0")
"""How long a test waits for what must happen; a mutant that hangs is noticed sooner. The unchanged copy has it, too."""
_SHOWN_LINES = 12
_SUMMARY = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$", re.MULTILINE)
_ORIGIN_CHECK = "import omni_core, omni_core_cpu_sim; print(omni_core.__file__, omni_core_cpu_sim.__file__)"


class Verdict(Enum):
    """What a detector said."""

    NOTHING = "nothing"
    CAUGHT = "caught"
    BROKEN = "broken"
    """It could not be run at all: it says nothing about the mutant."""


@dataclass(frozen=True)
class Finding:
    """A detector's answer."""

    verdict: Verdict
    where: str = ""
    """The test or workload that failed."""
    what: str = ""
    """Its first line."""


@contextmanager
def frozen_source() -> Iterator[Path]:
    """A directory with a copy of all that detectors need, as it is now; gone when the block ends."""
    with _directory() as root:
        for name in _COPIED:
            source = REPOSITORY / name
            if source.is_dir():
                shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
            else:
                shutil.copy(source, root / name)
        file, old, new = _PATIENCE
        text = (root / file).read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise RuntimeError(f"{file} has no line {old!r} any more; bring {Path(__file__).name} up to date")
        (root / file).write_text(text.replace(old, new), encoding="utf-8")
        yield root


@contextmanager
def sandbox(source: Path) -> Iterator[Path]:
    """A copy of a frozen source that may be changed; gone when the block ends."""
    with _directory() as root:
        shutil.copytree(source, root, dirs_exist_ok=True)
        yield root


@contextmanager
def _directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="omni-core-mutant-", ignore_cleanup_errors=True) as directory:
        yield Path(directory).resolve()


def check_origin(root: Path) -> None:
    """Make sure that Python run in the sandbox imports the copy, not the original.

    Raises:
        RuntimeError: it does not.
    """
    run = subprocess.run(
        [sys.executable, "-c", _ORIGIN_CHECK],
        cwd=root,
        env=_environment(root),
        capture_output=True,
        text=True,
        check=True,
    )
    strangers = [file for file in run.stdout.split() if not Path(file).is_relative_to(root)]
    if strangers:
        raise RuntimeError(f"the sandbox imports {strangers} from outside {root}")


def ask(detector: Detector, root: Path, limit_s: float) -> Finding:
    """Run a detector in a sandbox. Blocks at most `limit_s`."""
    process = subprocess.Popen(
        [sys.executable, *detector.arguments],
        cwd=root,
        env=_environment(root),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return Finding(Verdict.CAUGHT, str(detector), f"did not end within {limit_s:.0f} s")
    if process.returncode == 0:
        return Finding(Verdict.NOTHING)
    if process.returncode < 0:
        return Finding(Verdict.CAUGHT, str(detector), f"the process died of signal {-process.returncode}")
    failed = _SUMMARY.search(output)
    if process.returncode == 1 and failed is not None and "::" in failed[1]:
        return Finding(Verdict.CAUGHT, failed[1], (failed[2] or "").strip())
    said = [line for line in output.splitlines() if line.strip("=!- ")]
    return Finding(Verdict.BROKEN, str(detector), "\n".join(said[-_SHOWN_LINES:]))


def _environment(root: Path) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(str(root / name) for name in _IMPORT_ROOTS),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "HYPOTHESIS_PROFILE": "ci",
        "COLUMNS": "400",
    }
