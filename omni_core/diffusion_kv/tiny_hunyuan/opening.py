# SPDX-License-Identifier: Apache-2.0
"""What the entry point of the pipeline names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omni_core.diffusion_kv.parallel import Ranks
from omni_core.diffusion_kv.tiny_hunyuan.options import TinyHunyuanOptions
from omni_core.diffusion_kv.tiny_hunyuan.pipeline import TinyHunyuanPipeline


def open_tiny_hunyuan(options: Mapping[str, Any], ranks: Ranks) -> TinyHunyuanPipeline:
    """A tiny-hunyuan of a deploy file's `model_options`.

    Raises:
        DiffusionKVConfigError: an unknown option, a value out of range, or ranks the model does not divide by.
    """
    return TinyHunyuanPipeline(TinyHunyuanOptions.from_mapping(options), ranks)
