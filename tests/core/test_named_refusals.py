# SPDX-License-Identifier: Apache-2.0
"""What this version does not do yet is refused by name; where it concerns one request, that request alone."""

import pytest
import torch
from cache_rig import more, new
from row_values import assert_rows

from omni_core.prefix_cache.errors import FeatureUnsupportedError, LifecycleError
from omni_core.prefix_cache.events import RequestEvent, RequestEventKind
from omni_core.prefix_cache.policy import ModelCachePolicy


def test_deferred_keys_are_refused_by_name_and_the_old_policy_stays(make_rig):
    rig = make_rig(keys={"codes": ((4,), torch.float32)}, policy=ModelCachePolicy(token_keys={"codes"}))
    with pytest.raises(FeatureUnsupportedError, match=r"deferred_keys=\['mel', 'wave'\].*JOIN_ON_FINISH.*token_keys"):
        rig.cache.register_policy(ModelCachePolicy(deferred_keys={"wave", "mel"}))
    assert_rows(rig.run(new("A", [1], run=1))["A"], ("A", 0, 1), key="codes", trailing=(4,))


def test_a_policy_after_the_first_step_is_refused(rig):
    rig.begin(new("A", [1]))
    with pytest.raises(RuntimeError, match="register it at load"):
        rig.cache.register_policy(ModelCachePolicy(token_keys={"codes"}))
    assert_rows(rig.take(rig.save())["A"], ("A", 0, 4))
