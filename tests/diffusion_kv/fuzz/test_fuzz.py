# SPDX-License-Identifier: Apache-2.0
"""A stage on vLLM's own KV manager, asked anything in any order: no page is ever wrong, lost, or held twice."""

import pytest
from diffusion_kv.fuzz.engine_machine import EngineMachine
from diffusion_kv.fuzz.run_machine import run_machine
from diffusion_kv.fuzz.scheduler_machine import SchedulerMachine
from diffusion_kv.fuzz.small_model import make_adapters
from diffusion_kv.fuzz.stage import vllm_pages
from diffusion_kv.native_pages import import_native
from diffusion_kv.worker_rig import opened_backend
from hypothesis import strategies as st

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default"), pytest.mark.timeout(3_000)]


@pytest.fixture(scope="module", autouse=True)
def vllm():
    import_native()


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    adapters = make_adapters(tmp_path_factory.mktemp("adapters"))
    span_safe = st.sampled_from((False, False, True))
    with opened_backend() as backend:
        yield {"make_pages": vllm_pages, "adapters": adapters, "backend": backend, "span_safe": span_safe}


def test_any_use_of_an_engine_keeps_every_page_right(parts):
    run_machine(EngineMachine, parts, share=0.7)


def test_steps_messages_and_ends_may_come_in_any_order(parts):
    run_machine(SchedulerMachine, parts, share=0.7)
