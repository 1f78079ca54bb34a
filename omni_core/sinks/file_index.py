# SPDX-License-Identifier: Apache-2.0
"""The index of a directory of request files: one line of JSON per file, appended when the file is there.

Only a help for the search: what a killed or failing writer did not add is found in the files themselves, and what the
index names without a file is no request.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omni_core.sinks.file_names import INDEX_NAME, is_file_name_of
from omni_core.sinks.request_content import MALFORMED
from omni_core.sinks.request_index import RequestNames

_LOG = logging.getLogger(__name__)

_FILE_MODE = 0o600


class FileIndex:
    """Appends to one directory's index. One thread; several processes may write to one directory."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / INDEX_NAME
        self._failed = False

    def append(self, file_name: str, names: RequestNames) -> None:
        """Name a file that is there. Blocks on the file system; a failure is logged once and costs no request."""
        line = json.dumps({"file": file_name} | asdict(names)).encode("ascii")
        try:
            descriptor = _open_regular(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            try:
                # One write, and a line end in front of it too: a line that was cut short stays alone.
                os.write(descriptor, b"\n" + line + b"\n")
            finally:
                os.close(descriptor)
        except OSError as error:
            if not self._failed:
                _LOG.warning("%s cannot be written; the requests' files are whole without it: %s", self._path, error)
            self._failed = True


def indexed_files(directory: Path) -> dict[str, RequestNames]:
    """File name → what its request is called, in the order the files came. Any thread; blocks on the file system.

    What the index cannot tell for certain is left out, for the caller to find in the files: lines that are none of a
    `FileIndex` or were cut short, lines whose internal id does not fit the file's name, and files of which two lines
    disagree. An index that is not a regular file or cannot be read names nothing. The client's id of a line is taken
    as it is: one that is wrong hides that file from its client, and no other.
    """
    named: dict[str, RequestNames] = {}
    contradicted: set[str] = set()
    for file_name, names in filter(None, map(_entry, _lines(directory / INDEX_NAME))):
        if named.setdefault(file_name, names) != names:
            contradicted.add(file_name)
    return {file_name: names for file_name, names in named.items() if file_name not in contradicted}


def _lines(path: Path) -> list[bytes]:
    try:
        descriptor = _open_regular(path, os.O_RDONLY)
        with os.fdopen(descriptor, "rb") as file:
            return file.read().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        _LOG.warning("%s cannot be read, so every request's file is opened instead: %s", path, error)
        return []


def _open_regular(path: Path, flags: int) -> int:
    """A descriptor of a regular file, not followed through a link; a pipe under this name is not waited for."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, _FILE_MODE)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return descriptor


def _entry(line: bytes) -> tuple[str, RequestNames] | None:
    try:
        fields: Mapping[str, Any] = json.loads(line)
        names = RequestNames.from_json(fields)
        file_name = fields["file"]
        return (file_name, names) if is_file_name_of(file_name, names.req_id) else None
    except MALFORMED:
        return None
