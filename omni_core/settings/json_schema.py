# SPDX-License-Identifier: Apache-2.0
"""The schema as a JSON schema, for editors and for programs that write configuration files."""

from __future__ import annotations

from typing import Any

from omni_core.settings.setting import Place, Setting
from omni_core.settings.stage_settings import SCHEMA

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema(place: Place) -> dict[str, Any]:
    """What may be given there: in the configuration file (`ANYWHERE`), or in a stage's flag (`FLAG_ONLY`)."""
    left_out = Place.TOOLS if place is Place.FLAG_ONLY else Place.FLAG_ONLY
    allowed = [one for one in SCHEMA if one.place is not left_out]
    return {
        "$schema": DIALECT,
        "title": "Omni Core settings",
        "type": "object",
        "additionalProperties": False,
        "properties": {one.name: _property(one) for one in allowed},
    }


def _property(one: Setting) -> dict[str, Any]:
    return {**one.kind.json_schema(), "default": one.kind.plain(one.default), "description": one.meaning}
