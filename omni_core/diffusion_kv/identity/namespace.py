# SPDX-License-Identifier: Apache-2.0
"""The root of every row's chain: rows of two namespaces never share a page.

The number of ranks is not in it: pages live and die with the process group that computed them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from omni_core.diffusion_kv.errors import RowError
from omni_core.diffusion_kv.identity.canonical import canonical_digest
from omni_core.diffusion_kv.pipeline import LoRARequest

_DOMAIN = "omni_core.diffusion_kv.namespace/1"
"""The number grows with every change of what is hashed, or how."""


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Which model computes the keys and values, and how it lays rows out."""

    architecture: str
    path: str
    """Where the weights came from, as the operator said it."""
    revision: str | None
    """Of the weights at that path, where it has revisions."""
    dtype: str
    """What it computes in."""
    layout_version: int
    """Of the model's rule from a request to rows; grows with every change of that rule."""
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Whatever else of the model's settings changes a key or a value: seed of random weights, number of layers."""


def namespace(model: ModelIdentity, lora: LoRARequest | None, weight_epoch: int) -> bytes:
    """32 bytes that differ whenever `model`, the adapter or the weights do. An adapter is all its fields.

    Raises:
        RowError: the architecture, the path or the dtype is empty.
        IdentityValueError: an option has no canonical hash.
    """
    for name, value in (("architecture", model.architecture), ("path", model.path), ("dtype", model.dtype)):
        if not value:
            raise RowError(f"the model's {name} is empty; two models would share pages")
    return canonical_digest(
        _DOMAIN,
        {
            "architecture": model.architecture,
            "path": model.path,
            "revision": model.revision,
            "dtype": model.dtype,
            "layout_version": model.layout_version,
            "options": dict(model.options),
            "lora": None
            if lora is None
            else {
                "name": lora.name,
                "lora_id": lora.lora_id,
                "path": lora.path,
                "load_epoch": lora.load_epoch,
                "scale": float(lora.scale),
            },
            "weight_epoch": weight_epoch,
        },
    )
