# SPDX-License-Identifier: Apache-2.0
"""How anything registered by entry point is found: list without importing, load exactly one, refuse two of one name.

`importlib.metadata` lists and stevedore loads. stevedore's own listing is not used: it drops one of two distributions
that register the same line, and caches on disk under a time stamp too coarse to see a reinstall.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from stevedore.driver import DriverManager
from stevedore.extension import ExtensionManager


@dataclass(frozen=True, order=True, slots=True)
class InstalledPlugin:
    """One line of an entry-point group, as a distribution registered it. Nothing of it has been imported."""

    name: str
    """The name it is asked for by."""
    distribution: str
    """The distribution that registers it."""
    version: str
    """That distribution's version."""
    entry_point: str
    """Where the class lies: `module:attribute`."""

    def __str__(self) -> str:
        return f"{self.name} (from {self.distribution} {self.version})"


@dataclass(frozen=True, slots=True)
class PluginGroup:
    """One entry-point group, the word for its members, and the errors that refuse one.

    Any thread may call the methods. They read the metadata of the installed distributions each time, so they are for
    start-up, not for the step path.
    """

    group: str
    """The entry-point group, such as `omni_core.backends`."""
    kind: str
    """What one member is called in messages, such as `backend`."""
    unknown_error: Callable[[str], Exception]
    """Raised when no distribution registers the name."""
    duplicate_error: Callable[[str], Exception]
    """Raised when several do."""
    broken_error: Callable[[str], Exception]
    """Raised when the registered object cannot be imported; `__cause__` is the reason."""

    def installed(self) -> tuple[InstalledPlugin, ...]:
        """Every registered member, sorted by name and distribution; two of one name are both listed. Imports none."""
        return tuple(
            sorted(
                InstalledPlugin(
                    name=entry_point.name,
                    distribution=entry_point.dist.name if entry_point.dist else "an unnamed distribution",
                    version=entry_point.dist.version if entry_point.dist else "unknown",
                    entry_point=entry_point.value,
                )
                for entry_point in entry_points(group=self.group)
            )
        )

    def load(self, name: str) -> object:
        """Import the one member called `name`, and no other.

        Raises:
            unknown_error: names the installed members.
            duplicate_error: names the distributions that claim the name.
            broken_error: names the distribution and the import's own error.
        """
        plugin = self._only(name)

        def refuse(manager: ExtensionManager[Any], entry_point: EntryPoint, error: BaseException) -> None:
            raise self._broken(plugin, error) from error

        try:
            manager = _UncachedDriverManager(self.group, name, on_load_failure_callback=refuse)
        except (AssertionError, SystemExit) as error:  # stevedore hands these past its callback
            raise self._broken(plugin, error) from error
        # Not `manager.driver`, which tests an instance's truth; here no instance is ever made by stevedore.
        loaded: object = manager.extensions[0].plugin
        return loaded

    def describe_installed(self) -> str:
        """The installed members for an error message."""
        return ", ".join(str(plugin) for plugin in self.installed()) or (
            f"none: no installed distribution registers one under {self.group!r} (from a source tree, run "
            "`pip install -e .` first)"
        )

    def _only(self, name: str) -> InstalledPlugin:
        claims = [plugin for plugin in self.installed() if plugin.name == name]
        if not claims:
            raise self.unknown_error(
                f"no {self.kind} is installed under the name {name!r}; installed: {self.describe_installed()}"
            )
        if len(claims) > 1:
            owners = " and ".join(f"{plugin.distribution} {plugin.version} ({plugin.entry_point})" for plugin in claims)
            raise self.duplicate_error(
                f"the {self.kind} name {name!r} is registered by {owners}; uninstall all but one of them"
            )
        return claims[0]

    def _broken(self, plugin: InstalledPlugin, error: BaseException) -> Exception:
        return self.broken_error(
            f"{self.kind} {plugin} cannot be imported from {plugin.entry_point!r}: {type(error).__name__}: {error}"
        )


class _UncachedDriverManager(DriverManager[Any]):
    """stevedore's driver pattern (one name, one plugin) over the metadata as it is now."""

    def list_entry_points(self) -> list[EntryPoint]:
        return list(entry_points(group=self.namespace))
