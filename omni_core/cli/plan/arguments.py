# SPDX-License-Identifier: Apache-2.0
"""The arguments of `omni-core plan`, and how each is understood."""

from __future__ import annotations

import argparse
import re
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from omni_core.cli.plan.config_fields import MAX_COUNT
from omni_core.cli.plan.engine_dtypes import AUTO, KV_CACHE_DTYPES
from omni_core.cli.plan.errors import PlanInputError
from omni_core.cli.plan.running_engine import DEFAULT_TIMEOUT_S
from omni_core.cli.setting_sources import add_setting_sources
from omni_core.cli.tables import add_format_argument
from omni_core.settings.kinds import ByteCount, NotOfKindError, Seconds
from omni_core.settings.sources import GivenValue, Origin
from omni_core.settings.stage_settings import SCHEMA

N = TypeVar("N", int, float)

DEFAULT_BLOCK_SIZE = 16
DEFAULT_MAX_NUM_TOKENS = 8192
"""vLLM's own default depends on the device and the use (0.32: 2,048 to 16,384)."""
_MEMORY_SETTINGS = frozenset(
    {
        "layers",
        "staging_depth",
        "extra_row_bytes",
        "extra_step_bytes",
        "device_staging_bytes",
        "max_recycled_bytes",
        "sink_queue_bytes",
    }
)
"""Stage settings that change what a stage costs."""


@dataclass(frozen=True, slots=True)
class KeyArgument:
    """One `--key` or `--deferred-key`."""

    name: str
    row_bytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All of them. What is not given is `None`, so that what a model or a server tells can stand in for it."""
    engine = parser.add_argument_group("the engine, as vLLM is given it")
    engine.add_argument("--model", type=_path, metavar="PATH", help="a model's folder, or its config.json")
    engine.add_argument(
        "--stage-config",
        metavar="DOTTED.PATH",
        help="the stage's part of a configuration with several, such as thinker_config.text_config",
    )
    engine.add_argument("--server", metavar="URL", help="a running vLLM server: its blocks, and what it has allocated")
    engine.add_argument(
        "--server-timeout-s",
        type=_seconds,
        metavar="SECONDS",
        help=f"how long each of two questions to it may take, all in all; default {DEFAULT_TIMEOUT_S:g}",
    )
    engine.add_argument(
        "--num-blocks", type=_count, metavar="N", help="blocks of the KV cache, the null block included"
    )
    engine.add_argument(
        "--kv-cache-bytes", type=_size, metavar="SIZE", help="KV cache of one rank, such as '16 GiB'; needs --model"
    )
    engine.add_argument("--block-size", type=_count, metavar="TOKENS", help=f"default {DEFAULT_BLOCK_SIZE}")
    engine.add_argument("--hidden-size", type=_count, metavar="ELEMENTS")
    engine.add_argument("--dtype", type=_dtype, metavar="DTYPE", help="of the hidden rows, such as bfloat16")
    engine.add_argument(
        "--max-num-tokens",
        type=_count,
        metavar="TOKENS",
        default=DEFAULT_MAX_NUM_TOKENS,
        help="vLLM's --max-num-batched-tokens; default %(default)s",
    )
    engine.add_argument("--tensor-parallel-size", type=_count, metavar="N")
    engine.add_argument("--pipeline-parallel-size", type=_count, metavar="N")
    engine.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, help=f"default {AUTO}")
    engine.add_argument(
        "--caches-per-host",
        type=_count,
        metavar="N",
        help="vLLM's --data-parallel-size-local; default 1, or what --server tells",
    )
    engine.add_argument("--on-cpu", action="store_true", help="the device is the CPU: its memory is the host's")

    outputs = parser.add_argument_group("what the model puts out")
    for name, help_text in (
        ("--key", "a further output with a row per token, such as codes:16:int64"),
        ("--deferred-key", "the same, of a key that waits on the device"),
    ):
        outputs.add_argument(name, action="append", default=[], type=_key, metavar="NAME:WIDTH:DTYPE", help=help_text)
    outputs.add_argument("--no-hidden", action="store_true", help="the stage keeps no hidden rows")

    stage = parser.add_argument_group("settings of the stage")
    for setting in SCHEMA:
        if setting.name in _MEMORY_SETTINGS:
            shown = "10,20" if setting.name == "layers" else "VALUE"
            stage.add_argument(_flag(setting.name), metavar=shown, help=setting.kind.rule)
    stage.add_argument("--pretouch", action="store_true", help="known keys' rows are committed at start")
    stage.add_argument("--sink-bytes", type=_size, metavar="SIZE", help="most memory the sink holds rows in")
    add_setting_sources(parser)

    host = parser.add_argument_group("the host")
    host.add_argument("--host-bytes", type=_size, metavar="SIZE", help="memory of another host, instead of this one's")
    host.add_argument(
        "--beside",
        type=_size,
        default=0,
        metavar="SIZE",
        help="what other stages take of it: the sum of their plans' 'at most' on this host",
    )
    add_format_argument(parser)


_IGNORED_WITHOUT = (
    ("stage_config", "model"),
    ("kv_cache_bytes", "model"),
    ("tensor_parallel_size", "kv_cache_bytes"),
    ("pipeline_parallel_size", "kv_cache_bytes"),
    ("kv_cache_dtype", "kv_cache_bytes"),
    ("server_timeout_s", "server"),
)
"""Arguments of which the first means nothing without the second."""
_IGNORED_BESIDE = (("kv_cache_bytes", "num_blocks"), ("kv_cache_bytes", "server"))
"""Arguments that both say how many blocks there are."""
_TOLD_BY_A_STAGE = (
    "num_blocks",
    "block_size",
    "model",
    "hidden_size",
    "dtype",
    "on_cpu",
    "key",
    "deferred_key",
    "no_hidden",
    "pretouch",
    *sorted(_MEMORY_SETTINGS),
)
"""Arguments that a running stage has told itself."""


def refuse_ignored(args: argparse.Namespace) -> None:
    """Refuse combinations of which one argument would do nothing.

    Raises:
        PlanInputError: names both.
    """
    given = vars(args)
    for name, needed in _IGNORED_WITHOUT:
        if given[name] is not None and given[needed] is None:
            raise PlanInputError(f"{_flag(name)} means nothing without {_flag(needed)}: give that, or leave it out")
    for name, other in _IGNORED_BESIDE:
        if given[name] is not None and given[other] is not None:
            raise PlanInputError(f"{_flag(name)} and {_flag(other)} both say how many blocks there are: give one")


def unused_if_live(args: argparse.Namespace) -> tuple[str, ...]:
    """What is to be said of arguments that a running stage's own figures stand in for."""
    unused = [_flag(name) for name in _TOLD_BY_A_STAGE if vars(args)[name] not in (None, False, [])]
    return (f"not used, because the running stage tells its own figures: {', '.join(unused)}",) if unused else ()


def given_settings(args: argparse.Namespace) -> Iterator[GivenValue]:
    """Stage settings among the arguments."""
    for setting in SCHEMA:
        text = vars(args).get(setting.name) if setting.name in _MEMORY_SETTINGS else None
        if text is not None:
            flag = _flag(setting.name)
            listed = f"[{text}]" if setting.name == "layers" and not text.startswith("[") else text
            yield GivenValue(setting.name, listed, Origin.FLAG, flag, is_text=True)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _understood(understand: Callable[[str], N], rule: str) -> Callable[[str], N]:
    def parse(text: str) -> N:
        try:
            return understand(text)
        except (NotOfKindError, ValueError):
            raise argparse.ArgumentTypeError(f"{reprlib.repr(text)}: must be {rule}") from None

    return parse


def _at_least_one(text: str) -> int:
    if _COUNT.fullmatch(text) is None:
        raise ValueError(text)
    value = int(text.replace("_", "").replace(",", ""))
    if not 1 <= value <= MAX_COUNT:
        raise ValueError(text)
    return value


_COUNT = re.compile(r"\+?([0-9]{1,3}(,[0-9]{3})+|[0-9]+(_[0-9]+)*)")
_count = _understood(_at_least_one, "a whole number of at least 1, below 2**63")
_size = _understood(ByteCount(at_least=0).from_text, "a number of bytes below 2**63, such as 1073741824 or '16 GiB'")
_seconds = _understood(Seconds().from_text, Seconds.rule)


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("must be a model's folder, or its config.json")
    return Path(text)


def _dtype(name: str) -> torch.dtype:
    dtype = _dtype_of_rows(name)
    if not dtype.is_floating_point:
        raise argparse.ArgumentTypeError(f"{name!r}: must be a dtype that models run in, such as bfloat16")
    return dtype


def _dtype_of_rows(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    # Of smaller integers and packed bits, an element is no whole number of bytes.
    if not isinstance(dtype, torch.dtype) or _NOT_OF_ROWS.fullmatch(name) is not None:
        raise argparse.ArgumentTypeError(f"{reprlib.repr(name)}: must be a dtype of torch, such as bfloat16")
    return dtype


_NOT_OF_ROWS = re.compile(r"u?int[1-7]|bits.*|q.*|float4.*")


def _key(text: str) -> KeyArgument:
    name, _, rest = text.rpartition(":")
    name, _, width = name.rpartition(":")
    try:
        row_bytes = _at_least_one(width) * _dtype_of_rows(rest).itemsize
    except ValueError:
        row_bytes = 0
    if not name.strip() or not 1 <= row_bytes <= MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{reprlib.repr(text)}: must be NAME:WIDTH:DTYPE, such as codes:16:int64")
    return KeyArgument(name, row_bytes)
