# SPDX-License-Identifier: Apache-2.0
"""The delivery world: one request, preempted, replaced and speculated with, and a consumer who may leave its rows."""

from collections.abc import Iterable, Iterator

from .delivery_cache import Cache
from .delivery_engine import Engine
from .delivery_rules import Change, DeliveryWorldSize, Happening
from .delivery_state import DeliveryState, Phase
from .explorer import Move, Violation


class DeliveryWorld:
    """Properties: (a) right row, (b) no needless failure, (h) no position twice, (i) none neither delivered nor
    reported, (j) nothing of a replaced version, (k) owed rows come when the consumer takes rows again.
    """

    def __init__(self, size: DeliveryWorldSize, changes: Iterable[Change] = ()) -> None:
        self._size = size
        self._two_phase = Happening.TWO_PHASE in size.happenings
        self._cache = Cache(frozenset(changes), two_phase=self._two_phase)
        self._engine = Engine(size, self._cache)

    def initial(self) -> DeliveryState:
        return DeliveryState(self._size)

    def moves(self, state: DeliveryState) -> Iterator[Move]:
        yield from self._engine.moves(state)
        for step in state.open_steps:
            number = step.run.number
            yield Move(
                f"consumer: materialize({number})", lambda changed, step=step: self._cache.materialize(changed, step)
            )
            yield Move(
                f"consumer: discard_step({number})", lambda changed, step=step: self._cache.discard(changed, step)
            )
        for given in state.handed_over:
            positions = [position for position, _ in given.rows]
            yield Move(
                f"consumer: acknowledges positions {positions}",
                lambda changed, given=given: self._cache.acknowledge(changed, given),
            )
            yield Move(
                f"consumer: releases positions {positions} without acknowledging them",
                lambda changed, given=given: self._cache.release(changed, given),
            )

    def check_at_rest(self, state: DeliveryState) -> None:
        if state.phase is not Phase.OVER:
            return  # the search ends here: the engine may go on only with a larger world
        reached = [life.reached for life in state.lives] + [state.reached]
        for serial in range(1, state.serial + 1):
            for position in range(reached[serial]):
                one = (serial, position)
                if serial not in state.replaced and one not in state.delivered and one not in state.reported:
                    raise Violation("i", f"position {position} is neither delivered nor reported")
