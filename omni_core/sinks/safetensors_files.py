# SPDX-License-Identifier: Apache-2.0
"""Writes each ended request to a safetensors file of its own, whole or not at all."""

from __future__ import annotations

import io
import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.outputs import TokenRange
from omni_core.sinks.base import PossibleSample, RequestEnd, SinkDelivery, SinkRequestEnd, StageSink
from omni_core.sinks.errors import InvalidRequestFileError, SinkClosedError
from omni_core.sinks.file_index import FileIndex, indexed_files
from omni_core.sinks.file_names import (
    ERROR_SUFFIX,
    PARTIAL_PREFIX,
    RESULT_PREFIX,
    RESULT_SUFFIX,
    request_file_stem,
)
from omni_core.sinks.options import checked_bool, checked_path
from omni_core.sinks.request_index import RequestIndex, RequestNames
from omni_core.sinks.rows import CollectedRequest, RequestJoiner, StoredRequest, positions_of
from omni_core.sinks.safetensors_format import write_safetensors

FORMAT_NAME = "omni-core.request"
FORMAT_VERSION = 1
HIDDEN_TENSOR = "hidden_states"
TOKEN_IDS_TENSOR = "token_ids"

_KEY_TENSOR_PREFIX = "key:"
_RESERVED_TENSORS = frozenset({HIDDEN_TENSOR, TOKEN_IDS_TENSOR, "__metadata__"})
_HEADER_LENGTH_BYTES = 8
_FILE_MODE = 0o600
_DIRECTORY_MODE = 0o700


class SafetensorsSink(StageSink):
    """One file per ended request: `hidden_states`, every further key, `token_ids`, and metadata.

    Rows wait in memory until their request ends; then the file is written beside its final name, forced to the disk
    and renamed, so a reader sees a whole file or none. A file of a crashed run starts with `.partial-` and is never
    taken for a result. Files are for their owner only (0600). All methods belong to the feeder thread and block on
    the file system. `index.jsonl` says which file holds the request of which client.

    What is written: a finished or flushed request; one with missing rows says `complete: false` and which; an aborted
    one only with `keep_aborted`; a failed one leaves its error in `….error.json` and no rows. Outputs without a row
    per token are named in the metadata and not written.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, overwrite: bool = False, keep_aborted: bool = False
    ) -> None:
        """Make the directory if there is none (0700).

        Args:
            directory: where the files go.
            overwrite: whether a file of the same request id may be replaced. By default it stays and the request's
                end raises `FileExistsError`.
            keep_aborted: whether an aborted request is written with what came before.

        Raises:
            InvalidSinkOptionError: an option is of another type, or the directory is empty text.
            OSError: the directory cannot be made, or is something else.
        """
        self._directory = Path(checked_path("safetensors", "directory", directory)).absolute()
        self._overwrite = checked_bool("safetensors", "overwrite", overwrite)
        self._keep_aborted = checked_bool("safetensors", "keep_aborted", keep_aborted)
        self._index = FileIndex(self._directory)
        self._joiner = RequestJoiner()
        self._closed = False
        self._directory.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)

    @property
    def directory(self) -> Path:
        """Where the files lie."""
        return self._directory

    def accept(self, delivery: SinkDelivery) -> None:
        if self._closed:
            raise SinkClosedError(f"safetensors sink: rows of request {delivery.req_id!r} came after close()")
        self._joiner.add(delivery)

    def finish(self, end: SinkRequestEnd) -> None:
        if self._closed:
            raise SinkClosedError(f"safetensors sink: the end of request {end.req_id!r} came after close()")
        collected = self._joiner.finish(end)
        stem = request_file_stem(end.req_id, end.use)
        if end.end is RequestEnd.FAILED:
            record = json.dumps(_error_record(end), indent=2).encode("ascii")
            self._publish(stem + ERROR_SUFFIX, lambda file: file.write(record))
        elif end.end is not RequestEnd.ABORTED or self._keep_aborted:
            tensors, names = _tensors_of(collected)
            metadata = _metadata_of(collected, names)
            self._publish(stem + RESULT_SUFFIX, lambda file: write_safetensors(file, tensors, metadata))
            self._index.append(stem + RESULT_SUFFIX, RequestNames(end.req_id, end.client_req_id, end.sample))

    def close(self) -> None:
        self._closed = True
        self._joiner.clear()

    def _publish(self, name: str, write: Callable[[BinaryIO], object]) -> None:
        partial = self._directory / f"{PARTIAL_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, _FILE_MODE)
        try:
            with os.fdopen(descriptor, "wb", buffering=1 << 20) as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            final = self._directory / name
            if self._overwrite:
                os.replace(partial, final)
            else:
                _link_as_new(partial, final)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(partial)
        _sync_directory(self._directory)


def request_files(directory: str | os.PathLike[str]) -> tuple[Path, ...]:
    """The result files of a directory, by name. Files being written and those of crashed runs are left out."""
    found = Path(directory).glob(f"{RESULT_PREFIX}*{RESULT_SUFFIX}")
    return tuple(sorted(path for path in found if path.is_file()))


def read_request_file(path: str | os.PathLike[str]) -> StoredRequest:
    """Read a request that `SafetensorsSink` wrote. Any thread; blocks on the file. Needs the `sinks` extra.

    Raises:
        InvalidRequestFileError: not a result file, cut short, or of another format version.
        OSError: the file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    name = os.path.basename(os.fspath(path))
    if not name.endswith(RESULT_SUFFIX):
        raise InvalidRequestFileError(f"{os.fspath(path)}: a request's file ends in {RESULT_SUFFIX}; this is not one")
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            metadata = file.metadata() or {}
            _check_format(os.fspath(path), metadata)
            names: list[str] = file.keys()
            tensors = {tensor: file.get_tensor(tensor) for tensor in names}
            return _stored_request(tensors, {key: json.loads(text) for key, text in metadata.items()})
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequestFileError(f"{os.fspath(path)}: not a whole request file: {error}") from error


def read_requests_of_client(directory: str | os.PathLike[str], client_req_id: str) -> tuple[StoredRequest, ...]:
    """Every request with rows that a client started under this id: one, or all samples of it. Any thread.

    Reads the index and opens the files it leads to; a file that the index does not name (its writer was killed) is
    opened to see whose it is. Needs the `sinks` extra.

    Args:
        directory: where a `SafetensorsSink` writes or wrote.
        client_req_id: the client's id. An id that only looks like a sample's is found under itself alone, unless
            another sample of the same request lies here.

    Returns:
        In the order the requests ended, as far as the index tells; empty if there is none.

    Raises:
        InvalidRequestFileError: a file is not a whole request.
        OSError: a file cannot be read. One that disappears meanwhile is left out.
    """
    index: RequestIndex[str] = RequestIndex()
    there = {path.name: path for path in request_files(directory)}
    known = {name: names for name, names in indexed_files(Path(directory)).items() if name in there}
    for name in (*known, *(name for name in there if name not in known)):
        with suppress(FileNotFoundError):
            index.add(name, known.get(name) or _names_in(there[name]))
    found = []
    for name in index.by_client_id(client_req_id):
        with suppress(FileNotFoundError):
            found.append(read_request_file(there[name]))
    return tuple(found)


def request_file_bytes(stored: StoredRequest) -> bytes:
    """What `SafetensorsSink` would write for this request, to be sent instead. Any thread; copies every row once.

    Raises:
        RowsMismatchError: a dtype the format has no name for.
    """
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
    tensors, names = _tensors_of(collected)
    file = io.BytesIO()
    write_safetensors(file, tensors, _metadata_of(collected, names))
    return file.getvalue()


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
        metadata = header.get("__metadata__", {})
        _check_format(source, metadata)
        return _stored_request(tensors, {key: json.loads(text) for key, text in metadata.items()})
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequestFileError(f"{source}: not a whole request file: {error}") from error


def _names_in(path: Path) -> RequestNames:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            metadata = file.metadata() or {}
            _check_format(os.fspath(path), metadata)
            values = {key: json.loads(text) for key, text in metadata.items()}
            return RequestNames(values["req_id"], values["client_req_id"], _sample(values.get("sample")))
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequestFileError(f"{os.fspath(path)}: not a whole request file: {error}") from error


def _link_as_new(partial: Path, final: Path) -> None:
    try:
        os.link(partial, final)
    except FileExistsError as error:
        raise FileExistsError(
            error.errno,
            "a file of this request id is there already and overwrite=False; move it, use another directory, or set "
            "overwrite=True",
            os.fspath(final),
        ) from None


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _tensor_name(key: str) -> str:
    if key == HIDDEN_KEY:
        return HIDDEN_TENSOR
    ascii_only = key.isascii() and key.isprintable()
    if key in _RESERVED_TENSORS or key.startswith(_KEY_TENSOR_PREFIX) or not ascii_only:
        return _KEY_TENSOR_PREFIX + json.dumps(key)
    return key


def _tensors_of(collected: CollectedRequest) -> tuple[dict[str, Sequence[torch.Tensor]], dict[str, str]]:
    names = {_tensor_name(key): key for key in collected.pieces}
    tensors = {name: collected.pieces[key] for name, key in names.items()}
    token_ids = [torch.from_numpy(piece) for piece in collected.token_id_pieces]
    tensors[TOKEN_IDS_TENSOR] = token_ids or [torch.empty(0, dtype=torch.int64)]
    return tensors, names


def _metadata_of(collected: CollectedRequest, names: Mapping[str, str]) -> dict[str, str]:
    """Every value is JSON, so that any id can be told exactly."""
    end = collected.end
    complete = end.end in (RequestEnd.FINISHED, RequestEnd.FLUSHED) and not end.missing
    values: dict[str, Any] = {
        "format": FORMAT_NAME,
        "format_version": FORMAT_VERSION,
        "req_id": end.req_id,
        "client_req_id": end.client_req_id,
        "end": end.end.value,
        "complete": complete,
        "ranges": collected.ranges,
        "missing": end.missing,
        "keys": names,
        "key_ranges": collected.key_ranges,
        "leftover_keys": sorted(collected.leftovers),
        "sample": None if end.sample is None else asdict(end.sample),
        "use": end.use,
    }
    return {name: json.dumps(value) for name, value in values.items()}


def _error_record(end: SinkRequestEnd) -> dict[str, Any]:
    return {
        "format": FORMAT_NAME,
        "format_version": FORMAT_VERSION,
        "req_id": end.req_id,
        "client_req_id": end.client_req_id,
        "end": end.end.value,
        "missing": end.missing,
        "error": end.error,
    }


def _check_format(path: str, metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != json.dumps(FORMAT_NAME):
        raise InvalidRequestFileError(f"{path}: a safetensors file, but not one of the safetensors sink")
    if metadata.get("format_version") != json.dumps(FORMAT_VERSION):
        raise InvalidRequestFileError(
            f"{path}: format_version={metadata.get('format_version')}; this version reads {FORMAT_VERSION}"
        )


def _stored_request(tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> StoredRequest:
    stored = StoredRequest(
        req_id=values["req_id"],
        client_req_id=values["client_req_id"],
        end=RequestEnd(values["end"]),
        ranges=_ranges(values["ranges"]),
        missing=_ranges(values["missing"]),
        rows={key: tensors[name] for name, key in values["keys"].items()},
        token_ids=np.asarray(tensors[TOKEN_IDS_TENSOR].numpy(), dtype=np.int64),
        key_ranges={key: _ranges(covered) for key, covered in values["key_ranges"].items()},
        sample=_sample(values.get("sample")),
        use=int(values.get("use", 0)),
    )
    counts = {key: len(rows) for key, rows in stored.rows.items()} | {TOKEN_IDS_TENSOR: len(stored.token_ids)}
    for key, count in counts.items():
        expected = len(positions_of(stored.ranges_of(key)))
        if count != expected:
            raise ValueError(f"{key!r} has {count} rows for {expected} positions")
    return stored


def _ranges(pairs: Sequence[Sequence[int]]) -> tuple[TokenRange, ...]:
    return tuple((int(start), int(stop)) for start, stop in pairs)


def _sample(fields: Mapping[str, Any] | None) -> PossibleSample | None:
    return None if fields is None else PossibleSample(**fields)
