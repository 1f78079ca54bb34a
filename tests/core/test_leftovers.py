# SPDX-License-Identifier: Apache-2.0
"""Outputs that have no row per token: what each request gets of them, and that they are the step's own values."""

import numpy as np
import pytest
import torch
from cache_rig import SHORT_S, more, new
from row_values import assert_rows, row_values

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.errors import LayoutMismatchError, OmniPrefixCacheStagingTimeoutError
from omni_core.prefix_cache.policy import ModelCachePolicy


def three(rig):
    """A step of three requests with 2, 3 and 1 rows."""
    rig.begin(new("A", [1], run=2), new("B", [2], run=3), new("C", [3], run=1))


def of_each(taken, key):
    return [taken[req_id].leftovers[key] for req_id in ("A", "B", "C")]


def assert_each_equal(found, expected):
    for value, wanted in zip(found, expected, strict=True):
        assert value.dtype == wanted.dtype
        assert torch.equal(value, wanted)


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize(
    "elements",
    [
        [torch.full((2, 4), 1.0), torch.full((5, 4), 2.0), torch.full((1, 4), 3.0)],
        [torch.full((2, 4), 1.0), torch.zeros(0, 4), torch.full((3, 4), 3.0)],
        [torch.full((2, 4), 1.0), torch.full((2, 5), 2.0), torch.full((2,), 3.0)],
        [torch.full((2,), 1.0), torch.full((2,), 2.0).bfloat16(), torch.tensor(3)],
        [torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)],
    ],
    ids=["ragged", "one-empty", "shapes-differ", "dtypes-differ", "scalars"],
)
def test_of_a_list_with_an_element_per_request_each_gets_its_own(rig, kind, elements):
    three(rig)
    taken = rig.take(rig.save({"audio": kind(elements)}))
    assert_each_equal(of_each(taken, "audio"), elements)


def test_a_list_of_other_things_than_tensors(rig):
    three(rig)
    taken = rig.take(rig.save({"text": ["a", None, {"c": 3}], "mixed": [torch.ones(2), "b", 7]}))
    assert of_each(taken, "text") == ["a", None, {"c": 3}]
    first, *others = of_each(taken, "mixed")
    assert torch.equal(first, torch.ones(2))
    assert others == ["b", 7]


def test_a_list_of_another_length_goes_whole_to_everyone(rig):
    three(rig)
    taken = rig.take(rig.save({"pair": [torch.ones(2), torch.zeros(3)]}))
    for value in of_each(taken, "pair"):
        assert len(value) == 2
        assert_each_equal(value, [torch.ones(2), torch.zeros(3)])


def test_of_a_request_key_each_request_gets_its_entry(make_rig):
    rig = make_rig(policy=ModelCachePolicy(request_keys={"speaker", "language", "shared"}))
    three(rig)
    speakers = torch.arange(12.0).view(3, 4)
    languages = np.array([7, 8, 9])
    shared = torch.arange(5.0)
    taken = rig.take(rig.save({"speaker": speakers, "language": languages, "shared": shared}))
    assert_each_equal(of_each(taken, "speaker"), speakers)
    assert of_each(taken, "language") == [7, 8, 9]
    assert_each_equal(of_each(taken, "shared"), [shared] * 3)
    assert set(rig.cache.stats().key_row_bytes) == {HIDDEN_KEY}


def test_a_request_key_is_no_token_key_even_where_the_counts_agree(make_rig):
    rig = make_rig(policy=ModelCachePolicy(request_keys={"speaker"}))
    rig.begin(new("A", [1], run=1), new("B", [2], run=1))
    speakers = torch.arange(8.0).view(2, 4)
    taken = rig.take(rig.save({"speaker": speakers}))
    assert torch.equal(taken["A"].leftovers["speaker"], speakers[0])
    assert torch.equal(taken["B"].leftovers["speaker"], speakers[1])
    # A step of two rows for one request: still no token key.
    rig.begin(more("A", 2))
    rows = rig.take(rig.save({"speaker": speakers}))["A"]
    assert torch.equal(rows.leftovers["speaker"], speakers)
    assert set(rig.cache.stats().key_row_bytes) == {HIDDEN_KEY}


@pytest.mark.parametrize(
    "value",
    [torch.arange(7.0), torch.tensor(3), np.arange(5), "text", 4.5, None],
    ids=lambda value: type(value).__name__,
)
def test_anything_else_goes_whole_to_everyone(rig, value):
    three(rig)
    for found in of_each(rig.take(rig.save({"meta": value})), "meta"):
        assert type(found) is type(value)
        if isinstance(value, torch.Tensor):
            assert torch.equal(found, value)
        elif isinstance(value, np.ndarray):
            assert np.array_equal(found, value)
        else:
            assert found == value


def test_leftovers_overwritten_right_after_the_save_keep_their_values(make_rig):
    rig = make_rig(policy=ModelCachePolicy(request_keys={"entry"}))
    three(rig)
    ragged = [torch.full((2, 2), 1.0), torch.full((3, 2), 2.0), torch.full((1, 2), 3.0)]
    uneven = [torch.ones(2), torch.ones(2, 2), torch.ones(1)]
    entry, whole, array = torch.arange(3.0), torch.arange(7.0), np.arange(4)
    mutable = ["x", "y", "z"]
    expected = {
        "ragged": [value.clone() for value in ragged],
        "uneven": [value.clone() for value in uneven],
        "entry": list(entry.clone()),
        "whole": [whole.clone()] * 3,
    }
    with rig.held():
        step = rig.save(
            {"ragged": ragged, "uneven": uneven, "entry": entry, "whole": whole, "array": array, "mutable": mutable}
        )
        for tensor in (*ragged, *uneven, entry, whole):
            tensor.fill_(-1)
        array[:] = -1
        mutable[0] = "changed"
    taken = rig.take(step)
    for key, values in expected.items():
        assert_each_equal(of_each(taken, key), values)
    assert [value.tolist() for value in of_each(taken, "array")] == [[0, 1, 2, 3]] * 3
    assert of_each(taken, "mutable") == ["x", "y", "z"]


def test_leftovers_outlive_their_staging_page(make_rig):
    rig = make_rig(staging_depth=1)
    rig.begin(new("A", [1], run=3))
    rows = rig.take(rig.save({"meta": torch.arange(7.0), "list": [torch.arange(2.0)]}))["A"]
    for number in range(3):
        rig.begin(more("A", 3, blocks=[2 + number]))
        rig.take(rig.save({"meta": torch.full((7,), -1.0), "list": [torch.full((2,), -1.0)]}))
    assert torch.equal(rows.leftovers["meta"], torch.arange(7.0))
    assert torch.equal(rows.leftovers["list"], torch.arange(2.0))


def test_the_slices_of_an_undecided_step_are_its_own_rows_only(make_rig):
    rig = make_rig(keys={"codes": ((4,), torch.float32)})
    rig.run(new("Z", [1], run=1), new("Y", [2], run=1))
    # Both hold one token; a hit of one row and one more token each leaves the step undecided.
    taken = rig.run(new("A", [1], hit=1, run=1), new("B", [2], hit=1, run=1), finish=["Z", "Y"])
    assert_rows(taken["A"], ("Z", 0, 1), ("A", 1, 2))
    assert torch.equal(taken["A"].leftovers["codes"], row_values("A", [1], "codes", (4,)))
    assert torch.equal(taken["B"].leftovers["codes"], row_values("B", [1], "codes", (4,)))


def test_leftovers_of_a_step_go_only_to_its_own_requests_and_only_when_asked(rig):
    three(rig)
    step = rig.save({"audio": [torch.full((1,), float(number)) for number in range(3)]})
    taken = rig.take(step, "B")
    assert list(taken) == ["B"]
    assert taken["B"].leftovers["audio"].item() == 1.0
    assert rig.run(more("A", 1))["A"].leftovers == {}


def test_a_step_of_leftovers_only_holds_a_staging_slot(make_rig):
    policy = ModelCachePolicy(needs_full_hidden_states=False)
    rig = make_rig(policy=policy, staging_depth=2, staging_claim_timeout_s=SHORT_S)
    steps = []
    for number in range(2):
        rig.begin(more("A", 1) if number else new("A", [1], run=1))
        steps.append(rig.save({"text": [f"word {number}"]}, hidden=None))
        rig.cache.flush()
        assert rig.cache.stats().staging_slots_in_use == number + 1
    rig.begin(more("A", 1))
    with pytest.raises(OmniPrefixCacheStagingTimeoutError, match=f"step {steps[0]}, step {steps[1]}"):
        rig.save({"text": ["word 2"]}, hidden=None)
    assert [rig.take(step, "A")["A"].leftovers["text"] for step in steps] == ["word 0", "word 1"]
    rig.take(rig.save({"text": ["word 2"]}, hidden=None))
    rig.assert_nothing_held()
    assert rig.cache.stats().pool_reserved_bytes == 0


def test_a_step_without_hidden_rows_is_refused_where_the_policy_wants_them(rig):
    rig.begin(new("A", [1]))
    with pytest.raises(LayoutMismatchError, match="needs_full_hidden_states=False"):
        rig.save(hidden=None)
    assert_rows(rig.take(rig.save())["A"], ("A", 0, 4))
