# SPDX-License-Identifier: Apache-2.0
"""The floors: copies of the same bytes that no cache can avoid, between buffers that stay warm."""

from __future__ import annotations

import torch


class Copies:
    """Copies of `num_bytes`, by torch's own copy."""

    def __init__(self, num_bytes: int) -> None:
        self._source, self._clone, self._page = (torch.ones(num_bytes, dtype=torch.uint8) for _ in range(3))

    def clone_and_stage(self) -> None:
        """One clone, then one copy of the clone into a page: what a step's bytes cannot avoid."""
        self._clone.copy_(self._source)
        self._page.copy_(self._clone)

    def copy(self) -> None:
        """One copy: delivered rows cannot stay where a later step writes, and a deferred row is cloned once."""
        self._page.copy_(self._source)
