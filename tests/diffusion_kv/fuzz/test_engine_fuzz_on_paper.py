# SPDX-License-Identifier: Apache-2.0
"""An engine over pages on paper, asked anything in any order: engine loop, scheduler, worker and attention, no vLLM."""

import pytest
from diffusion_kv.fuzz.engine_machine import EngineMachine
from diffusion_kv.fuzz.small_model import make_adapters
from diffusion_kv.fuzz.stage import paper_pages
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    return make_adapters(tmp_path_factory.mktemp("adapters"))


def test_any_use_of_an_engine_keeps_every_page_right(adapters):
    machine = type("EngineOnPaper", (EngineMachine,), {"make_pages": paper_pages, "adapters": adapters})
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=20))
