# SPDX-License-Identifier: Apache-2.0
"""Where delivered rows go. A sink is registered under the entry-point group `omni_core.sinks`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

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


def is_complete(end: RequestEnd, missing: Sequence[TokenRange]) -> bool:
    """Whether a request that ended so, with these positions missing, is whole: not aborted, and nothing missing."""
    return end in (RequestEnd.FINISHED, RequestEnd.FLUSHED) and not missing


RequestKey = tuple[str, int]
"""Internal id and use: one request of one engine run."""


@dataclass(frozen=True, slots=True)
class PossibleSample:
    """What a request's id says if it is one of the samples of one client's request (`n > 1`).

    It is one only if another sample of the same `group` was seen: a client may give such an id itself.
    """

    client_req_id: str
    """The client's request whose sample it then is."""
    group: str
    """The same for all samples of that request, and for no other request."""
    index: int
    """From 0 on."""


@dataclass(frozen=True, slots=True)
class SinkDelivery:
    """The rows of one step for one request. Tensors are valid during `accept` only: a sink that keeps them copies."""

    req_id: str
    """The engine's internal id; unique in this engine run, together with `use`."""
    client_req_id: str | None
    """The internal id without what the engine put behind it, if it can be told: the id the client gave, or, for one
    sample of several, that id behind the sample's index."""
    step_id: int
    ranges: tuple[TokenRange, ...]
    """Token positions delivered, ascending; row `i` of every tensor is the `i`-th position."""
    rows: Mapping[str, torch.Tensor]
    """Key → CPU tensor `(num_rows, ...)`; the hidden rows lie under `HIDDEN_KEY`."""
    token_ids: npt.NDArray[np.int64]
    """`(num_rows,)`: the token at each delivered position."""
    leftovers: Mapping[str, Any] = field(default_factory=dict)
    sample: PossibleSample | None = None
    use: int = 0
    """How many requests of this engine run had the same internal id before; above 0 only if the engine makes none of
    its own."""

    @property
    def key(self) -> RequestKey:
        """Which request of the engine run this belongs to."""
        return self.req_id, self.use


@dataclass(frozen=True, slots=True)
class SinkRequestEnd:
    """A request's last word."""

    req_id: str
    client_req_id: str | None
    end: RequestEnd
    missing: tuple[TokenRange, ...] = ()
    """Positions whose hidden rows were not delivered: computed ones, and those of the prompt that were not computed
    before the end. Of other keys a row may have come. Empty for a whole request."""
    error: str | None = None
    """Why the request could not be served (FAILED)."""
    sample: PossibleSample | None = None
    use: int = 0
    """As for `SinkDelivery`."""

    @property
    def key(self) -> RequestKey:
        """Which request of the engine run this belongs to."""
        return self.req_id, self.use


class StageSink(ABC):
    """Receives every delivery of a stage. Called by one thread (the feeder), never by the engine thread.

    An exception of `accept` or `finish`, whatever its class, is recorded for that request and never reaches the engine;
    the sink then sees no more of that request. A call that does not return costs rows, but never a step of the engine.
    """

    option_rules: ClassVar[Mapping[str, Callable[[str, str, Any], Any]]] = {}
    """Option → what refuses a wrong value with `InvalidSinkOptionError`, given sink, option and value, such as the
    functions of `omni_core.sinks.options`. For tools that look at settings and start nothing."""
    rows_may_wait: ClassVar[bool] = False
    """Whether rows of a request that goes on may come a quarter of a second later, several steps at a time, which costs
    less. For a sink that shows nothing of a request before its end; of that it is told at once all the same."""

    @abstractmethod
    def accept(self, delivery: SinkDelivery) -> None:
        """Take one step's rows of one request. May block on its own medium."""

    @abstractmethod
    def finish(self, end: SinkRequestEnd) -> None:
        """A request ended: make what was accepted readable, or drop it. Called once per request that was accepted."""

    @abstractmethod
    def close(self) -> None:
        """Give up resources. Requests not finished are dropped, never half readable. Idempotent."""
