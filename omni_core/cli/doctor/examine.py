# SPDX-License-Identifier: Apache-2.0
"""The examined process: `python -m omni_core.cli.doctor.examine BACKEND FILE` appends what it finds to the file.

Nothing that a vendor's package may break is imported before the first line is written.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import IO, Any

from omni_core.cli.doctor.examination import Stage


class Notes:
    """Writes facts, one JSON object a line, so that they outlive the process."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, **facts: Any) -> None:
        """Write facts at once."""
        self._file.write(json.dumps(facts) + "\n")
        self._file.flush()


def examine(name: str, notes: Notes) -> None:
    """Find out everything about the backend `name`; stops at the first thing that does not go on."""
    notes.write(stage=Stage.IMPORT_CORE)
    from omni_core.backend.registry import create_backend, load_backend_class
    from omni_core.runtime import ThreadingRuntime

    notes.write(stage=Stage.IMPORT_BACKEND)
    backend_class = load_backend_class(name)
    notes.write(device_type=backend_class.device_type, refuses=backend_class.refuses, stage=Stage.AVAILABILITY)
    reason = backend_class.unavailable_reason()
    if reason is not None:
        notes.write(unavailable_reason=reason, finished=True)
        return
    notes.write(stage=Stage.MAKE)
    backend = create_backend(name, runtime=ThreadingRuntime())
    notes.write(stage=Stage.DEVICE)
    backend.bind_thread()
    info = backend.device_info()
    # A mapping of any kind is no dictionary to `asdict`.
    device = {field.name: getattr(info, field.name) for field in dataclasses.fields(info)}
    notes.write(device={**device, "software": dict(info.software)})
    notes.write(capabilities=dataclasses.asdict(backend.capabilities), stage=Stage.CLOSE)
    backend.close()
    _try_conformance(name, notes)
    _measure(name, notes)
    notes.write(finished=True)


def _try_conformance(name: str, notes: Notes) -> None:
    from omni_core.backend.conformance import CONFORMANCE_CHECKS, run_conformance
    from omni_core.backend.registry import create_backend

    notes.write(num_checks=len(CONFORMANCE_CHECKS))
    seconds = 0.0
    for check in CONFORMANCE_CHECKS:
        notes.write(stage=f"conformance check {check.name}")
        (result,) = run_conformance(lambda runtime: create_backend(name, runtime=runtime), (check,))
        seconds += result.seconds
        why = None if result.error is None else f"{_one_line(result.error)}. Required: {check.requirement}"
        notes.write(checks={check.name: why})
    notes.write(conformance_s=seconds)


def _measure(name: str, notes: Notes) -> None:
    from omni_core.backend.conformance import measure_throughput
    from omni_core.backend.registry import create_backend

    notes.write(stage=Stage.THROUGHPUT)
    measured = measure_throughput(lambda runtime: create_backend(name, runtime=runtime))
    notes.write(pinned_bytes_per_s=measured.pinned_bytes_per_s, pageable_bytes_per_s=measured.pageable_bytes_per_s)


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}"


if __name__ == "__main__":
    with open(sys.argv[2], "a", encoding="utf-8") as notes_file:
        found = Notes(notes_file)
        try:
            examine(sys.argv[1], found)
        except Exception as error:
            found.write(error=_one_line(error), finished=True)
    # Neither a check that hangs nor a vendor's handler at exit may hold the answer back.
    os._exit(0)
