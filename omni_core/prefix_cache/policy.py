# SPDX-License-Identifier: Apache-2.0
"""What a model says about its own outputs, and how an undeclared output is understood."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.errors import InvalidConfigError
from omni_core.prefix_cache.gate_facts import StageKind

MODEL_POLICY_ATTRIBUTE = "omni_cache_policy"
"""A model declares its policy under this attribute: a `ModelCachePolicy` or a mapping of its fields."""


@dataclass(frozen=True, slots=True)
class ModelCachePolicy:
    """A model's declaration. Everything is optional: undeclared outputs are classified by what the first steps show."""

    token_keys: frozenset[str] = field(default_factory=frozenset)
    """Outputs with one row per token: stored, and joined on a hit."""
    request_keys: frozenset[str] = field(default_factory=frozenset)
    """Outputs with one entry per request: delivered, never stored."""
    deferred_keys: frozenset[str] = field(default_factory=frozenset)
    """Token outputs that may stay on the device until their request ends: stored and joined like `token_keys`. They are
    copied to the host earlier where someone wants them, or their room in `device_staging_bytes`."""
    needs_full_hidden_states: bool = True
    """Whether the consumer wants hidden rows of the whole prompt; `False` stores none and delivers this step's only."""
    stage_kind: StageKind = StageKind.AUTOREGRESSIVE
    """What the model's stage computes, where the engine's configuration does not say; also given by its value, such as
    `"codec_decoder"`. The gate asks."""

    def __post_init__(self) -> None:
        """Check that no key is declared twice, none that cannot be, and a kind of stage there is.

        Raises:
            InvalidConfigError: names the key and its declarations, or the kind and those there are.
        """
        for name in ("token_keys", "request_keys", "deferred_keys"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise InvalidConfigError(f"{name}={value!r}: must be a collection of key names, not one string")
            object.__setattr__(self, name, frozenset(value))
        try:
            object.__setattr__(self, "stage_kind", StageKind(self.stage_kind))
        except ValueError:
            kinds = ", ".join(repr(kind.value) for kind in StageKind)
            raise InvalidConfigError(f"stage_kind={self.stage_kind!r}: must be one of {kinds}") from None
        if HIDDEN_KEY in self.deferred_keys:
            raise InvalidConfigError(f"deferred_keys names {HIDDEN_KEY!r}: hidden rows are never deferred")
        pairs = (("token_keys", "request_keys"), ("token_keys", "deferred_keys"), ("request_keys", "deferred_keys"))
        for first, second in pairs:
            both = getattr(self, first) & getattr(self, second)
            if both:
                raise InvalidConfigError(f"key {min(both)!r} is declared in {first} and in {second}; declare it once")

    @classmethod
    def from_model(cls, model: Any) -> ModelCachePolicy:
        """The policy a model declares under `omni_cache_policy`, or the default one. Called once, at load.

        Raises:
            InvalidConfigError: the attribute is neither a policy nor a mapping of its fields.
        """
        declared = getattr(model, MODEL_POLICY_ATTRIBUTE, None)
        if declared is None:
            return cls()
        if isinstance(declared, cls):
            return declared
        if isinstance(declared, Mapping):
            known = set(cls.__dataclass_fields__)
            unknown = sorted(set(declared) - known)
            if unknown:
                raise InvalidConfigError(
                    f"{type(model).__name__}.{MODEL_POLICY_ATTRIBUTE} has unknown field {unknown[0]!r}; "
                    f"known: {', '.join(sorted(known))}"
                )
            return cls(**declared)
        raise InvalidConfigError(
            f"{type(model).__name__}.{MODEL_POLICY_ATTRIBUTE} is a {type(declared).__name__}; "
            "make it a ModelCachePolicy or a mapping of its fields"
        )
