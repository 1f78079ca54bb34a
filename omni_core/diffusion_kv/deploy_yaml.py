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

    class UniqueKeyLoader(yaml.SafeLoader):  # type: ignore[misc]
        """PyYAML keeps the last of two equal keys and says nothing."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen: dict[object, int] = {}
            for key_node, _ in node.value:
                if key_node.tag == "tag:yaml.org,2002:merge":
                    continue
                key = self.construct_object(key_node, deep=True)
                line = key_node.start_mark.line + 1
                if isinstance(key, (list, dict)):
                    raise DiffusionKVConfigError(f"line {line}: a key is a {type(key).__name__}; text is wanted")
                if key in seen:
                    raise DiffusionKVConfigError(f"{key!r} stands at line {seen[key]} and at line {line}; keep one")
                seen[key] = line
            mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
            return mapping

    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), Loader=UniqueKeyLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise DiffusionKVConfigError(f"cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise DiffusionKVConfigError(f"is no YAML: {error}") from error
    if not isinstance(loaded, Mapping):
        raise DiffusionKVConfigError(f"holds a {type(loaded).__name__}; a mapping is wanted")
    return loaded
