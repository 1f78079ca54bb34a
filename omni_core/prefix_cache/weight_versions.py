# SPDX-License-Identifier: Apache-2.0
"""How often the caller said that the weights, or an adapter's, have changed."""

from __future__ import annotations

from collections.abc import Mapping

MAX_ADAPTERS_KEPT = 1024
"""Adapters whose count is kept, the latest to change; what of their rows is absent does not depend on it."""


class WeightVersions:
    """Counts changes. Every method needs the state lock."""

    def __init__(self) -> None:
        self.weights = 0
        """Changes of the weights so far; `reset` leaves it as it is."""
        self._adapters: dict[int, int] = {}

    @property
    def adapters(self) -> Mapping[int, int]:
        """Adapter id → its changes so far. A copy."""
        return dict(self._adapters)

    def bump(self, adapter_id: int | None) -> int:
        """Count one more change of an adapter, or of the weights; returns how many there were."""
        if adapter_id is None:
            self.weights += 1
            return self.weights
        version = self._adapters.pop(adapter_id, 0) + 1
        self._adapters[adapter_id] = version
        if len(self._adapters) > MAX_ADAPTERS_KEPT:
            del self._adapters[next(iter(self._adapters))]
        return version
