# SPDX-License-Identifier: Apache-2.0
"""A stage over pages on paper, asked anything in any order: engine loop, scheduler, worker and attention, no vLLM."""

import pytest
from diffusion_kv.fuzz.engine_machine import EngineMachine
from diffusion_kv.fuzz.run_machine import run_machine
from diffusion_kv.fuzz.scheduler_machine import SchedulerMachine
from diffusion_kv.fuzz.small_model import make_adapters
from diffusion_kv.fuzz.stage import paper_pages
from diffusion_kv.worker_rig import opened_backend


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    adapters = make_adapters(tmp_path_factory.mktemp("adapters"))
    with opened_backend() as backend:
        yield {"make_pages": paper_pages, "adapters": adapters, "backend": backend}


def test_any_use_of_an_engine_keeps_every_page_right(parts):
    run_machine(EngineMachine, parts, share=0.25)


def test_steps_messages_and_ends_may_come_in_any_order(parts):
    run_machine(SchedulerMachine, parts, share=0.25)
