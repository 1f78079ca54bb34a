# SPDX-License-Identifier: Apache-2.0
"""Two values have one digest exactly if they are one value of one type; what has no canonical form is refused."""

import struct
from collections import OrderedDict
from enum import IntEnum, StrEnum

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from omni_core.diffusion_kv.errors import IdentityValueError
from omni_core.diffusion_kv.identity.canonical import canonical_digest

ARRAY_DTYPES = (">f4", "?", "c16", "f2", "f8", "i1", "i8", "u8")
TENSOR_DTYPES = (torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)


def digest(value):
    return canonical_digest("test", value)


def numbers(dtype, count):
    """`count` numbers of `dtype`, made of small integers."""
    return st.lists(st.integers(0, 1), min_size=count, max_size=count).map(
        lambda values: np.array(values).astype(dtype)
    )


tensors = st.tuples(
    st.sampled_from(TENSOR_DTYPES), st.sampled_from([(), (0,), (1,), (4,), (2, 2), (4, 1)]), st.integers(0, 15)
).map(lambda made: (torch.arange(16)[: torch.Size(made[1]).numel()] + made[2]).reshape(made[1]).to(made[0]))
arrays = st.tuples(
    st.sampled_from(ARRAY_DTYPES), st.sampled_from([(), (0,), (1,), (4,), (2, 2)]), st.integers(0, 15)
).map(lambda made: (np.arange(16)[: int(np.prod(made[1]))] + made[2]).reshape(made[1]).astype(made[0]))
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.integers(),
    st.sampled_from([0.0, -0.0, 1.0, float("nan"), float("inf")]),
    st.floats(),
    st.text(max_size=4),
    st.binary(max_size=4),
    tensors,
    arrays,
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2) | st.integers(0, 2), inner, max_size=3)
    ),
    max_leaves=6,
)


def same(left, right):
    """Whether two values are the same value of the same type, by the plainest rules."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and raw(left) == raw(right)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        typed = {(type(key), key): value for key, value in left.items()}
        other = {(type(key), key): value for key, value in right.items()}
        return typed.keys() == other.keys() and all(same(typed[key], other[key]) for key in typed)
    return left == right


def raw(tensor):
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


@given(values, values)
def test_digests_are_equal_exactly_if_the_values_are(left, right):
    assert (digest(left) == digest(right)) == same(left, right)


@given(values)
def test_wrapping_a_value_makes_another(value):
    assert len({digest(value), digest([value]), digest([[value]]), digest({"": value}), digest([value, value])}) == 5


@given(st.lists(values, max_size=4), st.integers(0, 4))
def test_where_a_list_is_cut_is_seen(members, cut):
    assume(cut <= len(members))
    assert digest([members[:cut], members[cut:]]) != digest(members)


@given(st.dictionaries(st.text(max_size=3), leaves, min_size=2, max_size=5), st.randoms())
def test_the_order_of_keys_is_not_seen(mapping, random):
    keys = list(mapping)
    random.shuffle(keys)
    assert digest({key: mapping[key] for key in keys}) == digest(mapping)


SEVERAL_ONES = (
    1,
    1.0,
    True,
    "1",
    b"1",
    [1],
    {1: None},
    {"1": None},
    {True: None},
    np.int64(1),
    np.int32(1),
    np.float32(1),
    np.float64(1),
    np.bool_(True),
    np.array(1),
    np.array([1]),
    np.array([1], dtype=">i8"),
    torch.tensor(1),
    torch.tensor([1]),
    torch.tensor([1], dtype=torch.int32),
    torch.tensor([1.0]),
    torch.tensor([1.0], dtype=torch.bfloat16),
    torch.tensor([1.0], dtype=torch.float64),
    torch.tensor([True]),
)


def test_the_type_of_a_one_is_seen():
    assert len({digest(one) for one in SEVERAL_ONES}) == len(SEVERAL_ONES)


def test_floats_are_their_bits():
    assert digest(0.0) != digest(-0.0)
    assert digest(float("nan")) == digest(float("nan"))
    other_nan = struct.unpack(">d", b"\x7f\xf8\x00\x00\x00\x00\x00\x01")[0]
    assert digest(float("nan")) != digest(other_nan)
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))


@pytest.mark.parametrize("dtype", TENSOR_DTYPES)
def test_one_bit_of_a_tensor_is_seen(dtype):
    tensor = torch.zeros(3, 5, dtype=dtype)
    changed = tensor.clone()
    changed[2, 4] = 1
    assert digest(tensor) != digest(changed)


def test_a_tensors_place_in_memory_is_not_seen():
    tensor = torch.arange(24.0).reshape(4, 6)
    for alike in (tensor.T.contiguous().T, torch.stack([tensor, tensor], -1)[..., 1], tensor.clone().requires_grad_()):
        assert digest(alike) == digest(tensor)
    assert digest(np.arange(6)[::-1]) == digest(np.arange(6)[::-1].copy())


def test_a_lazily_conjugated_tensor_is_what_it_stands_for():
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert digest(tensor.conj()) == digest(torch.tensor([1 - 2j, 3 + 4j]))
    assert digest(tensor.conj().imag) == digest(torch.tensor([-2.0, 4.0]))


def test_a_list_and_a_tuple_are_one_sequence():
    assert digest((1, (2, 3))) == digest([1, [2, 3]])


def test_a_value_that_stands_twice_is_no_cycle():
    shared = [1, 2]
    assert digest([shared, shared]) == digest([[1, 2], [1, 2]])


def test_another_domain_is_another_digest():
    assert canonical_digest("a", 1) != canonical_digest("b", 1)
    assert canonical_digest("a", "b") != canonical_digest("b", "a")


def test_a_digest_is_the_same_in_every_process():
    value = {
        "b": [1, 2.5, None, True],
        "a": torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        "c": np.arange(2, dtype="<i4"),
    }
    assert digest(value).hex() == KNOWN


KNOWN = "927d38dc91dea73331981209bd1f236d3206a15caa280e0bf678ce696d2aaa40"


class Colour(StrEnum):
    RED = "red"


class Level(IntEnum):
    LOW = 1


class Named(torch.Tensor):
    pass


def cyclic_list():
    value = []
    value.append([value])
    return value


def cyclic_dict():
    value = {}
    value["self"] = {"inner": value}
    return value


def deep():
    value = []
    for _ in range(1_000):
        value = [value]
    return value


REFUSED = {
    "object": (object(), r"value: a builtins\.object has no canonical hash"),
    "set": ({1, 2}, r"builtins\.set has no canonical hash"),
    "bytearray": (bytearray(b"x"), "bytearray"),
    "generator": ((x for x in ()), "generator"),
    "str enum": (Colour.RED, "Colour"),
    "int enum": (Level.LOW, "Level"),
    "ordered dict": (OrderedDict(a=1), "OrderedDict"),
    "dtype": (torch.float32, "dtype"),
    "torch generator": (torch.Generator(), "Generator"),
    "nested": ({"a": [1, {"b": object()}]}, r"value\['a'\]\[1\]\['b'\]: a builtins\.object"),
    "key": ({(1,): 2}, r"the key \(1,\) is a tuple"),
    "numpy key": ({np.int64(1): 2}, "is a int64"),
    "sparse": (torch.eye(3).to_sparse(), "layout torch.sparse_coo"),
    "meta": (torch.empty(3, device="meta"), "meta device"),
    "subclass": (torch.ones(2).as_subclass(Named), "Named"),
    "float8": (torch.ones(2).to(torch.float8_e4m3fn), "float8_e4m3fn"),
    "long double": (np.longdouble(1), "float128|longdouble"),
    "long doubles": (np.ones(2, dtype=np.longdouble), "float128|longdouble"),
    "complex long doubles": (np.ones(2, dtype=np.clongdouble), "complex256|clongdouble"),
    "object array": (np.array([object()]), "dtype object"),
    "text array": (np.array(["a"]), "dtype <U1"),
    "times": (np.array(["2026-01-01"], dtype="datetime64[D]"), "datetime64"),
    "records": (np.zeros(2, dtype=[("a", "i4")]), "dtype"),
    "masked": (np.ma.masked_array([1], [True]), "MaskedArray"),
    "cycle of lists": (cyclic_list(), r"value\[0\]\[0\]: the list contains itself"),
    "cycle of dicts": (cyclic_dict(), r"the dict contains itself"),
    "too deep": (deep(), "nested deeper than 64"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    value, told = REFUSED[name]
    with pytest.raises(IdentityValueError, match=told):
        digest(value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_quantised_tensor_is_refused():
    with pytest.raises(IdentityValueError, match=r"torch\.quint8.*dequantise"):
        digest(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8))


def test_a_contiguous_tensor_is_not_copied():
    tensor = torch.zeros(1 << 22)
    with torch.profiler.profile(profile_memory=True) as profiled:
        digest(tensor)
    assert sum(max(0, event.cpu_memory_usage) for event in profiled.key_averages()) < tensor.nbytes
