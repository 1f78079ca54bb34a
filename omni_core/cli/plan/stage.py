# SPDX-License-Identifier: Apache-2.0
"""Puts a stage's sizes together from a model, a server, the settings and the arguments. The arguments win."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import TypeVar

from omni_core.cli.plan.arguments import DEFAULT_BLOCK_SIZE
from omni_core.cli.plan.config_fields import MAX_COUNT
from omni_core.cli.plan.engine_dtypes import AUTO
from omni_core.cli.plan.errors import PlanInputError
from omni_core.cli.plan.kv_layout import Parallel
from omni_core.cli.plan.model_config import StageModel
from omni_core.cli.plan.running_engine import RunningEngine
from omni_core.integrations.vllm.cache_settings import StageGeometry, config_of
from omni_core.integrations.vllm.chosen_layers import layer_key
from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.errors import InvalidConfigError
from omni_core.prefix_cache.sizing import StageSizes
from omni_core.settings.stage_settings import StageSettings
from omni_core.sinks.errors import InvalidSinkOptionError
from omni_core.sinks.held_bytes import most_held_bytes

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A stage's sizes, and in words what they follow from."""

    sizes: StageSizes
    sources: tuple[str, ...]
    notes: tuple[str, ...]
    """What is not known, and what to do about it."""


def planned_stage(
    args: argparse.Namespace, settings: StageSettings, model: StageModel | None, engine: RunningEngine | None
) -> PlannedStage:
    """The stage that the arguments describe. Pure.

    Raises:
        PlanInputError: something is missing; names the arguments that give it.
    """
    sources: list[str] = []
    notes: list[str] = []
    if model is not None:
        sources.append(model.source)
        notes.extend(model.notes)
    if engine is not None:
        sources.append(f"{engine.url}, {engine.num_engines} engine{'s' if engine.num_engines > 1 else ''}")
        if args.caches_per_host is None:
            notes.extend(engine.not_seen)
    hidden_size = _first(args.hidden_size, None if model is None else model.hidden_size, "--hidden-size or --model")
    dtype = _first(args.dtype, None if model is None else model.dtype, "--dtype or --model")
    block_size: int = args.block_size or (DEFAULT_BLOCK_SIZE if engine is None else engine.block_size)
    num_blocks: int | None = args.num_blocks
    if num_blocks is None and engine is not None:
        num_blocks = engine.num_blocks
    if num_blocks is None and args.kv_cache_bytes is not None and model is not None:
        parallel = Parallel(args.tensor_parallel_size or 1, args.pipeline_parallel_size or 1)
        kv_cache_dtype = args.kv_cache_dtype or AUTO
        num_blocks = model.num_blocks(args.kv_cache_bytes, block_size, parallel, kv_cache_dtype)
        token_bytes = model.kv_bytes_per_token(parallel, kv_cache_dtype)
        notes.extend(model.kv_notes(kv_cache_dtype))
        sources.append(f"{args.kv_cache_bytes:,} bytes of KV cache per rank, of which a token takes {token_bytes:,}")
    if num_blocks is None:
        raise PlanInputError("how many blocks? give --num-blocks, --server, or --kv-cache-bytes with --model")
    keys = {key.name: key.row_bytes for key in (*args.key, *args.deferred_key)}
    if len(keys) != len(args.key) + len(args.deferred_key) or HIDDEN_KEY in keys:
        raise PlanInputError("--key and --deferred-key: each name once, and not that of the hidden rows")
    layer_keys = tuple(map(layer_key, settings.layers))
    for name in layer_keys:
        if name in keys:
            raise PlanInputError(f"--key and --deferred-key: {name} is a key of --layers; leave one out")
    sink_bytes, unknown = sink_bytes_of(args, settings)
    notes.extend(unknown)
    try:
        geometry = StageGeometry(
            num_blocks,
            block_size,
            hidden_size,
            dtype,
            args.max_num_tokens,
            caches_per_host=args.caches_per_host or (1 if engine is None else engine.num_caches),
        )
        config = config_of(replace(settings, pretouch=args.pretouch or settings.pretouch), geometry)
    except InvalidConfigError as error:
        raise PlanInputError(str(error)) from error
    sizes = StageSizes(
        config,
        keys,
        deferred_keys=tuple(key.name for key in args.deferred_key),
        keeps_hidden=not args.no_hidden,
        layer_keys=layer_keys,
        device_is_host=args.on_cpu,
        sink_queue_bytes=settings.sink_queue_bytes,
        sink_bytes=sink_bytes,
        beside_bytes=args.beside,
    )
    return PlannedStage(sizes, tuple(sources), tuple(notes))


def _first(given: T | None, known: T | None, how: str) -> T:
    value = known if given is None else given
    if value is None:
        raise PlanInputError(f"give {how}")
    return value


def sink_bytes_of(args: argparse.Namespace, settings: StageSettings) -> tuple[int, tuple[str, ...]]:
    """Most bytes that the stage's sink holds, and what to say if that is not known.

    Raises:
        PlanInputError: the sink's option is no number of bytes.
    """
    if args.sink_bytes is not None:
        return args.sink_bytes, ()
    try:
        held_bytes = most_held_bytes(settings.sink, settings.sink_options)
    except InvalidSinkOptionError as error:
        raise PlanInputError(f"sink_options: {error}") from error
    if held_bytes is None:
        return 0, (f"what the sink {settings.sink!r} holds in memory is not known: give --sink-bytes",)
    if held_bytes > MAX_COUNT:
        raise PlanInputError(f"sink_options: the {settings.sink} sink's bound is above 2**63; give a smaller one")
    return held_bytes, ()
