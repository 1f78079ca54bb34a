# SPDX-License-Identifier: Apache-2.0
"""A deployment: which stages, each with its own settings. A YAML file and these classes say the same.

    pipeline: tiny_hunyuan_dit
    stages:
      - stage_id: 0
        diffusion_kv_mode: paged_scheduler
        enable_prefix_caching: true

A flag is its stage's. `enable_prefix_caching` beside `stages` is for autoregressive stages and reaches no other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from omni_core.diffusion_kv.config import DiffusionKVConfig
from omni_core.diffusion_kv.deploy_yaml import read_mapping
from omni_core.diffusion_kv.errors import DiffusionKVConfigError, DiffusionKVConfigTypeError
from omni_core.diffusion_kv.setting_values import checked_names


class StageType(StrEnum):
    """What a stage runs."""

    DIFFUSION = "diffusion"
    LLM = "llm"


@dataclass(frozen=True, slots=True)
class PipelineDefaults:
    """What a pipeline's name says of its diffusion stage, where the stage does not say it."""

    model: str
    settings: Mapping[str, Any]


PIPELINES: Mapping[str, PipelineDefaults] = MappingProxyType(
    {
        "tiny_hunyuan_dit": PipelineDefaults("tiny-hunyuan", {"diffusion_kv_max_rows_per_request": 2}),
        "hunyuan_image3_dit": PipelineDefaults("hunyuan-image3", {"diffusion_kv_max_rows_per_request": 2}),
    }
)
"""Of any other pipeline a stage names its `model` itself."""

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "diffusion_kv_max_sequences_per_request": "diffusion_kv_max_rows_per_request",
        "diffusion_attention_backend": "attention_owner",
        "gpu_memory_utilisation": "gpu_memory_utilization",
    }
)
"""Other names of a setting, accepted in a deploy file."""
GROUPS = ("parallel_config", "engine_extras")
"""Mappings whose settings may as well stand beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    """One diffusion stage.

    Raises:
        DiffusionKVConfigTypeError: a field of the wrong type.
        DiffusionKVConfigError: a negative stage id, or no model.
    """

    stage_id: int
    model: str
    """The architecture, as its pipeline and its hook are registered."""
    model_options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """What the model's pipeline is made with; the model checks them."""
    kv: DiffusionKVConfig = field(default_factory=DiffusionKVConfig)

    def __post_init__(self) -> None:
        _check_stage_id(self.stage_id)
        _check_type(f"stage {self.stage_id}: model", self.model, str)
        if not self.model:
            raise DiffusionKVConfigError(f"stage {self.stage_id}: model is empty; name the architecture")
        _check_type(f"stage {self.stage_id}: model_options", self.model_options, Mapping)
        for name in self.model_options:
            _check_type(f"stage {self.stage_id}: the name of a model option", name, str)
        _check_type(f"stage {self.stage_id}: kv", self.kv, DiffusionKVConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class ARStageConfig:
    """One autoregressive stage of the same deployment. Nothing here runs it; what it is given passes through."""

    stage_id: int
    enable_prefix_caching: bool | None = None
    """The stage's own, else the deployment's; `None`: neither says."""
    settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Everything else it was given, unchecked."""

    def __post_init__(self) -> None:
        _check_stage_id(self.stage_id)
        if self.enable_prefix_caching is not None:
            _check_type(f"stage {self.stage_id}: enable_prefix_caching", self.enable_prefix_caching, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployConfig:
    """All stages of a deployment, in the order given.

    Raises:
        DiffusionKVConfigError: no stage, or two of one id.
    """

    pipeline: str
    stages: tuple[StageConfig, ...] = ()
    """The diffusion stages."""
    ar_stages: tuple[ARStageConfig, ...] = ()

    def __post_init__(self) -> None:
        _check_type("pipeline", self.pipeline, str)
        ids = Counter(stage.stage_id for stage in self._all)
        if not ids:
            raise DiffusionKVConfigError("stages is empty; give at least one stage")
        twice = sorted(stage_id for stage_id, count in ids.items() if count > 1)
        if twice:
            raise DiffusionKVConfigError(f"stage_id={twice[0]} stands at {ids[twice[0]]} stages; number them apart")

    @property
    def _all(self) -> tuple[StageConfig | ARStageConfig, ...]:
        return (*self.stages, *self.ar_stages)

    def stage(self, stage_id: int | None = None) -> StageConfig:
        """The diffusion stage of this id; without one, the only diffusion stage.

        Raises:
            DiffusionKVConfigError: there is none, or several and no id was given.
        """
        found = [stage for stage in self.stages if stage_id is None or stage.stage_id == stage_id]
        if len(found) != 1:
            wanted = "one diffusion stage" if stage_id is None else f"diffusion stage {stage_id}"
            known = ", ".join(str(stage.stage_id) for stage in self.stages) or "none"
            raise DiffusionKVConfigError(f"pipeline {self.pipeline!r}: {wanted} is wanted; there is {known}")
        return found[0]


def load_deploy(path: Path) -> DeployConfig:
    """The deployment of a YAML file. Needs PyYAML, of the extra `diffusion`.

    Raises:
        DiffusionKVConfigError: PyYAML is not installed; the file cannot be read, is no mapping, or has a key twice; or
            what `parse_deploy` refuses. Names the file.
    """
    try:
        return parse_deploy(read_mapping(path))
    except DiffusionKVConfigError as error:
        raise type(error)(f"{path}: {error}") from error


def parse_deploy(deploy: Mapping[str, Any]) -> DeployConfig:
    """The deployment of a mapping, as a YAML file has it.

    Raises:
        DiffusionKVConfigError: an unknown key, with the nearest known one; a setting given twice under two names; or
            what the classes refuse. Names the stage.
    """
    checked_names(deploy, _DEPLOY_KEYS, of="a deploy file")
    for key in ("pipeline", "stages"):
        if key not in deploy:
            raise DiffusionKVConfigError(f"a deploy file names its {key}, and this one does not")
    pipeline, entries = deploy["pipeline"], deploy["stages"]
    _check_type("pipeline", pipeline, str)
    if not isinstance(entries, Sequence) or isinstance(entries, (str, bytes)):
        raise DiffusionKVConfigTypeError(f"stages={entries!r} is a {type(entries).__name__}; a list is wanted")
    for flag in _AR_FLAGS:
        if deploy.get(flag) is not None:
            _check_type(flag, deploy[flag], bool)
    stages: list[StageConfig] = []
    ar_stages: list[ARStageConfig] = []
    for index, entry in enumerate(entries):
        settings = _stage_entry(index, entry)
        stage_id = settings.pop("stage_id")
        if _stage_type(stage_id, settings.pop("stage_type", StageType.DIFFUSION)) is StageType.LLM:
            own = settings.pop("enable_prefix_caching", deploy.get("enable_prefix_caching"))
            ar_stages.append(ARStageConfig(stage_id=stage_id, enable_prefix_caching=own, settings=settings))
        else:
            stages.append(_diffusion_stage(pipeline, stage_id, settings))
    return DeployConfig(pipeline=pipeline, stages=tuple(stages), ar_stages=tuple(ar_stages))


def _stage_entry(index: int, entry: object) -> dict[str, Any]:
    if not isinstance(entry, Mapping):
        raise DiffusionKVConfigTypeError(f"stages[{index}]={entry!r} is a {type(entry).__name__}; a mapping is wanted")
    if "stage_id" not in entry:
        raise DiffusionKVConfigError(f"stages[{index}] has no stage_id; number the stages from 0")
    _check_stage_id(entry["stage_id"])
    return dict(entry)


def _stage_type(stage_id: int, value: object) -> StageType:
    try:
        return StageType(str(value))
    except ValueError:
        known = ", ".join(StageType)
        raise DiffusionKVConfigError(f"stage {stage_id}: stage_type={value!r} is none of {known}") from None


def _diffusion_stage(pipeline: str, stage_id: int, given: Mapping[str, Any]) -> StageConfig:
    defaults = PIPELINES.get(pipeline)
    try:
        settings = _flat(given)
        checked_names(settings, (*_STAGE_KEYS, *_KV_KEYS), of="a diffusion stage")
        model = settings.pop("model", None if defaults is None else defaults.model)
        if model is None:
            raise DiffusionKVConfigError(
                f"there is no model, and pipeline={pipeline!r} implies none; set model, or use one of the pipelines "
                f"{', '.join(PIPELINES)}"
            )
        options = settings.pop("model_options", None)
        implied = {} if defaults is None else defaults.settings
        kv = DiffusionKVConfig.from_mapping({**implied, **settings})
    except DiffusionKVConfigError as error:
        raise type(error)(f"stage {stage_id}: {error}") from error
    return StageConfig(stage_id=stage_id, model=model, model_options={} if options is None else options, kv=kv)


def _flat(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a stage out of their groups and under their own names."""
    flat: dict[str, Any] = {}
    said_as: dict[str, str] = {}
    for name, value in given.items():
        if name in GROUPS and not isinstance(value, Mapping):
            raise DiffusionKVConfigTypeError(f"{name}={value!r} is a {type(value).__name__}; a mapping is wanted")
        for inner, setting in value.items() if name in GROUPS else ((name, value),):
            own = ALIASES.get(inner, inner)
            said = f"{name}.{inner}" if name in GROUPS else str(inner)
            if own in flat:
                raise DiffusionKVConfigError(f"{own} is given twice, as {said_as[own]} and as {said}; keep one")
            flat[own], said_as[own] = setting, said
    return flat


def _check_stage_id(value: object) -> None:
    _check_type("stage_id", value, int)
    if isinstance(value, int) and value < 0:
        raise DiffusionKVConfigError(f"stage_id={value} is negative; number the stages from 0")


def _check_type(name: str, value: object, kind: type) -> None:
    if type(value) is not kind and not (kind is Mapping and isinstance(value, Mapping)):
        raise DiffusionKVConfigTypeError(f"{name}={value!r} is a {type(value).__name__}; {kind.__name__} is wanted")


_AR_FLAGS = ("enable_prefix_caching", "async_chunk")
_DEPLOY_KEYS = ("pipeline", "stages", *_AR_FLAGS)
_STAGE_KEYS = ("model", "model_options")
_KV_KEYS = tuple(one.name for one in fields(DiffusionKVConfig))
