# SPDX-License-Identifier: Apache-2.0
"""Fixtures that run a model's outputs, or a backend, under the real cache on a simulated engine.

pytest loads this module in every project where Omni Core is installed, so it imports nothing but pytest: torch and the
cache are imported by the first test that asks for a fixture.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from omni_core.testing.fixtures import SimEngineFactory, StageJudge

_PASSED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember whether the test itself passed: its teardown then says what it left behind."""
    report = yield
    if report.when == "call":
        item.stash[_PASSED] = report.passed
    return report


@pytest.fixture
def sim_engine(request: pytest.FixtureRequest) -> Iterator[SimEngineFactory]:
    """Makes simulated stages: `sim_engine(model, config=None, *, policy=None)`; see `SimEngineFactory`.

    A model of yours gives a `ModelStage`, a `FakeModel` a `SimStage`. Both are closed when the test ends. A step that
    was neither built nor discarded, memory that was not given back and a thread that has not ended fail the test.
    """
    from omni_core.testing.fixtures import SimEngineFactory
    from omni_core.testing.leaks import LeakError

    factory = SimEngineFactory()
    yield factory
    try:
        factory.close(test_passed=request.node.stash.get(_PASSED, False))
    except LeakError as leak:
        pytest.fail(str(leak), pytrace=False)


@pytest.fixture
def stage_oracle() -> StageJudge:
    """Judges a stage: `stage_oracle(stage)` runs it to its end and gives a `StageVerdict`, or raises what is wrong."""
    from omni_core.testing.fixtures import StageJudge

    return StageJudge()
