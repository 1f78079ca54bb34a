# SPDX-License-Identifier: Apache-2.0
"""Whether a step's layout fits itself, the step and the mirrored KV cache, before anything is changed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from omni_core.prefix_cache.config import PrefixCacheConfig
from omni_core.prefix_cache.errors import BlockSizeMismatchError, LayoutMismatchError, SlotOutOfRangeError
from omni_core.prefix_cache.events import StepLayout


class LayoutChecker:
    """Refuses layouts. Engine thread only. Remembers the last batch: a decode phase brings it step after step."""

    def __init__(self, config: PrefixCacheConfig) -> None:
        self._block_size = config.block_size
        self._num_blocks = config.num_blocks
        self._num_slots = config.num_slots
        self._known_req_ids: tuple[str, ...] = ()
        self._known_starts = b""
        self._known_dtype: np.dtype[np.int64] | None = None

    def check(self, layout: StepLayout, num_tokens: int) -> bool:
        """Refuse a layout that disagrees with itself, with the step, or with the mirrored KV cache.

        Returns:
            Whether every row has a slot.

        Raises:
            LayoutMismatchError: counts, bounds or positions do not fit together.
            SlotOutOfRangeError: a slot lies outside the pool.
            BlockSizeMismatchError: a slot's offset in its block is not its position's.
        """
        req_ids, starts, positions, slots = layout.req_ids, layout.starts, layout.positions, layout.slots
        if not _are_flat_integers(layout):
            raise _not_flat_integers(layout)
        if len(positions) != num_tokens or len(slots) != num_tokens:
            raise LayoutMismatchError(
                f"num_tokens_unpadded={num_tokens}, but the layout has {len(positions)} positions and {len(slots)} "
                "slots; leave padding rows out of the layout"
            )
        self._check_batch(req_ids, starts, num_tokens)
        if np.minimum.reduce(positions) < 0 or (num_tokens > len(req_ids) and not _are_consecutive(positions, starts)):
            raise LayoutMismatchError("positions of a request must be consecutive and not negative")
        if np.maximum.reduce(positions) >= self._num_slots:
            raise LayoutMismatchError(
                f"position {positions.max()} lies beyond the KV cache, which holds {self._num_slots} tokens "
                f"(num_blocks={self._num_blocks} x block_size={self._block_size})"
            )
        lowest = int(np.minimum.reduce(slots))
        if lowest < -1 or np.maximum.reduce(slots) >= self._num_slots:
            bad = slots[(slots >= self._num_slots) | (slots < -1)][0]
            raise SlotOutOfRangeError(
                f"slot {bad} lies outside the pool of num_blocks={self._num_blocks} x block_size={self._block_size} = "
                f"{self._num_slots} slots; build the cache with the engine's geometry"
            )
        if layout.num_draft_tokens is not None:
            _check_drafts(layout.num_draft_tokens, starts)
        if np.count_nonzero((slots - positions) % self._block_size):
            self._check_offsets(positions, slots)
        return lowest >= 0

    def _check_batch(self, req_ids: tuple[str, ...], starts: npt.NDArray[np.int64], num_tokens: int) -> None:
        as_bytes = starts.tobytes()
        if as_bytes == self._known_starts and req_ids == self._known_req_ids and starts.dtype == self._known_dtype:
            if int(starts[-1]) != num_tokens:
                raise _starts_do_not_fit(starts, num_tokens)
            return
        if len(starts) != len(req_ids) + 1:
            raise LayoutMismatchError(
                f"layout has {len(req_ids)} requests and {len(starts)} starts; starts must hold one more than requests"
            )
        if len(set(req_ids)) != len(req_ids):
            twice = next(req_id for index, req_id in enumerate(req_ids) if req_id in req_ids[:index])
            raise LayoutMismatchError(f"request {twice!r} occurs twice in the layout's req_ids")
        if starts[0] != 0 or starts[-1] != num_tokens or not (starts[1:] > starts[:-1]).all():
            raise _starts_do_not_fit(starts, num_tokens)
        if num_tokens == 0:
            raise LayoutMismatchError("a step without rows is not saved; call new_step_starts alone")
        self._known_req_ids, self._known_starts, self._known_dtype = req_ids, as_bytes, starts.dtype

    def _check_offsets(self, positions: npt.NDArray[np.int64], slots: npt.NDArray[np.int64]) -> None:
        off = ((slots - positions) % self._block_size != 0) & (slots >= 0)
        if off.any():
            at = int(np.argmax(off))
            raise BlockSizeMismatchError(
                f"slot {slots[at]} for position {positions[at]} cannot be right with block_size={self._block_size}: "
                f"offsets {slots[at] % self._block_size} and {positions[at] % self._block_size} differ; "
                "build the cache with the block size of the runner's block table"
            )


def _are_flat_integers(layout: StepLayout) -> bool:
    starts, positions, slots, drafts = layout.starts, layout.positions, layout.slots, layout.num_draft_tokens
    try:
        return (
            starts.ndim == positions.ndim == slots.ndim == 1
            and starts.dtype.kind in "iu"
            and positions.dtype.kind in "iu"
            and slots.dtype.kind in "iu"
            and (drafts is None or (drafts.ndim == 1 and drafts.dtype.kind in "iu"))
        )
    except AttributeError:  # no arrays
        return False


def _not_flat_integers(layout: StepLayout) -> LayoutMismatchError:
    arrays = {"starts": layout.starts, "positions": layout.positions, "slots": layout.slots}
    if layout.num_draft_tokens is not None:
        arrays["num_draft_tokens"] = layout.num_draft_tokens
    told = ", ".join(f"{name} is {_kind(array)}" for name, array in arrays.items())
    return LayoutMismatchError(f"layout: {told}; make each a flat numpy array of integers")


def _kind(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype}, shape {value.shape}"
    return f"a {type(value).__name__}"


def _starts_do_not_fit(starts: npt.NDArray[np.int64], num_tokens: int) -> LayoutMismatchError:
    return LayoutMismatchError(
        f"starts run from {starts[0]} to {starts[-1]} for {num_tokens} rows; they must rise from 0 to the row count"
    )


def _check_drafts(drafts: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]) -> None:
    lengths = starts[1:] - starts[:-1]
    if len(drafts) != len(lengths) or (drafts < 0).any() or (drafts >= lengths).any():
        raise LayoutMismatchError(
            f"num_draft_tokens={drafts.tolist()} for runs of {lengths.tolist()} rows: give one count per request, "
            "smaller than its run, because the first row of a run is never a draft's"
        )


def _are_consecutive(positions: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]) -> bool:
    steps = positions[1:] - positions[:-1]
    steps[starts[1:-1] - 1] = 1
    return bool((steps == 1).all())
