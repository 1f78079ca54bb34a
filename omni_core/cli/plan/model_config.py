# SPDX-License-Identifier: Apache-2.0
"""Reads a model's `config.json` of Hugging Face form, as JSON: one stage's rows, and what its KV cache costs per token.

The KV cache's arithmetic is vLLM's (0.32: `FullAttentionSpec` and `MLAAttentionSpec` in `v1/kv_cache_interface.py`,
`get_kv_cache_config_from_groups` in `v1/core/kv_cache_utils.py`, `get_num_kv_heads` in `config/model.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from omni_core.cli.plan.errors import PlanInputError

ROOT = ""
"""The dotted path of the configuration itself."""
_STAGE_FIELDS = ("hidden_size", "num_hidden_layers", "num_attention_heads")
_NOT_A_STAGE = ("image_size", "patch_size", "num_mel_bins", "num_quantizers", "upsample_rates")
"""Fields of encoders and codecs, which have layers and heads, and no KV cache of tokens."""
_HYBRID = (
    "full_attention_interval",
    "attn_layer_period",
    "hybrid_override_pattern",
    "layers_block_type",
    "mamba_d_state",
)
"""Fields of models whose layers are not all attention."""
_KV_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
AUTO = "auto"
KV_CACHE_DTYPES = (AUTO, *_KV_DTYPE_BYTES)
"""vLLM's `--kv-cache-dtype`, as far as the size of an element follows from it."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """How the engine splits the model over ranks."""

    tensor_size: int = 1
    pipeline_size: int = 1


@dataclass(frozen=True, slots=True)
class StageModel:
    """One stage's part of a model's configuration."""

    source: str
    """File and dotted path, for people."""
    hidden_size: int
    dtype: torch.dtype
    num_layers: int
    num_kv_heads: int
    head_size: int
    latent_size: int | None
    """Elements of a token's KV entry under latent attention (`kv_lora_rank + qk_rope_head_dim`); `None`: not used."""
    not_sized: str | None
    """Why the KV cache cannot be sized from the configuration, or `None`."""

    def kv_bytes_per_token(self, parallel: Parallel, kv_cache_dtype: str) -> int:
        """Bytes of one token in the KV cache of the rank with the most layers.

        Raises:
            PlanInputError: the layers are not all of one kind.
        """
        if self.not_sized is not None:
            raise PlanInputError(f"{self.source}: {self.not_sized}; give --num-blocks, as the engine's log tells it")
        dtype_bytes = self.dtype.itemsize if kv_cache_dtype == AUTO else _KV_DTYPE_BYTES[kv_cache_dtype]
        if self.latent_size is not None:
            elements = self.latent_size
        else:
            elements = 2 * max(1, self.num_kv_heads // parallel.tensor_size) * self.head_size
        return -(-self.num_layers // parallel.pipeline_size) * elements * dtype_bytes

    def num_blocks(self, kv_cache_bytes: int, block_size: int, parallel: Parallel, kv_cache_dtype: str) -> int:
        """Blocks that vLLM makes of `kv_cache_bytes` per rank.

        Raises:
            PlanInputError: not one, or the layers are not all of one kind.
        """
        block_bytes = block_size * self.kv_bytes_per_token(parallel, kv_cache_dtype)
        if kv_cache_bytes < block_bytes:
            raise PlanInputError(f"--kv-cache-bytes {kv_cache_bytes}: one block takes {block_bytes} bytes")
        return kv_cache_bytes // block_bytes


def read_stage_model(path: Path, stage_config: str | None, dtype: torch.dtype | None) -> StageModel:
    """Read one stage's part of a model's configuration.

    Args:
        path: a model's folder, or its `config.json`.
        stage_config: dotted path of the stage's part, such as `thinker_config.text_config`; `None`: the only one there.
        dtype: the engine runs the model in; `None`: in the configuration's.

    Raises:
        PlanInputError: it cannot be read, or has several stages and none was chosen; names them.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanInputError(f"--model {path}: {error}") from error
    if not isinstance(document, Mapping):
        raise PlanInputError(f"--model {path}: is no configuration, but a {type(document).__name__}")
    stages = dict(_stages(document, ROOT, None))
    if stage_config is None and len(stages) != 1:
        found = "has several stages; choose one with --stage-config: " if stages else "has no stage with "
        names = sorted(stages) if stages else _STAGE_FIELDS
        raise PlanInputError(f"--model {path}: {found}{', '.join(names)}")
    chosen = next(iter(stages)) if stage_config is None else stage_config
    if chosen not in stages:
        raise PlanInputError(f"--stage-config {chosen}: {file} has {', '.join(sorted(stages)) or 'none'}")
    section, dtype_name = stages[chosen]
    source = f"{file}{f' ({chosen})' if chosen else ''}"
    return _stage_model(section, dtype or _dtype_named(dtype_name, source), source)


def _dtype_named(name: str | None, source: str) -> torch.dtype:
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise PlanInputError(f"{source}: dtype is {name!r}; give --dtype")
    return dtype


def _stages(
    section: Mapping[str, Any], path: str, dtype: str | None
) -> Iterator[tuple[str, tuple[Mapping[str, Any], str | None]]]:
    """Parts that describe a decoder, with the dtype that holds for each: its own, or that of what it lies in."""
    dtype = section.get("dtype") or section.get("torch_dtype") or dtype
    if all(isinstance(section.get(name), int) for name in _STAGE_FIELDS) and not any(
        section.get(name) is not None for name in _NOT_A_STAGE
    ):
        yield path, (section, dtype)
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _stages(value, f"{path}.{name}" if path else name, dtype)


def _stage_model(section: Mapping[str, Any], dtype: torch.dtype, source: str) -> StageModel:
    heads = int(section["num_attention_heads"])
    rank, rope = section.get("kv_lora_rank"), section.get("qk_rope_head_dim")
    return StageModel(
        source=source,
        hidden_size=int(section["hidden_size"]),
        dtype=dtype,
        num_layers=int(section["num_hidden_layers"]),
        num_kv_heads=int(section.get("num_key_value_heads") or heads),
        head_size=int(section.get("head_dim") or int(section["hidden_size"]) // heads),
        latent_size=int(rank) + int(rope or 0) if rank else None,
        not_sized=_not_sized(section),
    )


def _not_sized(section: Mapping[str, Any]) -> str | None:
    kinds = set(section.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        return f"layers are also of {', '.join(sorted(kinds))}, whose KV cache vLLM groups and pads in its own way"
    hybrid = [name for name in _HYBRID if section.get(name)]
    if hybrid:
        return f"{hybrid[0]} says that not all layers are attention"
    if section.get("sliding_window") and section.get("use_sliding_window", True) and not section.get("layer_types"):
        return "it has a sliding window"
    return None
