# SPDX-License-Identifier: Apache-2.0
"""Which vLLM is installed, and what of the contracts its source text, or its plugin's, does not have."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

from omni_core.integrations.vllm.releases.ascend_contract import ASCEND_CONTRACT
from omni_core.integrations.vllm.releases.engine_contract import EngineFact, contract_of
from omni_core.integrations.vllm.releases.engine_releases import NEWEST_RELEASE, NPU, release_of
from omni_core.integrations.vllm.releases.engine_sources import EngineSources
from omni_core.integrations.vllm.releases.v2_contract import V2_CONTRACT


def engine_version() -> str:
    """The installed vLLM's version, such as `0.32.0`."""
    import vllm

    return str(vllm.__version__)


@functools.cache
def engine_lacks(device_type: str, *, uses_v2_runner: bool) -> tuple[EngineFact, ...]:
    """Facts of the contracts that the installed vLLM's source text does not have; empty for one that can be served.

    Those about the second model runner only where it runs, and those about vLLM-Ascend on its device. Reads some fifty
    files, about a second, once per process; at start only.
    """
    engine = EngineSources(_package_folder("vllm"))
    lacking = engine.lacking(contract_of(release_of(engine_version()) or NEWEST_RELEASE))
    if uses_v2_runner:
        lacking += engine.lacking(V2_CONTRACT)
    if device_type == NPU:
        lacking += EngineSources(_package_folder("vllm_ascend")).lacking(ASCEND_CONTRACT)
    return lacking


def _package_folder(name: str) -> Path:
    found = importlib.util.find_spec(name)
    folders = [] if found is None else found.submodule_search_locations or []
    return Path(folders[0]) if folders else Path()
