# SPDX-License-Identifier: Apache-2.0
"""The arguments of `omni-core plan`, and how each is understood."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from omni_core.cli.plan.engine_dtypes import AUTO, KV_CACHE_DTYPES
from omni_core.cli.setting_sources import add_setting_sources
from omni_core.cli.tables import add_format_argument
from omni_core.settings.kinds import ByteCount, NotOfKindError
from omni_core.settings.sources import GivenValue, Origin
from omni_core.settings.stage_settings import SCHEMA

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
    engine.add_argument("--model", type=Path, metavar="PATH", help="a model's folder, or its config.json")
    engine.add_argument(
        "--stage-config",
        metavar="DOTTED.PATH",
        help="the stage's part of a configuration with several, such as thinker_config.text_config",
    )
    engine.add_argument("--server", metavar="URL", help="a running vLLM server: its blocks, and what it has allocated")
    engine.add_argument("--server-timeout-s", type=float, default=10.0, help="how long each question to it may take")
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
    engine.add_argument("--tensor-parallel-size", type=_count, default=1, metavar="N")
    engine.add_argument("--pipeline-parallel-size", type=_count, default=1, metavar="N")
    engine.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default=AUTO)
    engine.add_argument(
        "--caches-per-host", type=_count, default=1, metavar="N", help="vLLM's --data-parallel-size-local"
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
            stage.add_argument(f"--{setting.name.replace('_', '-')}", metavar=shown, help=setting.kind.rule)
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


def given_settings(args: argparse.Namespace) -> Iterator[GivenValue]:
    """Stage settings among the arguments."""
    for setting in SCHEMA:
        text = vars(args).get(setting.name) if setting.name in _MEMORY_SETTINGS else None
        if text is not None:
            flag = f"--{setting.name.replace('_', '-')}"
            listed = f"[{text}]" if setting.name == "layers" and not text.startswith("[") else text
            yield GivenValue(setting.name, listed, Origin.FLAG, flag, is_text=True)


def _understood(understand: Callable[[str], int], rule: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            return understand(text)
        except (NotOfKindError, ValueError):
            raise argparse.ArgumentTypeError(f"{text!r}: must be {rule}") from None

    return parse


def _at_least_one(text: str) -> int:
    value = int(text.replace("_", "").replace(",", ""))
    if value < 1:
        raise ValueError(text)
    return value


_count = _understood(_at_least_one, "a whole number of at least 1")
_size = _understood(ByteCount(at_least=0).from_text, "a number of bytes, such as 1073741824 or '16 GiB'")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(f"{name!r}: must be a dtype of torch, such as bfloat16")
    return dtype


def _key(text: str) -> KeyArgument:
    name, _, rest = text.rpartition(":")
    name, _, width = name.rpartition(":")
    if not name or not width.isdigit() or int(width) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be NAME:WIDTH:DTYPE, such as codes:16:int64")
    return KeyArgument(name, int(width) * _dtype(rest).itemsize)
