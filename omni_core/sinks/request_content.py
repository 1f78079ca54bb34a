# SPDX-License-Identifier: Apache-2.0
"""What a request's file holds: from a request to tensors and metadata, and back. Knows no directory and no file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.outputs import TokenRange
from omni_core.sinks.base import RequestEnd, SinkRequestEnd, is_complete
from omni_core.sinks.errors import InvalidRequestFileError
from omni_core.sinks.request_index import RequestNames
from omni_core.sinks.rows import CollectedRequest, StoredRequest
from omni_core.sinks.safetensors_format import safetensors_parts

FORMAT_NAME = "omni-core.request"
FORMAT_VERSION = 1
HIDDEN_TENSOR = "hidden_states"
TOKEN_IDS_TENSOR = "token_ids"

MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What reading JSON raises that is none, or that holds other values than those written here: wrong types, numbers of
any size, any depth."""

_KEY_TENSOR_PREFIX = "key:"
_RESERVED_TENSORS = frozenset({HIDDEN_TENSOR, TOKEN_IDS_TENSOR, "__metadata__"})
_HEADER_LENGTH_BYTES = 8


def request_file_bytes(stored: StoredRequest) -> bytes:
    """What `SafetensorsSink` would write for this request, to be sent instead. Any thread; copies every row once.

    Raises:
        RowsMismatchError: a dtype the format has no name for.
    """
    return b"".join(_file_parts(stored))


def request_file_piece(stored: StoredRequest, offset: int, max_bytes: int) -> tuple[bytes, int]:
    """A piece of `request_file_bytes`, and the length of the whole. Any thread; copies what it returns and no more.

    Args:
        stored: the request.
        offset: first byte of the piece; at or behind the end the piece is empty.
        max_bytes: the most bytes of it.

    Raises:
        RowsMismatchError: a dtype the format has no name for.
    """
    piece: list[memoryview] = []
    start = 0
    for part in _file_parts(stored):
        piece.append(memoryview(part)[max(0, offset - start) : max(0, offset + max_bytes - start)])
        start += len(part)
    return b"".join(piece), start


def _file_parts(stored: StoredRequest) -> Iterator[bytes | memoryview]:
    end = SinkRequestEnd(
        stored.req_id, stored.client_req_id, stored.end, stored.missing, sample=stored.sample, use=stored.use
    )
    collected = CollectedRequest(
        end=end,
        ranges=stored.ranges,
        pieces={key: [rows] for key, rows in stored.rows.items()},
        token_id_pieces=[stored.token_ids],
        key_ranges=stored.key_ranges,
        leftovers=stored.leftovers,
    )
    tensors, names = tensors_of(collected)
    return safetensors_parts(tensors, metadata_of(collected, names))


def read_request_bytes(content: bytes) -> StoredRequest:
    """Read what `request_file_bytes` made, or the content of a request's file. Any thread. Needs the `sinks` extra.

    Raises:
        InvalidRequestFileError: not a request's file, cut short, or of another format version.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    source = f"{len(content)} bytes"
    try:
        tensors = load(content)
        header_bytes = int.from_bytes(content[:_HEADER_LENGTH_BYTES], "little")
        header = json.loads(content[_HEADER_LENGTH_BYTES : _HEADER_LENGTH_BYTES + header_bytes])
        return stored_request(tensors, checked_metadata(source, header.get("__metadata__", {})))
    except (SafetensorError, *MALFORMED) as error:
        raise InvalidRequestFileError(f"{source}: not a whole request file: {error}") from error


def tensors_of(collected: CollectedRequest) -> tuple[dict[str, Sequence[torch.Tensor]], dict[str, str]]:
    """The tensors of a request's file, each in pieces along its first dimension, and the key of each."""
    names = {_tensor_name(key): key for key in collected.pieces}
    tensors = {name: collected.pieces[key] for name, key in names.items()}
    token_ids = [torch.from_numpy(piece) for piece in collected.token_id_pieces]
    tensors[TOKEN_IDS_TENSOR] = token_ids or [torch.empty(0, dtype=torch.int64)]
    return tensors, names


def metadata_of(collected: CollectedRequest, names: Mapping[str, str]) -> dict[str, str]:
    """The metadata of a request's file. Every value is JSON, so that any id can be told exactly.

    Args:
        collected: the request.
        names: the key of each tensor, as `tensors_of` told.
    """
    end = collected.end
    values: dict[str, Any] = {
        "format": FORMAT_NAME,
        "format_version": FORMAT_VERSION,
        "req_id": end.req_id,
        "client_req_id": end.client_req_id,
        "end": end.end.value,
        "complete": is_complete(end.end, end.missing),
        "ranges": collected.ranges,
        "missing": end.missing,
        "keys": names,
        "key_ranges": collected.key_ranges,
        "leftover_keys": sorted(collected.leftovers),
        "sample": None if end.sample is None else asdict(end.sample),
        "use": end.use,
    }
    return {name: json.dumps(value) for name, value in values.items()}


def checked_metadata(source: str, metadata: Mapping[str, str]) -> dict[str, Any]:
    """The values of a file's metadata.

    Args:
        source: names the file in errors.
        metadata: as the file has it.

    Raises:
        InvalidRequestFileError: not a file of the safetensors sink, or of another format version.
        ValueError: a value is not JSON.
    """
    if metadata.get("format") != json.dumps(FORMAT_NAME):
        raise InvalidRequestFileError(f"{source}: a safetensors file, but not one of the safetensors sink")
    if metadata.get("format_version") != json.dumps(FORMAT_VERSION):
        raise InvalidRequestFileError(
            f"{source}: format_version={metadata.get('format_version')}; this version reads {FORMAT_VERSION}"
        )
    return {key: json.loads(text) for key, text in metadata.items()}


def names_in(values: Mapping[str, Any]) -> RequestNames:
    """What the request of a file is called.

    Raises:
        KeyError, TypeError: the values are not a request file's.
    """
    return RequestNames.from_json({"sample": None} | dict(values))


def stored_request(tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> StoredRequest:
    """The request of a file, from its tensors by name and the values of its metadata.

    Raises:
        One of `MALFORMED`: they do not belong together.
    """
    names = names_in(values)
    stored = StoredRequest(
        req_id=names.req_id,
        client_req_id=names.client_req_id,
        end=RequestEnd(values["end"]),
        ranges=_ranges(values["ranges"]),
        missing=_ranges(values["missing"]),
        rows={key: tensors[name] for name, key in values["keys"].items()},
        token_ids=np.asarray(tensors[TOKEN_IDS_TENSOR].numpy(), dtype=np.int64),
        key_ranges={key: _ranges(covered) for key, covered in values["key_ranges"].items()},
        sample=names.sample,
        use=int(values.get("use", 0)),
    )
    counts = {key: len(rows) for key, rows in stored.rows.items()} | {TOKEN_IDS_TENSOR: len(stored.token_ids)}
    for key, count in counts.items():
        expected = sum(stop - start for start, stop in stored.ranges_of(key))
        if count != expected:
            raise ValueError(f"{key!r} has {count} rows for {expected} positions")
    return stored


def _tensor_name(key: str) -> str:
    if key == HIDDEN_KEY:
        return HIDDEN_TENSOR
    ascii_only = key.isascii() and key.isprintable()
    if key in _RESERVED_TENSORS or key.startswith(_KEY_TENSOR_PREFIX) or not ascii_only:
        return _KEY_TENSOR_PREFIX + json.dumps(key)
    return key


def _ranges(pairs: Sequence[Sequence[int]]) -> tuple[TokenRange, ...]:
    ranges = tuple((int(start), int(stop)) for start, stop in pairs)
    if any(not 0 <= start < stop for start, stop in ranges):
        raise ValueError(f"{pairs!r:.100}: a range holds no position")
    return ranges
