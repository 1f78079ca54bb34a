# SPDX-License-Identifier: Apache-2.0
"""How a backend is found and chosen: by the device of the tensor, or by a name that must own that tensor.

`torch.cuda.is_available()` is never asked. A tensor on an accelerator whose backend is missing is an error, never a
slower path. All functions may be called from any thread; they read distribution metadata and may import packages, so
they are for start-up.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from omni_core.backend.base import DeviceBackend
from omni_core.backend.errors import (
    AmbiguousBackendError,
    BackendError,
    BackendOptionError,
    BackendUnavailableError,
    BrokenBackendError,
    DuplicateBackendError,
    NoBackendForTensorError,
    UnknownBackendError,
)
from omni_core.plugins import InstalledPlugin, PluginGroup
from omni_core.runtime import Runtime

BACKEND_GROUP = "omni_core.backends"
"""The entry-point group of backends. An entry point's name equals the `name` of the class it leads to."""

InstalledBackend = InstalledPlugin
"""A backend as its distribution registers it."""

_NO_OPTIONS: Mapping[str, Any] = {}
_BACKENDS = PluginGroup(
    group=BACKEND_GROUP,
    kind="backend",
    unknown_error=UnknownBackendError,
    duplicate_error=DuplicateBackendError,
    broken_error=BrokenBackendError,
)


@dataclass(frozen=True, slots=True)
class BackendReport:
    """One line of `omni-core backends`."""

    installed: InstalledBackend
    device_type: str | None
    """torch's device type it owns; `None` if the class could not be loaded."""
    reason: str | None
    """Why it cannot be used on this machine, the error of its import included; `None` if it can."""
    refuses: str | None
    """What this version of it refuses; `None` if nothing."""

    @property
    def available(self) -> bool:
        """Whether this machine can run it."""
        return self.reason is None


def installed_backends() -> tuple[InstalledBackend, ...]:
    """Every registered backend, sorted by name. Imports none of them; a name claimed twice is listed twice."""
    return _BACKENDS.installed()


def load_backend_class(name: str) -> type[DeviceBackend]:
    """Import the backend registered under `name`, and no other.

    Raises:
        UnknownBackendError: not installed; names what is.
        DuplicateBackendError: two distributions register the name; names both.
        BrokenBackendError: it cannot be imported, is no `DeviceBackend`, or calls itself by another name.
    """
    loaded = _BACKENDS.load(name)
    if not (isinstance(loaded, type) and issubclass(loaded, DeviceBackend)):
        raise BrokenBackendError(f"backend {name!r} leads to {loaded!r}, which is not a subclass of DeviceBackend")
    for attribute in ("name", "device_type"):
        if not hasattr(loaded, attribute):
            raise BrokenBackendError(f"backend {name!r}: {loaded.__qualname__} does not set {attribute!r}")
    if loaded.name != name:
        raise BrokenBackendError(
            f"backend {name!r}: {loaded.__qualname__} calls itself {loaded.name!r}; "
            "its distribution must register it under that name"
        )
    return loaded


def create_backend(name: str, *, runtime: Runtime, options: Mapping[str, Any] = _NO_OPTIONS) -> DeviceBackend:
    """Make the backend registered under `name`.

    Args:
        name: as `omni-core backends` lists it.
        runtime: makes the backend's threads, locks and waits.
        options: the backend's own keyword arguments.

    Raises:
        UnknownBackendError, DuplicateBackendError, BrokenBackendError: as `load_backend_class`.
        BackendUnavailableError: this machine cannot run it; says why.
        BackendOptionError: the backend has no such option; names those it has.
        BackendFeatureUnsupportedError: this version of the backend refuses to be made.
    """
    return _construct(load_backend_class(name), runtime, options)


def backend_for_tensor(
    tensor: torch.Tensor,
    *,
    runtime: Runtime,
    override: str | None = None,
    options: Mapping[str, Any] = _NO_OPTIONS,
) -> DeviceBackend:
    """Make the backend that owns the device `tensor` lies on.

    Without `override`, every installed backend's class is imported and asked for its `device_type`; importing one needs
    no hardware. With it, only the named one is imported.

    Args:
        tensor: any tensor the cache will be given.
        runtime: makes the backend's threads, locks and waits.
        override: the setting `backend`: the name of an installed backend that owns the tensor's device.
        options: the backend's own keyword arguments.

    Raises:
        NoBackendForTensorError: no installed backend, or not the named one, owns the device; names those installed.
        AmbiguousBackendError: several that this machine can run own it; names them.
        BackendUnavailableError: one owns it, but this machine cannot run it; says why.
        UnknownBackendError, DuplicateBackendError, BrokenBackendError, BackendOptionError: as `create_backend`.
    """
    device_type = tensor.device.type
    if override is not None:
        named = load_backend_class(override)
        if named.device_type != device_type:
            raise NoBackendForTensorError(
                f"backend={override!r} owns {named.device_type!r} tensors, but the tensor lies on "
                f"{str(tensor.device)!r}. Installed: {_describe_owned()}. Set `backend` to one that owns "
                f"{device_type!r}, or leave it unset"
            )
        return _construct(named, runtime, {**named.serving_options, **options})
    owners = _owners(device_type)
    if not owners:
        raise NoBackendForTensorError(
            f"no installed backend owns {device_type!r} tensors; the tensor lies on {str(tensor.device)!r}. Installed: "
            f"{_describe_owned()}. Install a distribution that registers a backend for {device_type!r} under "
            f"{BACKEND_GROUP!r}; its rows are not taken through another device"
        )
    if len(owners) > 1:
        owners = [owner for owner in owners if _unavailable_reason(owner) is None] or owners
    if len(owners) > 1:
        raise AmbiguousBackendError(
            f"{len(owners)} installed backends own {device_type!r} tensors: "
            f"{', '.join(owner.name for owner in owners)}. Set `backend` to one of these names"
        )
    return _construct(owners[0], runtime, {**owners[0].serving_options, **options})


def explain_backends() -> tuple[BackendReport, ...]:
    """Say of every installed backend whether this machine can run it, and if not, why.

    Imports each; one that cannot be imported is reported with the import's error, not left out. May take as long as the
    slowest `unavailable_reason()`.
    """
    reports = []
    for plugin, found in _survey():
        if isinstance(found, BackendError):
            reports.append(BackendReport(plugin, device_type=None, reason=str(found), refuses=None))
        else:
            reason = _unavailable_reason(found)
            reports.append(BackendReport(plugin, found.device_type, reason, found.refuses))
    return tuple(reports)


def _survey() -> list[tuple[InstalledBackend, type[DeviceBackend] | BackendError]]:
    """Every registered backend with its class, or with the error that keeps it from being one."""
    survey: list[tuple[InstalledBackend, type[DeviceBackend] | BackendError]] = []
    for plugin in installed_backends():
        try:
            survey.append((plugin, load_backend_class(plugin.name)))
        except BackendError as error:
            survey.append((plugin, error))
    return survey


def _owners(device_type: str) -> list[type[DeviceBackend]]:
    owners = []
    for _, found in _survey():
        if isinstance(found, DuplicateBackendError):
            raise found  # which of the two owns what cannot be told without choosing one
        if not isinstance(found, BackendError) and found.device_type == device_type:
            owners.append(found)
    return owners


def _describe_owned() -> str:
    """Every registered backend with the device it owns, for an error message."""
    lines = [
        f"{plugin}: {found}" if isinstance(found, BackendError) else f"{plugin}, owns {found.device_type!r}"
        for plugin, found in _survey()
    ]
    return "; ".join(lines) or _BACKENDS.describe_installed()


def _unavailable_reason(backend_class: type[DeviceBackend]) -> str | None:
    try:
        return backend_class.unavailable_reason()
    except Exception as error:  # the contract says it never raises; another vendor's class may break it
        return f"{backend_class.__qualname__}.unavailable_reason() raised {type(error).__name__}: {error}"


def _construct(backend_class: type[DeviceBackend], runtime: Runtime, options: Mapping[str, Any]) -> DeviceBackend:
    reason = _unavailable_reason(backend_class)
    if reason is not None:
        raise BackendUnavailableError(
            f"backend {backend_class.name!r} cannot run on this machine: {reason}. "
            "`omni-core backends` lists what this machine can run"
        )
    signature = inspect.signature(backend_class)
    try:
        signature.bind(runtime, **options)
    except TypeError as error:
        raise BackendOptionError(
            f"backend {backend_class.name!r} with the options {dict(options)!r}: {error}; it takes {signature}"
        ) from error
    return backend_class(runtime, **options)
