# SPDX-License-Identifier: Apache-2.0
"""Outputs of chosen decoder layers, through the model's own auxiliary-hidden-state interface.

The interface is the one EAGLE-3 drafters use (vLLM 0.32: `SupportsEagle3` in `model_executor/models/interfaces.py`,
`use_aux_hidden_state_outputs` in `v1/worker/gpu_model_runner.py`). A model that has it returns, beside its hidden
state, one tensor `(num_tokens, hidden_size)` per layer asked for. Layer `l` is what transformers, asked for
`output_hidden_states=True`, calls `hidden_states[l]`: 0 is the embeddings, `l` the output of the `l`-th decoder layer.
The last one, `l == num_hidden_layers`, is taken before the final norm, where transformers takes it after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from omni_core.integrations.vllm.errors import LayersNotCapturedError
from omni_core.integrations.vllm.versions import carry_layers_over_pipeline, is_last_pipeline_rank
from omni_core.prefix_cache.block_pool import RowSpec
from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.settings.errors import SettingsError
from omni_core.settings.sources import SECTION
from omni_core.settings.stage_settings import StageSettings

LAYER_KEY_PREFIX = "hidden_states.layer_"

SPECULATIVE_METHODS_WITH_LAYERS = frozenset({"eagle3", "dflash", "dspark", "extract_hidden_states"})
"""Methods that choose the layers themselves (vLLM 0.32: `SpeculativeConfig.compute_hash`)."""

MAX_PIPELINE_PARALLEL_SIZE = 2
"""A pipeline rank in the middle does not hand on what it got (vLLM 0.32: `LlamaModel.forward` packs its own layers)."""


@runtime_checkable
class AuxiliaryLayersModel(Protocol):
    """The part of vLLM's `SupportsEagle3` that is used here."""

    supports_eagle3: ClassVar[bool]

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """Which layers' outputs the next forwards return, in ascending order."""
        ...


class ForwardState(Protocol):
    """The part of vLLM's `ExecuteModelState` that is used here."""

    hidden_states: torch.Tensor
    """`(num_tokens_padded, hidden_size)`."""
    aux_hidden_states: Sequence[torch.Tensor] | None
    """One `(num_tokens_padded, hidden_size)` per layer, in ascending order."""


def layer_key(layer: int) -> str:
    """The key under which a layer's rows are stored and delivered, such as `hidden_states.layer_10`."""
    return f"{LAYER_KEY_PREFIX}{layer}"


@dataclass(frozen=True, slots=True)
class ChosenLayers:
    """The layers one stage captures; none by default."""

    layers: tuple[int, ...] = ()
    """Ascending, each once."""

    @property
    def keys(self) -> tuple[str, ...]:
        """One key per layer, in the order of `layers`."""
        return tuple(map(layer_key, self.layers))

    def key_rows(self, hidden_size: int, dtype: torch.dtype) -> dict[str, RowSpec]:
        """What a row of each key is."""
        return {key: RowSpec((hidden_size,), dtype) for key in self.keys}

    def row_bytes(self, hidden_size: int, dtype: torch.dtype) -> int:
        """Bytes of one token's rows of all layers."""
        return len(self.layers) * hidden_size * dtype.itemsize

    def declared_in(self, policy: ModelCachePolicy) -> ModelCachePolicy:
        """The model's policy with the layers' keys as keys with a row per token.

        Raises:
            SettingsError: the model declares one of the keys as an output of its own.
        """
        taken = (policy.token_keys | policy.request_keys | policy.deferred_keys) & set(self.keys)
        if taken:
            raise SettingsError(
                f"{SECTION}.layers={list(self.layers)}: the model's policy declares {min(taken)!r} itself; "
                "leave that layer out, or give the model's output another name"
            )
        return replace(policy, token_keys=policy.token_keys | set(self.keys))

    def added_to(self, outputs: Mapping[str, Any], forward: ForwardState) -> Mapping[str, Any]:
        """A step's further outputs with the layers' rows among them. Engine thread; no torch operation.

        Args:
            outputs: what the model handed out.
            forward: what the step's forward left behind.

        Raises:
            LayersNotCapturedError: the forward returned another number of layers or of rows, or the model handed out a
                key of theirs.
        """
        if not self.layers:
            return outputs
        captured = forward.aux_hidden_states or ()
        if len(captured) != len(self.layers):
            raise LayersNotCapturedError(
                f"{SECTION}.layers={list(self.layers)}: the forward returned {len(captured)} auxiliary hidden states; "
                "something else changed the model's layers after it was loaded"
            )
        num_rows = forward.hidden_states.shape[0]
        for key, value in zip(self.keys, captured, strict=True):
            if not isinstance(value, torch.Tensor) or value.dim() != 2 or value.shape[0] != num_rows:
                found = f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
                raise LayersNotCapturedError(
                    f"{SECTION}.layers={list(self.layers)}: {key!r} is {found} where the forward has {num_rows} rows; "
                    "the model does not give one row per token here"
                )
        rows = dict(zip(self.keys, captured, strict=True))
        taken = rows.keys() & outputs.keys()
        if taken:
            raise LayersNotCapturedError(
                f"{SECTION}.layers={list(self.layers)}: the model hands out {min(taken)!r} itself; "
                "leave that layer out, or give the model's output another name"
            )
        return {**outputs, **rows}


def check_layers(settings: StageSettings, vllm_config: Any) -> None:
    """Refuse layers this engine cannot give. Before the model is loaded; reads vLLM's `VllmConfig` only.

    Raises:
        SettingsError: names the layers, what stands against them, and what to do.
    """
    layers = settings.captured_layers
    if not layers or vllm_config.model_config.runner_type == "pooling":
        return
    named = f"{SECTION}.layers={list(layers)}"
    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    if layers[-1] > num_layers:
        raise SettingsError(
            f"{named}: the model has {num_layers} decoder layers, so the numbers run from 0 (the embeddings) to "
            f"{num_layers} (the last layer, before the final norm)"
        )
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method in SPECULATIVE_METHODS_WITH_LAYERS:
        raise SettingsError(
            f"{named}: speculative method {speculative.method!r} chooses the model's auxiliary layers itself; "
            "use another method, or leave layers out"
        )
    pipeline_size = vllm_config.parallel_config.pipeline_parallel_size
    if pipeline_size > MAX_PIPELINE_PARALLEL_SIZE:
        raise SettingsError(
            f"{named}: with pipeline_parallel_size={pipeline_size} the ranks in the middle do not hand on the layers "
            f"of those before; use at most {MAX_PIPELINE_PARALLEL_SIZE}"
        )
    kernels = vllm_config.kernel_config.ir_op_priority.fused_add_rms_norm
    if 0 in layers and kernels[:1] != ["native"]:
        # LlamaDecoderLayer.forward adds to the very tensor that is handed out as layer 0.
        raise SettingsError(
            f"{named}: layer 0 would be overwritten, because the kernel {kernels[0] if kernels else None!r} of "
            "fused_add_rms_norm works in place; leave enforce_eager off, set "
            'ir_op_priority={"fused_add_rms_norm": ["native"]}, or leave layer 0 out'
        )


def capture_layers(settings: StageSettings, runner: Any) -> None:
    """Let the model return the layers asked for. Once, after the model was loaded and before its first forward.

    On every rank, and whatever the gate says later: a compiled forward then depends on the settings alone, which are
    part of vLLM's compile-cache key. Without layers the runner and its model stay as they are. A pooling model, which
    gets no cache either, is left alone.

    Raises:
        SettingsError: the model has no such interface, or its runner captures layers for another purpose.
    """
    layers = settings.captured_layers
    if not layers or runner.is_pooling_model:
        return
    model = runner.get_model()
    named = f"{SECTION}.layers={list(layers)}"
    if not isinstance(model, AuxiliaryLayersModel):
        raise SettingsError(
            f"{named}: {type(model).__name__} cannot hand out its layers (it has no set_aux_hidden_state_layers, "
            "vLLM's SupportsEagle3 interface); leave layers out"
        )
    if runner.use_aux_hidden_state_outputs:
        raise SettingsError(
            f"{named}: the engine captures layers already, for its speculative method; "
            "use another method, or leave layers out"
        )
    model.set_aux_hidden_state_layers(layers)
    hands_out = True
    if runner.parallel_config.pipeline_parallel_size > 1:
        carry_layers_over_pipeline(model, named)
        # Earlier ranks return intermediate tensors, not the pair that the runner takes apart where this is set.
        hands_out = is_last_pipeline_rank()
    runner.use_aux_hidden_state_outputs = hands_out
