# SPDX-License-Identifier: Apache-2.0
"""Reads a model's `config.json` of Hugging Face form, as JSON: one stage's rows, and its KV cache's cost per token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from omni_core.cli.plan.config_fields import ConfigFields
from omni_core.cli.plan.config_file import read_config_file
from omni_core.cli.plan.engine_dtypes import AUTO, checkpoint_kv_dtype, engine_dtype, kv_element_bytes
from omni_core.cli.plan.errors import PlanInputError
from omni_core.cli.plan.kv_layout import KVLayout, Parallel, read_kv_layout

ROOT = ""
"""The dotted path of the configuration itself."""
_STAGE_FIELDS = ("hidden_size", "num_hidden_layers", "num_attention_heads")
_NOT_A_STAGE = ("image_size", "patch_size", "num_mel_bins", "num_quantizers", "upsample_rates")
"""Fields of encoders and codecs, which have layers and heads, and no KV cache of tokens."""


@dataclass(frozen=True, slots=True)
class StageModel:
    """One stage's part of a model's configuration."""

    source: str
    """File and dotted path, for people."""
    hidden_size: int
    dtype: torch.dtype
    """The engine runs the model in."""
    layout: KVLayout
    kv_dtype: str | None
    """vLLM's name for the KV cache's dtype that the checkpoint asks for; `None`: it asks for none."""
    notes: tuple[str, ...]
    """What the engine makes of the configuration that it does not say itself."""

    def kv_bytes_per_token(self, parallel: Parallel, kv_cache_dtype: str) -> int:
        """Bytes of one token in the KV cache of the rank with the most layers.

        Raises:
            PlanInputError: it does not follow from the configuration, or vLLM does not split the model so.
        """
        if self.layout.not_sized is not None:
            raise PlanInputError(
                f"{self.source}: {self.layout.not_sized}; give --num-blocks, as the engine's log tells it"
            )
        element_bytes = kv_element_bytes(kv_cache_dtype, self.kv_dtype, self.dtype)
        return self.layout.elements_per_token(parallel) * element_bytes

    def kv_notes(self, kv_cache_dtype: str) -> tuple[str, ...]:
        """What decided the size of an element of the KV cache, where it was not the engine's argument."""
        if kv_cache_dtype != AUTO or self.kv_dtype in (None, AUTO):
            return ()
        return (f"the checkpoint asks for a KV cache in {self.kv_dtype}; another --kv-cache-dtype overrides it",)

    def num_blocks(self, kv_cache_bytes: int, block_size: int, parallel: Parallel, kv_cache_dtype: str) -> int:
        """Blocks that vLLM makes of `kv_cache_bytes` per rank.

        Raises:
            PlanInputError: not one, or as `kv_bytes_per_token`.
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
        dtype: the engine runs the model in; `None`: what vLLM makes of the configuration's.

    Raises:
        PlanInputError: it cannot be read, a field has a value of another kind, or it has several stages and none was
            chosen; names them.
    """
    file, document = read_config_file(path)
    stages: dict[str, tuple[Mapping[str, Any], Any]] = {}
    for name, stage in _stages(document):
        if name in stages:
            raise PlanInputError(f"--model {path}: two stages are both called {name}")
        stages[name] = stage
    if stage_config is None and len(stages) != 1:
        found = "has several stages; choose one with --stage-config: " if stages else "has no stage with "
        names = sorted(stages) if stages else _STAGE_FIELDS
        raise PlanInputError(f"--model {path}: {found}{', '.join(names)}")
    chosen = next(iter(stages)) if stage_config is None else stage_config
    if chosen not in stages:
        raise PlanInputError(f"--stage-config {chosen}: {file} has {', '.join(sorted(stages)) or 'none'}")
    section, named_dtype = stages[chosen]
    source = f"{file}{f' ({chosen})' if chosen else ''}"
    fields = ConfigFields(source, section)
    hidden_size = fields.needed_count("hidden_size")
    notes: tuple[str, ...] = ()
    if dtype is None:
        dtype, notes = engine_dtype(named_dtype, section.get("model_type"), source)
    return StageModel(
        source=source,
        hidden_size=hidden_size,
        dtype=dtype,
        layout=read_kv_layout(fields, document),
        kv_dtype=checkpoint_kv_dtype(section, _with_quantization(document, file)),
        notes=notes,
    )


def _stages(document: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Mapping[str, Any], Any]]]:
    """Parts that describe a decoder, with the dtype that holds for each: its own, or that of what it lies in."""
    waiting: list[tuple[str, Mapping[str, Any], Any]] = [(ROOT, document, None)]
    while waiting:
        path, section, dtype = waiting.pop()
        dtype = section.get("dtype") or section.get("torch_dtype") or dtype
        has_fields = all(_is_plain(section.get(name)) for name in _STAGE_FIELDS)
        if has_fields and not any(section.get(name) is not None for name in _NOT_A_STAGE):
            yield path, (section, dtype)
        for name, value in section.items():
            if isinstance(value, Mapping):
                waiting.append((f"{path}.{name}" if path else name, value, dtype))


def _with_quantization(document: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    """The configuration, with the quantization's file where that stands beside it (`transformers_utils/config.py`)."""
    beside = file.with_name("hf_quant_config.json")
    if document.get("quantization_config") is not None or not beside.is_file():
        return document
    return {**document, "quantization_config": read_config_file(beside)[1]}


def _is_plain(value: Any) -> bool:
    """Whether it may be meant as a number; `ConfigFields` then wants one."""
    return value is not None and not isinstance(value, list | Mapping)
