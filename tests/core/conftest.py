# SPDX-License-Identifier: Apache-2.0
"""Rigs that are closed when their test ends; a thread, a page or a copy left behind fails the test."""

import pytest
from cache_rig import rig_maker


@pytest.fixture
def make_rig():
    with rig_maker() as make:
        yield make


@pytest.fixture
def rig(make_rig):
    """16 blocks of 4, hidden rows of 3."""
    return make_rig()
