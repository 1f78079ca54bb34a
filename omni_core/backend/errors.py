# SPDX-License-Identifier: Apache-2.0
"""What can go wrong when a backend is found, chosen or used."""

from __future__ import annotations


class BackendError(RuntimeError):
    """Root of every backend error."""


class UnknownBackendError(BackendError):
    """No installed distribution registers a backend under the asked name."""


class DuplicateBackendError(BackendError):
    """Two distributions register a backend under one name."""


class BrokenBackendError(BackendError):
    """What a distribution registers as a backend cannot be imported, or is not a backend of that name."""


class AmbiguousBackendError(BackendError):
    """Several installed backends own the device a tensor lies on, and none was chosen by name."""


class BackendOptionError(BackendError, ValueError):
    """A backend was given an option it does not have."""


class BackendUnavailableError(BackendError):
    """The backend is installed, but this machine cannot run it."""


class NoBackendForTensorError(BackendError):
    """No installed backend owns the device a tensor lies on."""


class BackendFeatureUnsupportedError(BackendError):
    """The backend says, by name, that it does not do this."""


class DeviceWaitTimeoutError(BackendError):
    """A device event did not complete in the time given."""


class DeviceCopyError(BackendError):
    """A device copy failed."""
