# SPDX-License-Identifier: Apache-2.0
"""The index of a directory of request files: one line of JSON per file, appended when the file is there.

Only a help for the search: what a killed or failing writer did not add is found in the files themselves, and what the
index names without a file is no request.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omni_core.sinks.base import PossibleSample
from omni_core.sinks.file_names import INDEX_NAME
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
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(self._path, flags, _FILE_MODE)
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
    """File name → what its request is called, in the order the files came. Lines cut short are left out.

    Raises:
        OSError: the index is there and cannot be read.
    """
    try:
        lines = (directory / INDEX_NAME).read_bytes().splitlines()
    except FileNotFoundError:
        return {}
    entries = (_entry(line) for line in lines)
    return dict(entry for entry in entries if entry is not None)


def _entry(line: bytes) -> tuple[str, RequestNames] | None:
    try:
        fields: Mapping[str, Any] = json.loads(line)
        sample = fields["sample"]
        names = RequestNames(
            fields["req_id"], fields["client_req_id"], None if sample is None else PossibleSample(**sample)
        )
        return fields["file"], names
    except (ValueError, KeyError, TypeError):
        return None
