# SPDX-License-Identifier: Apache-2.0
"""Whoever installs Omni Core has its pytest fixtures, in any project; whoever does not use them pays nothing."""

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import torch

from omni_core.backend.registry import load_backend_class
from omni_core.prefix_cache.manager import OmniPrefixCacheManager
from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.testing import (
    FakeKey,
    FakeModel,
    ModelStage,
    ModelStageConfig,
    RowKind,
    SchedulerConfig,
    SimRequest,
    SimStage,
    StageConfig,
    hidden_key,
)
from omni_core.testing.fixtures import SimEngineFactory
from omni_core.testing.leaks import LeakError
from omni_core.testing.model_check import ModelCheckFailedError

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5)

LOADED = """
import json, sys
import pytest
before = set(sys.modules)
import omni_core.pytest_plugin
print(json.dumps(sorted(set(sys.modules) - before)))
"""

USERS_PROJECT = """
import sys


def test_nothing_was_imported_for_it():
    heavy = ("torch", "numpy", "stevedore", "omni_core.prefix_cache", "omni_core.testing")
    assert [name for name in heavy if name in sys.modules] == []


def model(runs):
    import torch

    rows = torch.cat([run.token_ids.cumsum(0)[run.start:, None] for run in runs])
    return rows.to(torch.float64), {"codes": rows}


def test_stage(sim_engine, stage_oracle):
    from omni_core.prefix_cache.policy import ModelCachePolicy
    from omni_core.testing import SimRequest

    stage = sim_engine(model, policy=ModelCachePolicy(token_keys=frozenset({"codes"})))
    for req_id in ("first", "second"):
        stage.submit(SimRequest(req_id, (1, 2, 3, 4, 5, 6), 2))
    verdict = stage_oracle(stage)
    assert (verdict.rows_delivered, verdict.rows_from_hits) == (14, 4)
    assert verdict.differences == {"__hidden_states__": 0.0, "codes": 0.0}


def test_forgets_a_step(sim_engine):
    from omni_core.testing import SimRequest

    stage = sim_engine(model)
    stage.submit(SimRequest("a", (1, 2, 3)))
    stage.step()


def test_fails_and_forgets_a_step(sim_engine):
    test_forgets_a_step(sim_engine)
    raise RuntimeError("of its own")


def test_model_raises(sim_engine):
    from omni_core.testing import SimRequest

    def broken(runs):
        return model(runs)[0], {"codes": runs[3]}

    sim_engine(broken).submit(SimRequest("a", (1, 2, 3)))
"""


def run_pytest(directory, *arguments):
    """Run pytest on a project that knows nothing of this one but that it is installed."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "error", "-rA", *arguments],
        cwd=directory,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_plugin_is_registered():
    (plugin,) = (entry for entry in entry_points(group="pytest11") if entry.name == "omni_core")
    assert plugin.value == "omni_core.pytest_plugin"


def test_loading_the_plugin_imports_nothing_but_pytest():
    run = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=60, check=True)
    loaded = json.loads(run.stdout)
    assert [name for name in loaded if name.partition(".")[0] not in sys.stdlib_module_names] == [
        "omni_core",
        "omni_core.pytest_plugin",
    ]


def test_a_project_outside_can_use_the_fixtures(tmp_path):
    (tmp_path / "test_mine.py").write_text(USERS_PROJECT)
    run = run_pytest(tmp_path)
    outcomes = {}
    for line in run.stdout.partition("short test summary info")[2].splitlines():
        word, _, rest = line.partition(" ")
        if word in ("PASSED", "FAILED", "ERROR"):
            outcomes.setdefault(rest.partition("::")[2].partition(" ")[0], []).append(word)
    assert outcomes == {
        "test_nothing_was_imported_for_it": ["PASSED"],
        "test_stage": ["PASSED"],
        "test_forgets_a_step": ["PASSED", "ERROR"],
        "test_fails_and_forgets_a_step": ["FAILED"],
        "test_model_raises": ["FAILED"],
    }, run.stdout + run.stderr
    assert "sim_engine: step 1 was neither built nor discarded" in run.stdout
    assert "ModelCallError: call 1 of test_model_raises.<locals>.broken, for 'dry run' [0, 3)" in run.stdout


def test_fixtures_say_what_they_are(tmp_path):
    run = run_pytest(tmp_path, "--fixtures")
    assert run.returncode in (0, 5), run.stderr
    words = " ".join(run.stdout.split())
    assert "Makes simulated stages: `sim_engine(model, config=None, *, policy=None)`" in words
    assert "Judges a stage: `stage_oracle(stage)`" in words


def tokens_model(runs):
    rows = torch.cat([run.token_ids.cumsum(0)[run.start :, None] for run in runs])
    return rows.double(), {"codes": rows}


def test_a_model_gives_a_model_stage(sim_engine, stage_oracle):
    config = ModelStageConfig(SchedulerConfig(8, 2, 32), capture_sizes=(4, 16))
    stage = sim_engine(tokens_model, config, policy=ModelCachePolicy(deferred_keys=frozenset({"codes"})))
    assert isinstance(stage, ModelStage)
    stage.submit(SimRequest("a", PROMPT, 3))
    verdict = stage_oracle(stage)
    assert verdict.rows_delivered == verdict.counts[RowKind.DEFERRED] == len(PROMPT) + 2


def test_a_fake_model_gives_a_sim_stage(sim_engine, stage_oracle):
    stage = sim_engine(FakeModel(hidden_key(4), (FakeKey("codes", (2,)),)), StageConfig(SchedulerConfig(8, 2, 32)))
    assert isinstance(stage, SimStage)
    for req_id in "ab":
        stage.submit(SimRequest(req_id, PROMPT))
    verdict = stage_oracle(stage)
    assert (verdict.rows_delivered, verdict.rows_from_hits, verdict.differences) == (2 * len(PROMPT), 10, {})


def test_rows_that_depend_on_who_else_is_there_are_found(sim_engine, stage_oracle):
    stage = sim_engine(lambda runs: (tokens_model(runs)[0] * len(runs), {}))
    for req_id in "ab":
        stage.submit(SimRequest(req_id, PROMPT))
    with pytest.raises(ModelCheckFailedError, match="request 'a', position 0, the delivered row differs by 1 of"):
        stage_oracle(stage)


def test_a_configuration_of_the_other_kind_is_refused(sim_engine):
    with pytest.raises(TypeError, match="a FakeModel needs a StageConfig, not a ModelStageConfig"):
        sim_engine(FakeModel(hidden_key(4)), ModelStageConfig())
    with pytest.raises(TypeError, match="needs a ModelStageConfig, not a StageConfig"):
        sim_engine(tokens_model, StageConfig(SchedulerConfig(8, 2, 32)))
    with pytest.raises(TypeError, match="a FakeModel has no policy"):
        sim_engine(FakeModel(hidden_key(4)), policy=ModelCachePolicy())


def test_what_does_not_end_is_named(monkeypatch):
    factory = SimEngineFactory()
    stage = factory(tokens_model)
    stage.submit(SimRequest("a", PROMPT))
    stage.run_to_end()
    not_closed = []
    for owner in (OmniPrefixCacheManager, load_backend_class("cpu_sim")):
        close = owner.close
        monkeypatch.setattr(owner, "close", lambda self, close=close: not_closed.append((close, self)))
    monkeypatch.setattr("omni_core.testing.fixtures.THREAD_WAIT_S", 0.05)
    with pytest.raises(LeakError) as raised:
        factory.close(test_passed=True)
    assert "bytes of pinned memory were not given back" in str(raised.value)
    assert "thread 'omni-core-committer' has not ended" in str(raised.value)
    for close, thing in not_closed:
        close(thing)
    factory.close(test_passed=True)
