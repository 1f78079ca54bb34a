# SPDX-License-Identifier: Apache-2.0
"""The one suite every backend passes, from pytest or from a program.

For pytest, name the backend in a subclass; every check becomes one test:

    class TestMyBackend(BackendConformance):
        backend_name = "mine"

From a program, `run_conformance(factory)` returns one result per check, `measure_throughput(factory)` the bytes per
second. The checks use only the contract of `omni_core.backend.base`, and read and write behind the backend's back with
torch alone; pytest is not imported.
"""

from omni_core.backend.conformance.properties import BackendProperty
from omni_core.backend.conformance.rig import BackendFactory, HoldsCopies
from omni_core.backend.conformance.suite import (
    CONFORMANCE_CHECKS,
    BackendConformance,
    CheckResult,
    ConformanceCheck,
    run_conformance,
)
from omni_core.backend.conformance.throughput import CopyThroughput, measure_throughput

__all__ = [
    "CONFORMANCE_CHECKS",
    "BackendConformance",
    "BackendFactory",
    "BackendProperty",
    "CheckResult",
    "ConformanceCheck",
    "CopyThroughput",
    "HoldsCopies",
    "measure_throughput",
    "run_conformance",
]
