# SPDX-License-Identifier: Apache-2.0
"""Writes each ended request to a safetensors file of its own, whole or not at all."""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from omni_core.sinks.base import RequestEnd, SinkDelivery, SinkRequestEnd, StageSink
from omni_core.sinks.errors import InvalidRequestFileError, SinkClosedError
from omni_core.sinks.file_index import FileIndex, indexed_files
from omni_core.sinks.file_names import (
    ERROR_SUFFIX,
    PARTIAL_PREFIX,
    RESULT_PREFIX,
    RESULT_SUFFIX,
    request_file_stem,
)
from omni_core.sinks.joiner import DEFAULT_MAX_OPEN_BYTES, RequestJoiner
from omni_core.sinks.options import checked_bool, checked_count, checked_path
from omni_core.sinks.request_content import (
    FORMAT_NAME,
    FORMAT_VERSION,
    MALFORMED,
    checked_metadata,
    metadata_of,
    names_in,
    stored_request,
    tensors_of,
)
from omni_core.sinks.request_index import RequestIndex, RequestNames
from omni_core.sinks.rows import StoredRequest
from omni_core.sinks.safetensors_format import write_safetensors

_LOG = logging.getLogger(__name__)

_FILE_MODE = 0o600
_DIRECTORY_MODE = 0o700


class SafetensorsSink(StageSink):
    """One file per ended request: `hidden_states`, every further key, `token_ids`, and metadata.

    Rows wait in memory until their request ends, at most `max_open_bytes` as `RequestJoiner` counts them. The request
    whose rows would exceed that is dropped: `accept` raises `SinkFullError`.

    Then the file is written beside its final name, forced to the disk and renamed, so a reader sees a whole file or
    none. A file of a crashed run starts with `.partial-` and is never taken for a result. Files are for their owner
    only (0600). All methods belong to the feeder thread and block on the file system. `index.jsonl` says which file
    holds the request of which client.

    What is written: a finished or flushed request; one with missing rows says `complete: false` and which; an aborted
    one only with `keep_aborted`; a failed one leaves its error in `….error.json` and no rows. Outputs without a row
    per token are named in the metadata and not written.
    """

    option_rules: ClassVar = {
        "directory": checked_path,
        "overwrite": checked_bool,
        "keep_aborted": checked_bool,
        "max_open_bytes": checked_count,
    }
    rows_may_wait: ClassVar = True

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        keep_aborted: bool = False,
        max_open_bytes: int = DEFAULT_MAX_OPEN_BYTES,
    ) -> None:
        """Make the directory if there is none (0700).

        Args:
            directory: where the files go.
            overwrite: whether a file of the same request id may be replaced. By default it stays and the request's
                end raises `FileExistsError`. It is replaced by a whole file only: if the later request fails, or is
                aborted, the earlier one's file stays.
            keep_aborted: whether an aborted request is written with what came before.
            max_open_bytes: most bytes that requests which have not ended may hold together.

        Raises:
            InvalidSinkOptionError: an option is of another type, `max_open_bytes` is below 1, or the directory is empty
                text.
            OSError: the directory cannot be made, or is something else.
        """
        self._directory = Path(checked_path("safetensors", "directory", directory)).absolute()
        self._overwrite = checked_bool("safetensors", "overwrite", overwrite)
        self._keep_aborted = checked_bool("safetensors", "keep_aborted", keep_aborted)
        self._index = FileIndex(self._directory)
        self._joiner = RequestJoiner(max_open_bytes=checked_count("safetensors", "max_open_bytes", max_open_bytes))
        self._closed = False
        self._directory.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)

    @property
    def directory(self) -> Path:
        """Where the files lie."""
        return self._directory

    @property
    def open_bytes(self) -> int:
        """Bytes that requests which have not ended hold: what `max_open_bytes` bounds. Any thread."""
        return self._joiner.open_bytes

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
            tensors, names = tensors_of(collected)
            metadata = metadata_of(collected, names)
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
            values = checked_metadata(os.fspath(path), file.metadata() or {})
            names: list[str] = file.keys()
            tensors = {tensor: file.get_tensor(tensor) for tensor in names}
            return stored_request(tensors, values)
    except (SafetensorError, *MALFORMED) as error:
        raise InvalidRequestFileError(f"{os.fspath(path)}: not a whole request file: {error}") from error


def read_requests_of_client(directory: str | os.PathLike[str], client_req_id: str) -> tuple[StoredRequest, ...]:
    """Every request with rows that a client started under this id: one, or all samples of it. Any thread.

    Reads the index and opens the files it leads to; a file that the index does not name (its writer was killed) is
    opened to see whose it is. What a file says of itself counts, whatever the index says of it. A file that is not
    named by the index, and does not say whose it is or cannot be read, is passed over, and the log has one line about
    all of them (`read_request_file` says what is wrong with each). Needs the `sinks` extra.

    Args:
        directory: where a `SafetensorsSink` writes or wrote.
        client_req_id: the client's id. An id that only looks like a sample's is found under itself alone, unless
            another sample of the same request lies here.

    Returns:
        In the order the requests ended, as far as the index tells; empty if there is none.

    Raises:
        InvalidRequestFileError: a file that is this client's, by the index or by itself, is not a whole request.
        OSError: such a file cannot be read. One that disappears meanwhile is left out.
    """
    there = {path.name: path for path in request_files(directory)}
    names = {name: said for name, said in indexed_files(Path(directory)).items() if name in there}
    names |= _names_in_files([path for name, path in there.items() if name not in names])
    stored: dict[str, StoredRequest] = {}
    while True:
        index: RequestIndex[str] = RequestIndex()
        for name, said in names.items():
            index.add(name, said)
        found = index.by_client_id(client_req_id)
        unread = [name for name in found if name not in stored]
        if not unread:
            return tuple(stored[name] for name in found)
        for name in unread:
            try:
                stored[name] = read_request_file(there[name])
                names[name] = _names_of(stored[name])
            except FileNotFoundError:
                del names[name]


def _names_of(stored: StoredRequest) -> RequestNames:
    return RequestNames(stored.req_id, stored.client_req_id, stored.sample)


def _names_in_files(paths: Sequence[Path]) -> dict[str, RequestNames]:
    names = {}
    passed_over: list[Exception] = []
    for path in paths:
        try:
            names[path.name] = _names_in(path)
        except FileNotFoundError:
            continue
        except (InvalidRequestFileError, OSError) as error:
            passed_over.append(error)
    if passed_over:
        _LOG.warning(
            "%d files passed over that do not say whose they are, the first: %s", len(passed_over), passed_over[0]
        )
    return names


def _names_in(path: Path) -> RequestNames:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            return names_in(checked_metadata(os.fspath(path), file.metadata() or {}))
    except (SafetensorError, *MALFORMED) as error:
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
