# SPDX-License-Identifier: Apache-2.0
"""The dtypes that vLLM runs a model and its KV cache in if it is told none, by the model's configuration.

vLLM 0.32: `_resolve_auto_dtype` in `config/model.py`; `get_kv_cache_quant_algo_string` in `utils/torch_utils.py` and
the `kv_cache_scheme` of `model_executor/layers/attention/attention.py`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

import torch

from omni_core.cli.plan.errors import PlanInputError

AUTO = "auto"
_KV_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
KV_CACHE_DTYPES = (AUTO, *_KV_DTYPE_BYTES)
"""vLLM's `--kv-cache-dtype`, as far as the size of an element follows from it."""
_ENGINE_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "float": torch.float32,
}
"""What vLLM runs models in."""
_NOT_IN_FLOAT16 = frozenset({"gemma2", "gemma3", "gemma3_text", "glm4"})
"""Model types that vLLM does not run in float16."""
_MODELOPT_KV_DTYPES = {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}


def engine_dtype(named: Any, model_type: Any, source: str) -> tuple[torch.dtype, tuple[str, ...]]:
    """What vLLM's `dtype=auto` makes of a configuration's dtype, and what is to be said of it.

    Args:
        named: the configuration's dtype.
        model_type: the configuration's model type.
        source: file and dotted path, for people.

    Raises:
        PlanInputError: vLLM does not run models in it, or there is none.
    """
    dtype = _ENGINE_DTYPES.get(named.removeprefix("torch.")) if isinstance(named, str) else None
    if dtype is None:
        raise PlanInputError(f"{source}: dtype is {reprlib.repr(named)}; give --dtype, as the engine runs the model")
    if dtype == torch.float32:
        return torch.bfloat16, (
            "the checkpoint is in float32, which vLLM's dtype=auto runs in bfloat16, or in float16 on a device "
            "without bfloat16; give --dtype float32 if the engine is started so",
        )
    if dtype == torch.float16 and isinstance(model_type, str) and model_type in _NOT_IN_FLOAT16:
        return torch.bfloat16, (f"vLLM does not run {model_type} in float16: bfloat16 is meant",)
    return dtype, ()


def kv_element_bytes(kv_cache_dtype: str, checkpoint_dtype: str | None, dtype: torch.dtype) -> int:
    """Bytes of one element of the KV cache.

    Args:
        kv_cache_dtype: as vLLM is given it.
        checkpoint_dtype: what the checkpoint asks for under `auto`.
        dtype: of the model.

    Raises:
        PlanInputError: the checkpoint asks for one whose size does not follow from its name.
    """
    wanted = (checkpoint_dtype or AUTO) if kv_cache_dtype == AUTO else kv_cache_dtype
    if wanted == AUTO:
        return dtype.itemsize
    if wanted not in _KV_DTYPE_BYTES:
        raise PlanInputError(
            f"--kv-cache-dtype auto: the checkpoint asks for a KV cache in {wanted}, which has scales beside it; give "
            "--num-blocks, as the engine's log tells it, or another --kv-cache-dtype"
        )
    return _KV_DTYPE_BYTES[wanted]


def checkpoint_kv_dtype(section: Mapping[str, Any], root: Mapping[str, Any]) -> str | None:
    """The KV cache's dtype that a quantized checkpoint asks for, by vLLM's name; `None`: it asks for none.

    Args:
        section: the stage's part of the configuration.
        root: the whole.

    Raises:
        PlanInputError: it is told in a way that vLLM does not read.
    """
    given = next((part[name] for part, name in _places(section, root) if part.get(name)), None)
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise PlanInputError(f"quantization_config is {reprlib.repr(given)}; it must be an object")
    inner = given.get("quantization")
    places = (inner, given) if isinstance(inner, Mapping) else (given,)
    scheme = next((place["kv_cache_scheme"] for place in places if place.get("kv_cache_scheme")), None)
    algorithm = next((place["kv_cache_quant_algo"] for place in places if place.get("kv_cache_quant_algo")), None)
    method = _quantization_method(given)
    if method.startswith("modelopt"):
        return _modelopt_kv_dtype(algorithm if scheme is None else scheme)
    return "fp8" if method == "compressed-tensors" and scheme is not None else None


def _quantization_method(given: Mapping[str, Any]) -> str:
    producer, method = given.get("producer"), given.get("quant_method")
    if isinstance(producer, Mapping) and producer.get("name") == "modelopt":
        return "modelopt"
    return method.lower().replace("_", "-") if isinstance(method, str) else ""


def _places(section: Mapping[str, Any], root: Mapping[str, Any]) -> tuple[tuple[Mapping[str, Any], str], ...]:
    names = ("quantization_config", "compression_config")
    return tuple((part, name) for part in (root, section) for name in names)


def _modelopt_kv_dtype(wanted: Any) -> str | None:
    if wanted is None:
        return None
    if isinstance(wanted, Mapping):
        bits, kind = wanted.get("num_bits"), wanted.get("type")
        if kind == "float" and bits == 8 and wanted.get("dynamic") is False:
            return "fp8_e4m3"
        return "nvfp4" if kind == "float" and bits == 4 else AUTO
    return _MODELOPT_KV_DTYPES.get(wanted.lower(), AUTO) if isinstance(wanted, str) else AUTO
