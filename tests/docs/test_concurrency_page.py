# SPDX-License-Identifier: Apache-2.0
"""The page on threads and locks says what is in the source: generated parts are current, locks and threads named."""

import re
import threading
from collections import Counter

import pytest
import render_concurrency

from omni_core.runtime import ThreadingRuntime
from omni_core.testing import WorkloadConfig, run_workload

HOW_TO = "run `python scripts/render_concurrency.py`"


@pytest.fixture(scope="module")
def page():
    return render_concurrency.PAGE.read_text(encoding="utf-8")


def first_cells(page, header):
    """The code spans in the first column of the table with that header, and those of its third."""
    table = page.partition(header)[2].partition("\n\n")[0].splitlines()[2:]
    return [[set(re.findall(r"`([^`]+)`", cell)) for cell in row.split("|")[1:-1]] for row in table]


def test_the_generated_parts_are_current(page):
    assert set(re.findall(r"<!-- generated: (\S+) -->", page)) == set(render_concurrency.PARTS)
    assert render_concurrency.rendered(page) == page, HOW_TO


def test_the_picture_of_the_states_is_current():
    assert render_concurrency.PICTURE.read_text(encoding="utf-8") == render_concurrency.states_svg(), HOW_TO


def test_a_stale_page_is_noticed(page):
    for name in render_concurrency.PARTS:
        stale = re.sub(rf"(<!-- generated: {name} -->\n\n.*?\n)[^\n]+\n", r"\1", page, count=1, flags=re.DOTALL)
        assert stale != page
        assert render_concurrency.rendered(stale) == page


def test_every_state_is_explained():
    assert set(render_concurrency.state_meanings()) == set(render_concurrency.TaskState)
    assert all(render_concurrency.state_meanings().values())


def test_every_thread_is_in_the_table(page):
    named = {name for row in first_cells(page, "| Thread | Runs |") for name in row[0]}
    assert named == render_concurrency.named("spawn")


def test_every_lock_and_condition_is_in_the_table(page):
    rows = first_cells(page, "| Lock | Guards |")
    assert {name for row in rows for name in row[0]} == render_concurrency.named("lock")
    assert {name for row in rows for name in row[2]} == render_concurrency.named("condition")


def test_every_wait_of_a_caller_is_bounded():
    unbounded = [row for row in render_concurrency.waits_table().splitlines() if "no bound" in row]
    assert [re.search(r"`(\w+\.\w+\.\w+)`", row).group(1) for row in unbounded] == [
        "committer.Committer._run",
        "prefetcher.Prefetcher._run",
    ]


class NestingRuntime(ThreadingRuntime):
    """Counts how often a thread takes one lock while it holds another."""

    def __init__(self):
        self.nested = Counter()
        self._held = threading.local()

    def lock(self, name):
        return NotedLock(super().lock(name), name, self._held, self.nested)

    def condition(self, lock, name):
        return super().condition(lock.inner, name)


class NotedLock:
    def __init__(self, inner, name, held, nested):
        self.inner = inner
        self._name = name
        self._held = held
        self._nested = nested

    def __enter__(self):
        names = self._held.__dict__.setdefault("names", [])
        if names:
            self._nested[names[-1], self._name] += 1
        self.inner.acquire()
        names.append(self._name)
        return True

    def __exit__(self, *error):
        self._held.names.remove(self._name)
        self.inner.release()


def test_no_thread_takes_a_lock_while_it_holds_one_of_the_cache():
    runtime = NestingRuntime()
    for seed in range(8):
        run_workload(seed, WorkloadConfig.draw(seed), runtime=runtime)
    assert [pair for pair in runtime.nested if pair[0] in ("prefix-cache", "host-buffers")] == []


def test_a_nested_lock_is_noticed():
    runtime = NestingRuntime()
    with runtime.lock("outer"), runtime.lock("inner"):
        pass
    assert runtime.nested == {("outer", "inner"): 1}
