# SPDX-License-Identifier: Apache-2.0
"""Reads a model's configuration, whatever lies at the path: bounded, and never waited for."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omni_core.cli.plain_json import loads_without_repeats
from omni_core.cli.plan.errors import PlanInputError

MAX_FILE_BYTES = 16 << 20
"""No configuration is nearly as large."""


def read_config_file(path: Path) -> tuple[Path, Mapping[str, Any]]:
    """The file, and the JSON object in it.

    Args:
        path: a model's folder, or its `config.json`.

    Raises:
        PlanInputError: it cannot be read, is no plain file, is too large, or holds something else.
    """
    try:
        file = path / "config.json" if path.is_dir() else path
        document = loads_without_repeats(_read(file).decode("utf-8"))
    except (OSError, ValueError) as error:
        raise PlanInputError(f"--model {path}: {error}") from error
    if not isinstance(document, Mapping):
        raise PlanInputError(f"--model {path}: is no configuration, but a {type(document).__name__}")
    return file, document


def _read(file: Path) -> bytes:
    # Without O_NONBLOCK, opening a pipe waits for its writer.
    with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise ValueError(f"{file} is not a plain file; give a model's folder, or its config.json")
        content = opened.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"{file} has more than {MAX_FILE_BYTES:,} bytes, which no configuration has")
    return content
