# SPDX-License-Identifier: Apache-2.0
"""The engine of the delivery world: one request, its block table, and a KV cache whose free blocks others take."""

from collections.abc import Iterator

from .delivery_cache import Cache
from .delivery_rules import DeliveryWorldSize, Happening
from .delivery_state import FOREIGN, REJECTED, DeliveryState, Life, Phase, Run
from .explorer import Move
from .storage_state import put


class Engine:
    """Blocks hold one token. Its moves are whole calls: `new_step_starts` and `save_outputs`, joined where nothing that
    comes between them matters.
    """

    def __init__(self, size: DeliveryWorldSize, cache: Cache) -> None:
        self._size = size
        self._cache = cache

    def moves(self, state: DeliveryState) -> Iterator[Move]:
        if state.phase is Phase.OVER:
            return
        if state.entering:
            yield from self._runs(state)
            if Happening.UNSAVED_STEP in self._size.happenings:
                yield Move("engine: the step does not run the request", self._skip)
            return
        yield from self._others(state)
        if state.phase is Phase.NEW:
            yield Move("engine: STARTED without a hit", lambda changed: self._start(changed, 0))
            longest = self._longest_hit(state)
            if longest:
                yield Move(f"engine: STARTED with a hit of {longest}", lambda changed: self._start(changed, longest))
            return
        if state.phase is Phase.RUNNING:
            yield from self._runs(state)
            if Happening.PREEMPTION in self._size.happenings and state.preemptions < self._size.max_preemptions:
                yield Move("engine: preempts the request", self._preempt)
        elif state.steps < self._size.num_steps:
            for hit in range(self._longest_hit(state) + 1):
                yield Move(
                    f"engine: RESUMED with a hit of {hit}, {state.known} tokens known",
                    lambda changed, hit=hit: self._resume(changed, hit),
                )
        yield from self._endings(state)

    # -- other requests

    def _others(self, state: DeliveryState) -> Iterator[Move]:
        if state.thefts == self._size.max_thefts:
            return
        for block in state.free_blocks:
            if Happening.THIEF in self._size.happenings and state.blocks[block] is not None:
                yield Move(
                    f"engine: another request takes block {block}",
                    lambda changed, block=block: self._take(changed, block, (FOREIGN, 0)),
                )
        blank = next((block for block in state.free_blocks if state.blocks[block] is None), None)
        if Happening.TWIN in self._size.happenings and blank is not None and state.phase is not Phase.RUNNING:
            position = self._longest_hit(state)
            if position < state.known - 1:
                yield Move(
                    f"engine: another request with the same tokens computes position {position} in block {blank}",
                    lambda changed: self._take(changed, blank, changed.content(position)),
                )

    def _take(self, state: DeliveryState, block: int, content: tuple[int, int]) -> None:
        state.thefts += 1
        self._cache.start_tenancy(state, block)
        state.blocks = put(state.blocks, block, content)
        state.rows = put(state.rows, block, content)

    # -- entering

    def _hit_blocks(self, state: DeliveryState) -> list[int]:
        """The blocks of the longest hit: one short of the tokens known, for the last one is computed always."""
        blocks = []
        for position in range(state.known - 1):
            block = next((b for b in range(len(state.blocks)) if state.blocks[b] == state.content(position)), None)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _longest_hit(self, state: DeliveryState) -> int:
        return len(self._hit_blocks(state))

    def _enter(self, state: DeliveryState, hit: int) -> None:
        state.table = tuple(self._hit_blocks(state)[:hit])
        state.computed = hit
        state.reached = max(state.reached, hit)
        state.phase = Phase.RUNNING
        state.entering = True

    def _start(self, state: DeliveryState, hit: int) -> None:
        self._enter(state, hit)
        self._cache.start(state, state.table, hit)

    def _resume(self, state: DeliveryState, hit: int) -> None:
        self._enter(state, hit)
        self._cache.resume(state, state.table, hit, state.known)

    def _skip(self, state: DeliveryState) -> None:
        state.entering = False
        self._cache.end_unsaved(state)

    # -- a step

    def _runs(self, state: DeliveryState) -> Iterator[Move]:
        if state.steps == self._size.num_steps or len(state.open_steps) == self._size.open_steps:
            return
        left = state.known - state.computed
        for rows in {1, left}:
            if state.known < self._size.max_tokens or rows < left:
                yield self._run(state, rows, num_drafts=0, num_sampled=int(rows == left))
        happenings = self._size.happenings
        has_drafts = Happening.DRAFTS in happenings and state.known > self._size.prompt_tokens
        if has_drafts and (left == 1 or Happening.LONG_DRAFT_RUNS in happenings):
            for num_drafts in range(1, min(self._size.max_drafts, self._size.max_tokens - state.known - 1) + 1):
                for num_sampled in range(1, num_drafts + 2):
                    yield self._run(state, left, num_drafts, num_sampled)

    def _run(self, state: DeliveryState, rows: int, num_drafts: int, num_sampled: int) -> Move:
        """A run of `rows` rows, and one more for each draft; it samples a token for each draft accepted, and one."""
        first, end = state.computed, state.computed + rows + num_drafts
        num_valid = rows + (num_sampled - 1 if num_drafts else 0)
        drafts = f", {num_drafts} drafts of which {num_sampled - 1} accepted" if num_drafts else ""

        def save(changed: DeliveryState) -> None:
            changed.entering = False
            changed.steps += 1
            while len(changed.table) < end:
                self._allocate(changed)
            for position in range(first, end):
                is_valid = position < first + num_valid
                block = changed.table[position]
                content = changed.content(position) if is_valid else (REJECTED, position)
                changed.blocks = put(changed.blocks, block, content if is_valid else None)
                changed.rows = put(changed.rows, block, content)
            run = Run(changed.steps, first, end, num_drafts, num_valid, num_sampled)
            self._cache.save(changed, run, changed.table)
            changed.computed = first + num_valid
            changed.reached = max(changed.reached, changed.computed)
            changed.known += num_sampled

        return Move(f"engine: step {state.steps + 1} runs positions {first} to {end - 1}{drafts}", save)

    def _allocate(self, state: DeliveryState) -> None:
        """The next block of the table: a blank one if there is one, so that free blocks stay hits for long."""
        free = state.free_blocks
        block = min(free, key=lambda each: (state.blocks[each] is not None, each))
        self._cache.start_tenancy(state, block)
        state.blocks = put(state.blocks, block, None)
        state.table = (*state.table, block)

    # -- leaving

    def _preempt(self, state: DeliveryState) -> None:
        """The cache hears of it only when the request comes back."""
        state.phase = Phase.PREEMPTED
        state.preemptions += 1
        state.table = ()
        state.computed = 0

    def _endings(self, state: DeliveryState) -> Iterator[Move]:
        yield Move("engine: FINISHED", self._finish)
        if state.serial > 1 or state.steps == self._size.num_steps:
            return
        if Happening.REPLACEMENT in self._size.happenings:
            for kept in {0, min(state.computed, 1)}:
                yield Move(
                    f"engine: REPLACED, {kept} tokens kept", lambda changed, kept=kept: self._replace(changed, kept)
                )
        if Happening.ID_REUSE in self._size.happenings:
            yield Move("engine: FINISHED and STARTED again under the same id", self._reuse)

    def _finish(self, state: DeliveryState) -> None:
        self._cache.end(state)
        state.phase = Phase.OVER

    def _replace(self, state: DeliveryState, kept: int) -> None:
        kept_table = state.table[:kept]
        self._cache.replace(state)
        self._begin_version(state, kept)
        state.table = kept_table
        state.computed = state.reached = kept
        self._cache.start(state, kept_table, kept)

    def _reuse(self, state: DeliveryState) -> None:
        self._cache.end(state)
        self._begin_version(state, self._size.prompt_tokens)
        hit = self._longest_hit(state)
        state.reached = 0
        self._enter(state, hit)
        self._cache.start(state, state.table, hit)

    def _begin_version(self, state: DeliveryState, same_tokens: int) -> None:
        """Contents from `same_tokens` on are new."""
        state.lives = (*state.lives, Life(state.reached, state.origins))
        fresh = (state.serial + 1,) * (self._size.max_tokens - same_tokens)
        state.origins = state.origins[:same_tokens] + fresh
        state.known = self._size.prompt_tokens
        state.phase = Phase.RUNNING
        state.entering = True
        state.reached = 0
