# SPDX-License-Identifier: Apache-2.0
"""What the tests of the builder's path, and those of changed weights, share."""

import pytest
from changing_stage import ChangingStage
from delivery_rig import RecordingSink, ScriptedCache


@pytest.fixture
def cache():
    """A cache that gives each step what the test wrote down."""
    return ScriptedCache()


@pytest.fixture
def sink():
    """A sink that keeps a list of what it was told."""
    return RecordingSink()


@pytest.fixture
def changing_stage():
    """A stage under a worker whose weights and adapters change."""
    made = ChangingStage()
    yield made
    made.session.close()
