# SPDX-License-Identifier: Apache-2.0
"""Which graph vLLM's V2 runner chooses for a step.

Source: vLLM 0.32, `v1/worker/gpu/cudagraph_utils.py`, `CudaGraphManager` `_init_candidates`, `_maybe_ubatch_twin`,
`dispatch`, and `_is_compatible`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import groupby

from omni_core.backend.graph_padding.batch import PaddedBatch
from omni_core.backend.graph_padding.capture_sizes import round_up
from omni_core.backend.graph_padding.graph_config import GraphConfig
from omni_core.backend.graph_padding.graph_mode import ANY_MODE, GraphMode
from omni_core.backend.graph_padding.microbatches import NO_MICROBATCHES, Microbatches


class DecodeGraphs(Enum):
    """Which steps the graphs of decodes were captured for."""

    UNIFORM = auto()
    """Every request has the same number of tokens."""
    VARYING = auto()
    """Every request has at most `query_len` tokens: adaptive verification (`varlen_decode`)."""


class MixedGraphs(Enum):
    """How far the graphs of mixed steps go."""

    ALL_SIZES = auto()
    DECODE_SIZES = auto()
    """No further than the largest step of decodes (`use_kda_recoverssm`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class V2Config:
    """The settings only the V2 runner has.

    Raises:
        ValueError: query lengths that do not rise strictly from at least 1.
    """

    decode_graphs: DecodeGraphs = DecodeGraphs.UNIFORM
    mixed_graphs: MixedGraphs = MixedGraphs.ALL_SIZES
    query_lens: tuple[int, ...] = ()
    """Query lengths decodes may have where the number of drafts follows the batch size (`decode_tiers`); empty: one."""
    microbatches: Microbatches = NO_MICROBATCHES

    def __post_init__(self) -> None:
        if any(query_len < 1 for query_len in self.query_lens) or sorted(set(self.query_lens)) != list(self.query_lens):
            raise ValueError(f"query_lens={self.query_lens}: must rise strictly, from at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph:
    """One captured graph, at every adapter count alike."""

    num_tokens: int
    num_reqs: int | None
    uniform_query_len: int | None = None
    max_query_len: int | None = None
    num_ubatches: int = 1


class V2Dispatcher:
    """The smallest full graphs that hold a step, if one of them fits it; else the smallest piecewise graph; else none.

    Immutable; any thread. Graphs count as captured: before that, every step is eager.

    Args:
        config: what the engine captured graphs for.
        v2: the settings of this runner.
    """

    def __init__(self, config: GraphConfig, v2: V2Config) -> None:
        self._config = config
        self._v2 = v2
        decodes = tuple(self._decode_graphs()) if config.capture_mode.separate_decode_graphs else ()
        mixed = tuple(self._mixed_graphs())
        self._groups = {
            GraphMode.FULL: _by_num_tokens(decodes + (mixed if config.capture_mode.mixed is GraphMode.FULL else ())),
            GraphMode.PIECEWISE: _by_num_tokens(mixed if config.capture_mode.mixed is GraphMode.PIECEWISE else ()),
        }

    @property
    def config(self) -> GraphConfig:
        """What the engine captured graphs for."""
        return self._config

    @property
    def v2(self) -> V2Config:
        """The settings of this runner."""
        return self._v2

    def dispatch(
        self,
        num_tokens: int,
        *,
        num_reqs: int,
        uniform_query_len: int | None,
        max_query_len: int | None,
        num_active_loras: int = 0,
        num_ubatches: int = 1,
        allowed: frozenset[GraphMode] = ANY_MODE,
    ) -> PaddedBatch:
        """What a step of `num_tokens` runs as.

        Args:
            num_tokens: 0 is always eager.
            num_reqs: requests of the step.
            uniform_query_len: the tokens of every request, if the step is one of uniform decodes.
            max_query_len: most tokens of one request; `None`: the step has prefills.
            num_active_loras: different adapters in the step.
            num_ubatches: parts the step is split into.
            allowed: modes the step may use.
        """
        if num_tokens > 0 and self._serves(num_active_loras):
            for mode in (GraphMode.FULL, GraphMode.PIECEWISE):
                for graph in self._smallest_holding(mode, num_tokens) if mode in allowed else ():
                    if (
                        graph.uniform_query_len in (None, uniform_query_len)
                        and (
                            graph.max_query_len is None
                            or (max_query_len is not None and max_query_len <= graph.max_query_len)
                        )
                        and (graph.num_reqs is None or num_reqs <= graph.num_reqs)
                        and graph.num_ubatches == num_ubatches
                    ):
                        return PaddedBatch(
                            mode=mode,
                            num_tokens=graph.num_tokens,
                            num_reqs=graph.num_reqs,
                            num_ubatches=num_ubatches,
                        )
        return PaddedBatch(mode=GraphMode.NONE, num_tokens=num_tokens, num_ubatches=num_ubatches)

    def _serves(self, num_active_loras: int) -> bool:
        largest = self._config.lora.counts[-1]
        return self._config.lora.serving(min(num_active_loras, largest) if largest else num_active_loras) is not None

    def _smallest_holding(self, mode: GraphMode, num_tokens: int) -> tuple[_Graph, ...]:
        sizes, groups = self._groups[mode]
        index = bisect_left(sizes, num_tokens)
        return groups[index] if index < len(groups) else ()

    def _decode_graphs(self) -> Iterator[_Graph]:
        config = self._config
        most_tokens = config.max_num_seqs * config.query_len
        for size in config.capture_sizes.sizes:
            if self._v2.decode_graphs is DecodeGraphs.VARYING:
                if size <= most_tokens:
                    num_reqs = min(size, config.max_num_seqs)
                    yield _Graph(num_tokens=size, num_reqs=num_reqs, max_query_len=config.query_len)
                continue
            for query_len in self._v2.query_lens or (config.query_len,):
                num_tokens = round_up(size, query_len)
                num_reqs = num_tokens // query_len
                if num_tokens <= min(most_tokens, config.capture_sizes.largest) and num_reqs <= config.max_num_seqs:
                    graph = _Graph(num_tokens=num_tokens, num_reqs=num_reqs, uniform_query_len=query_len)
                    yield graph
                    yield from self._split_twin(graph)

    def _mixed_graphs(self) -> Iterator[_Graph]:
        config = self._config
        for size in config.capture_sizes.sizes:
            if self._v2.mixed_graphs is MixedGraphs.DECODE_SIZES and size > config.max_num_seqs * config.query_len:
                continue
            if config.capture_mode.mixed is not GraphMode.FULL:
                yield _Graph(num_tokens=size, num_reqs=None)
                continue
            graph = _Graph(num_tokens=size, num_reqs=min(size, config.max_num_seqs))
            yield graph
            yield from self._split_twin(graph)

    def _split_twin(self, graph: _Graph) -> Iterator[_Graph]:
        """The same graph for a step split into microbatches, where every request has the same number of tokens."""
        microbatches = self._v2.microbatches
        assert graph.num_reqs is not None
        query_len, rest = divmod(graph.num_tokens, graph.num_reqs)
        if (
            not rest
            and graph.uniform_query_len in (None, query_len)
            and graph.num_tokens >= microbatches.num_ubatches
            and microbatches.wanted(graph.num_tokens, uniform_decode=True)
        ):
            yield replace(graph, num_ubatches=microbatches.num_ubatches, uniform_query_len=query_len)


def _by_num_tokens(graphs: tuple[_Graph, ...]) -> tuple[list[int], list[tuple[_Graph, ...]]]:
    """Rising token counts, and the graphs of each."""
    ordered = sorted(graphs, key=_num_tokens)
    groups = [(num_tokens, tuple(group)) for num_tokens, group in groupby(ordered, _num_tokens)]
    return [num_tokens for num_tokens, _ in groups], [group for _, group in groups]


def _num_tokens(graph: _Graph) -> int:
    return graph.num_tokens
