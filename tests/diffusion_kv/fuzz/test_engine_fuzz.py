# SPDX-License-Identifier: Apache-2.0
"""An engine over vLLM's own KV manager, asked anything in any order; no page is ever wrong, lost, or held twice."""

import pytest
from diffusion_kv.fuzz.engine_machine import EngineMachine
from diffusion_kv.fuzz.small_model import make_adapters
from diffusion_kv.fuzz.stage import vllm_pages
from diffusion_kv.native_pages import import_native
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default"), pytest.mark.timeout(3_000)]


@pytest.fixture(scope="module", autouse=True)
def vllm():
    import_native()


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    return make_adapters(tmp_path_factory.mktemp("adapters"))


def test_any_use_of_an_engine_keeps_every_page_right(adapters):
    members = {"make_pages": vllm_pages, "adapters": adapters, "span_safe": st.sampled_from((False, False, True))}
    machine = type("EngineOnNativePages", (EngineMachine,), members)
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=20))
