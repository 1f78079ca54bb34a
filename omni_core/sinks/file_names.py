# SPDX-License-Identifier: Apache-2.0
"""Turns any request id into a file name that is safe, readable and no other id's."""

from __future__ import annotations

import hashlib
import re

RESULT_PREFIX = "req-"
RESULT_SUFFIX = ".safetensors"
ERROR_SUFFIX = ".error.json"
PARTIAL_PREFIX = ".partial-"
"""Files being written. A crashed run leaves them behind; nothing reads them."""

_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")
_MAX_READABLE_CHARS = 80
_DIGEST_CHARS = 32


def request_file_stem(req_id: str) -> str:
    """The name, without suffix, of a request's files: at most 120 ASCII characters of `[A-Za-z0-9_-]`.

    The readable part replaces everything else by `_` and is cut; 128 bits of the id's SHA-256 follow, so that two ids
    share a name neither after that nor on a file system that ignores case.
    """
    digest = hashlib.sha256(req_id.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST_CHARS]
    return f"{RESULT_PREFIX}{_UNSAFE.sub('_', req_id[:_MAX_READABLE_CHARS])}-{digest}"
