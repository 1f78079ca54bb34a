# SPDX-License-Identifier: Apache-2.0
"""Settings and policies are checked when they are made; a message names the setting, its value and the rule."""

import dataclasses
import re

import pytest
import torch
from cache_rig import new
from row_values import assert_rows

from omni_core.backend.host_pages import PAGE_BYTES
from omni_core.prefix_cache.block_pool import RowSpec
from omni_core.prefix_cache.config import HIDDEN_KEY, PrefixCacheConfig
from omni_core.prefix_cache.errors import InvalidConfigError
from omni_core.prefix_cache.gate_facts import StageKind
from omni_core.prefix_cache.policy import MODEL_POLICY_ATTRIBUTE, ModelCachePolicy

GOOD = {"num_blocks": 8, "block_size": 4, "hidden_size": 6, "hidden_dtype": torch.bfloat16, "max_num_tokens": 32}

BAD_SETTINGS = [
    *[
        (name, value)
        for name in ("num_blocks", "block_size", "hidden_size", "max_num_tokens", "staging_depth")
        for value in (0, -1, True, 1.0, "4", None)
    ],
    *[
        (name, value)
        for name in (
            "extra_row_bytes",
            "extra_step_bytes",
            "max_recycled_bytes",
            "max_partial_reports",
            "pin_chunk_bytes",
        )
        for value in (-1, False, 0.5, None)
    ],
    *[
        (name, value)
        for name in ("staging_claim_timeout_s", "join_timeout_s")
        for value in (0, -1.0, float("inf"), float("nan"), "1", None)
    ],
    ("hidden_dtype", "float32"),
    ("hidden_dtype", None),
    ("pin_chunk_bytes", PAGE_BYTES + 1),
    ("pretouch", 1),
    ("key_rows", None),
    ("key_rows", {"codes": 16}),
]


@pytest.mark.parametrize(("name", "value"), BAD_SETTINGS)
def test_a_setting_that_cannot_work_is_refused_by_name(name, value):
    with pytest.raises(InvalidConfigError, match=re.escape(f"{name}={value!r}: must be")):
        PrefixCacheConfig(**GOOD | {name: value})
    with pytest.raises(ValueError, match=name):
        PrefixCacheConfig(**GOOD | {name: value})


def test_sizes_follow_from_the_settings():
    config = PrefixCacheConfig(**GOOD, extra_row_bytes=10, extra_step_bytes=100, staging_depth=3)
    assert config.num_slots == 32
    assert config.hidden_row_bytes == 12
    assert config.staging_arena_bytes == 32 * (12 + 10) + 100
    assert config.pool_bytes(12) == 32 * 12


def test_hidden_rows_are_not_declared_a_second_time():
    with pytest.raises(InvalidConfigError, match="key_rows names '__hidden_states__'"):
        PrefixCacheConfig(**GOOD, key_rows={HIDDEN_KEY: RowSpec((6,), torch.bfloat16)})


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PrefixCacheConfig(**GOOD).block_size = 8


# -- policies


def test_a_policy_takes_any_collection_and_keeps_sets():
    policy = ModelCachePolicy(token_keys=["a", "b", "a"], request_keys=("c",))
    assert policy.token_keys == frozenset({"a", "b"})
    assert policy.request_keys == frozenset({"c"})
    assert policy.deferred_keys == frozenset()
    assert policy.needs_full_hidden_states is True


@pytest.mark.parametrize(
    "pair", [("token_keys", "request_keys"), ("token_keys", "deferred_keys"), ("request_keys", "deferred_keys")]
)
def test_a_key_declared_twice_is_refused(pair):
    with pytest.raises(InvalidConfigError, match=f"'x' is declared in {pair[0]} and in {pair[1]}"):
        ModelCachePolicy(**{key: {"x"} for key in pair})


def test_a_kind_of_stage_is_declared_by_its_name_or_left_out():
    assert ModelCachePolicy().stage_kind is StageKind.AUTOREGRESSIVE
    assert ModelCachePolicy(stage_kind="codec_decoder").stage_kind is StageKind.CODEC_DECODER
    assert ModelCachePolicy(stage_kind=StageKind.DIFFUSION).stage_kind is StageKind.DIFFUSION


@pytest.mark.parametrize("name", ["token_keys", "request_keys", "deferred_keys"])
def test_one_string_is_no_collection_of_keys(name):
    with pytest.raises(InvalidConfigError, match=f"{name}='codes'"):
        ModelCachePolicy(**{name: "codes"})


class Model:
    """A model that declares what it is given."""

    def __init__(self, *declared):
        if declared:
            setattr(self, MODEL_POLICY_ATTRIBUTE, declared[0])


def test_a_models_declaration_is_taken():
    policy = ModelCachePolicy(token_keys={"codes"})
    assert ModelCachePolicy.from_model(Model(policy)) is policy
    mapping = {"token_keys": ["codes"], "needs_full_hidden_states": False}
    assert ModelCachePolicy.from_model(Model(mapping)) == ModelCachePolicy(
        token_keys={"codes"}, needs_full_hidden_states=False
    )
    assert ModelCachePolicy.from_model(Model()) == ModelCachePolicy()
    assert ModelCachePolicy.from_model(Model(None)) == ModelCachePolicy()


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"tokenkeys": []}, "Model.omni_cache_policy has unknown field 'tokenkeys'; known: .*token_keys"),
        (["codes"], "Model.omni_cache_policy is a list"),
        ({"token_keys": ["x"], "request_keys": ["x"]}, "'x' is declared in token_keys and in request_keys"),
        (
            {"stage_kind": "vocoder"},
            "stage_kind='vocoder': must be one of 'autoregressive', 'pooling', 'codec_decoder'",
        ),
    ],
)
def test_a_declaration_that_makes_no_sense_is_refused(declared, message):
    with pytest.raises(InvalidConfigError, match=message):
        ModelCachePolicy.from_model(Model(declared))


def test_a_policy_after_the_first_step_is_refused(rig):
    rig.begin(new("A", [1]))
    with pytest.raises(RuntimeError, match="register it at load"):
        rig.cache.register_policy(ModelCachePolicy(token_keys={"codes"}))
    assert_rows(rig.take(rig.save())["A"], ("A", 0, 4))
