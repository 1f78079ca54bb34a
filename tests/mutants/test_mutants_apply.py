# SPDX-License-Identifier: Apache-2.0
"""Every mutant fits the source as it is, and the page about them is about these. `make mutants` runs them."""

import shutil

import pytest

from mutants.model import Edit, Mutant, OutOfDateError, Tests, Workloads
from mutants.report import PAGE, described
from mutants.sandbox import REPOSITORY, check_origin, frozen_source
from mutants.table import LISTED_BUGS, MUTANTS
from mutants.trial import Outcome, complaint_about_unchanged, try_mutant


def copy_of_its_files(mutant, root):
    for file in mutant.files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / file, root / file)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fits_the_source_and_compiles(mutant, tmp_path):
    copy_of_its_files(mutant, tmp_path)
    mutant.apply(tmp_path)
    for file in mutant.files:
        text = (tmp_path / file).read_text(encoding="utf-8")
        compile(text, file, "exec")
        assert text != (REPOSITORY / file).read_text(encoding="utf-8")


def test_every_detector_is_there():
    detectors = [detector for mutant in MUTANTS for detector in mutant.detectors]
    paths = {path for detector in detectors if isinstance(detector, Tests) for path in detector.paths}
    assert [path for path in sorted(paths) if not (REPOSITORY / path).exists()] == []
    assert [mutant.name for mutant in MUTANTS if not mutant.detectors] == []


def test_every_listed_bug_has_a_mutant_and_no_name_is_used_twice():
    assert {mutant.listed_as for mutant in MUTANTS} - {""} == set(LISTED_BUGS)
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)


def test_a_mutant_whose_lines_are_gone_or_ambiguous_is_out_of_date(tmp_path):
    (tmp_path / "source.py").write_text("a = 1\nb = 1\n")
    for old in ("c = 1\n", " = 1\n"):
        mutant = Mutant("odd", "nothing", (Edit("source.py", old, "x"),), ())
        with pytest.raises(OutOfDateError, match=r"odd.*source\.py"):
            mutant.apply(tmp_path)


def test_the_page_lists_these_mutants():
    page = (REPOSITORY / PAGE).read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    shown = {row[0].strip("| `"): row[2].replace(r"\|", "|") for row in rows}
    assert shown == {mutant.name: described(mutant) for mutant in MUTANTS}, "make mutants MUTANTS_ARGS=--write-page"


@pytest.fixture
def small_source(tmp_path):
    """A source of one module, and one test of it."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "thing.py").write_text("LIMIT = 2\n")
    (tmp_path / "tests" / "test_thing.py").write_text(
        "from thing import LIMIT\n\n\ndef test_the_limit_is_two():\n    assert LIMIT == 2, 'not two'\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("new", "outcome", "caught_by", "evidence"),
    [
        ("LIMIT = 3", Outcome.KILLED, "tests/test_thing.py::test_the_limit_is_two", "AssertionError: not two"),
        ("LIMIT = 1 + 1", Outcome.SURVIVED, "", ""),
        ("LIMIT = missing", Outcome.BROKEN, "tests/test_thing.py", "NameError"),
        ("import os\nLIMIT = os.kill(os.getpid(), 9)", Outcome.KILLED, "tests/test_thing.py", "signal 9"),
    ],
)
def test_a_bug_is_noticed_a_harmless_change_survives_and_what_cannot_be_tried_is_broken(
    small_source, new, outcome, caught_by, evidence
):
    edit = Edit("thing.py", "LIMIT = 2", new)
    result = try_mutant(Mutant("odd", "", (edit,), (Tests(("tests/test_thing.py",)),)), small_source)
    assert result.outcome is outcome
    assert result.caught_by == caught_by
    assert evidence in result.evidence
    # Only the copy was changed.
    assert (small_source / "thing.py").read_text() == "LIMIT = 2\n"


def test_a_mutant_that_is_out_of_date_is_broken(small_source):
    edit = Edit("thing.py", "LIMIT = 4", "LIMIT = 5")
    result = try_mutant(Mutant("odd", "", (edit,), (Tests(("tests/test_thing.py",)),)), small_source)
    assert result.outcome is Outcome.BROKEN
    assert "out of date" in result.evidence


def test_detectors_run_against_the_copy():
    with frozen_source() as source:
        check_origin(source)


@pytest.fixture
def whole_source(small_source):
    """The same with all that the harness asks of a source, empty where it can be: its workloads find nothing."""
    for name in (
        "omni_core/__init__.py",
        "omni_core/pytest_plugin.py",
        "backends/cpu_sim/omni_core_cpu_sim/__init__.py",
        "tests/mutants/__init__.py",
        "tests/mutants/seeded_workloads.py",
    ):
        (small_source / name).parent.mkdir(parents=True, exist_ok=True)
        (small_source / name).touch()
    return small_source


def test_the_unchanged_source_is_shown_to_the_chosen_detectors_and_no_other(whole_source):
    """Of workloads alone pytest was once asked, without a file to run: then it runs every test there is."""
    (whole_source / "thing.py").write_text("LIMIT = 3\n")
    by_workloads = Mutant("odd", "nothing", (), (Workloads(),))
    by_a_test = Mutant("even", "nothing", (), (Tests(("tests/test_thing.py",)),))
    assert complaint_about_unchanged([by_workloads], whole_source) is None
    assert "test_the_limit_is_two" in (complaint_about_unchanged([by_workloads, by_a_test], whole_source) or "")


def test_tests_of_no_file_are_refused():
    with pytest.raises(ValueError, match="name the files"):
        Tests(())
