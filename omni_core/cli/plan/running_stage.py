# SPDX-License-Identifier: Apache-2.0
"""A running stage: what it costs by its own figures, and the sizes that these follow from, as far as it tells them."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from omni_core.cli.plan.errors import OTHER_RELEASE, PlanInputError
from omni_core.integrations.vllm.cache_settings import StageGeometry, config_of
from omni_core.integrations.vllm.chosen_layers import layer_key
from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.errors import InvalidConfigError
from omni_core.prefix_cache.sizing import CacheMemory, HostPlan, StageSizes
from omni_core.settings.kinds import NotOfKindError
from omni_core.settings.setting import settings_of
from omni_core.settings.stage_settings import StageSettings

_NOT_NAMED = ("deferred keys, which it does not name",)


def told_settings(told: Mapping[str, Any], otherwise: StageSettings) -> StageSettings:
    """A stage's settings, from the `settings` of its report; `otherwise` has those that it does not tell.

    Raises:
        PlanInputError: a value is not one of its setting.
    """
    values = {}
    for setting in settings_of(StageSettings):
        one = told.get(setting.name)
        if isinstance(one, Mapping) and "value" in one:
            try:
                values[setting.name] = setting.kind.from_value(one["value"])
            except NotOfKindError as error:
                shown = reprlib.repr(one["value"])
                raise PlanInputError(f"the running stage's {setting.name}: {shown} {error}; {OTHER_RELEASE}") from error
    return replace(otherwise, **values)


def running_plan(
    memory: CacheMemory,
    settings: StageSettings,
    *,
    caches_per_host: int,
    device_is_host: bool,
    sink_bytes: int,
    beside_bytes: int,
) -> HostPlan:
    """The plan of a stage from what it has allocated. Pure."""
    known = (HIDDEN_KEY, *map(layer_key, settings.layers)) if settings.pretouch else ()
    return HostPlan(
        memory,
        caches_per_host=caches_per_host,
        device_is_host=device_is_host,
        pretouched_keys=tuple(key for key in known if key in memory.pool_bytes),
        sink_queue_bytes=settings.sink_queue_bytes,
        sink_bytes=sink_bytes,
        beside_bytes=beside_bytes,
    )


def running_sizes(geometry: Mapping[str, Any], plan: HostPlan, settings: StageSettings) -> StageSizes | None:
    """The sizes that a running stage's plan follows from; `None` if its report has no `geometry`. Pure.

    Keys are those it has stored by now, and its layers.

    Raises:
        PlanInputError: the geometry is none that a cache can have.
    """
    if not geometry:
        return None
    dtype = getattr(torch, str(geometry.get("hidden_dtype")), None)
    if not isinstance(dtype, torch.dtype):
        raise PlanInputError(f"the running stage's hidden_dtype is {geometry.get('hidden_dtype')!r}; {OTHER_RELEASE}")
    try:
        config = config_of(
            settings,
            StageGeometry(
                num_blocks=geometry.get("num_blocks", 0),
                block_size=geometry.get("block_size", 0),
                hidden_size=geometry.get("hidden_size", 0),
                hidden_dtype=dtype,
                max_num_tokens=geometry.get("max_num_tokens", 0),
                caches_per_host=plan.caches_per_host,
            ),
        )
    except InvalidConfigError as error:
        raise PlanInputError(f"the running stage's geometry: {error}; {OTHER_RELEASE}") from error
    layer_keys = tuple(map(layer_key, settings.layers))
    pool_bytes = plan.cache.pool_bytes
    return StageSizes(
        config,
        {
            key: nbytes // config.num_slots
            for key, nbytes in pool_bytes.items()
            if key != HIDDEN_KEY and key not in layer_keys
        },
        deferred_keys=_NOT_NAMED if plan.cache.deferred_ring_bytes else (),
        keeps_hidden=HIDDEN_KEY in pool_bytes,
        layer_keys=layer_keys,
        device_is_host=plan.device_is_host,
        sink_queue_bytes=plan.sink_queue_bytes,
        sink_bytes=plan.sink_bytes,
        beside_bytes=plan.beside_bytes,
    )
