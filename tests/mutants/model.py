# SPDX-License-Identifier: Apache-2.0
"""What a mutant is: a named bug, the lines that put it into the source, and who should notice."""

import shlex
from dataclasses import dataclass
from pathlib import Path

CORE = "omni_core/prefix_cache/"
CPU_SIM = "backends/cpu_sim/omni_core_cpu_sim/"


class OutOfDateError(Exception):
    """The lines a mutant changes are not in the source, or not just once: bring the mutant up to date."""


@dataclass(frozen=True)
class Edit:
    """`old`, which stands exactly once in `file`, becomes `new`. `file` is relative to the repository."""

    file: str
    old: str
    new: str

    def apply(self, root: Path) -> None:
        """Change the file under `root`.

        Raises:
            OutOfDateError: `old` does not stand there exactly once.
        """
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        found = text.count(self.old)
        if found != 1:
            first_line = next(line.strip() for line in self.old.splitlines() if line.strip())
            raise OutOfDateError(f"{self.file}: expected once, found {found} times: {first_line!r}, …")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


@dataclass(frozen=True)
class Tests:
    """Some tests, run until one fails. `only` is pytest's `-k`."""

    paths: tuple[str, ...]
    only: str = ""

    __test__ = False  # not a test class

    def __post_init__(self) -> None:
        if not self.paths:
            raise ValueError("tests of no file: pytest would run every test there is; name the files")

    @property
    def arguments(self) -> list[str]:
        """What `python` is given."""
        chosen = ["-k", self.only] if self.only else []
        return ["-m", "pytest", *PYTEST_OPTIONS, "-x", *chosen, *self.paths]

    def __str__(self) -> str:
        return " ".join(self.paths) + (f" -k {shlex.quote(self.only)}" if self.only else "")


PYTEST_OPTIONS = ("-q", "-p", "no:cacheprovider", "--timeout", "60", "--no-header", "-rfE", "--tb", "short")


@dataclass(frozen=True)
class Workloads:
    """Random workloads under the oracle and the hazard checker, in schedules a seed decides, until one is wrong."""

    num_seeds: int = 12

    @property
    def arguments(self) -> list[str]:
        """What `python` is given."""
        return ["-m", "mutants.seeded_workloads", str(self.num_seeds)]

    def __str__(self) -> str:
        return f"random workloads, seeds 0 to {self.num_seeds - 1}"


Detector = Tests | Workloads
WORKLOADS = Workloads()
WORKLOAD = "workload::"
"""Begins the name of a workload that failed, as a file's path begins a test's."""


def files(*paths: str, only: str = "") -> Tests:
    """Tests by file, relative to `tests/`."""
    return Tests(tuple(f"tests/{path}" for path in paths), only)


@dataclass(frozen=True)
class Mutant:
    """One bug."""

    name: str
    breaks: str
    """What is wrong then, in one sentence."""
    edits: tuple[Edit, ...]
    detectors: tuple[Detector, ...]
    """Who should notice, cheapest first."""
    listed_as: str = ""
    """The words of the issue's list of bugs it stands for; "" for one of our own."""
    note: str = ""
    """How it differs from those words, if the code has no literal counterpart."""

    @property
    def files(self) -> tuple[str, ...]:
        """The files it changes."""
        return tuple(dict.fromkeys(edit.file for edit in self.edits))

    def apply(self, root: Path) -> None:
        """Put the bug into the source under `root`.

        Raises:
            OutOfDateError: the source has changed; names the mutant and the lines.
        """
        try:
            for edit in self.edits:
                edit.apply(root)
        except OutOfDateError as error:
            raise OutOfDateError(f"mutant {self.name!r} is out of date: {error}") from None


def bug(
    name: str,
    breaks: str,
    file: str,
    old: str,
    new: str,
    *detectors: Detector,
    listed_as: str = "",
    note: str = "",
) -> Mutant:
    """A mutant that changes one place."""
    return Mutant(name, breaks, (Edit(file, old, new),), detectors, listed_as, note)
