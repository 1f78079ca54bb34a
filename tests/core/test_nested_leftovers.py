# SPDX-License-Identifier: Apache-2.0
"""Tensors inside lists, tuples and mappings at any depth are the step's own values, like those on top."""

import numpy as np
import pytest
import torch
from cache_rig import new

from omni_core.backend import NoBackendForTensorError

FORMS = {
    "list-of-mappings": lambda a, b: [{"emb": a}, {"emb": b}],
    "list-of-lists": lambda a, b: [[a], [b]],
    "list-of-tuples": lambda a, b: [(a, 1), (b, 2)],
    "deep": lambda a, b: [[{"x": [(a,)]}], [{"x": [(b,)]}]],
    "one-has-none": lambda a, b: [{"emb": a}, None],
    "of-another-length": lambda a, b: [[a, b], {"n": b}, [a]],
}


def tensors_in(value):
    if isinstance(value, torch.Tensor | np.ndarray):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for each in value for leaf in tensors_in(each)] if isinstance(value, list | tuple) else []


def form_of(value):
    """Containers and other leaves, with a tensor's value as a list in its place."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return ("tensor", str(value.dtype), value.tolist())
    if isinstance(value, dict):
        return {name: form_of(each) for name, each in value.items()}
    return type(value)(form_of(each) for each in value) if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("name", FORMS)
def test_nested_tensors_overwritten_after_the_save_keep_their_values(rig, name):
    first, second = torch.arange(3.0), torch.arange(4, dtype=torch.int16)
    value = FORMS[name](first, second)
    shares = value if len(value) == 2 else (tuple(value), tuple(value))
    expected = [form_of(share) for share in shares]
    rig.begin(new("A", [1]), new("B", [2]))
    with rig.held():
        step = rig.save({"meta": value})
        first.fill_(-1)
        second.fill_(-1)
    taken = rig.take(step)
    assert [form_of(taken[req_id].leftovers["meta"]) for req_id in "AB"] == expected


def test_nested_arrays_overwritten_after_the_save_keep_their_values(rig):
    array = np.arange(3)
    rig.begin(new("A", [1]))
    step = rig.save({"meta": [{"size": array}]})
    array[:] = -1
    assert rig.take(step)["A"].leftovers["meta"]["size"].tolist() == [0, 1, 2]


def test_a_container_changed_after_the_save_is_delivered_as_it_was(rig):
    inner = {"emb": torch.ones(2)}
    value = [inner]
    rig.begin(new("A", [1]))
    step = rig.save({"meta": value})
    inner["emb"] = torch.zeros(2)
    inner["late"] = 1
    value.append(None)
    found = rig.take(step)["A"].leftovers["meta"]
    assert set(found) == {"emb"}
    assert torch.equal(found["emb"], torch.ones(2))


def test_nested_tensors_outlive_their_staging_page(make_rig):
    rig = make_rig(staging_depth=1)
    rig.begin(new("A", [1]))
    kept = rig.take(rig.save({"meta": [{"emb": torch.full((8,), 5.0)}]}))["A"].leftovers["meta"]
    for req_id, block in (("B", 2), ("C", 3)):
        rig.begin(new(req_id, [block]))
        rig.take(rig.save({"meta": [{"emb": torch.full((8,), -5.0)}]}))
    assert torch.equal(kept["emb"], torch.full((8,), 5.0))


@pytest.mark.parametrize("name", FORMS)
def test_a_nested_tensor_on_a_device_nobody_owns_is_refused_before_anything_changes(rig, name):
    rig.begin(new("A", [1]), new("B", [2]))
    before = rig.stats()
    with pytest.raises(NoBackendForTensorError, match=r"'meta' lies on device meta"):
        rig.save({"meta": FORMS[name](torch.zeros(3, device="meta"), torch.ones(2))})
    assert rig.stats() == before
    assert set(rig.take(rig.save())) == {"A", "B"}


def test_nested_tensors_are_copied_from_the_device_with_the_step(rig):
    rig.begin(new("A", [1]), new("B", [2]))
    admitted = rig.backend.copy_gate.admitted
    taken = rig.take(rig.save({"meta": [{"emb": torch.ones(3)}, {"emb": torch.ones(5)}], "nest": [[[torch.ones(1)]]]}))
    assert len(tensors_in([rows.leftovers["meta"] for rows in taken.values()])) == 2
    rig.cache.flush()
    assert rig.backend.copy_gate.admitted == admitted + 1
