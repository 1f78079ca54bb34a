# SPDX-License-Identifier: Apache-2.0
"""vLLM's own lines in commands that load it into their process."""

from __future__ import annotations

import os
from collections.abc import Mapping

_DEFAULTS: Mapping[str, str] = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}


def keep_vllm_quiet() -> None:
    """Let vLLM log errors alone, and to stderr, unless the operator says otherwise. Call it before vLLM is imported."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
