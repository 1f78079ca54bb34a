# SPDX-License-Identifier: Apache-2.0
"""What every test shares: property-test profiles, and the order and skipping of tests that need a real engine."""

import os
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("nightly", parent=settings.get_profile("ci"), derandomize=False, max_examples=2_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(items):
    """Run engine tests last, and skip them where there is no vLLM.

    Importing vLLM's CPU worker replaces parts of torch for the rest of the process (`torch.Event`, pinned memory); no
    other test may see that.
    """
    items.sort(key=lambda item: item.get_closest_marker("engine") is not None)
    if find_spec("vllm") is None:
        no_vllm = pytest.mark.skip(reason="no vLLM here; `make test-engine` brings it")
        for item in items:
            if item.get_closest_marker("engine") is not None:
                item.add_marker(no_vllm)
