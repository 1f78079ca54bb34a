# SPDX-License-Identifier: Apache-2.0
"""Which graph vLLM's V1 runner chooses for a step.

Source: vLLM 0.32, `v1/cudagraph_dispatcher.py`, `CudagraphDispatcher`.
"""

from __future__ import annotations

from omni_core.backend.graph_padding.batch import PaddedBatch
from omni_core.backend.graph_padding.graph_config import GraphConfig
from omni_core.backend.graph_padding.graph_mode import ANY_MODE, GraphMode


class V1Dispatcher:
    """The smallest capture size that holds a step; no padding where no graph fits. Immutable; any thread.

    Args:
        config: what the engine captured graphs for.

    Raises:
        ValueError: decodes have graphs of their own and a capture size is no multiple of `query_len`; vLLM rounds them
            at start-up.
    """

    def __init__(self, config: GraphConfig) -> None:
        odd = [size for size in config.capture_sizes.sizes if size % config.query_len]
        if config.capture_mode.separate_decode_graphs and odd:
            raise ValueError(
                f"capture sizes {odd} are no multiples of query_len={config.query_len}: round them up, as vLLM does at "
                "start-up"
            )
        self._config = config

    @property
    def config(self) -> GraphConfig:
        """What the engine captured graphs for."""
        return self._config

    def dispatch(
        self,
        num_tokens: int,
        *,
        uniform_decode: bool,
        num_active_loras: int = 0,
        allowed: frozenset[GraphMode] = ANY_MODE,
    ) -> PaddedBatch:
        """What a step of `num_tokens` runs as.

        Raises:
            ValueError: no graph fits and `allowed` has no `NONE`.
        """
        size = self._config.capture_sizes.holding(num_tokens)
        if size is not None and self._config.lora.serving(num_active_loras) is not None:
            full = self._full_graph(size, uniform_decode=uniform_decode)
            if full is not None and GraphMode.FULL in allowed:
                return full
            if self._config.capture_mode.mixed is GraphMode.PIECEWISE and GraphMode.PIECEWISE in allowed:
                return PaddedBatch(mode=GraphMode.PIECEWISE, num_tokens=size)
        if GraphMode.NONE not in allowed:
            raise ValueError(f"num_tokens={num_tokens}: no graph of {sorted(allowed)} fits, and eager is not allowed")
        return PaddedBatch(mode=GraphMode.NONE, num_tokens=num_tokens)

    def _full_graph(self, size: int, *, uniform_decode: bool) -> PaddedBatch | None:
        config = self._config
        if config.capture_mode.separate_decode_graphs:
            query_len = config.query_len
            if not (uniform_decode and query_len <= size <= query_len * config.max_num_seqs):
                return None
        elif config.capture_mode.mixed is GraphMode.FULL:
            query_len = 1
        else:
            return None
        num_reqs = min(size // query_len, config.max_num_seqs)
        return PaddedBatch(mode=GraphMode.FULL, num_tokens=size, num_reqs=num_reqs)
