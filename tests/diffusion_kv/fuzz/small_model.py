# SPDX-License-Identifier: Apache-2.0
"""tiny-hunyuan `debug` in float64, what a client may ask of it, and what each request gives alone and without pages."""

from dataclasses import dataclass, replace
from functools import cache, lru_cache

import numpy as np
import torch
from diffusion_kv.plain_owner import PlainOwner, run

from omni_core.diffusion_kv.attention.owner import RowKey
from omni_core.diffusion_kv.pipeline import DiffusionRequest
from omni_core.diffusion_kv.tiny_hunyuan import TinyHunyuanOptions, TinyHunyuanPipeline, make_adapter

PICTURES = {name: np.random.default_rng(ord(name)).integers(0, 256, (8, 8, 3), np.uint8) for name in "pqr"}
ADAPTER_FILES = ("first", "second")


@dataclass(frozen=True, slots=True)
class Ask:
    """What a client asks, apart from its id."""

    prompt: str
    pictures: str
    """Names in `PICTURES`, one letter each."""
    seed: int | None
    guidance_scale: float
    num_inference_steps: int
    lora_scale: float | None
    """`None`: no adapter."""

    def request(self, request_id, loras):
        return DiffusionRequest(
            request_id,
            self.prompt,
            references=tuple(PICTURES[name] for name in self.pictures),
            seed=self.seed,
            guidance_scale=self.guidance_scale,
            num_inference_steps=self.num_inference_steps,
            lora=None if self.lora_scale is None else loras.request("ink", self.lora_scale),
        )


@dataclass(frozen=True, slots=True)
class Truth:
    """One request computed alone, every row and layer in a tensor of its own."""

    latents: torch.Tensor
    prefixes: tuple
    """Per row, `[layers, 2, prefix tokens, num_kv_heads, head_size]`: keys, then values."""


@cache
def options(prefix_tokens):
    return TinyHunyuanOptions(layout="debug", prefix_tokens=prefix_tokens, dtype="float64")


class ModelOfSharedHeads(TinyHunyuanPipeline):
    """tiny-hunyuan whose unconditional row begins with the conditional one's tokens; its own differ from the start."""

    def __init__(self, options, shared_head_tokens):
        super().__init__(options)
        self._shared = shared_head_tokens

    def preprocess(self, request):
        prepared = super().preprocess(request)
        conditional, *others = prepared.rows
        rows = [replace(row, token_ids=self._with_shared_head(conditional, row)) for row in others]
        return replace(prepared, rows=(conditional, *rows))

    def _with_shared_head(self, conditional, row):
        return conditional.token_ids[: self._shared] + row.token_ids[self._shared :]


@cache
def model(layout, weight_seed=0):
    prefix_tokens, shared_head_tokens = layout
    return ModelOfSharedHeads(replace(options(prefix_tokens), weight_seed=weight_seed), shared_head_tokens)


def truth_of(prepared, layout, weight_seed):
    """What `prepared` gives with these weights. The picture of a random seed is computed with the seed it drew."""
    asked = prepared.request
    pictures = tuple(reference.tobytes() for reference in asked.references)
    return _truth(replace(asked, request_id="alone", seed=prepared.seed, references=()), pictures, layout, weight_seed)


@lru_cache(maxsize=400)
def _truth(asked, pictures, layout, weight_seed):
    references = tuple(np.frombuffer(bytearray(pixels), np.uint8).reshape(8, 8, 3) for pixels in pictures)
    owner, pipeline = PlainOwner(), model(layout, weight_seed)
    (state,) = run(pipeline, [replace(asked, references=references)], owner)
    layers = range(pipeline.kv_shape.num_layers)
    prefixes = tuple(
        torch.stack([owner.kept[RowKey("alone", index), layer] for layer in layers])[
            :, :, : row.layout.geometry.prefix_tokens
        ].clone()
        for index, row in enumerate(state.prepared.rows)
    )
    return Truth(state.latents, prefixes)


def make_adapters(folder):
    """Adapters that fit the model, by name."""
    paths = {}
    for seed, name in enumerate(ADAPTER_FILES):
        paths[name] = folder / f"{name}.safetensors"
        make_adapter(paths[name], options(None).transformer, rank=2, seed=seed)
    return paths


class BreakableModel:
    """The model as an engine runs it: its weights can be changed, and its next call for a request can fail."""

    def __init__(self, layout):
        """A model of `(prefix_tokens, shared_head_tokens)`."""
        self.layout = layout
        self.weight_seed = 0
        self.breaks = {}
        """Request id -> the call that fails: `start`, `layer`, `forward` or `decode`."""
        self.broken = set()
        """Requests whose call failed."""
        self.prepared = {}
        """Request id -> the request as it was laid out last."""
        self.first_queries = {}
        """Request id -> where its first step began."""
        self.first_model = self._model
        self.architecture = self.first_model.architecture
        self.kv_shape = self.first_model.kv_shape
        self.profile_request = self.first_model.profile_request

    @property
    def _model(self):
        return model(self.layout, self.weight_seed)

    def preprocess(self, asked):
        prepared = self._model.preprocess(asked)
        self.prepared[asked.request_id] = prepared
        return prepared

    def start(self, prepared):
        self._break("start", prepared.request.request_id)
        return self._model.start(prepared)

    def denoise(self, states, step_index, attention):
        request_ids = [state.prepared.request.request_id for state in states]
        if step_index == 0:
            self.first_queries.update(dict.fromkeys(request_ids, attention.query_start_tokens))
        broken = [one for one in request_ids if self.breaks.get(one) == "layer"]
        if broken:
            attention = BreakingAttention(attention, lambda: self._break("layer", *request_ids))
        self._model.denoise(states, step_index, attention)
        self._break("forward", *request_ids)

    def decode(self, state):
        self._break("decode", state.prepared.request.request_id)
        return self._model.decode(state)

    def _break(self, call, *request_ids):
        if any(self.breaks.get(request_id) == call for request_id in request_ids):
            for request_id in request_ids:
                self.breaks.pop(request_id, None)
                self.broken.add(request_id)
            raise RuntimeError(f"{call} broke for {', '.join(request_ids)}")


@dataclass
class BreakingAttention:
    """Keeps the first layer's keys and values and breaks at the second."""

    inner: object
    do_break: object

    @property
    def rows(self):
        return self.inner.rows

    @property
    def query_start_tokens(self):
        return self.inner.query_start_tokens

    @property
    def num_query_tokens(self):
        return self.inner.num_query_tokens

    def attend(self, layer_index, query, key, value):
        if layer_index:
            self.do_break()
        return self.inner.attend(layer_index, query, key, value)
