# SPDX-License-Identifier: Apache-2.0
"""Hears when an output that vLLM returned early is complete, on whatever thread completes it.

With asynchronous scheduling, and with the second model runner always, `sample_tokens` returns an output whose sampled
tokens are still being copied. `get_output` waits for the copy: on a thread of the worker's (`WorkerAsyncOutputCopy` in
`v1/executor/multiproc_executor.py`), or on the engine's own where the engine runs in one process
(`v1/executor/uniproc_executor.py`). It is called once, in the order of steps. No method body of vLLM is copied: the
output's class becomes one that extends its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, cast, runtime_checkable


@runtime_checkable
class AsyncOutput(Protocol):
    """The part of vLLM's `AsyncModelRunnerOutput` that is used here."""

    def get_output(self) -> Any:
        """Wait for what was sampled; vLLM's `ModelRunnerOutput`."""
        ...


OnOutput = Callable[[Any | None], None]
"""Told of the complete output, or of `None` if completing it failed."""


def observe_output(output: AsyncOutput, on_output: OnOutput) -> None:
    """Let `on_output` be told when an output is complete. Engine thread, before anyone has asked for it."""
    observed = cast("Any", output)
    observed.__class__ = _observed_class(type(output))
    observed.omni_core_on_output = on_output


@functools.cache
def _observed_class(own: type[AsyncOutput]) -> type:
    # No mixin in front, as for a runner: Python lets an object change into a class with one more base only if its own
    # class has no base of a kind that vLLM's outputs have, an abstract one.
    def get_output(output: Any) -> Any:
        """Run vLLM's `get_output`, and tell of it before it returns: nobody acts on it before we have heard."""
        try:
            complete = own.get_output(output)
        except BaseException:
            output.omni_core_on_output(None)
            raise
        output.omni_core_on_output(complete)
        return complete

    return type(f"OmniCore{own.__name__}", (own,), {"get_output": get_output, "__doc__": own.__doc__})
