# SPDX-License-Identifier: Apache-2.0
"""What a device must provide, how one is found, and the checks every backend must pass."""

from omni_core.backend.base import (
    Capabilities,
    DeviceBackend,
    DeviceInfo,
    Event,
    GraphPadding,
    PinnedArena,
    SnapshotRing,
    Stream,
)
from omni_core.backend.errors import (
    AmbiguousBackendError,
    BackendError,
    BackendFeatureUnsupportedError,
    BackendOptionError,
    BackendUnavailableError,
    BrokenBackendError,
    DeviceCopyError,
    DeviceWaitTimeoutError,
    DuplicateBackendError,
    NoBackendForTensorError,
    UnknownBackendError,
)
from omni_core.backend.memory import ByteCarver

__all__ = [
    "AmbiguousBackendError",
    "BackendError",
    "BackendFeatureUnsupportedError",
    "BackendOptionError",
    "BackendUnavailableError",
    "BrokenBackendError",
    "ByteCarver",
    "Capabilities",
    "DeviceBackend",
    "DeviceCopyError",
    "DeviceInfo",
    "DeviceWaitTimeoutError",
    "DuplicateBackendError",
    "Event",
    "GraphPadding",
    "NoBackendForTensorError",
    "PinnedArena",
    "SnapshotRing",
    "Stream",
    "UnknownBackendError",
]
