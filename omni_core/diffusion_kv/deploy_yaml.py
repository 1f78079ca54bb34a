# SPDX-License-Identifier: Apache-2.0
"""A YAML file as plain values, with PyYAML, which the extra `diffusion` brings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omni_core.diffusion_kv.errors import DiffusionKVConfigError

NO_YAML = "PyYAML is not installed, and a deploy file cannot be read: pip install 'omni-core[diffusion]'"


def read_mapping(path: Path) -> Mapping[str, Any]:
    """The mapping a YAML file holds.

    Raises:
        DiffusionKVConfigError: PyYAML is not installed; the file cannot be read, is no YAML, holds no mapping, or has
            a key twice in one mapping.
    """
    try:
        import yaml
    except ImportError as error:
        raise DiffusionKVConfigError(NO_YAML) from error

    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        _check_keys(root, set())
        loaded = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise DiffusionKVConfigError(f"cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise DiffusionKVConfigError(f"is no YAML: {error}") from error
    if not isinstance(loaded, Mapping):
        raise DiffusionKVConfigError(f"holds a {type(loaded).__name__}; a mapping is wanted")
    return loaded


def _check_keys(node: Any, checked: set[int]) -> None:
    """Refuse a key that stands twice in a mapping: PyYAML keeps the last and says nothing.

    Args:
        node: of PyYAML: a scalar, or a collection whose `value` lists its members, in pairs for a mapping.
        checked: ids of the nodes seen; an anchor stands for one node in several places.
    """
    if node is None or node.id == "scalar" or id(node) in checked:
        return
    checked.add(id(node))
    if node.id == "sequence":
        for member in node.value:
            _check_keys(member, checked)
        return
    lines: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.id != "scalar":
            raise DiffusionKVConfigError(f"line {line}: a key is a {key.id}; text is wanted")
        if key.value in lines:
            raise DiffusionKVConfigError(
                f"{key.value!r} stands at line {lines[key.value]} and at line {line}; keep one"
            )
        lines[key.value] = line
        _check_keys(value, checked)
