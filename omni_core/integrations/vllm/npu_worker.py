# SPDX-License-Identifier: Apache-2.0
"""The worker for vLLM on Ascend: `LLM(worker_cls="omni_core.integrations.vllm.npu_worker.OmniNpuWorker")`."""

from __future__ import annotations

from vllm_ascend.worker.worker import NPUWorker

from omni_core.integrations.vllm.stage_worker import StageWorkerMixin


class OmniNpuWorker(StageWorkerMixin, NPUWorker):  # type: ignore[misc]  # vllm_ascend ships no types: Any here
    """vLLM-Ascend's worker; its runner adopts Omni Core's hooks when the KV cache is made, if the gate lets it."""
