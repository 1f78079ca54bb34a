# SPDX-License-Identifier: Apache-2.0
"""What a backend is tried for, in an operator's words."""

from __future__ import annotations

from enum import Enum


class BackendProperty(Enum):
    """Something the cache relies on. Each is tried by one check or more."""

    DESCRIPTION = "says what it is"
    MEMORY = "accounts for its memory"
    FIDELITY = "moves every bit"
    ORDER = "ordering"
    STATIC_BUFFERS = "static buffers"
    LIFETIME = "buffer lifetime"
    VISIBILITY = "visibility"
    EVENTS = "event semantics"
    ASYNCHRONY = "never holds the engine up"
    TIMEOUTS = "time-outs"
    THREADS = "threads"
    REFUSALS = "refusals and their texts"
    CLOSING = "closing"
