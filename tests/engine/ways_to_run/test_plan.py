# SPDX-License-Identifier: Apache-2.0
"""`omni-core plan` and a real vLLM agree: on the blocks it makes, on the bytes of one, and on a running stage."""

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_blocks_planned_from_a_models_configuration_are_those_vllm_makes(run_way):
    seen = run_way("blocks_of_an_engine", script="run_plan.py")
    assert seen["plan"]["stage"]["num_blocks"] == seen["engine"] > 100


def test_a_block_takes_what_vllms_own_specs_say(run_way):
    assert run_way("bytes_of_a_block", script="run_plan.py") == {
        "full": 16 * 2 * 4 * 128 * 2,
        "latent": 16 * (512 + 64) * 2,
    }


def test_a_running_stage_has_allocated_what_a_plan_from_flags_says(run_way):
    seen = run_way("running_server", script="run_plan.py")
    live, planned = seen["live"], seen["planned"]
    assert (live["status"], live["live"], planned["live"]) == (0, True, False)
    assert live["cache"] == planned["cache"]
    assert set(live["cache"]["pool_bytes"]) == {"__hidden_states__", "talker.codes"}
    assert live["sink_queue_bytes"] == 1_000_000
    assert live["device_is_host"] is True
