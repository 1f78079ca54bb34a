# SPDX-License-Identifier: Apache-2.0
"""The releases of vLLM whose padding code can be cut: the installed one, and the next one's wheel."""

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest
from next_vllm import modules_of_next_vllm
from vllm_text import VLLM_MODULES, VllmText

RELEASES = [
    pytest.param("installed", marks=pytest.mark.engine),
    pytest.param("0.33", marks=[pytest.mark.slow, pytest.mark.timeout(1000)]),
]


def text_of(release: str, tmp_path_factory: pytest.TempPathFactory) -> VllmText:
    """Its code; the test is skipped if there is none here, or one that pads by other rules."""
    if release == "installed":
        return VllmText(installed_package())
    return VllmText(modules_of_next_vllm(VLLM_MODULES, tmp_path_factory.mktemp("vllm")))


def installed_package() -> Path:
    """Its folder."""
    [distribution, *_] = importlib.metadata.packages_distributions()["vllm"]
    release = importlib.metadata.version(distribution)
    if not release.startswith(("0.32.", "0.33.")):
        pytest.skip(f"vLLM {release} pads by other rules")
    [folder] = importlib.util.find_spec("vllm").submodule_search_locations
    return Path(folder)
