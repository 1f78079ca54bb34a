# SPDX-License-Identifier: Apache-2.0
"""Puts a stage's sizes together from a model, a server, the settings and the arguments. The arguments win."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TypeVar

from omni_core.cli.plan.arguments import DEFAULT_BLOCK_SIZE
from omni_core.cli.plan.errors import PlanInputError
from omni_core.cli.plan.model_config import Parallel, StageModel
from omni_core.cli.plan.running_engine import RunningEngine
from omni_core.integrations.vllm.chosen_layers import layer_key
from omni_core.prefix_cache.config import HIDDEN_KEY, PrefixCacheConfig
from omni_core.prefix_cache.errors import InvalidConfigError
from omni_core.prefix_cache.sizing import StageSizes
from omni_core.settings.stage_settings import StageSettings
from omni_core.sinks.rows import DEFAULT_MAX_OPEN_BYTES

T = TypeVar("T")

_SINK_LIMITS = {"memory": "max_bytes", "safetensors": "max_open_bytes"}
"""Our sinks that hold rows in memory, and the option that bounds it."""


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
    if engine is not None:
        sources.append(f"{engine.url}, {engine.num_engines} engine{'s' if engine.num_engines > 1 else ''}")
    hidden_size = _first(args.hidden_size, None if model is None else model.hidden_size, "--hidden-size or --model")
    dtype = _first(args.dtype, None if model is None else model.dtype, "--dtype or --model")
    block_size: int = args.block_size or (DEFAULT_BLOCK_SIZE if engine is None else engine.block_size)
    num_blocks: int | None = args.num_blocks
    if num_blocks is None and engine is not None:
        num_blocks = engine.num_blocks
    if num_blocks is None and args.kv_cache_bytes is not None and model is not None:
        parallel = Parallel(args.tensor_parallel_size, args.pipeline_parallel_size)
        num_blocks = model.num_blocks(args.kv_cache_bytes, block_size, parallel, args.kv_cache_dtype)
        token_bytes = model.kv_bytes_per_token(parallel, args.kv_cache_dtype)
        sources.append(f"{args.kv_cache_bytes:,} bytes of KV cache per rank, of which a token takes {token_bytes:,}")
    if num_blocks is None:
        raise PlanInputError("how many blocks? give --num-blocks, --server, or --kv-cache-bytes with --model")
    keys = {key.name: key.row_bytes for key in (*args.key, *args.deferred_key)}
    if len(keys) != len(args.key) + len(args.deferred_key) or HIDDEN_KEY in keys:
        raise PlanInputError("--key and --deferred-key: each name once, and not that of the hidden rows")
    sink_bytes, unknown = _sink_bytes(args, settings)
    notes.extend(unknown)
    try:
        config = PrefixCacheConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            hidden_size=hidden_size,
            hidden_dtype=dtype,
            max_num_tokens=args.max_num_tokens,
            staging_depth=settings.staging_depth,
            extra_row_bytes=settings.extra_row_bytes,
            extra_step_bytes=settings.extra_step_bytes,
            device_staging_bytes=settings.device_staging_bytes,
            max_recycled_bytes=settings.max_recycled_bytes,
            pretouch=args.pretouch or settings.pretouch,
            pin_chunk_bytes=settings.pin_chunk_bytes,
            caches_per_host=args.caches_per_host,
        )
    except InvalidConfigError as error:
        raise PlanInputError(str(error)) from error
    sizes = StageSizes(
        config,
        keys,
        deferred_keys=tuple(key.name for key in args.deferred_key),
        keeps_hidden=not args.no_hidden,
        layer_keys=tuple(map(layer_key, settings.layers)),
        device_is_host=args.on_cpu,
        sink_queue_bytes=settings.sink_queue_bytes,
        sink_bytes=sink_bytes,
    )
    return PlannedStage(sizes, tuple(sources), tuple(notes))


def _first(given: T | None, known: T | None, how: str) -> T:
    value = known if given is None else given
    if value is None:
        raise PlanInputError(f"give {how}")
    return value


def _sink_bytes(args: argparse.Namespace, settings: StageSettings) -> tuple[int, tuple[str, ...]]:
    if args.sink_bytes is not None:
        return args.sink_bytes, ()
    option = _SINK_LIMITS.get(settings.sink)
    if option is None:
        return 0, (f"what the sink {settings.sink!r} holds in memory is not known: give --sink-bytes",)
    return int(settings.sink_options.get(option, DEFAULT_MAX_OPEN_BYTES)), ()
