# SPDX-License-Identifier: Apache-2.0
"""`omni-core config`: every setting with its value and its origin, whether they fit here, what there is to set."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

from omni_core.backend import BackendError
from omni_core.backend.registry import explain_backends, load_backend_class
from omni_core.cli.setting_sources import add_setting_sources, resolve_settings
from omni_core.cli.tables import JSON, add_format_argument, print_json, render_table
from omni_core.settings.errors import SettingsError
from omni_core.settings.json_schema import json_schema
from omni_core.settings.resolve import ResolvedSettings, ResolvedValue
from omni_core.settings.setting import Place
from omni_core.settings.sources import CONFIG_FILE_VARIABLE
from omni_core.settings.stage_settings import SCHEMA
from omni_core.sinks.errors import InvalidSinkOptionError, SinkError
from omni_core.sinks.registry import check_sink

_FILE, _FLAG = "file", "flag"
_EPILOG = (
    "A value given as a flag wins over the environment (OMNI_CORE_NAME), that over the file "
    f"({CONFIG_FILE_VARIABLE}, TOML), and that over the default."
)


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to argparse's subparsers."""
    parser = subparsers.add_parser(
        "config",
        help="show every setting with its value and its origin, check them, or list what there is to set",
        description="Read the settings as a stage's worker would, without starting one.",
        epilog=_EPILOG,
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    show = actions.add_parser("show", help="every setting, its value, and where the value came from", epilog=_EPILOG)
    validate = actions.add_parser("validate", help="tell every mistake; exit status 1 if there is one", epilog=_EPILOG)
    for reader, run in ((show, run_show), (validate, run_validate)):
        add_setting_sources(reader)
        add_format_argument(reader)
        reader.set_defaults(run=run)
    schema = actions.add_parser("schema", help="what there is to set; as json, a JSON schema")
    schema.add_argument(
        "--of",
        choices=(_FILE, _FLAG),
        default=_FILE,
        help="whose JSON schema: the file's (the default), or that of the flag's omni_core section",
    )
    add_format_argument(schema)
    schema.set_defaults(run=run_schema)


def run_show(args: argparse.Namespace) -> int:
    """Print every setting; 0, or 1 if they cannot be read."""
    try:
        resolved = resolve_settings(args)
    except SettingsError as error:
        return _tell(error.problems, args)
    if args.format == JSON:
        print_json({"settings": resolved.plain()})
    else:
        rows = [_cells(one) for one in resolved.values]
        print(render_table(("setting", "value", "origin", "place"), rows))
    return 0


def run_validate(args: argparse.Namespace) -> int:
    """Print every mistake, or that there is none; 0 if the settings can be run with here, else 1."""
    try:
        problems = tuple(_not_runnable_here(resolve_settings(args)))
    except SettingsError as error:
        problems = error.problems
    return _tell(problems, args)


def run_schema(args: argparse.Namespace) -> int:
    """Print the schema; 0."""
    if args.format == JSON:
        print_json(json_schema(Place.FLAG_ONLY if args.of == _FLAG else Place.ANYWHERE))
        return 0
    rows = [
        (
            one.name,
            "-" if one.place is Place.FLAG_ONLY else one.variable,
            _shown(one.kind.plain(one.default)),
            one.kind.rule,
        )
        for one in SCHEMA
    ]
    print(render_table(("setting", "environment", "default", "must be"), rows))
    return 0


def _not_runnable_here(resolved: ResolvedSettings) -> Iterator[str]:
    """Mistakes that only this installation shows."""
    stage = resolved.stage()
    places = {one.setting.name: one.shown_as or one.setting.name for one in resolved.values}
    try:
        check_sink(stage.sink, stage.sink_options)
    except InvalidSinkOptionError as error:
        yield f"{places['sink_options']}: {error}"
    except SinkError as error:
        yield f"{places['sink']}={stage.sink!r}: {error}"
    if stage.backend is not None:
        try:
            load_backend_class(stage.backend)
        except BackendError as error:
            yield f"{places['backend']}={stage.backend!r}: {error}"
            return
        for report in explain_backends():
            if report.installed.name == stage.backend and (report.reason or report.refuses):
                yield f"{places['backend']}={stage.backend!r}: {report.reason or f'it refuses {report.refuses}'}"


def _tell(problems: tuple[str, ...], args: argparse.Namespace) -> int:
    if args.format == JSON:
        print_json({"valid": not problems, "problems": list(problems)})
    elif problems:
        print("\n".join(problems), file=sys.stderr)
    else:
        print("valid")
    return 1 if problems else 0


def _cells(one: ResolvedValue) -> tuple[str, str, str, str]:
    return one.setting.name, _shown(one.setting.kind.plain(one.value)), one.origin.value, one.shown_as


def _shown(value: Any) -> str:
    return json.dumps(value)
