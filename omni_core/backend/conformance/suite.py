# SPDX-License-Identifier: Apache-2.0
"""How the checks are run: each on a fresh backend and a fresh thread, so a check that hangs is a failed check."""

from __future__ import annotations

import unittest
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

from omni_core.backend.base import DeviceBackend
from omni_core.backend.conformance.asynchrony import ASYNCHRONY_CHECKS
from omni_core.backend.conformance.copies import FIDELITY_CHECKS
from omni_core.backend.conformance.events import CLOSING_CHECKS, EVENT_CHECKS, TIMEOUT_CHECKS, VISIBILITY_CHECKS
from omni_core.backend.conformance.ordering import LIFETIME_CHECKS, ORDER_CHECKS, STATIC_BUFFER_CHECKS
from omni_core.backend.conformance.properties import BackendProperty
from omni_core.backend.conformance.refusals import REFUSAL_CHECKS
from omni_core.backend.conformance.resources import DESCRIPTION_CHECKS, MEMORY_CHECKS
from omni_core.backend.conformance.rig import BackendFactory, Check, Rig
from omni_core.backend.conformance.threads import THREAD_CHECKS
from omni_core.backend.conformance.throughput import DEFAULT_NBYTES, measure_throughput
from omni_core.backend.registry import create_backend, load_backend_class
from omni_core.runtime import Runtime, ThreadingRuntime


@dataclass(frozen=True, slots=True)
class ConformanceCheck:
    """One requirement of a property that a backend must have."""

    name: str
    """Short and stable, such as `events_are_never_early`."""
    property: BackendProperty
    requirement: str
    """What is required, in one sentence."""
    body: Check
    """What tries it."""

    def run(self, factory: BackendFactory, limit_s: float = 120.0) -> None:
        """Make a backend and try the property on it, on a fresh thread. Blocks the caller for at most `limit_s`.

        Raises:
            AssertionError: the backend has not the property, or the check did not end in `limit_s`; says what was
                expected and what was seen.
            Exception: what the backend raised where the contract lets it raise nothing.
        """
        runtime = ThreadingRuntime()
        raised: list[BaseException] = []

        def attempt() -> None:
            try:
                with Rig.opened(factory, runtime) as rig:
                    self.body(rig)
            except BaseException as error:  # carried to the caller's thread, whatever it is
                raised.append(error)

        if not runtime.spawn(f"conformance-{self.name}", attempt).join(limit_s):
            raise AssertionError(f"{self.name}: did not end within {limit_s} s. Required: {self.requirement}")
        if raised:
            error = raised[0]
            error.add_note(f"Required by conformance check {self.name!r}: {self.requirement}")
            raise error


_CHECKS_OF: Mapping[BackendProperty, tuple[Check, ...]] = {
    BackendProperty.DESCRIPTION: DESCRIPTION_CHECKS,
    BackendProperty.MEMORY: MEMORY_CHECKS,
    BackendProperty.FIDELITY: FIDELITY_CHECKS,
    BackendProperty.ORDER: ORDER_CHECKS,
    BackendProperty.STATIC_BUFFERS: STATIC_BUFFER_CHECKS,
    BackendProperty.LIFETIME: LIFETIME_CHECKS,
    BackendProperty.VISIBILITY: VISIBILITY_CHECKS,
    BackendProperty.EVENTS: EVENT_CHECKS,
    BackendProperty.ASYNCHRONY: ASYNCHRONY_CHECKS,
    BackendProperty.TIMEOUTS: TIMEOUT_CHECKS,
    BackendProperty.THREADS: THREAD_CHECKS,
    BackendProperty.REFUSALS: REFUSAL_CHECKS,
    BackendProperty.CLOSING: CLOSING_CHECKS,
}

CONFORMANCE_CHECKS: tuple[ConformanceCheck, ...] = tuple(
    ConformanceCheck(body.__name__, tried, " ".join((body.__doc__ or body.__name__).split()), body)
    for tried, bodies in _CHECKS_OF.items()
    for body in bodies
)
"""Every check, in the order a reader of a report wants them: the first failure explains the later ones."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check found."""

    check: ConformanceCheck
    error: BaseException | None
    """`None`: passed."""
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether the backend has the property."""
        return self.error is None


def run_conformance(
    factory: BackendFactory, checks: Sequence[ConformanceCheck] = CONFORMANCE_CHECKS, limit_s: float = 120.0
) -> tuple[CheckResult, ...]:
    """Run `checks` one after the other; a failed one does not stop the rest. Blocks up to `limit_s` per check.

    Args:
        factory: makes a fresh backend from a runtime, as `lambda runtime: MyBackend(runtime)` does.
        checks: what to run.
        limit_s: how long one check may take.
    """
    clock = ThreadingRuntime()
    results = []
    for check in checks:
        started_s = clock.monotonic_s()
        error: BaseException | None = None
        try:
            check.run(factory, limit_s)
        except Exception as caught:  # a report lists every failure; it is not the place to stop at one
            error = caught
        results.append(CheckResult(check, error, clock.monotonic_s() - started_s))
    return tuple(results)


class _Metafunc(Protocol):
    """The part of pytest's `Metafunc` the suite needs; pytest itself is not imported."""

    @property
    def fixturenames(self) -> list[str]: ...

    def parametrize(self, argnames: str, argvalues: Sequence[object], *, ids: Sequence[str]) -> None: ...


class BackendConformance:
    """Subclass it in a test module, with a name that starts with `Test`, and set `backend_name`."""

    backend_name: ClassVar[str]
    """The entry point's name of the backend."""
    backend_options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """The backend's own keyword arguments."""
    limit_s: ClassVar[float] = 120.0
    """How long one check may take."""
    throughput_nbytes: ClassVar[int] = DEFAULT_NBYTES
    """Of each copy that `test_throughput` times."""

    def make_backend(self, runtime: Runtime) -> DeviceBackend:
        """Make the backend under test; override it for a backend that is not registered."""
        return create_backend(self.backend_name, runtime=runtime, options=self.backend_options)

    def skip_reason(self) -> str | None:
        """Why this machine cannot run the suite; override it together with `make_backend`."""
        return load_backend_class(self.backend_name).unavailable_reason()

    def pytest_generate_tests(self, metafunc: _Metafunc) -> None:
        """One test per check."""
        if "conformance_check" in metafunc.fixturenames:
            names = [check.name for check in CONFORMANCE_CHECKS]
            metafunc.parametrize("conformance_check", CONFORMANCE_CHECKS, ids=names)

    def test_conformance(self, conformance_check: ConformanceCheck) -> None:
        """The backend has the property."""
        self._skip_without_device()
        conformance_check.run(self.make_backend, self.limit_s)

    def test_throughput(self, record_property: Callable[[str, object], None]) -> None:
        """The bytes per second of its copies stand in the test report; any figure will do."""
        self._skip_without_device()
        measured = measure_throughput(self.make_backend, nbytes=self.throughput_nbytes)
        record_property("pinned_bytes_per_s", round(measured.pinned_bytes_per_s))
        record_property("pageable_bytes_per_s", round(measured.pageable_bytes_per_s))

    def _skip_without_device(self) -> None:
        reason = self.skip_reason()
        if reason is not None:
            raise unittest.SkipTest(reason)
