# SPDX-License-Identifier: Apache-2.0
"""Rows share pages only under one model, one layout rule, one adapter and one set of weights."""

from dataclasses import replace

import pytest

from omni_core.diffusion_kv.errors import IdentityValueError, RowError
from omni_core.diffusion_kv.identity.namespace import ModelIdentity, namespace
from omni_core.diffusion_kv.pipeline import LoRARequest

MODEL = ModelIdentity("toy", "/models/toy", "main", "bfloat16", layout_version=1, options={"weight_seed": 0})
LORA = LoRARequest(name="ink", lora_id=1, path="/adapters/ink", load_epoch=3, scale=0.5)


@pytest.mark.parametrize(
    "changed",
    [
        {"architecture": "toy2"},
        {"path": "/models/toy2"},
        {"revision": "v2"},
        {"revision": None},
        {"dtype": "float32"},
        {"layout_version": 2},
        {"options": {"weight_seed": 1}},
        {"options": {}},
    ],
)
def test_another_model_is_another_namespace(changed):
    assert namespace(replace(MODEL, **changed), LORA, 0) != namespace(MODEL, LORA, 0)


@pytest.mark.parametrize(
    "changed", [{"name": "oil"}, {"lora_id": 2}, {"path": "/adapters/oil"}, {"load_epoch": 4}, {"scale": 0.5000001}]
)
def test_another_adapter_is_another_namespace(changed):
    assert namespace(MODEL, replace(LORA, **changed), 0) != namespace(MODEL, LORA, 0)


def test_no_adapter_is_not_an_adapter_of_scale_0():
    assert namespace(MODEL, None, 0) != namespace(MODEL, replace(LORA, scale=0.0), 0)


def test_a_whole_scale_is_the_same_number():
    assert namespace(MODEL, replace(LORA, scale=1), 0) == namespace(MODEL, replace(LORA, scale=1.0), 0)


def test_new_weights_are_another_namespace():
    assert namespace(MODEL, LORA, 1) != namespace(MODEL, LORA, 0)


def test_the_same_is_the_same():
    assert namespace(MODEL, LORA, 0) == namespace(replace(MODEL), replace(LORA), 0)
    assert len(namespace(MODEL, None, 0)) == 32


@pytest.mark.parametrize("field", ["architecture", "path", "dtype"])
def test_a_model_without_a_name_is_refused(field):
    with pytest.raises(RowError, match=f"the model's {field} is empty"):
        namespace(replace(MODEL, **{field: ""}), None, 0)


def test_an_option_without_a_canonical_hash_is_refused():
    with pytest.raises(IdentityValueError, match=r"\['options'\]\['vae'\]"):
        namespace(replace(MODEL, options={"vae": object()}), None, 0)
