# SPDX-License-Identifier: Apache-2.0
"""What only the model and its ranks can tell, checked before pages are made: a stage that passes can be served.

Settings alone are checked by `config`, a missing model hook by `hooks.open_row_identifier`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from omni_core.diffusion_kv.attention.owner import KVShape
from omni_core.diffusion_kv.config import DiffusionKVConfig
from omni_core.diffusion_kv.errors import DiffusionKVConfigError


@dataclass(frozen=True, slots=True)
class LayerKVFacts:
    """The keys and values of one layer on one rank."""

    name: str
    num_kv_heads: int
    key_head_size: int
    value_head_size: int
    dtype: torch.dtype
    cache_role: str | None = None
    """What an attention of the model's own keeps between steps, in its own words; `None`: nothing."""


@dataclass(frozen=True, slots=True)
class RankKVFacts:
    """One rank's layers, in order."""

    rank: int
    layers: tuple[LayerKVFacts, ...]

    @classmethod
    def of(cls, rank: int, shape: KVShape) -> RankKVFacts:
        """Layers that all look like `shape`, named by their number."""
        return cls(
            rank,
            tuple(
                LayerKVFacts(f"layers.{index}", shape.num_kv_heads, shape.head_size, shape.head_size, shape.dtype)
                for index in range(shape.num_layers)
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKVFacts:
    """What a paged stage needs to know of its model."""

    architecture: str
    num_query_heads: int
    """Of the whole model."""
    num_kv_heads: int
    """Of the whole model."""
    ranks: tuple[RankKVFacts, ...]
    profile_rows: int
    """CFG rows of the largest request."""
    profile_total_tokens: int
    """Tokens of its longest row."""
    max_model_len: int | None
    """Tokens of the longest row the model can lay out; `None`: the model does not say."""
    kv_cache_layouts: tuple[tuple[str, str], ...] = ()
    """Who asks for which layout of pages in memory, by vLLM's names: `("attention_owner=kernel", "LBHNC")`."""
    native_max_num_seqs: int | None = None
    """What vLLM's scheduler was configured with; `None`: not yet."""


def check_model(config: DiffusionKVConfig, facts: ModelKVFacts) -> None:
    """Check a paged stage's model and ranks against its settings. A dense stage passes: the model owns its KV.

    Raises:
        DiffusionKVConfigError: the first thing that does not fit; names it, its value and what to do.
    """
    if not config.paged:
        return
    for check in _CHECKS:
        for refusal in check(config, facts):
            raise DiffusionKVConfigError(f"model {facts.architecture!r}: {refusal}")


def _cache_roles(config: DiffusionKVConfig, facts: ModelKVFacts) -> Iterator[str]:
    for rank, layer in _layers(facts):
        if layer.cache_role is not None:
            yield (
                f"layer {layer.name!r} on rank {rank} keeps {layer.cache_role!r} in an attention of its own, and with "
                f"diffusion_kv_mode={config.diffusion_kv_mode} pages keep keys and values; set "
                "diffusion_kv_mode=dense_legacy"
            )


def _heads(config: DiffusionKVConfig, facts: ModelKVFacts) -> Iterator[str]:
    for name, ranks in (
        ("tensor_parallel_size", config.tensor_parallel_size),
        ("sequence_parallel_size", config.sequence_parallel_size),
    ):
        for heads, count in (("query", facts.num_query_heads), ("KV", facts.num_kv_heads)):
            if count % ranks:
                yield (
                    f"{count} {heads} heads do not divide by {name}={ranks}; every rank holds the pages of as many "
                    f"heads, so set {name} to a divisor of {count}"
                )


def _layer_sets(config: DiffusionKVConfig, facts: ModelKVFacts) -> Iterator[str]:
    wanted = config.tensor_parallel_size * config.cfg_parallel_size
    if len(facts.ranks) != wanted:
        yield (
            f"{len(facts.ranks)} ranks told their layers, and tensor_parallel_size={config.tensor_parallel_size} x "
            f"cfg_parallel_size={config.cfg_parallel_size} are {wanted}; start as many"
        )
    for rank in facts.ranks:
        if not rank.layers:
            yield f"rank {rank.rank} has no layer with keys and values; set diffusion_kv_mode=dense_legacy"
    first = facts.ranks[0]
    names = {layer.name for layer in first.layers}
    for rank in facts.ranks[1:]:
        odd = sorted(names ^ {layer.name for layer in rank.layers})
        if odd:
            yield (
                f"ranks {first.rank} and {rank.rank} have different layers, {', '.join(map(repr, odd))} on one of them "
                "only; pages have the same ids on every rank, so give each rank every layer"
            )


def _head_sizes(config: DiffusionKVConfig, facts: ModelKVFacts) -> Iterator[str]:
    for rank, layer in _layers(facts):
        if layer.key_head_size != layer.value_head_size:
            yield (
                f"layer {layer.name!r} on rank {rank} has keys of head size {layer.key_head_size} and values of "
                f"{layer.value_head_size}; a page holds both in one size. Set diffusion_kv_mode=dense_legacy"
            )


def _geometries(config: DiffusionKVConfig, facts: ModelKVFacts) -> Iterator[str]:
    known: dict[tuple[int, int, torch.dtype], str] = {}
    for rank, layer in _layers(facts):
        shape = (layer.num_kv_heads, layer.key_head_size, layer.dtype)
        known.setdefault(shape, f"{layer.name!r} on rank {rank}")
        if len(known) > 1:
            said = " and ".join(
                f"{heads} KV heads of {size} in {dtype} (layer {where})"
                for (heads, size, dtype), where in known.items()
            )
            yield f"several geometries: {said}; all pages are alike. Set diffusion_kv_mode=dense_legacy"


def _max_model_len(config: DiffusionKVConfig, facts: ModelKVFacts) -> Iterator[str]:
    if config.max_model_len == -1 and facts.max_model_len is None:
        yield "max_model_len=-1, and the model does not say how long its rows may be; set max_model_len"
    if config.max_model_len != -1 and config.max_model_len < facts.profile_total_tokens:
        yield (
            f"max_model_len={config.max_model_len}, and a row of the largest request has "
            f"{facts.profile_total_tokens} tokens; raise it to that, or set -1"
        )


def _rows(config: DiffusionKVConfig, facts: ModelKVFacts) -> Iterator[str]:
    if facts.profile_rows > config.max_rows:
        yield (
            f"diffusion_kv_max_rows_per_request={config.max_rows}, and the largest request has {facts.profile_rows} "
            "rows; raise it to that"
        )


def _native_sequences(config: DiffusionKVConfig, facts: ModelKVFacts) -> Iterator[str]:
    native = facts.native_max_num_seqs
    if native is None:
        return
    if native % config.max_rows:
        yield (
            f"vLLM's max_num_seqs={native} does not divide by "
            f"diffusion_kv_max_rows_per_request={config.max_rows}: a request is all of its rows; make it "
            f"max_num_seqs x rows = {config.native_max_num_seqs}"
        )


def _layouts(config: DiffusionKVConfig, facts: ModelKVFacts) -> Iterator[str]:
    asked = list(facts.kv_cache_layouts)
    if config.kv_cache_layout is not None:
        asked.insert(0, ("kv_cache_layout", config.kv_cache_layout))
    if len({layout for _, layout in asked}) > 1:
        said = ", ".join(f"{layout} by {who}" for who, layout in asked)
        yield f"two layouts of pages are asked for: {said}; unset kv_cache_layout, or make them agree"


def _layers(facts: ModelKVFacts) -> Iterator[tuple[int, LayerKVFacts]]:
    for rank in facts.ranks:
        for layer in rank.layers:
            yield rank.rank, layer


_CHECKS: tuple[Callable[[DiffusionKVConfig, ModelKVFacts], Iterator[str]], ...] = (
    _cache_roles,
    _heads,
    _layer_sets,
    _head_sizes,
    _geometries,
    _max_model_len,
    _rows,
    _native_sequences,
    _layouts,
)
