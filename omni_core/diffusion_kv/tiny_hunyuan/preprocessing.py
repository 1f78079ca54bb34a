# SPDX-License-Identifier: Apache-2.0
"""A request to its rows: pictures fitted, text tokenised, CFG rows laid out. Knows no weights; any thread may call."""

from __future__ import annotations

import math
import secrets

from omni_core.diffusion_kv.errors import RequestRefusedError
from omni_core.diffusion_kv.pipeline import DiffusionRequest, PreparedRow
from omni_core.diffusion_kv.tiny_hunyuan.lora import check_adapter_file
from omni_core.diffusion_kv.tiny_hunyuan.options import TinyHunyuanOptions
from omni_core.diffusion_kv.tiny_hunyuan.pictures import check_picture, fitted
from omni_core.diffusion_kv.tiny_hunyuan.state import ProcessedReference, TinyHunyuanRequest
from omni_core.diffusion_kv.tiny_hunyuan.tokenizer import conditional_token_ids, unconditional_token_ids

MAX_INFERENCE_STEPS = 1_000
_SEEDS = 2**63


def prepare(request: DiffusionRequest, options: TinyHunyuanOptions, *, cfg_ranks: int) -> TinyHunyuanRequest:
    """Lay out one request.

    Args:
        request: not yet looked at.
        options: the deployment's.
        cfg_ranks: ranks that share the CFG rows; each needs one.

    Raises:
        RequestRefusedError: too many references, a picture that is none, a prompt that is too long, a number out of
            range, or an adapter that cannot be loaded.
    """
    _check_numbers(request, cfg_ranks)
    slots = options.slots
    num_references = len(request.references)
    if num_references > slots.max_references:
        raise RequestRefusedError(
            request.request_id,
            f"{num_references} reference pictures; this deployment takes {slots.max_references} (max_references)",
        )
    for index, pixels in enumerate(request.references):
        check_picture(request.request_id, f"reference picture {index}", pixels)
    if request.lora is not None:
        check_adapter_file(request.request_id, request.lora, options.transformer)
    prefix_tokens = options.prefix_tokens_with(num_references)
    conditional = conditional_token_ids(request.request_id, request.prompt, slots, num_references, prefix_tokens)
    layout = slots.row_layout(num_references, prefix_tokens)
    rows = [PreparedRow(conditional, layout)]
    if request.guidance_scale != 1.0:
        rows.append(PreparedRow(unconditional_token_ids(conditional), layout))
    return TinyHunyuanRequest(
        request=request,
        rows=tuple(rows),
        references=tuple(
            ProcessedReference(fitted(pixels, slots.vae_grid), fitted(pixels, slots.vit_grid))
            for pixels in request.references
        ),
        seed=secrets.randbelow(_SEEDS) if request.seed is None else request.seed,
    )


def _check_numbers(request: DiffusionRequest, cfg_ranks: int) -> None:
    steps, scale, seed = request.num_inference_steps, request.guidance_scale, request.seed
    if type(steps) is not int or not 1 <= steps <= MAX_INFERENCE_STEPS:
        raise RequestRefusedError(
            request.request_id, f"num_inference_steps={steps!r} is no int between 1 and {MAX_INFERENCE_STEPS}"
        )
    if type(scale) not in (int, float) or not math.isfinite(scale):
        raise RequestRefusedError(request.request_id, f"guidance_scale={scale!r} is no finite number")
    if seed is not None and (type(seed) is not int or not 0 <= seed < _SEEDS):
        raise RequestRefusedError(request.request_id, f"seed={seed!r} is no int between 0 and {_SEEDS - 1}")
    if cfg_ranks > 1 and scale == 1.0:
        raise RequestRefusedError(
            request.request_id,
            f"guidance_scale=1.0 runs one row, and {cfg_ranks} CFG-parallel ranks need one each; use another scale or "
            "a stage without CFG parallelism",
        )
