# SPDX-License-Identifier: Apache-2.0
"""How a step runs, and which graphs an engine captured.

Source: `CUDAGraphMode` in vLLM 0.32, `config/compilation.py`; vllm-ascend uses the same enum.
"""

from __future__ import annotations

from enum import Enum, IntEnum


class GraphMode(IntEnum):
    """How one step runs. Ranks that must agree take the smallest."""

    NONE = 0
    """Eager."""
    PIECEWISE = 1
    """Graphs between the attention layers; any number of requests."""
    FULL = 2
    """One graph of the whole forward, for a number of requests."""


ANY_MODE = frozenset(GraphMode)
"""What a step may use unless its runner forbids a mode."""
EAGER_ONLY = frozenset({GraphMode.NONE})
"""vLLM's `force_eager`."""
NO_FULL_GRAPH = frozenset({GraphMode.NONE, GraphMode.PIECEWISE})
"""A step of an encoder-decoder model with encoder output, or, in vllm-ascend, one with cascade attention."""


class CaptureMode(Enum):
    """The `cudagraph_mode` of an engine: the mode of steps of uniform decodes, then the mode of all other steps."""

    NONE = (GraphMode.NONE, GraphMode.NONE)
    PIECEWISE = (GraphMode.PIECEWISE, GraphMode.PIECEWISE)
    FULL = (GraphMode.FULL, GraphMode.FULL)
    FULL_DECODE_ONLY = (GraphMode.FULL, GraphMode.NONE)
    FULL_AND_PIECEWISE = (GraphMode.FULL, GraphMode.PIECEWISE)

    @property
    def decode(self) -> GraphMode:
        """How steps of uniform decodes run."""
        return self.value[0]

    @property
    def mixed(self) -> GraphMode:
        """How all other steps run."""
        return self.value[1]

    @property
    def separate_decode_graphs(self) -> bool:
        """Whether steps of uniform decodes have graphs of their own."""
        return self.decode is not self.mixed
