# SPDX-License-Identifier: Apache-2.0
"""Pipelines found by entry point: the `model` of a deploy file to a `DiffusionPipeline`.

    [project.entry-points."omni_core.diffusion_pipelines"]
    tiny-hunyuan = "omni_core.diffusion_kv.tiny_hunyuan.opening:open_tiny_hunyuan"

The object takes `model_options` and this process's place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from omni_core.diffusion_kv.errors import DiffusionKVConfigError
from omni_core.diffusion_kv.parallel import Ranks
from omni_core.diffusion_kv.pipeline import AnyPipeline
from omni_core.plugins import PluginGroup

PIPELINE_GROUP = PluginGroup(
    group="omni_core.diffusion_pipelines",
    kind="diffusion pipeline",
    unknown_error=DiffusionKVConfigError,
    duplicate_error=DiffusionKVConfigError,
    broken_error=DiffusionKVConfigError,
)

PipelineFactory = Callable[[Mapping[str, Any], Ranks], AnyPipeline]
"""What an entry point names: `model_options` and this process's place to a pipeline with its weights loaded."""


def open_pipeline(model: str, options: Mapping[str, Any], ranks: Ranks) -> AnyPipeline:
    """The pipeline registered as `model`. Loads its weights.

    Raises:
        DiffusionKVConfigError: there is none of that name, there are two, it cannot be imported, it calls itself
            otherwise, or it refuses its options.
    """
    factory = PIPELINE_GROUP.load(model)
    if not callable(factory):
        raise DiffusionKVConfigError(
            f"the diffusion pipeline {model!r} is {factory!r}; a callable that takes options and ranks is wanted"
        )
    pipeline: AnyPipeline = factory(options, ranks)
    if pipeline.architecture != model:
        raise DiffusionKVConfigError(
            f"the diffusion pipeline registered as {model!r} calls itself {pipeline.architecture!r}; the two must be "
            "the same, because its model hook is found by that name"
        )
    return pipeline
