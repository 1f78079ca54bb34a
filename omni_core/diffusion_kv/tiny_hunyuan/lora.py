# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters of the q, k, v and o projections, kept as safetensors files.

An adapter file holds per layer and projection `layers.N.q_proj.lora_A`, `[rank, in]`, and `…lora_B`, `[out, rank]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from omni_core.diffusion_kv.errors import RequestRefusedError
from omni_core.diffusion_kv.pipeline import LoRARequest
from omni_core.diffusion_kv.tiny_hunyuan.layouts import TransformerSize
from omni_core.diffusion_kv.tiny_hunyuan.weights import WeightSource

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
"""What an adapter alters."""


@dataclass(frozen=True, slots=True, eq=False)
class LowRankPair:
    """One projection's change: `x @ a.T @ b.T`, times the request's scale."""

    a: torch.Tensor
    """`[rank, in]`."""
    b: torch.Tensor
    """`[out, rank]`."""


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """The whole adapter of one request, before tensor parallelism, in the model's type and on its device."""

    lora: LoRARequest
    layers: tuple[Mapping[str, LowRankPair], ...]
    """Per layer, projection name to its change."""


def projection_widths(size: TransformerSize) -> Mapping[str, tuple[int, int]]:
    """Projection name to its input and output width."""
    query_width = size.num_query_heads * size.head_size
    kv_width = size.num_kv_heads * size.head_size
    return {
        "q_proj": (size.dim, query_width),
        "k_proj": (size.dim, kv_width),
        "v_proj": (size.dim, kv_width),
        "o_proj": (query_width, size.dim),
    }


def make_adapter(path: Path, size: TransformerSize, *, rank: int, seed: int) -> None:
    """Write an adapter drawn from `seed`; it alters pictures visibly and means nothing. Needs safetensors.

    Args:
        path: the file; overwritten.
        size: the transformer it fits.
        rank: of the change; at least 1.
        seed: of the numbers.
    """
    from safetensors.torch import save_file

    source = WeightSource(seed, torch.float32, torch.device("cpu"))
    tensors = {}
    for layer_index in range(size.num_layers):
        for name, (width_in, width_out) in projection_widths(size).items():
            tensors[_tensor_name(layer_index, name, "A")] = source.normal((rank, width_in), std=width_in**-0.5)
            tensors[_tensor_name(layer_index, name, "B")] = source.normal((width_out, rank), std=rank**-0.5)
    save_file(tensors, path)


def check_adapter_file(request_id: str, lora: LoRARequest, size: TransformerSize) -> None:
    """Check that the request's adapter can be loaded; reads the file's header alone.

    Raises:
        RequestRefusedError: no such file, no safetensors file, not this model's tensors, a scale that is no number, or
            safetensors is not installed.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise RequestRefusedError(
            request_id, f"adapter {lora.name!r}: reading one needs safetensors; pip install 'omni-core[diffusion]'"
        ) from error
    if not abs(lora.scale) < float("inf"):
        raise RequestRefusedError(request_id, f"the scale {lora.scale} of adapter {lora.name!r} is not a finite number")
    if not Path(lora.path).is_file():
        raise RequestRefusedError(request_id, f"adapter {lora.name!r}: there is no file {lora.path}")
    try:
        with safe_open(lora.path, framework="pt") as file:
            names = file.keys()
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    except (SafetensorError, OSError) as error:
        raise RequestRefusedError(request_id, f"adapter {lora.name!r}: {lora.path} cannot be read: {error}") from error
    _check_shapes(request_id, lora, shapes, size)


class AdapterStore:
    """The adapters a worker has read, by path and load epoch. Its thread alone calls."""

    def __init__(self, size: TransformerSize, dtype: torch.dtype, device: torch.device) -> None:
        """Start empty, for a transformer of `size`."""
        self._size = size
        self._dtype = dtype
        self._device = device
        self._loaded: dict[str, tuple[int, tuple[Mapping[str, LowRankPair], ...]]] = {}

    def adapter(self, request_id: str, lora: LoRARequest) -> Adapter:
        """The request's adapter; read from its file when its path or load epoch is new. Blocks on the file then.

        A state that holds the adapter of an earlier epoch keeps it.

        Raises:
            RequestRefusedError: as `check_adapter_file`.
        """
        held = self._loaded.get(lora.path)
        if held is None or held[0] != lora.load_epoch:
            held = (lora.load_epoch, self._read(request_id, lora))
            self._loaded[lora.path] = held
        return Adapter(lora, held[1])

    def _read(self, request_id: str, lora: LoRARequest) -> tuple[Mapping[str, LowRankPair], ...]:
        from safetensors.torch import load_file

        check_adapter_file(request_id, lora, self._size)
        tensors = {
            name: tensor.to(device=self._device, dtype=self._dtype) for name, tensor in load_file(lora.path).items()
        }
        return tuple(
            {
                name: LowRankPair(tensors[_tensor_name(index, name, "A")], tensors[_tensor_name(index, name, "B")])
                for name in PROJECTIONS
            }
            for index in range(self._size.num_layers)
        )


def _tensor_name(layer_index: int, projection: str, side: str) -> str:
    return f"layers.{layer_index}.{projection}.lora_{side}"


def _check_shapes(
    request_id: str, lora: LoRARequest, shapes: Mapping[str, tuple[int, ...]], size: TransformerSize
) -> None:
    widths = projection_widths(size)
    expected = {
        _tensor_name(index, name, side) for index in range(size.num_layers) for name in widths for side in ("A", "B")
    }
    if shapes.keys() != expected:
        odd = sorted(shapes.keys() ^ expected)
        raise RequestRefusedError(
            request_id,
            f"adapter {lora.name!r}: {lora.path} does not fit a model of {size.num_layers} layers: {odd[0]!r} "
            f"and {len(odd) - 1} other tensors are missing or not known",
        )
    for index in range(size.num_layers):
        for name, (width_in, width_out) in widths.items():
            a, b = shapes[_tensor_name(index, name, "A")], shapes[_tensor_name(index, name, "B")]
            if len(a) != 2 or a[1] != width_in or b != (width_out, a[0]):
                raise RequestRefusedError(
                    request_id,
                    f"adapter {lora.name!r}: layer {index} {name} has the shapes {a} and {b}; "
                    f"[rank, {width_in}] and [{width_out}, rank] are wanted",
                )
