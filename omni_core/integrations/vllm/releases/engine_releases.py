# SPDX-License-Identifier: Apache-2.0
"""The vLLM releases this integration was run on, as data, and the verdict on any vLLM."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from omni_core.integrations.vllm.releases.engine_contract import Release
from omni_core.prefix_cache.gate_platforms import ModelRunner
from omni_core.settings.sources import SECTION


class Runs(Enum):
    """When the engine tests run on a release."""

    ALWAYS = "make test"
    NIGHTLY = "make soak"
    BY_HAND = "make test-vllm"


@dataclass(frozen=True, slots=True)
class EngineRelease:
    """One release that the engine tests pass on."""

    release: Release
    tested: str
    """The very version the tests run on."""
    runs: Runs
    differs: str = ""
    """What an operator gets otherwise than on the newest one; one phrase for the documentation."""
    runners: tuple[ModelRunner, ...] = (ModelRunner.V1,)
    """The model runners it was run with."""


ENGINE_RELEASES = (
    EngineRelease((0, 27), "0.27.0", Runs.NIGHTLY, "no `layers` over pipeline ranks: refused by name"),
    EngineRelease((0, 28), "0.28.0", Runs.BY_HAND, "as 0.27"),
    EngineRelease((0, 29), "0.29.0", Runs.BY_HAND, "as 0.27"),
    EngineRelease((0, 30), "0.30.0", Runs.NIGHTLY),
    EngineRelease((0, 31), "0.31.0", Runs.BY_HAND),
    EngineRelease((0, 32), "0.32.0", Runs.ALWAYS, runners=(ModelRunner.V1, ModelRunner.V2)),
)
"""Oldest first."""

NEWEST_RELEASE = ENGINE_RELEASES[-1].release

NPU = "npu"
"""vLLM's word for a device of vLLM-Ascend."""

ASCEND_RELEASES_READ = ("0.18.0", "0.23.0")
"""Releases of vLLM-Ascend whose source text holds the contract. Each goes with vLLM of the same version."""

_LET_IT_TRY = f"All that it rests on is there under its name: {SECTION}.allow_untested_version=true lets it try"


def release_of(version: str) -> Release | None:
    """Major and minor number of a version such as `0.32.0+cpu`; `None` if it has none."""
    found = re.match(r"(\d+)\.(\d+)\.\d", version)
    return None if found is None else (int(found[1]), int(found[2]))


@dataclass(frozen=True, slots=True)
class VersionProblem:
    """Why a vLLM is not supported."""

    reason: str
    remedy: str
    """What to do about it."""


def engine_version_problem(
    version: str,
    *,
    lacking: Sequence[object] = (),
    device_type: str = "cpu",
    runner: ModelRunner = ModelRunner.V1,
    allow_untested: bool = False,
) -> VersionProblem | None:
    """Why this vLLM is not supported, and what to do; `None` if it is. Pure.

    Args:
        version: vLLM's version; a local part such as `+cpu` is allowed.
        lacking: facts of the contract that its source text, or its plugin's, does not have.
        device_type: vLLM's word for the stage's device.
        runner: the model runner of the stage's worker.
        allow_untested: whether what was never run is let through if it lacks nothing.
    """
    if lacking:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        return VersionProblem(
            f"its source text no longer says that {lacking[0]}{more}, which this integration rests on",
            f"install an unchanged {_supported(device_type)}, or turn the cache off",
        )
    if allow_untested:
        return None
    run_on = {one.release: one.runners for one in ENGINE_RELEASES}.get(release_of(version) or (0, 0), ())
    if device_type == NPU:
        return VersionProblem(
            f"this integration was never run with vLLM-Ascend; it has read {_supported(device_type)}",
            f"turn the cache off. {_LET_IT_TRY}",
        )
    if not run_on:
        return VersionProblem(
            f"this integration was run on {_supported(device_type)}",
            f"install one of those, or turn the cache off. {_LET_IT_TRY}",
        )
    if runner not in run_on:
        return VersionProblem(
            f"model runner {runner.value} of this release was never run with this integration",
            f"set VLLM_USE_V2_MODEL_RUNNER=0. {_LET_IT_TRY}",
        )
    return None


def _supported(device_type: str) -> str:
    if device_type == NPU:
        return f"vLLM-Ascend {' and '.join(ASCEND_RELEASES_READ)} on vLLM of the same version"
    oldest, newest = (".".join(map(str, one.release)) for one in (ENGINE_RELEASES[0], ENGINE_RELEASES[-1]))
    return f"vLLM {oldest} to {newest}"
