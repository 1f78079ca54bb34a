# SPDX-License-Identifier: Apache-2.0
"""A simulated stage on vLLM's own scheduler, step by step, with each schedule kept to be looked at."""

import importlib
import logging
import sys
import warnings
from types import SimpleNamespace

from omni_core.testing.fake_model import FakeModel, hidden_key
from omni_core.testing.scheduler_config import SchedulerConfig
from omni_core.testing.sim_request import SimRequest
from omni_core.testing.sim_stage import SimStage
from omni_core.testing.sim_step import StepFaults
from omni_core.testing.stage_config import StageConfig

BLOCK = 4


def import_simulation():
    """The package that drives vLLM's scheduler. Imports vLLM, which takes some seconds; no worker, no device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = "omni_core.integrations.vllm.simulation"
        modules = {name: importlib.import_module(f"{package}.{name}") for name in ("driver", "shape", "workload")}
    logging.getLogger("vllm").setLevel(logging.ERROR)
    assert "vllm.v1.worker.cpu_worker" not in sys.modules, "importing a worker would change torch for other tests"
    return SimpleNamespace(**modules)


def prompt(length, *, first=100):
    """Tokens that no other prompt of another `first` shares."""
    return tuple(range(first, first + length))


class RealStage:
    """A stage whose every delivery is judged. A context manager."""

    def __init__(self, simulation, *, num_blocks=64, drafts=(), shape=(), priorities=None, wrap_cache=None, **limits):
        self._drafts = list(drafts)
        config = SchedulerConfig(**{"num_blocks": num_blocks, "block_size": BLOCK, "max_num_tokens": 64} | limits)
        shape = simulation.shape.VllmShape(**{"max_model_len": 64} | dict(shape))
        self.driver = simulation.driver.VllmSchedulerDriver(
            config, shape, self._propose, priorities and (lambda request: priorities[request.req_id])
        )
        self.model = FakeModel(hidden_key(4))
        self.stage = SimStage(
            StageConfig(config), self.model, make_scheduler=lambda _: self.driver, wrap_cache=wrap_cache
        )
        self.schedules = []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stage.close()

    def _propose(self, track):
        """Right drafts, as many as asked for, then wrong ones."""
        if not self._drafts:
            return ()
        right, wrong = self._drafts.pop(0)
        guess = track.continued(len(track.token_ids), ())
        for _ in range(right):
            guess.token_ids.append(self.model.next_token(guess))
        return (*guess.token_ids[len(track.token_ids) :], *[7] * wrong)

    def submit(self, req_id, tokens, outputs=1, **more):
        self.stage.submit(SimRequest(req_id, tokens, outputs, **more))

    def step(self, *, abort_before_forward=()):
        """Run one step, build it, judge it. Returns the schedule."""
        held = len(self.schedules)

        def faults(schedule):
            self.schedules.append(schedule)
            return StepFaults(abort_before_forward=frozenset(abort_before_forward))

        saved = self.stage.step(faults=faults)
        if saved is not None:
            self.stage.build(saved)
            self.stage.collect()
        return self.schedules[held]

    def run_to_end(self):
        """Step until nothing is left, and judge the whole run. Returns all schedules."""
        while self.driver.has_news:
            self.step()
        self.stage.finish()
        return self.schedules


def events_of(schedule, kind):
    """The step's events of one kind, by request."""
    return {event.req_id: event for event in schedule.events.requests if event.kind is kind}


def run_of(schedule, req_id):
    """What the step computes of a request."""
    (run,) = [run for run in schedule.runs if run.req_id == req_id]
    return run
