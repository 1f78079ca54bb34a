# SPDX-License-Identifier: Apache-2.0
"""Which model runner on which device a stage may run with, as data; `docs/support.md` is rendered from it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ModelRunner(Enum):
    """vLLM's two model runners."""

    V1 = "V1"
    V2 = "V2"


@dataclass(frozen=True, slots=True)
class PlatformRunner:
    """One model runner on one kind of device."""

    device_type: str
    """vLLM's word for it (`DeviceConfig.device_type`)."""
    runner: ModelRunner
    worker: str
    """The worker class to give to vLLM."""
    checked: str
    """What it was checked with; one phrase for the documentation."""
    refusal: str = ""
    """Why it cannot be served, if so."""
    remedy: str = ""
    """What to do then."""


_WORKERS = "omni_core.integrations.vllm"

PLATFORM_RUNNERS = (
    PlatformRunner(
        "cpu", ModelRunner.V1, f"{_WORKERS}.cpu_worker.OmniCpuWorker", "the engine tests, on every release listed below"
    ),
    PlatformRunner(
        "cpu",
        ModelRunner.V2,
        f"{_WORKERS}.cpu_worker.OmniCpuWorker",
        "engine tests on vLLM 0.32 whose Triton kernels are interpreted",
    ),
    PlatformRunner(
        "cuda",
        ModelRunner.V1,
        f"{_WORKERS}.cuda_worker.OmniCudaWorker",
        "its code in engine tests on CPU, asynchronously too, its source text, a stand-in; never run on a device",
    ),
    PlatformRunner(
        "cuda",
        ModelRunner.V2,
        f"{_WORKERS}.cuda_worker.OmniCudaWorker",
        "its code in engine tests on CPU, asynchronously too, its source text, a stand-in; never run on a device",
    ),
    PlatformRunner(
        "npu",
        ModelRunner.V1,
        f"{_WORKERS}.npu_worker.OmniNpuWorker",
        "the source text of vLLM-Ascend 0.18 and 0.23, a stand-in; never run, so only with `allow_untested_version`",
    ),
    PlatformRunner(
        "npu",
        ModelRunner.V2,
        f"{_WORKERS}.npu_worker.OmniNpuWorker",
        "nothing",
        refusal="vLLM-Ascend 0.18 calls its second model runner unfinished, and it keeps requests in a form of its own",
        remedy="set VLLM_USE_V2_MODEL_RUNNER=0",
    ),
)
"""A device or a runner that is not listed is refused."""


@dataclass(frozen=True, slots=True)
class RunnerProblem:
    """Why a stage cannot run with its model runner."""

    reason: str
    remedy: str


def runner_problem(device_type: str, runner: ModelRunner) -> RunnerProblem | None:
    """Why a stage on this device cannot be served with this runner; `None` if it can. Pure."""
    of_device = {one.runner: one for one in PLATFORM_RUNNERS if one.device_type == device_type}
    if not of_device:
        known = ", ".join(dict.fromkeys(one.device_type for one in PLATFORM_RUNNERS))
        return RunnerProblem(
            f"device type {device_type!r}: there are worker classes for {known} only", "turn the cache off"
        )
    entry = of_device[runner]
    return RunnerProblem(f"{device_type}, {runner.value}: {entry.refusal}", entry.remedy) if entry.refusal else None
