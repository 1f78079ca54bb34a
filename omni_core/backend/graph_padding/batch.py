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


class Prefills(Enum):
    """What a step's requests with unread prompt tokens are to vLLM's V2 runner (`gather_batch_req_state`)."""

    NONE = auto()
    """There are none."""
    LIKE_DECODES = auto()
    """Each adds one token to tokens computed before, so decode graphs of one query length serve it."""
    SOME = auto()


class AttentionState(Enum):
    """What vllm-ascend calls a step (`AscendAttentionState`); its 310P runner asks."""

    PREFILL_NO_CACHE = auto()
    PREFILL_CACHE_HIT = auto()
    DECODE_ONLY = auto()
    CHUNKED_PREFILL = auto()
    SPEC_DECODING = auto()


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
    prefills: Prefills = Prefills.NONE
    """vLLM's V2 runner asks."""
    attention_state: AttentionState | None = None
    """vllm-ascend's 310P runner asks."""
    uniform_decode: UniformDecode = UniformDecode.BY_COUNTS
    allowed: frozenset[GraphMode] = ANY_MODE
    """The modes the runner lets the step use, such as `EAGER_ONLY` or `NO_FULL_GRAPH`."""
    may_split: bool = True
    """Whether the runner lets the step be split into microbatches."""

    def __post_init__(self) -> None:
        if not 0 <= self.num_reqs <= self.num_tokens <= self.num_reqs * self.max_query_len:
            raise ValueError(
                f"num_tokens={self.num_tokens} num_reqs={self.num_reqs} max_query_len={self.max_query_len}: every "
                "request has at least 1 token and at most max_query_len"
            )
        if not 0 <= self.num_first_chunks <= self.num_reqs:
            raise ValueError(f"num_first_chunks={self.num_first_chunks}: a step of {self.num_reqs} requests")
        if self.num_active_loras < 0:
            raise ValueError(f"num_active_loras={self.num_active_loras}: must be at least 0")
        if GraphMode.NONE not in self.allowed:
            raise ValueError(f"allowed={sorted(self.allowed)}: a step may always run eagerly")

    @property
    def uniform_query_len(self) -> int | None:
        """The tokens of every request, if all have the same number of them."""
        same = self.num_reqs > 0 and self.num_tokens == self.num_reqs * self.max_query_len
        return self.max_query_len if same else None

    def is_uniform_decode(self, query_len: int) -> bool:
        """Whether every request has exactly `query_len` tokens, or the runner was told so.

        Source: vLLM 0.32, `v1/worker/gpu_model_runner.py`, `_is_uniform_decode`.
        """
        if self.uniform_decode is not UniformDecode.BY_COUNTS:
            return self.uniform_decode is UniformDecode.FORCED
        return self.uniform_query_len == query_len


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
