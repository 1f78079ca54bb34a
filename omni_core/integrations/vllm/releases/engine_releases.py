# SPDX-License-Identifier: Apache-2.0
"""The vLLM releases this integration was run on, as data, and the verdict on any vLLM."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from omni_core.integrations.vllm.releases.engine_contract import Release
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


ENGINE_RELEASES = (
    EngineRelease((0, 27), "0.27.0", Runs.NIGHTLY, "no `layers` over pipeline ranks: refused by name"),
    EngineRelease((0, 28), "0.28.0", Runs.BY_HAND, "as 0.27"),
    EngineRelease((0, 29), "0.29.0", Runs.BY_HAND, "as 0.27"),
    EngineRelease((0, 30), "0.30.0", Runs.NIGHTLY),
    EngineRelease((0, 31), "0.31.0", Runs.BY_HAND),
    EngineRelease((0, 32), "0.32.0", Runs.ALWAYS),
)
"""Oldest first."""

NEWEST_RELEASE = ENGINE_RELEASES[-1].release


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
    version: str, *, lacking: Sequence[object] = (), uses_v2_runner: bool = False, allow_untested: bool = False
) -> VersionProblem | None:
    """Why this vLLM is not supported, and what to do; `None` if it is. Pure.

    Args:
        version: vLLM's version; a local part such as `+cpu` is allowed.
        lacking: facts of the contract that its source text does not have.
        uses_v2_runner: whether the worker runs vLLM's second model runner, which keeps no block table on the host.
        allow_untested: whether a release that was never run is let through if it lacks nothing.
    """
    was_run = release_of(version) in {one.release for one in ENGINE_RELEASES}
    if lacking:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        return VersionProblem(
            f"its source text no longer says that {lacking[0]}{more}, which this integration rests on",
            f"install an unchanged {_supported()}, or turn the cache off",
        )
    if not was_run and not allow_untested:
        return VersionProblem(
            f"this integration was run on {_supported()}",
            "install one of those, or turn the cache off. All that it rests on is there under its name: "
            f"{SECTION}.allow_untested_version=true lets it try",
        )
    if uses_v2_runner:
        return VersionProblem("model runner V2 is not supported", "set VLLM_USE_V2_MODEL_RUNNER=0")
    return None


def _supported() -> str:
    oldest, newest = (".".join(map(str, one.release)) for one in (ENGINE_RELEASES[0], ENGINE_RELEASES[-1]))
    return f"vLLM {oldest} to {newest}"
