# SPDX-License-Identifier: Apache-2.0
"""A model whose every row says where it belongs: a pure function of the whole token prefix, the position and the key.

Two rows that should differ do differ, in nearly every element, so a row of another request, position, key or tenant
cannot pass for the right one. Equal prefixes give equal rows, so what a prefix hit must deliver is known beforehand.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.testing.sim_request import TokenTrack

_U64 = npt.NDArray[np.uint64]

_RADIX = 0x9E3779B97F4A7C15 | 1
_RADIX_INVERSE = pow(_RADIX, -1, 1 << 64)


@dataclass(frozen=True, slots=True)
class _Encoding:
    """How hash bits become an element: kept bits, then forced bits. Floats fall in ±[1, 2), integers are odd."""

    bits_dtype: npt.DTypeLike
    carrier: torch.dtype
    keep: int
    force: int


_ENCODINGS: Mapping[torch.dtype, _Encoding] = {
    torch.float32: _Encoding(np.uint32, torch.int32, 0x807FFFFF, 0x3F800000),
    torch.float64: _Encoding(np.uint64, torch.int64, 0x800FFFFFFFFFFFFF, 0x3FF0000000000000),
    torch.float16: _Encoding(np.uint16, torch.int16, 0x83FF, 0x3C00),
    torch.bfloat16: _Encoding(np.uint16, torch.int16, 0x807F, 0x3F80),
    torch.int64: _Encoding(np.uint64, torch.int64, 0xFFFFFFFFFFFFFFFF, 1),
    torch.int32: _Encoding(np.uint32, torch.int32, 0xFFFFFFFF, 1),
}

GARBAGE_BYTE = 0xA5
"""Every byte of a padding row, and of a static output buffer after its step was saved."""


@dataclass(frozen=True, slots=True)
class FakeKey:
    """One output of the fake model with a row per token."""

    name: str
    """Its flattened name; "codes.audio" is emitted as `{"codes": {"audio": …}}`."""
    trailing: tuple[int, ...]
    """Shape of one row."""
    dtype: torch.dtype = torch.float32
    padded: bool = True
    """Whether its tensor carries the padding rows of a padded step; `False`: always the real rows only."""

    def __post_init__(self) -> None:
        """Check the key.

        Raises:
            ValueError: a dtype this model cannot make, or an empty row.
        """
        if self.dtype not in _ENCODINGS:
            raise ValueError(f"key {self.name!r}: dtype {self.dtype} is not one of {list(_ENCODINGS)}")
        if self.width < 1:
            raise ValueError(f"key {self.name!r}: rows of shape {self.trailing} hold nothing")

    @property
    def width(self) -> int:
        """Elements per row."""
        return math.prod(self.trailing)

    @property
    def row_bytes(self) -> int:
        """Bytes per row."""
        return self.width * self.dtype.itemsize


def hidden_key(hidden_size: int, dtype: torch.dtype = torch.float32) -> FakeKey:
    """The key of hidden rows of `hidden_size` elements."""
    return FakeKey(HIDDEN_KEY, (hidden_size,), dtype)


@dataclass(frozen=True, slots=True)
class FakeRun:
    """Positions `[start, stop)` of one request, computed in one forward."""

    track: TokenTrack
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class FakeOutputs:
    """What one forward returns."""

    hidden: torch.Tensor
    """`(num_tokens_padded, hidden_size)`, real rows first."""
    token_outputs: Mapping[str, torch.Tensor]
    """Emitted keys by flattened name, `(num_tokens or num_tokens_padded, *trailing)`."""

    def nested(self) -> dict[str, Any]:
        """`token_outputs` with dotted names as nested mappings, as models return them."""
        nested: dict[str, Any] = {}
        for name, rows in self.token_outputs.items():
            *parents, leaf = name.split(".")
            place = nested
            for parent in parents:
                place = place.setdefault(parent, {})
            place[leaf] = rows
        return nested


class StaticOutputs:
    """Output buffers that every forward writes into, as a captured graph does. Engine thread only.

    Args:
        keys: every key of the model.
        max_num_tokens_padded: rows of each buffer.
    """

    def __init__(self, keys: Sequence[FakeKey], max_num_tokens_padded: int) -> None:
        self._buffers = {key.name: torch.empty((max_num_tokens_padded, *key.trailing), dtype=key.dtype) for key in keys}

    def place(self, key: str, rows: torch.Tensor) -> torch.Tensor:
        """Write `rows` into the key's buffer and return the view a graph would."""
        view = self._buffers[key][: rows.shape[0]]
        view.copy_(rows)
        return view

    def overwrite(self) -> None:
        """Fill every buffer with garbage, as a graph that already runs its next step would."""
        for buffer in self._buffers.values():
            buffer.view(torch.uint8).fill_(GARBAGE_BYTE)


@dataclass(slots=True)
class FakeModel:
    """The model. Pure: it keeps nothing between calls but tables of constants. Any one thread at a time.

    Args:
        hidden: the key of its hidden rows.
        keys: its further outputs with a row per token.
        vocabulary: sampled tokens are below this.
    """

    hidden: FakeKey
    keys: tuple[FakeKey, ...] = ()
    vocabulary: int = 50_000
    _powers: _U64 = field(init=False, repr=False)
    _inverse_powers: _U64 = field(init=False, repr=False)
    _key_salts: dict[str, int] = field(init=False, repr=False)
    _columns: dict[str, _U64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Make the tables."""
        self._powers = np.ones(1, np.uint64)
        self._inverse_powers = np.ones(1, np.uint64)
        self._key_salts = {key.name: _text_hash(key.name) for key in self.all_keys}
        self._columns = {key.name: _mix(np.arange(1, key.width + 1, dtype=np.uint64)) for key in self.all_keys}

    @property
    def all_keys(self) -> tuple[FakeKey, ...]:
        """Hidden rows first, then the others."""
        return (self.hidden, *self.keys)

    def key(self, name: str) -> FakeKey:
        """The key of that flattened name.

        Raises:
            KeyError: no such key.
        """
        for key in self.all_keys:
            if key.name == name:
                return key
        raise KeyError(name)

    def rows(self, key: FakeKey, track: TokenTrack, positions: npt.NDArray[np.int64]) -> torch.Tensor:
        """The rows of one request: `(len(positions), *key.trailing)` in the key's dtype."""
        return self._rows(key, self._digests(track, int(positions.max(initial=-1)) + 1)[positions], positions)

    def forward(
        self,
        runs: Sequence[FakeRun],
        emitted: Collection[str],
        num_tokens_padded: int,
        static: StaticOutputs | None = None,
    ) -> FakeOutputs:
        """Compute the rows of `runs`, in order; padding rows are garbage.

        Args:
            runs: at least one.
            emitted: names of the further keys this forward brings.
            num_tokens_padded: rows of a padded tensor; at least the real ones.
            static: buffers to write into, as a captured graph does.
        """
        digests = np.concatenate([self._digests(run.track, run.stop)[run.start : run.stop] for run in runs])
        positions = np.concatenate([np.arange(run.start, run.stop, dtype=np.int64) for run in runs])
        outputs: dict[str, torch.Tensor] = {}
        for key in self.all_keys:
            if key is not self.hidden and key.name not in emitted:
                continue
            rows = self._rows(key, digests, positions)
            padding = num_tokens_padded - len(positions) if key.padded else 0
            if padding:
                garbage = torch.full((padding, key.row_bytes), GARBAGE_BYTE, dtype=torch.uint8)
                rows = torch.cat([rows, garbage.view(key.dtype).view(padding, *key.trailing)])
            outputs[key.name] = static.place(key.name, rows) if static else rows
        return FakeOutputs(outputs.pop(self.hidden.name), outputs)

    def next_token(self, track: TokenTrack) -> int:
        """The token sampled after everything `track` knows: equal prefixes continue equally."""
        return int(self._digests(track, len(track.token_ids))[-1] % np.uint64(self.vocabulary))

    def _digests(self, track: TokenTrack, stop: int) -> _U64:
        """`(stop,)`: element `p` depends on everything at positions 0 to `p`, and on the request's salt."""
        self._grow_powers(stop)
        content = np.array(track.token_ids[:stop], np.int64).view(np.uint64)
        for image in track.request.images:
            for position in range(image.offset, min(image.offset + image.length, stop)):
                content[position] = _text_hash(f"{image.identity} {position - image.offset}")
        content = _mix(content + np.uint64(_text_hash(track.request.salt)))
        # A polynomial in an odd radix modulo 2**64, evaluated for all prefixes at once: prefix sums of c[i] / r**i.
        return _mix(np.cumsum(content * self._inverse_powers[:stop], dtype=np.uint64) * self._powers[:stop])

    def _rows(self, key: FakeKey, digests: _U64, positions: npt.NDArray[np.int64]) -> torch.Tensor:
        encoding = _ENCODINGS[key.dtype]
        seeds = _mix(digests ^ _mix(positions.view(np.uint64) + np.uint64(self._key_salts[key.name])))
        bits = _mix(seeds[:, None] ^ self._columns[key.name][None, :])
        bits = (bits & np.uint64(encoding.keep)) | np.uint64(encoding.force)
        carrier = torch.from_numpy(bits.astype(encoding.bits_dtype).view(f"i{key.dtype.itemsize}"))
        return carrier.view(key.dtype).view(len(positions), *key.trailing)

    def _grow_powers(self, count: int) -> None:
        if count <= len(self._powers):
            return
        exponents = max(count, 2 * len(self._powers))
        self._powers = np.cumprod(np.full(exponents, _RADIX, np.uint64), dtype=np.uint64)
        self._inverse_powers = np.cumprod(np.full(exponents, _RADIX_INVERSE, np.uint64), dtype=np.uint64)


def _mix(values: _U64) -> _U64:
    """The finaliser of splitmix64 on every element: a bijection whose outputs look independent."""
    values = values ^ (values >> np.uint64(30))
    values = values * np.uint64(0xBF58476D1CE4E5B9)
    values = values ^ (values >> np.uint64(27))
    values = values * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _text_hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
