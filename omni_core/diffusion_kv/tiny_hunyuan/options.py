# SPDX-License-Identifier: Apache-2.0
"""What an operator may set about tiny-hunyuan: `model_options` of a deploy file, or the same as a Python object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

import torch

from omni_core.diffusion_kv.errors import DiffusionKVConfigError, DiffusionKVConfigTypeError
from omni_core.diffusion_kv.tiny_hunyuan.layouts import PRESETS, RowSlots, TransformerSize

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
)
"""The computing types by the name a deploy file uses."""
MAX_REFERENCES = 2
"""More pictures than this in one request are always refused."""
MIN_TAIL_TOKENS = 8
"""End of the last reference, target size and room for a prompt of a few bytes."""


@dataclass(frozen=True, slots=True)
class TinyHunyuanOptions:
    """One tiny-hunyuan.

    Raises:
        DiffusionKVConfigError: an unknown layout or type, or a number out of range.
        DiffusionKVConfigTypeError: a value of the wrong type; a bool is no int.
    """

    layout: str = "small"
    """`small`, `big` or `debug`: lengths of the row and width of the model."""
    prefix_tokens: int | None = None
    """Fixes the prefix of every row; the tail's text slot takes what the references leave. `None`: as the layout."""
    max_references: int | None = None
    """Reference pictures per request, at most 2. `None`: as the layout."""
    num_layers: int | None = None
    """`None`: as the layout."""
    dtype: str = "float32"
    """`float32`, `float64` or `bfloat16`. Latents are float32 at least."""
    weight_seed: int = 0
    """The weights are drawn from this; nothing was ever trained."""
    device: str = "cpu"
    timestep_shift: float = 3.0
    """Shift of the flow-matching schedule towards noisy steps; 1.0 is none."""

    def __post_init__(self) -> None:
        for name, kinds in _KINDS.items():
            value = getattr(self, name)
            if type(value) not in kinds:
                wanted = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
                raise DiffusionKVConfigTypeError(
                    f"tiny-hunyuan: {name}={value!r} is a {type(value).__name__}; {wanted} is wanted"
                )
        self._check_name("layout", self.layout, PRESETS)
        self._check_name("dtype", self.dtype, DTYPES)
        self._check_range("max_references", self.max_references, 0, MAX_REFERENCES)
        self._check_range("num_layers", self.num_layers, 1, 1_000)
        self._check_range("weight_seed", self.weight_seed, 0, 2**63 - 1)
        if not 0.0 < self.timestep_shift < float("inf"):
            raise DiffusionKVConfigError(f"tiny-hunyuan: timestep_shift={self.timestep_shift} is not a positive number")
        try:
            torch.device(self.device)
        except RuntimeError as error:
            raise DiffusionKVConfigError(f"tiny-hunyuan: device={self.device!r}: {error}") from error
        if self.prefix_tokens is not None:
            slots = self.slots
            least = slots.tokens_before_tail(slots.max_references) + MIN_TAIL_TOKENS
            self._check_range("prefix_tokens", self.prefix_tokens, least, 1_000_000)

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> TinyHunyuanOptions:
        """The options of a deploy file's `model_options`.

        Raises:
            DiffusionKVConfigError: an unknown key; names those there are. And what the class itself refuses.
        """
        known = tuple(field.name for field in fields(cls))
        unknown = [str(name) for name in options if name not in known]
        if unknown:
            raise DiffusionKVConfigError(
                f"tiny-hunyuan has no option {', '.join(map(repr, unknown))}; it has {', '.join(known)}"
            )
        return cls(**options)

    @property
    def slots(self) -> RowSlots:
        """The layout's lengths, with this deployment's number of references."""
        slots = PRESETS[self.layout].slots
        return slots if self.max_references is None else replace(slots, max_references=self.max_references)

    @property
    def transformer(self) -> TransformerSize:
        """The layout's model, with this deployment's number of layers."""
        size = PRESETS[self.layout].transformer
        return size if self.num_layers is None else replace(size, num_layers=self.num_layers)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def latent_dtype(self) -> torch.dtype:
        """Type of latents and of the scheduler's arithmetic."""
        return torch.promote_types(self.torch_dtype, torch.float32)

    def prefix_tokens_with(self, num_references: int) -> int:
        """The prefix of a row with so many references; its tail may be too short for any prompt."""
        if self.prefix_tokens is not None:
            return self.prefix_tokens
        return self.slots.tokens_before_tail(num_references) + self.slots.tail_tokens

    @staticmethod
    def _check_name(name: str, value: str, known: Mapping[str, object]) -> None:
        if value not in known:
            raise DiffusionKVConfigError(f"tiny-hunyuan: {name}={value!r} is none of {', '.join(known)}")

    @staticmethod
    def _check_range(name: str, value: int | None, least: int, most: int) -> None:
        if value is not None and not least <= value <= most:
            raise DiffusionKVConfigError(f"tiny-hunyuan: {name}={value} is not between {least} and {most}")


_OPTIONAL_INT = (int, type(None))
_KINDS: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        "layout": (str,),
        "prefix_tokens": _OPTIONAL_INT,
        "max_references": _OPTIONAL_INT,
        "num_layers": _OPTIONAL_INT,
        "dtype": (str,),
        "weight_seed": (int,),
        "device": (str,),
        "timestep_shift": (float, int),
    }
)
