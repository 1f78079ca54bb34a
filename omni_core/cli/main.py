# SPDX-License-Identifier: Apache-2.0
"""`omni-core`: one table of commands, each in its own module, imported only when it is the one asked for.

Exit status: 0 done; 1 the command's own "no" (a check that failed, a demo whose rows differ); 2 wrong usage.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import omni_core

EXIT_INTERRUPTED = 130
"""Ended by Ctrl-C, as shells report it."""


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand and where it lives.

    Its module has `register(subparsers)`, which adds a parser named as the command, whose defaults set `run` to a
    function from the parsed arguments to an exit status.
    """

    name: str
    module: str
    summary: str
    """One line for `omni-core --help`."""


COMMANDS = (
    Command("simulate", "omni_core.cli.simulate", "run the cache on a simulated engine, with no vLLM, and draw it"),
    Command("demo", "omni_core.cli.demo", "run vLLM on the CPU with prefix caching and check every delivered row"),
    Command("bench", "omni_core.cli.bench", "measure what the cache costs, beside a copy and beside the peer"),
    Command("fuzz", "omni_core.cli.fuzz", "run random workloads, schedules and faults, and check every delivered row"),
    Command("plan", "omni_core.cli.plan", "what a stage will cost in memory, whether it fits, and what to change"),
    Command("diffuse", "omni_core.cli.diffuse", "run a diffusion stage on prompts and pictures, and say what was hit"),
    Command("config", "omni_core.cli.config", "show every setting with its value and its origin, or check them"),
    Command("doctor", "omni_core.cli.doctor", "try every backend on this machine and say what to do next"),
    Command("backends", "omni_core.cli.backends", "list the installed backends and whether this machine can run them"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments after the program's name; `None` takes them from the process.

    Returns:
        The exit status.

    Raises:
        SystemExit: by argparse, with 2 for wrong usage and 0 after `--help` and `--version`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal without a character, or a name that is no text, must not end a command that has its answer.
        sys.stdout.reconfigure(errors="backslashreplace")
    args = _parser(arguments).parse_args(arguments)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) left. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser, with only the asked command's own options in it: another's module may need what is not installed."""
    parser = argparse.ArgumentParser(
        prog="omni-core", description="Whole-prompt stage outputs from vLLM with prefix caching on."
    )
    parser.add_argument("--version", action="version", version=f"omni-core {omni_core.__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
    for command in COMMANDS:
        if command.name == asked:
            importlib.import_module(command.module).register(subparsers)
        else:
            subparsers.add_parser(command.name, help=command.summary)
    return parser


if __name__ == "__main__":
    sys.exit(main())
