# SPDX-License-Identifier: Apache-2.0
"""Results as lines, as JSON, and as the page `docs/mutants.md`."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from mutants.model import WORKLOAD, Mutant
from mutants.trial import Outcome, Result

PAGE = "docs/mutants.md"
_INTRODUCTION = """\
# Mutants

Each of these bugs is put into a copy of the source, alone, and must be noticed. `make mutants` does it. A mutant that
survives shows a hole in the tests, and fails the run. The unchanged source is put to the same tests, and must pass.

`make mutants MUTANTS_ARGS=--write-page` writes this page. `--only NAME` tries one mutant, `--list` names them, and
`--format json` prints a document.
"""
_LISTED = """\
## Bugs the cache was designed against

Where our design has no literal counterpart of a bug, the nearest real one is injected; "for" says what it stands for.
"""
_OWN = "## Further bugs\n"
_HEADER = ("Mutant", "File", "What it breaks", "Caught by")


def line_of(result: Result) -> str:
    """One result for a terminal."""
    evidence = f"{result.caught_by}: {result.evidence}" if result.caught_by else result.evidence
    return f"{result.outcome.value:8} {result.mutant.name:42} {result.seconds:5.0f} s  {_short(evidence, 240)}"


def summary_of(results: Sequence[Result], complaint: str | None) -> str:
    """The last lines for a terminal."""
    counts = Counter(result.outcome for result in results)
    lines = [f"{len(results)} mutants: " + ", ".join(f"{counts[outcome]} {outcome.value}" for outcome in Outcome)]
    lines += [
        f"  survived: {result.mutant.name} ({', '.join(result.mutant.files)}): {result.mutant.breaks}"
        for result in results
        if result.outcome is Outcome.SURVIVED
    ]
    lines += [
        f"  broken: {result.mutant.name}: {result.caught_by} {result.evidence}"
        for result in results
        if result.outcome is Outcome.BROKEN
    ]
    return "\n".join([*lines, *([complaint] if complaint else [])])


def json_document(results: Sequence[Result], complaint: str | None) -> dict[str, Any]:
    """Everything, for a program."""
    return {
        "unchanged_source": complaint or "passes",
        "mutants": [
            {
                "name": result.mutant.name,
                "stands_for": result.mutant.listed_as,
                "files": list(result.mutant.files),
                "breaks": result.mutant.breaks,
                "note": result.mutant.note,
                "outcome": result.outcome.value,
                "caught_by": result.caught_by,
                "evidence": result.evidence,
                "seconds": round(result.seconds, 1),
            }
            for result in results
        ],
    }


def page_text(results: Sequence[Result]) -> str:
    """The page, from a run in which every mutant was killed."""
    listed = [result for result in results if result.mutant.listed_as]
    own = [result for result in results if not result.mutant.listed_as]
    return "\n".join([_INTRODUCTION, _LISTED, *_table(listed), "", _OWN, *_table(own), ""])


def _table(results: Sequence[Result]) -> list[str]:
    rows = [_HEADER, tuple("---" for _ in _HEADER)]
    rows += [
        (f"`{result.mutant.name}`", _files_of(result.mutant), described(result.mutant), _catcher(result))
        for result in results
    ]
    return ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows]


def described(mutant: Mutant) -> str:
    """What a mutant breaks, and what it stands for."""
    remarks = "; ".join(remark for remark in (mutant.listed_as and f"for: {mutant.listed_as}", mutant.note) if remark)
    return f"{mutant.breaks} ({remarks})" if remarks else mutant.breaks


def _files_of(mutant: Mutant) -> str:
    return ", ".join(f"`{file.rsplit('/', 1)[-1]}`" for file in mutant.files)


def _catcher(result: Result) -> str:
    where = result.caught_by.removeprefix("tests/")
    if where.startswith(WORKLOAD):
        return f"random workload, {where.removeprefix(WORKLOAD)}: {_short(result.evidence, 100)}"
    return f"`{where}`" + ("" if "::" in where else f": {_short(result.evidence, 80)}")


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
