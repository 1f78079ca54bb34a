# SPDX-License-Identifier: Apache-2.0
"""The worker for vLLM on CUDA: `LLM(worker_cls="omni_core.integrations.vllm.cuda_worker.OmniCudaWorker")`."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from omni_core.integrations.vllm.stage_worker import StageWorkerMixin


class OmniCudaWorker(StageWorkerMixin, Worker):  # type: ignore[misc]  # vLLM ships no types: its class is Any here
    """vLLM's GPU worker; its runner adopts Omni Core's hooks when the KV cache is made, if the gate lets it."""
