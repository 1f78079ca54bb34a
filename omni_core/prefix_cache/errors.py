# SPDX-License-Identifier: Apache-2.0
"""Every way the cache says no. A message names the request, step, key or slot, the setting, and what to do.

Three families: misuse of a call (nothing was changed), a failure of one request (found in `StageCacheOutputs.failed`;
the other requests of the step are whole), and a failure of the cache itself (sticky until `reset`).
"""

from __future__ import annotations


class OmniPrefixCacheError(RuntimeError):
    """Root of every error of the prefix cache."""


class InvalidConfigError(OmniPrefixCacheError, ValueError):
    """A setting has a value the cache cannot run with."""


class HostMemoryError(OmniPrefixCacheError, MemoryError):
    """The cache would take more host memory than this process may use."""


class OmniPrefixCacheUnmatchError(OmniPrefixCacheError):
    """What the engine handed over does not match the KV state the cache mirrors. Never reported as a miss."""


class LayoutMismatchError(OmniPrefixCacheUnmatchError):
    """A step's layout disagrees with itself or with the tensors saved for it."""


class SlotOutOfRangeError(OmniPrefixCacheUnmatchError):
    """A slot or block id lies outside the mirrored KV cache."""


class BlockSizeMismatchError(OmniPrefixCacheUnmatchError):
    """Slots and positions disagree about the block size."""


class KeyShapeChangedError(OmniPrefixCacheUnmatchError):
    """A key came with another rank, width or dtype than the pool holds for it."""


class StepTooLargeError(OmniPrefixCacheError):
    """A step's rows do not fit one staging arena."""


class StepOrderError(OmniPrefixCacheError):
    """`save_outputs` was called without its `new_step_starts`."""


class UnknownStepError(OmniPrefixCacheError, KeyError):
    """The step id was never given out by `save_outputs`."""

    def __str__(self) -> str:
        return RuntimeError.__str__(self)


class StepAlreadyMaterializedError(OmniPrefixCacheError):
    """The step id was already consumed by `materialize`."""


class StepAlreadyDiscardedError(OmniPrefixCacheError):
    """The step id was already given up by `discard_step`."""


class RequestNotInStepError(OmniPrefixCacheError):
    """A request id asked of a step is not among the requests saved with it."""


class DraftCountError(OmniPrefixCacheError, ValueError):
    """A sampled count cannot be: a run with d draft tokens samples 1 to 1 + d."""


class DraftCountMissingError(OmniPrefixCacheError):
    """A request of the step has draft tokens, and no sampled count says which rows are valid."""


class UnknownKeyError(OmniPrefixCacheError, KeyError):
    """Rows were asked under a key that no step stored."""

    def __str__(self) -> str:
        return RuntimeError.__str__(self)


class OmniPrefixCacheStagingTimeoutError(OmniPrefixCacheError, TimeoutError):
    """No staging slot became free in time; names the steps and tasks that hold them."""


class JoinTimeoutError(OmniPrefixCacheError, TimeoutError):
    """A step's copy, write or read did not complete in time; names it and its state."""


class CacheFailedError(OmniPrefixCacheError):
    """A write failed and nothing can be trusted until `reset()`; `__cause__` is the first failure."""


class CacheClosedError(OmniPrefixCacheError):
    """The cache was closed."""


class RequestError(OmniPrefixCacheError, KeyError):
    """Root of the errors that concern one request; found in `StageCacheOutputs.failed`.

    A `KeyError` too, so that `in` and `get` of the outputs treat the request as one that has no rows.
    """

    def __init__(self, req_id: str, message: str) -> None:
        super().__init__(f"request {req_id!r}: {message}")
        self.req_id = req_id

    def __str__(self) -> str:
        return RuntimeError.__str__(self)


class RequestEventError(RequestError):
    """A request's event contradicts itself."""


class HitRowsAbsentError(RequestError):
    """vLLM skipped tokens whose hidden rows the cache does not hold."""


class PositionGapError(RequestError):
    """A step's positions do not continue where the request's last step ended."""


class RequestNotStartedError(RequestError):
    """A request is in a step but no STARTED event announced it (or `reset` forgot it)."""


class LifecycleError(RequestError):
    """The request's steps do not follow from each other, and no event says why."""


class ContentReplacedError(RequestError):
    """The request's content was replaced after the step was saved: its rows belong to a version that is gone."""


class ReadFailedError(RequestError):
    """The rows of a hit could not be read in time; they stay owed to the request."""
