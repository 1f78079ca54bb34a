# SPDX-License-Identifier: Apache-2.0
"""What comes too late is refused by name, and changes nothing."""

import pytest
from cache_rig import new
from row_values import assert_rows

from omni_core.prefix_cache.policy import ModelCachePolicy


def test_a_policy_after_the_first_step_is_refused(rig):
    rig.begin(new("A", [1]))
    with pytest.raises(RuntimeError, match="register it at load"):
        rig.cache.register_policy(ModelCachePolicy(token_keys={"codes"}))
    assert_rows(rig.take(rig.save())["A"], ("A", 0, 4))
