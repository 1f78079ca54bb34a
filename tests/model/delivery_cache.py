# SPDX-License-Identifier: Apache-2.0
"""What the cache does with one request's rows: who is promised, owed, given and told what. Each method is atomic."""

from .delivery_rules import Change
from .delivery_state import NO_POSITIONS, REJECTED, Content, DeliveryState, HandedOver, OpenStep, Phase, Rows, Run
from .explorer import Violation
from .storage_state import put


class Cache:
    """Every method changes the state it is given. Reads give what lies there when they are planned: the storage world
    shows that they do.
    """

    def __init__(self, changes: frozenset[Change], *, two_phase: bool) -> None:
        self._changes = changes
        self._two_phase = two_phase

    # -- entering

    def start_tenancy(self, state: DeliveryState, block: int) -> None:
        state.rows = put(state.rows, block, None)
        state.held = tuple(held and of != block for held, of in zip(state.held, state.cache_table, strict=True))

    def start(self, state: DeliveryState, table: tuple[int, ...], hit: int) -> None:
        """A life or version begins; the tenancies of its blocks have begun."""
        state.serial += 1
        state.missing = NO_POSITIONS if Change.OLD_MISSING_KEPT not in self._changes else state.missing
        state.backing_off = False
        state.computed_upto = state.promised_upto = state.draft_floor = hit
        self._take_table(state, table)
        state.old_blocks = table[:hit]
        state.hit = self._read(state, frozenset(range(hit)))

    def resume(self, state: DeliveryState, table: tuple[int, ...], hit: int, known: int) -> None:
        """The request was preempted and comes back."""
        if state.draft_floor < state.computed_upto and Change.REJECTION_KEPT_ON_RESUME not in self._changes:
            state.promised_upto = min(state.promised_upto, max(known - 1, state.draft_floor))
        promised = state.promised_upto
        if Change.MISSING_LOST_ON_RESUME in self._changes:
            state.missing = NO_POSITIONS
        self._take_table(state, table)
        state.old_blocks += table[len(state.old_blocks) :]
        state.computed_upto = state.draft_floor = hit
        if Change.RESUME_LOWERS_PROMISE in self._changes:
            state.promised_upto = hit
        elif Change.RESUME_DOES_NOT_PROMISE not in self._changes:
            state.promised_upto = max(promised, hit)
        if hit <= promised and Change.WHOLE_HIT_READ_AGAIN not in self._changes:
            return
        if Change.LONGER_HIT_NOT_READ in self._changes:
            return
        positions = frozenset(range(0 if Change.WHOLE_HIT_READ_AGAIN in self._changes else promised, hit))
        if not state.backing_off:
            owed = frozenset(position for position in state.missing if position < min(promised, hit))
            positions |= owed
            state.missing -= owed
        state.hit = self._read(state, positions)

    def replace(self, state: DeliveryState) -> None:
        """The version ends: nothing of it is delivered, owed or reported any more."""
        state.replaced |= {state.serial}
        if Change.OLD_VERSION_DELIVERED not in self._changes:
            state.open_steps = tuple(
                step._replace(failed=step.failed or step.serial == state.serial) for step in state.open_steps
            )
        state.reported = frozenset(each for each in state.reported if each[0] != state.serial)

    def end(self, state: DeliveryState) -> None:
        """The life ends; what is still missing is reported."""
        self._report(state, state.serial, state.missing)
        state.missing = NO_POSITIONS

    def _take_table(self, state: DeliveryState, table: tuple[int, ...]) -> None:
        state.cache_table = table
        state.held = (True,) * len(table)

    def _read(self, state: DeliveryState, positions: frozenset[int]) -> Rows:
        rows = []
        for position in sorted(positions):
            if Change.OWED_FROM_OLD_BLOCKS in self._changes:
                rows.append((position, state.rows[state.old_blocks[position]]))
            elif position < len(state.cache_table) and state.held[position]:
                rows.append((position, state.rows[state.cache_table[position]]))
            else:
                rows.append((position, None))
        return tuple(rows)

    # -- a step

    def save(self, state: DeliveryState, run: Run, table: tuple[int, ...]) -> None:
        """The request's run is saved; its rows are stored."""
        first, end = run.first, run.end
        self._expect(state, first)
        state.cache_table = table
        state.held += (True,) * (len(table) - len(state.held))
        before = min(max(state.promised_upto - first, 0), end - first)
        if Change.RECOMPUTED_ROWS_TWICE in self._changes:
            before = 0
        owed: Rows = ()
        if not state.hit and not state.backing_off:
            positions = frozenset(
                each for each in state.missing if each < end or Change.OWED_AFTER_THE_RUN in self._changes
            )
            state.missing -= positions
            owed = self._read(state, positions)
        for position, content in (*state.hit, *owed):
            if content is None:
                raise Violation("b", f"position {position} was computed, and no row of it is found: the request fails")
        if not state.open_steps and not state.handed_over and state.last_taken and not state.hit:
            late = [position for position in state.missing if position < end]
            if late:
                raise Violation("k", f"positions {late} are still not carried, although the consumer takes rows again")
        state.open_steps = (*state.open_steps, OpenStep(state.serial, run, before, state.hit, owed))
        state.hit = ()
        state.promised_upto = max(state.promised_upto, end)
        state.computed_upto = end
        state.draft_floor = end - run.num_drafts
        state.old_blocks = (*state.old_blocks[:first], *table[first:end], *state.old_blocks[end:])

    def _expect(self, state: DeliveryState, first: int) -> None:
        """A run continues where the last one ended, or where drafts of it were rejected."""
        if first == state.computed_upto:
            return
        if not state.draft_floor <= first < state.computed_upto:
            raise Violation("b", f"a run at {first} is refused; {state.computed_upto} is expected")
        state.computed_upto = first
        if Change.REJECTION_AS_RESUME not in self._changes:
            state.promised_upto = min(state.promised_upto, first)

    def end_unsaved(self, state: DeliveryState) -> None:
        """The step that let the request in did not run it."""
        if Change.UNSAVED_HIT_LOST not in self._changes:
            state.missing |= frozenset(position for position, _ in state.hit)
        state.hit = ()

    # -- the consumer

    def materialize(self, state: DeliveryState, step: OpenStep) -> None:
        state.open_steps = tuple(each for each in state.open_steps if each != step)
        if step.failed:
            return
        rows = (*step.hit, *step.owed, *self._own_rows(state, step))
        lowers = Change.LATE_COUNT_LOWERS_PROMISE in self._changes and step.run.num_drafts > 0
        if lowers and step.serial == state.serial:
            state.promised_upto = min(state.promised_upto, step.run.first + step.run.num_valid)
        if not self._two_phase:
            self._deliver(state, step.serial, rows)
            self._take_again(state, step.serial)
            return
        state.handed_over = (*state.handed_over, HandedOver(step.serial, rows, bool(step.owed)))
        if Change.OWED_WHEN_HANDED_OVER in self._changes:
            self._owe(state, step.serial, frozenset(position for position, _ in rows))

    def discard(self, state: DeliveryState, step: OpenStep) -> None:
        state.open_steps = tuple(each for each in state.open_steps if each != step)
        if step.failed:
            return
        state.last_taken = False
        rows = (*step.hit, *self._own_rows(state, step))
        if Change.MISSING_LOST_ON_DISCARD not in self._changes:
            rows = (*rows, *step.owed)
        positions = frozenset(position for position, _ in rows)
        if Change.PROMISE_FALLS_ON_DISCARD in self._changes and positions and step.serial == state.serial:
            state.promised_upto = min(state.promised_upto, *positions)
            return
        self._owe(state, step.serial, positions)
        if step.owed and step.serial == state.serial:
            state.backing_off = True

    def acknowledge(self, state: DeliveryState, given: HandedOver) -> None:
        state.handed_over = tuple(each for each in state.handed_over if each != given)
        self._deliver(state, given.serial, given.rows)
        self._take_again(state, given.serial)

    def release(self, state: DeliveryState, given: HandedOver) -> None:
        state.handed_over = tuple(each for each in state.handed_over if each != given)
        state.last_taken = False
        if Change.RELEASE_FORGETS in self._changes or Change.OWED_WHEN_HANDED_OVER in self._changes:
            return
        self._owe(state, given.serial, frozenset(position for position, _ in given.rows))
        if given.carried_owed and given.serial == state.serial:
            state.backing_off = True

    def _take_again(self, state: DeliveryState, serial: int) -> None:
        """The consumer took rows of this serial."""
        if serial == state.serial:
            state.last_taken = True
            state.backing_off = state.backing_off and Change.BACK_OFF_FOR_EVER in self._changes

    def _own_rows(self, state: DeliveryState, step: OpenStep) -> Rows:
        """Rows of the run that are delivered: not promised before, not of rejected drafts."""
        run = step.run
        num_valid = run.num_valid
        if run.num_drafts and Change.COUNT_IS_OF_TOKENS in self._changes:
            num_valid = run.num_sampled
        end = run.end if Change.REJECTED_ROWS_DELIVERED in self._changes else run.first + num_valid
        return tuple(
            (position, _content(state, step, position)) for position in range(run.first + step.num_before, end)
        )

    def _owe(self, state: DeliveryState, serial: int, positions: frozenset[int]) -> None:
        if serial == state.serial and state.phase is not Phase.OVER:
            state.missing |= positions
        elif serial not in state.replaced:
            self._report(state, serial, positions)
        elif Change.OLD_VERSION_OWED in self._changes:
            state.missing |= positions

    def _report(self, state: DeliveryState, serial: int, positions: frozenset[int]) -> None:
        for position in sorted(positions):
            self._count(state, serial, position)
            state.reported |= {(serial, position)}

    def _deliver(self, state: DeliveryState, serial: int, rows: Rows) -> None:
        if serial in state.replaced:
            if rows and not self._two_phase:
                raise Violation("j", f"rows of a replaced version are delivered: positions {[row[0] for row in rows]}")
            return
        for position, content in rows:
            if content != state.content(position, serial):
                raise Violation(
                    "a", f"position {position} is delivered as {content}, right is {state.content(position, serial)}"
                )
            self._count(state, serial, position)
            state.delivered |= {(serial, position)}

    def _count(self, state: DeliveryState, serial: int, position: int) -> None:
        if (serial, position) in state.delivered or (serial, position) in state.reported:
            raise Violation("h", f"position {position} is delivered or reported twice")


def _content(state: DeliveryState, step: OpenStep, position: int) -> Content:
    """What a row of the step's own run is of."""
    if position >= step.run.first + step.run.num_valid:
        return (REJECTED, position)
    return state.content(position, step.serial)
