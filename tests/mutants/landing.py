# SPDX-License-Identifier: Apache-2.0
"""Bugs in how rows get into the pool: the committer, what it sets aside, staging pages, states, failures."""

from mutants.model import CORE, WORKLOADS, Edit, Mutant, bug, files

READS = files("core/test_reads_and_rescue.py")
PAGES = files("core/test_page_ownership.py", "core/test_owed_rows.py", "core/test_reset_and_close.py")
SCHEDULES = files("core/test_mutant_schedules.py")
FAILURES = files("core/test_failure_and_waits.py", "core/test_task_states.py")

LANDING = (
    bug(
        "rescue-flagged-by-slot",
        "rows about to be overwritten are set aside for every read of the slot, also for one that wants another row",
        CORE + "reads.py",
        "owed = candidates & ~self.resolved & (self.rescue == _NO_RESCUE) & (self.ids == stamps)",
        "owed = candidates & ~self.resolved & (self.rescue == _NO_RESCUE)",
        READS,
        listed_as="rescue flagged by slot instead of by the id stamped there",
    ),
    bug(
        "rescue-before-landing",
        "a write sets rows aside for the reads that wait for this very write, before it has put its rows there",
        CORE + "pool_writer.py",
        """\
            rescues = self._flag_rescues(keys, slots)
        sides""",
        """\
            self._table.stamp(keys, slots, write_id)
            rescues = self._flag_rescues(keys, slots)
        sides""",
        READS,
        listed_as="rescue before landing",
    ),
    bug(
        "nothing-set-aside",
        "rows that a read still wants are overwritten",
        CORE + "pool_writer.py",
        """\
            rescues = self._flag_rescues(keys, slots)
        sides""",
        """\
            rescues = self._flag_rescues(keys, slots[:0])
        sides""",
        READS,
    ),
    bug(
        "rescued-after-the-write",
        "a row is copied aside when it has been overwritten already",
        CORE + "pool_writer.py",
        """\
        sides = [self._set_aside(rescue) for rescue in rescues]
""",
        """\
        for key in keys:
            self._pool.scatter(key, slots, rows[key])
        sides = [self._set_aside(rescue) for rescue in rescues]
""",
        READS,
    ),
    bug(
        "superseded-write-skipped",
        "a row whose slot was claimed again meanwhile is not landed, although a read waits for it",
        CORE + "pool_writer.py",
        """\
        order = self._last_rows(slots)
        if order is not None:
""",
        """\
        order = self._last_rows(slots)
        newest = self._table._latest[next(iter(rows_by_key))][slots] if rows_by_key else slots
        order = np.flatnonzero((slots >= 0) & (newest == write_id))
        if order is not None:
""",
        WORKLOADS,
        READS,
        listed_as="skip of pinned slots",
        note="our committer skips nothing; this one skips what is superseded, pinned or not",
    ),
    bug(
        "page-freed-with-its-step",
        "a step's page is given to the next step while its write still reads from it",
        CORE + "staging.py",
        """\
        if holder in slot.holders and slot.drop(holder):
            self._free.append(slot)
""",
        """\
        if holder in slot.holders and (slot.drop(holder) or holder.startswith("step ")):
            slot._holders.clear()
            self._free.append(slot)
""",
        WORKLOADS,
        PAGES,
        listed_as="staging slot freed at the step's release",
    ),
    bug(
        "claim-outside-the-pop",
        "a write is taken from the queue in one lock section and marked as taken in the next",
        CORE + "committer.py",
        """\
                if task is not None:
                    task.transition(TaskState.COPYING)
                    self._current = task
                elif not self._abandoned.places:
                    return
                any_abandoned = bool(self._abandoned.places)
            if task is not None:
""",
        """\
                if task is None and not self._abandoned.places:
                    return
                any_abandoned = bool(self._abandoned.places)
            if task is not None:
                with self._state.lock:
                    task.transition(TaskState.COPYING)
                    self._current = task
""",
        SCHEDULES,
        listed_as="claim outside the pop",
    ),
    bug(
        "wake-before-the-failure-record",
        "waiters are woken for a failed write before the failure can be found",
        CORE + "committer.py",
        """\
                self._current = None
                self.drop_queue()
                self._state.fail(cause)
""",
        """\
                self._current = None
                self.drop_queue()
                self._state.wake_all()
            with self._state.lock:
                self._state.fail(cause)
""",
        SCHEDULES,
        listed_as="wake before the failure record",
    ),
    bug(
        "one-page-too-many",
        "one more step than `staging_depth` may be open",
        CORE + "controller.py",
        """\
            config.staging_depth,
            config.staging_arena_bytes,
""",
        """\
            config.staging_depth + 1,
            config.staging_arena_bytes,
""",
        FAILURES,
        files("core/test_bad_input.py"),
        listed_as="depth off by one",
    ),
    bug(
        "one-page-too-few",
        "one step fewer than `staging_depth` may be open",
        CORE + "staging.py",
        "self._free = list(reversed(self._slots))",
        "self._free = list(reversed(self._slots[1:] or self._slots))",
        FAILURES,
        READS,
        listed_as="depth off by one",
    ),
    bug(
        "landed-before-written",
        "a write counts as landed before its rows are in the pool",
        CORE + "committer.py",
        """\
            task.transition(TaskState.HOST_READY)
            self._state.progress.notify_all()
""",
        """\
            task.transition(TaskState.HOST_READY)
            self.landed_upto = task.write_id
            self._state.progress.notify_all()
""",
        WORKLOADS,
        READS,
    ),
    bug(
        "copy-not-awaited",
        "a page is read before its copy from the device is complete",
        CORE + "committer.py",
        """\
        if task.copy_done is not None:
            task.copy_done.synchronize(self._join_timeout_s)
""",
        "",
        WORKLOADS,
        FAILURES,
    ),
    Mutant(
        "failed-copy-frees-its-page",
        "the page of a write that was given up is used again while the device still writes into it",
        (
            Edit(
                CORE + "committer.py",
                "        if to is TaskState.FAILED and task.copy_done is not None:\n",
                "        if to is TaskState.COPYING and task.copy_done is not None:\n",
            ),
        ),
        (PAGES,),
    ),
)
