# SPDX-License-Identifier: Apache-2.0
"""Writes the safetensors format piece by piece.

The safetensors library wants each tensor whole and hides the operating system's errors. A request's rows lie here in
pieces, one per step; writing them one after the other needs no second copy, and a full disk stays an `OSError`. The
layout is the format's own: 8 bytes of header length, a JSON header, the tensors' bytes without holes. Tests read the
files back with the library.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO

import torch

from omni_core.sinks.errors import RowsMismatchError

_HEADER_ALIGNMENT_BYTES = 8

_DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
}


def write_safetensors(
    file: BinaryIO, tensors: Mapping[str, Sequence[torch.Tensor]], metadata: Mapping[str, str]
) -> None:
    """Write what `safetensors_parts` gives, which says more. Blocks on the file.

    Args:
        file: opened for binary writing, at its start.
        tensors: name → at least one contiguous CPU tensor; all of one dtype and trailing shape.
        metadata: text to text, for the header.

    Raises:
        RowsMismatchError: a dtype the format has no name for.
        OSError: the medium failed.
    """
    for part in safetensors_parts(tensors, metadata):
        file.write(part)


def safetensors_parts(
    tensors: Mapping[str, Sequence[torch.Tensor]], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """A file's content, part after part. Any thread; copies no row, so tensors must not change meanwhile.

    Args:
        tensors: name → at least one contiguous CPU tensor, which are pieces along the first dimension; all of one dtype
            and trailing shape.
        metadata: text to text, for the header.

    Raises:
        RowsMismatchError: a dtype the format has no name for.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    # Widest elements first: each tensor then starts at a multiple of its element size, which mapping readers need.
    names = sorted(tensors, key=lambda name: (-tensors[name][0].dtype.itemsize, name))
    for name in names:
        pieces = tensors[name]
        dtype = pieces[0].dtype
        if dtype not in _DTYPE_NAMES:
            raise RowsMismatchError(f"key {name!r}: {dtype} has no name in the safetensors format")
        shape = [sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:]]
        size_bytes = sum(piece.numel() for piece in pieces) * dtype.itemsize
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [offset, offset + size_bytes]}
        offset += size_bytes
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % _HEADER_ALIGNMENT_BYTES)
    yield len(text).to_bytes(8, "little")
    yield text
    for name in names:
        yield from _bytes_of(tensors[name])


def _bytes_of(pieces: Sequence[torch.Tensor]) -> Iterator[memoryview]:
    for piece in pieces:
        if piece.numel():
            yield piece.reshape(-1).view(torch.uint8).numpy().data
