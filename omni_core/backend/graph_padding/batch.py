# SPDX-License-Identifier: Apache-2.0
"""A step's shape before padding and after it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from omni_core.backend.graph_padding.graph_mode import ANY_MODE, GraphMode


class UniformDecode(Enum):
    """How a runner decides whether every request of a step is a decode of the same length."""

    BY_COUNTS = auto()
    """From the step's counts."""
    FORCED = auto()
    """Told so: dummy steps, and the 310P runner."""
    EXCLUDED = auto()
    """Told that it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """What a runner knows of a step when it chooses a graph.

    Raises:
        ValueError: counts that no step can have; names them.
    """

    num_tokens: int
    """Scheduled tokens; 0: a rank without work beside others that have some."""
    num_reqs: int
    max_query_len: int
    """Most tokens of one request."""
    num_active_loras: int = 0
    """Different adapters in the step."""
    num_first_chunks: int = 0
    """Requests without a computed token; vllm-ascend asks."""
    may_split: bool = True
    """Whether the runner lets the step be split into microbatches."""
    uniform_decode: UniformDecode = UniformDecode.BY_COUNTS
    allowed: frozenset[GraphMode] = ANY_MODE
    """The modes the runner lets the step use, such as `EAGER_ONLY` or `NO_FULL_GRAPH`."""

    def __post_init__(self) -> None:
        if not self.num_reqs <= self.num_tokens <= self.num_reqs * self.max_query_len:
            raise ValueError(
                f"num_tokens={self.num_tokens} num_reqs={self.num_reqs} max_query_len={self.max_query_len}: every "
                "request has at least 1 token and at most max_query_len"
            )
        if GraphMode.NONE not in self.allowed:
            raise ValueError(f"allowed={sorted(self.allowed)}: a step may always run eagerly")

    def is_uniform_decode(self, query_len: int) -> bool:
        """Whether every request has exactly `query_len` tokens, or the runner was told so.

        Source: vLLM 0.32, `v1/worker/gpu_model_runner.py`, `_is_uniform_decode`.
        """
        if self.uniform_decode is not UniformDecode.BY_COUNTS:
            return self.uniform_decode is UniformDecode.FORCED
        return self.max_query_len == query_len and self.num_tokens == query_len * self.num_reqs


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedBatch:
    """What a step runs as. Real rows come first; padding lies behind them."""

    mode: GraphMode
    num_tokens: int
    """Rows of the step's output. May exceed the real rows in every mode, `NONE` included."""
    num_reqs: int | None = None
    """Requests the graph was captured for; `None`: any number."""
    num_ubatches: int = 1
    """Microbatches the step is split into."""
