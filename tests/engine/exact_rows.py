# SPDX-License-Identifier: Apache-2.0
"""Makes vLLM on CPU compute a row the same, bit for bit, whatever else is in the batch.

Only then can a run with prefix caching be held against one without. Import this module before vllm, and call
`make_rows_exact()` before the first engine of the process is made.
"""

import os

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_ATTN_SPLIT_KV": "0",  # otherwise the split of the KV cache depends on a request's neighbours
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
os.environ.update(ENVIRONMENT)


def make_rows_exact() -> None:
    """Undo the two habits of vLLM on CPU that make a second engine, or a one-row batch, differ."""
    import vllm._custom_ops as custom_ops
    from vllm.platforms.cpu import CpuPlatform

    multiply = custom_ops.onednn_mm

    def multiply_at_least_two_rows(handler, rows, bias=None):
        # oneDNN rounds a product of one row differently from the same row in a larger product.
        if rows.numel() != rows.shape[-1]:
            return multiply(handler, rows, bias)
        doubled = rows.reshape(1, -1).repeat(2, 1)
        return multiply(handler, doubled, bias)[:1].reshape(*rows.shape[:-1], -1)

    custom_ops.onednn_mm = multiply_at_least_two_rows

    if not hasattr(CpuPlatform, "register_triton_kernel_overrides"):
        return  # vLLM before 0.31 registers none
    register = CpuPlatform.register_triton_kernel_overrides
    done = []

    def register_once(cls):
        # A second engine in one process would register again and fail on what the first one left behind.
        if not done:
            done.append(True)
            register()

    CpuPlatform.register_triton_kernel_overrides = classmethod(register_once)
