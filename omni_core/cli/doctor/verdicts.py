# SPDX-License-Identifier: Apache-2.0
"""What an operator is told about one backend: a word, one sentence, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from omni_core.cli.doctor.child import TIME_LIMIT
from omni_core.cli.doctor.examination import Examination, Stage
from omni_core.cli.doctor.packages import PackageReport
from omni_core.plugins import InstalledPlugin


class Verdict(Enum):
    """The word."""

    READY = "ready"
    """Every check passed."""
    UNAVAILABLE = "unavailable"
    """Installed, but this machine cannot run it."""
    REFUSES = "refuses"
    """This version of it does not do the work, and says so."""
    BROKEN = "broken"
    """It should work here, and does not."""
    NOT_INSTALLED = "not installed"
    """Nothing is registered under its name."""


@dataclass(frozen=True, slots=True)
class BackendDiagnosis:
    """One backend."""

    name: str
    installed: InstalledPlugin | None
    examination: Examination
    verdict: Verdict
    summary: str
    """What was found, one sentence."""
    next_step: str

    @property
    def is_available(self) -> bool:
        """Whether the machine has what it needs."""
        return self.verdict in (Verdict.READY, Verdict.BROKEN, Verdict.REFUSES)


def diagnose(
    name: str, installed: InstalledPlugin, found: Examination, packages: Sequence[PackageReport]
) -> BackendDiagnosis:
    """Judge what was found of a backend."""
    verdict, summary, next_step = _judge(installed, found, packages)
    return BackendDiagnosis(name, installed, found, verdict, summary, next_step)


def not_installed(name: str, plugins: Sequence[InstalledPlugin]) -> BackendDiagnosis:
    """Nobody registers the name."""
    names = ", ".join(plugin.name for plugin in plugins) or "none"
    return BackendDiagnosis(
        name,
        None,
        Examination(),
        Verdict.NOT_INSTALLED,
        f"No installed distribution registers a backend under this name. Installed: {names}.",
        "Install its distribution, or give --backend one of the names above.",
    )


def _judge(
    installed: InstalledPlugin, found: Examination, packages: Sequence[PackageReport]
) -> tuple[Verdict, str, str]:
    if found.unavailable_reason is not None:
        return (
            Verdict.UNAVAILABLE,
            f"This machine cannot run it: {found.unavailable_reason.rstrip('.')}.",
            "Nothing, unless this machine should run it: then the reason above is what to look at.",
        )
    if found.error is not None:
        if found.refuses is not None and found.stage == Stage.MAKE:
            remedy = f"Install a version of {installed.distribution} that does not, or serve without the cache."
            return Verdict.REFUSES, f"This version refuses {found.refuses.rstrip('.')}.", remedy
        return Verdict.BROKEN, f"It stopped at {found.stage}: {found.error.rstrip('.')}.", _remedy(installed, found)
    if found.failed:
        summary = f"{len(found.failed)} of {found.num_checks} conformance checks failed."
        return Verdict.BROKEN, summary, _remedy(installed, found)
    for package in packages:
        if package.problem is not None and package.backend == installed.name:
            summary = f"It passed every conformance check, but {package.problem}."
            return Verdict.BROKEN, summary, f"{package.remedy[:1].upper()}{package.remedy[1:]}."
    summary = f"All {found.num_checks} conformance checks passed in {found.conformance_s:.1f} s."
    return Verdict.READY, summary, "Nothing. The cache may serve on it."


def _remedy(installed: InstalledPlugin, found: Examination) -> str:
    """What to do about a backend that did not get to its end, or failed a check."""
    tell = (
        f"Send what `omni-core doctor --backend {installed.name} --format json` prints to the authors of "
        f"{installed.distribution} {installed.version}."
    )
    problems = [*found.failed.values(), *filter(None, [found.error])]
    if any(problem.startswith(MemoryError.__name__) for problem in problems):
        return (
            "Free host memory, or raise the container's limits: of memory, and of page-locked memory (docker: --ulimit "
            "memlock=-1). Then run this again."
        )
    if found.stage == Stage.IMPORT_CORE:
        return (
            "Python cannot import torch here. If torch_npu is named above: source CANN's set_env.sh, or uninstall "
            "torch-npu, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to go on without it."
        )
    if found.stage == Stage.IMPORT_BACKEND:
        return f"Reinstall {installed.distribution}, or uninstall it if nobody needs it."
    if found.error is not None and TIME_LIMIT in found.error:
        return (
            f"Do not serve with it: a step could hang. If the machine is only slow, give a longer {TIME_LIMIT}. {tell}"
        )
    return f"Do not serve with it: rows could be wrong, or late. {tell}"
