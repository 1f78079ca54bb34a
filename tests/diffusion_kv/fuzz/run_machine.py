# SPDX-License-Identifier: Apache-2.0
"""A state machine with the parts of one stage, as often as the profile says."""

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test


def run_machine(machine, parts, *, share):
    """Run `share` of the profile's examples; `HYPOTHESIS_PROFILE=nightly` has twenty times as many."""
    few = settings(max_examples=round(share * settings().max_examples), stateful_step_count=20)
    run_state_machine_as_test(type(machine.__name__, (machine,), parts), settings=few)
