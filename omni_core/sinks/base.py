# SPDX-License-Identifier: Apache-2.0
"""Where delivered rows go. A sink is registered under the entry-point group `omni_core.sinks`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from omni_core.prefix_cache.outputs import TokenRange


class RequestEnd(Enum):
    """How a request ended."""

    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"
    """The cache could not serve it; the engine's own output is not affected."""
    FLUSHED = "flushed"
    """Delivered so far and completed by a flush; the engine has not said that it ended."""


@dataclass(frozen=True, slots=True)
class SinkDelivery:
    """The rows of one step for one request. Tensors are valid during `accept` only: a sink that keeps them copies."""

    req_id: str
    """The engine's internal id, unique in this engine run."""
    client_req_id: str | None
    """The id the client gave, if it can be told from the internal one."""
    step_id: int
    ranges: tuple[TokenRange, ...]
    """Token positions delivered, ascending; row `i` of every tensor is the `i`-th position."""
    rows: Mapping[str, torch.Tensor]
    """Key → CPU tensor `(num_rows, ...)`; the hidden rows lie under `HIDDEN_KEY`."""
    token_ids: npt.NDArray[np.int64]
    """`(num_rows,)`: the token at each delivered position."""
    leftovers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SinkRequestEnd:
    """A request's last word."""

    req_id: str
    client_req_id: str | None
    end: RequestEnd
    missing: tuple[TokenRange, ...] = ()
    """Positions promised and never delivered; empty for a whole request."""
    error: str | None = None
    """Why the request could not be served (FAILED)."""


class StageSink(ABC):
    """Receives every delivery of a stage. Called by one thread (the builder), never by the engine thread.

    An exception of `accept` or `finish` is recorded for that request and never reaches the engine; the sink then sees
    no more of that request.
    """

    @abstractmethod
    def accept(self, delivery: SinkDelivery) -> None:
        """Take one step's rows of one request. May block on its own medium."""

    @abstractmethod
    def finish(self, end: SinkRequestEnd) -> None:
        """A request ended: make what was accepted readable, or drop it. Called once per request that was accepted."""

    @abstractmethod
    def close(self) -> None:
        """Give up resources. Requests not finished are dropped, never half readable. Idempotent."""
