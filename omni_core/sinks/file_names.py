# SPDX-License-Identifier: Apache-2.0
"""Turns any request id into a file name that is safe, readable and no other id's."""

from __future__ import annotations

import hashlib
import re

RESULT_PREFIX = "req-"
RESULT_SUFFIX = ".safetensors"
ERROR_SUFFIX = ".error.json"
INDEX_NAME = "index.jsonl"
"""Which file holds the request of which client, one line per file. Speeds the search up; the files are what counts."""
PARTIAL_PREFIX = ".partial-"
"""Files being written. A crashed run leaves them behind; nothing reads them."""

_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")
_USE_AND_SUFFIX = re.compile(rf"(-[1-9][0-9]*)?{re.escape(RESULT_SUFFIX)}")
_MAX_READABLE_CHARS = 80
_DIGEST_CHARS = 32


def request_file_stem(req_id: str, use: int = 0) -> str:
    """The name, without suffix, of a request's files, in ASCII characters of `[A-Za-z0-9_-]`.

    At most 120 characters, plus the number of the use if the id was used before in the engine run. The readable part
    replaces everything else by `_` and is cut; 128 bits of the id's SHA-256 follow, so that two ids share a name
    neither after that nor on a file system that ignores case.
    """
    digest = hashlib.sha256(req_id.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST_CHARS]
    stem = f"{RESULT_PREFIX}{_UNSAFE.sub('_', req_id[:_MAX_READABLE_CHARS])}-{digest}"
    return stem if use == 0 else f"{stem}-{use + 1}"


def is_file_name_of(name: str, req_id: str) -> bool:
    """Whether a result file of this name is that of a request with this internal id, of whichever use. Pure."""
    stem = request_file_stem(req_id)
    return name.startswith(stem) and _USE_AND_SUFFIX.fullmatch(name, len(stem)) is not None
