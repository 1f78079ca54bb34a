# SPDX-License-Identifier: Apache-2.0
"""A stage's parts are made together and end together: no thread outlives them, and a stuck sink holds nothing up."""

import threading

import fake_runner as fake
import pytest
from exiting_stages import PROMPT, open_stage

from omni_core.integrations.vllm import stage_parts as parts_module
from omni_core.runtime import ThreadingRuntime

BOUND_S = 20.0


def our_threads():
    return {thread.name for thread in threading.enumerate() if thread.name.startswith(("omni-core", "cpu_sim"))}


def test_no_thread_outlives_a_closed_stage(tmp_path):
    before = our_threads()
    stage = open_stage(tmp_path, shutdown_timeout_s=BOUND_S)
    stage.step(fake.scheduled(new=[("a-00000001", PROMPT, [1, 2], 0, 4)]))
    assert our_threads() > before
    stage.session.close()
    assert our_threads() == before


def test_a_stage_that_cannot_be_made_leaves_no_thread(tmp_path, monkeypatch):
    def broken(model):
        raise LookupError("the model has no outputs")

    before = our_threads()
    monkeypatch.setattr(parts_module, "stage_outputs_model", broken)
    with pytest.raises(LookupError, match="the model has no outputs"):
        open_stage(tmp_path, shutdown_timeout_s=BOUND_S)
    assert our_threads() == before


def test_closing_waits_for_a_stuck_sink_as_long_as_the_setting_says_and_says_what_it_costs(
    tmp_path, monkeypatch, caplog
):
    gate, entered = threading.Event(), threading.Event()
    stage = open_stage(tmp_path, shutdown_timeout_s=0.05)

    def stuck(delivery):
        entered.set()
        assert gate.wait(BOUND_S)

    monkeypatch.setattr(stage.session.sink, "accept", stuck)
    stage.step(fake.scheduled(new=[("a-00000001", PROMPT, [1, 2], 0, 4)]))
    assert entered.wait(BOUND_S)
    clock = ThreadingRuntime()
    before_s = clock.monotonic_s()
    stage.session.close()
    assert clock.monotonic_s() - before_s < BOUND_S / 2
    assert "within 0.05 s (shutdown_timeout_s)" in caplog.records[-1].message
    gate.set()
