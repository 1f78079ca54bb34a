# SPDX-License-Identifier: Apache-2.0
"""Where a command that reads a stage's settings takes them from: the arguments it shares with the others."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from omni_core.cli.plain_json import loads_without_repeats
from omni_core.settings.errors import SettingsError
from omni_core.settings.resolve import ResolvedSettings, resolve
from omni_core.settings.sources import CONFIG_FILE_VARIABLE, GivenValue, from_additional_config, from_flags


def add_setting_sources(parser: argparse.ArgumentParser) -> None:
    """Give a command `--additional-config`, `--set` and `--file`."""
    parser.add_argument(
        "--additional-config",
        metavar="JSON",
        help="what vLLM is given under the same name; its omni_core section is read",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting given as a flag; may be repeated"
    )
    parser.add_argument("--file", type=Path, help=f"a TOML file instead of the one {CONFIG_FILE_VARIABLE} names")


def resolve_settings(args: argparse.Namespace, flags: Iterable[GivenValue] = ()) -> ResolvedSettings:
    """The settings those arguments, the environment and the file give.

    Args:
        args: with the arguments of `add_setting_sources`.
        flags: from the command's own arguments; they win.

    Raises:
        SettingsError: tells every mistake.
    """
    return resolve(chain(flags, _from_arguments(args)), os.environ, args.file)


def _from_arguments(args: argparse.Namespace) -> Iterator[GivenValue]:
    yield from from_flags(args.set)
    if args.additional_config is not None:
        try:
            additional_config = loads_without_repeats(args.additional_config)
        except ValueError as error:
            raise SettingsError(f"--additional-config is not JSON: {error}") from error
        if not isinstance(additional_config, dict):
            raise SettingsError(f"--additional-config is not a JSON object but {args.additional_config}")
        yield from from_additional_config(additional_config)
