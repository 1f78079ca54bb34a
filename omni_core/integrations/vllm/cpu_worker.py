# SPDX-License-Identifier: Apache-2.0
"""The worker for vLLM on CPU: `LLM(worker_cls="omni_core.integrations.vllm.cpu_worker.OmniCpuWorker")`."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from omni_core.integrations.vllm.stage_worker import StageWorkerMixin


class OmniCpuWorker(StageWorkerMixin, CPUWorker):  # type: ignore[misc]  # vLLM ships no types: its class is Any here
    """vLLM's CPU worker; its runner adopts Omni Core's hooks when the KV cache is made, if the gate lets it."""
