# SPDX-License-Identifier: Apache-2.0
"""What a diffusion transformer brings to be run by the engine loop, dense or paged.

preprocess   tokens, layout, processed images        (engine front; no model weights)
start        encoders, sampled latents, first noise  (worker; draws from the request's generator, always all of it)
denoise      one step of a wave of requests          (worker; the only call that attends)
decode       latents to pixels                       (worker)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from omni_core.diffusion_kv.attention.owner import AttentionOwner, KVShape, StepAttention
from omni_core.diffusion_kv.rows import RowLayout

Pixels = npt.NDArray[np.uint8]
"""`[height, width, 3]`, RGB."""


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter and how strongly it acts. All of it identifies the keys it alters."""

    name: str
    lora_id: int
    path: str
    load_epoch: int
    """Grows when other weights are loaded under the same id (vLLM issue 30931)."""
    scale: float


@dataclass(frozen=True, slots=True)
class DiffusionRequest:
    """One image to generate."""

    request_id: str
    prompt: str
    references: tuple[Pixels, ...] = ()
    seed: int | None = None
    """`None`: random, and no image prefix of this request is ever shared."""
    guidance_scale: float = 2.5
    """1.0 runs the conditional row alone."""
    num_inference_steps: int = 8
    lora: LoRARequest | None = None


@dataclass(frozen=True, slots=True)
class PreparedRow:
    """One CFG row after preprocessing."""

    token_ids: tuple[int, ...]
    """`total_tokens` ids, placeholders for images included."""
    layout: RowLayout


class PreparedRequest(Protocol):
    """A request after preprocessing: what the scheduler reads of it. A model's own class holds more."""

    @property
    def request(self) -> DiffusionRequest: ...

    @property
    def rows(self) -> tuple[PreparedRow, ...]:
        """Conditional row first; all of one layout."""
        ...


class RequestState(Protocol):
    """A request on the worker between steps. A model's own class holds embeddings, noise levels, the generator."""

    @property
    def prepared(self) -> PreparedRequest: ...

    @property
    def latents(self) -> torch.Tensor:
        """The target as it stands; replaced by each step, never written in place."""
        ...

    @property
    def encoder_s(self) -> float:
        """Seconds `start` spent in the reference encoders."""
        ...


PreparedT = TypeVar("PreparedT", bound=PreparedRequest)
StateT = TypeVar("StateT", bound=RequestState)


class DiffusionPipeline(Protocol[PreparedT, StateT]):
    """A model and what surrounds it. The engine's one thread calls everything but `preprocess`, which any may."""

    @property
    def architecture(self) -> str:
        """The name its hook is registered under."""
        ...

    @property
    def kv_shape(self) -> KVShape:
        """Keys and values of one layer on this rank."""
        ...

    def profile_request(self) -> DiffusionRequest:
        """The largest request the deployment accepts: largest picture, CFG on, most references."""
        ...

    def preprocess(self, request: DiffusionRequest) -> PreparedT:
        """Tokenise, lay out, process the pictures.

        Raises:
            RequestRefusedError: too many references, an empty picture, a setting the model does not take.
        """
        ...

    def start(self, prepared: PreparedT) -> StateT:
        """Run the encoders and draw the reference latents and the first noise, hit or no hit."""
        ...

    def denoise(self, states: Sequence[StateT], step_index: int, attention: StepAttention) -> None:
        """Advance every state by one step, in place.

        Args:
            states: requests of one layout, one adapter and one number of steps.
            step_index: 0 computes `[attention.query_start_tokens, total)`, later steps the target alone.
            attention: the step's; its `rows` are the states' rows on this rank, state by state.

        Raises:
            PagedAttentionError: the layers refused.
            DiffusionKVError: states that do not belong in one forward.
        """
        ...

    def decode(self, state: StateT) -> Pixels:
        """The finished picture."""
        ...


AnyPipeline = DiffusionPipeline[Any, Any]
"""A pipeline whose own classes the engine hands through untouched."""

__all__ = [
    "AnyPipeline",
    "AttentionOwner",
    "DiffusionPipeline",
    "DiffusionRequest",
    "LoRARequest",
    "Pixels",
    "PreparedRequest",
    "PreparedRow",
    "RequestState",
]
