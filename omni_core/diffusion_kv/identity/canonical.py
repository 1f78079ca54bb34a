# SPDX-License-Identifier: Apache-2.0
"""One digest per value: typed, canonical, without pickle. Two different values never feed the hash the same bytes.

Every value is a tag of one byte, its length where it has one, and its content. So `1`, `1.0`, `True`, `"1"` and `b"1"`
differ, and so do `["ab"]` and `["a", "b"]`. A list and a tuple of the same members are the same sequence.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from omni_core.diffusion_kv.errors import IdentityValueError

_MAX_DEPTH = 64
_TENSOR_DTYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    }
)
_ARRAY_DTYPES = frozenset(
    np.dtype(kind) for kind in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
)


def canonical_digest(domain: str, value: object) -> bytes:
    """The sha256 of `value` in `domain`.

    Args:
        domain: what is hashed and by which version of the rule; equal values of two domains differ.
        value: `None`, bool, int, float, str, bytes; a torch tensor or a numpy array or scalar; a list, tuple or dict
            of such. A contiguous CPU tensor is read where it lies.

    Raises:
        IdentityValueError: a value of any other type (a subclass is one), or a tensor that is sparse, quantised, on
            the meta device or of another dtype; a structure that contains itself. Names where it lies.
    """
    hasher = _Hasher()
    hasher.add(domain, "domain")
    hasher.add(value, "value")
    return hasher.digest()


class _Hasher:
    """A sha256 fed with one value after the other."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._open: list[int] = []

    def digest(self) -> bytes:
        return self._hash.digest()

    def add(self, value: object, where: str) -> None:
        plain = _plain(value)
        if plain is not None:
            self._hash.update(plain)
        elif type(value) in (list, tuple):
            self._nested(value, where, self._sequence)
        elif type(value) in (dict, MappingProxyType):
            self._nested(value, where, self._mapping)
        elif type(value) in (torch.Tensor, torch.nn.Parameter):
            self._tensor(value, where)
        elif type(value) is np.ndarray or isinstance(value, np.generic):
            self._array(value, where)
        else:
            raise IdentityValueError(
                f"{where}: a {type(value).__module__}.{type(value).__qualname__} has no canonical hash; give plain "
                "values, lists, tuples, dicts, torch tensors or numpy arrays"
            )

    def _nested(self, value: Any, where: str, add: Any) -> None:
        if id(value) in self._open:
            raise IdentityValueError(f"{where}: the {type(value).__name__} contains itself")
        if len(self._open) >= _MAX_DEPTH:
            raise IdentityValueError(f"{where}: nested deeper than {_MAX_DEPTH} levels")
        self._open.append(id(value))
        add(value, where)
        self._open.pop()

    def _sequence(self, value: list[Any] | tuple[Any, ...], where: str) -> None:
        self._hash.update(b"l" + _length(len(value)))
        for index, member in enumerate(value):
            self.add(member, f"{where}[{index}]")

    def _mapping(self, value: Mapping[Any, Any], where: str) -> None:
        keyed = []
        for key, member in value.items():
            plain = _plain(key)
            if plain is None:
                raise IdentityValueError(
                    f"{where}: the key {key!r} is a {type(key).__name__}; keys are None, bool, int, float, str or bytes"
                )
            keyed.append((plain, key, member))
        self._hash.update(b"m" + _length(len(keyed)))
        for plain, key, member in sorted(keyed, key=lambda entry: entry[0]):
            self._hash.update(plain)
            self.add(member, f"{where}[{key!r}]")

    def _tensor(self, value: Any, where: str) -> None:
        tensor: torch.Tensor = value.detach()
        if tensor.is_quantized or tensor.dtype not in _TENSOR_DTYPES:
            raise IdentityValueError(f"{where}: a tensor of {tensor.dtype} has no canonical hash; dequantise it first")
        if tensor.layout is not torch.strided:
            raise IdentityValueError(
                f"{where}: a tensor of layout {tensor.layout} has no canonical hash; make it dense"
            )
        if tensor.is_meta:
            raise IdentityValueError(f"{where}: a tensor on the meta device has no content to hash")
        self._header(b"t", str(tensor.dtype), tuple(tensor.shape))
        whole = tensor.resolve_conj().resolve_neg().cpu().contiguous()
        self._content(whole.reshape(-1).view(torch.uint8).numpy() if whole.numel() else b"")

    def _array(self, value: Any, where: str) -> None:
        dtype = value.dtype
        if dtype.newbyteorder("=") not in _ARRAY_DTYPES or type(value) is np.longdouble:
            raise IdentityValueError(f"{where}: numpy values of dtype {dtype} have no canonical hash")
        kind = b"a" if type(value) is np.ndarray else b"g"
        self._header(kind, dtype.str, value.shape)
        flat = np.ascontiguousarray(value).reshape(-1)
        self._content(flat.view(np.uint8) if flat.size else b"")

    def _header(self, tag: bytes, dtype: str, shape: tuple[int, ...]) -> None:
        name = dtype.encode()
        self._hash.update(tag + _length(len(name)) + name + _length(len(shape)) + b"".join(map(_length, shape)))

    def _content(self, content: Any) -> None:
        """Bytes whose number the header already tells."""
        self._hash.update(content)


def _length(value: int) -> bytes:
    return struct.pack(">Q", value)


def _plain(value: object) -> bytes | None:
    """The bytes of a value that contains no others; `None` if it is none of those."""
    if value is None:
        return b"n"
    if type(value) is bool:
        return b"T" if value else b"F"
    if type(value) is int:
        content = value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)
        return b"i" + _length(len(content)) + content
    if type(value) is float:
        return b"f" + struct.pack(">d", value)
    if type(value) is str:
        content = value.encode("utf-8", "surrogatepass")
        return b"s" + _length(len(content)) + content
    if type(value) is bytes:
        return b"b" + _length(len(value)) + value
    return None
