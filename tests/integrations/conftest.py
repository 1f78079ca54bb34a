# SPDX-License-Identifier: Apache-2.0
"""What the tests of the builder's path share."""

import pytest
from delivery_rig import RecordingSink, ScriptedCache


@pytest.fixture
def cache():
    """A cache that gives each step what the test wrote down."""
    return ScriptedCache()


@pytest.fixture
def sink():
    """A sink that keeps a list of what it was told."""
    return RecordingSink()
