# SPDX-License-Identifier: Apache-2.0
"""Bugs in rows that wait on the device: their room, what forces them to leave, the order in which they land."""

from mutants.model import CORE, Edit, Mutant, bug, files

ORDER = files("core/test_mutant_deferred.py")
DEFERRED = files("core/test_deferred_keys.py", "core/test_deferred_pressure.py", "core/test_deferred_failures.py")

DEFERRED_ROWS = (
    Mutant(
        "ticket-returned-twice",
        "a record's device bytes are given back when they are on the host, and once more when they have landed",
        (
            Edit(
                CORE + "device_ring.py",
                """\
        if ticket.returned:
            raise RuntimeError(f"device bytes {ticket.start} to {ticket.start + ticket.nbytes} were returned twice")
""",
                "",
            ),
            Edit(
                CORE + "deferred_copier.py",
                """\
                record.transition(TaskState.WRITTEN)
                self._release_host(record)
""",
                """\
                record.transition(TaskState.WRITTEN)
                self._release_all(record)
""",
            ),
        ),
        (DEFERRED,),
        listed_as="ticket returned twice",
    ),
    bug(
        "ticket-never-returned",
        "a record's device bytes stay charged after they are on the host",
        CORE + "deferred_copier.py",
        """\
            record.transition(TaskState.HOST_READY)
            self._release_device(record)
""",
        """\
            record.transition(TaskState.HOST_READY)
""",
        DEFERRED,
        listed_as="ticket never returned",
    ),
    bug(
        "ticket-never-returned-at-reset",
        "device bytes of records that a reset drops stay charged",
        CORE + "deferred_copier.py",
        """\
        elif state is TaskState.COPYING:
            self._release_all(record)
        else:
            self._release_device(record)
""",
        """\
        elif state is TaskState.COPYING:
            self._release_all(record)
""",
        DEFERRED,
        listed_as="ticket never returned",
    ),
    Mutant(
        "next-write-not-opened",
        "rows saved after a flush belong to the write that the flush closed",
        (
            Edit(CORE + "open_writes.py", "self._write_n[rows] + closed, 1)", "self._write_n[rows], 1)"),
            Edit(CORE + "open_writes.py", "= self._last_write_ns + 1", "= self._last_write_ns"),
        ),
        (DEFERRED,),
        listed_as="`write_n + 1` dropped",
    ),
    bug(
        "rows-of-the-next-write-not-brought",
        "when a request ends, only the rows of its first deferred write leave the device",
        CORE + "open_writes.py",
        """\
        self._last_record[rows] = record_id
""",
        """\
        self._last_record[rows] = np.where(self._last_write_ns == 1, record_id, self._last_record[rows])
""",
        DEFERRED,
        listed_as="`write_n + 1` dropped",
    ),
    bug(
        "ended-request-keeps-its-rows-on-the-device",
        "rows of a request that has ended stay on the device until something else wants them",
        CORE + "step_intake.py",
        """\
                self._deferred.force_ended(req_id, self._requests.row(req_id), self._requests.serial(req_id))
""",
        """\
                pass
""",
        DEFERRED,
    ),
    bug(
        "deferred-rows-not-brought-for-a-hit",
        "a hit on rows that are still on the device reads what lies in their slots",
        CORE + "planner.py",
        """\
                if key in self._deferred.keys:
                    newest_deferred = max(
""",
        """\
                if key in self._deferred.keys and newest < 0:
                    newest_deferred = max(
""",
        DEFERRED,
    ),
    bug(
        "deferred-rows-not-brought-for-a-block-copy",
        "a block is copied before rows of it that are still on the device have landed",
        CORE + "step_intake.py",
        """\
        self._force_sources(sources.values(), f"copy of block {source} to block {destination}")
""",
        "",
        DEFERRED,
    ),
    bug(
        "deferred-rows-not-brought-for-a-flush",
        "`flush` returns while rows are still on the device",
        CORE + "manager.py",
        'record = self._controller.deferred.force_all("flush") if self._state.usable else ABSENT',
        "record = ABSENT",
        DEFERRED,
    ),
    Mutant(
        "records-land-newest-first",
        "of two records that hold rows of one slot, the older one's stay in the pool",
        (
            Edit(
                CORE + "deferred_records.py",
                "        task.records = records\n",
                "        task.records = records[::-1]\n",
            ),
            Edit(
                CORE + "deferred_copier.py",
                "                self.landed_upto = record.write_id\n",
                "                self.landed_upto = max(self.landed_upto, record.write_id)\n",
            ),
        ),
        (ORDER,),
    ),
    bug(
        "record-copied-before-its-clone",
        "a record's copy to the host does not wait for the engine's stream to have made the clone",
        CORE + "deferred_copier.py",
        """\
        self._stream.wait(record.cloned)
""",
        "",
        ORDER,
        listed_as="copy stream not waiting for the producer",
    ),
    bug(
        "immediate-rows-overtake-deferred-ones",
        "rows of a key that cannot wait land before older rows of the key, which then overwrite them",
        CORE + "step_intake.py",
        """\
            self._deferred.force_all(f"rows of {step} that cannot wait")
""",
        """\
            pass
""",
        DEFERRED,
    ),
    bug(
        "page-part-of-a-record-released-early",
        "a step's page is given to another step while a deferred record is still being copied into it",
        CORE + "deferred_copier.py",
        """\
                record.page.hold(DEFERRED_HOLDER)
""",
        "",
        DEFERRED,
    ),
    bug(
        "taken-device-bytes-handed-out",
        "a new record's rows overwrite those of one that is still on the device",
        CORE + "device_ring.py",
        """\
        return 0 if nbytes <= oldest.start else None
""",
        """\
        return 0
""",
        DEFERRED,
    ),
    bug(
        "pressure-ignored",
        "nothing makes room for the next record: once the budget is full, every step's rows are copied at once",
        CORE + "deferred_records.py",
        """\
            if ring.would_fit(nbytes, record.ticket):
""",
        """\
            if record is self._open[0]:
""",
        DEFERRED,
    ),
    Mutant(
        "deferred-rows-delivered-before-they-are-there",
        "a step is materialised before its deferred rows are on the host",
        (
            Edit(
                CORE + "step_consumer.py",
                "                and (deferred is None or deferred.host_ready)\n",
                "",
            ),
            Edit(
                CORE + "step_consumer.py",
                "late = next((write for write in (task, deferred) if",
                "late = next((write for write in (task,) if",
            ),
        ),
        (DEFERRED,),
    ),
    bug(
        "records-outlive-a-reset",
        "deferred rows of before a reset are copied and landed after it",
        CORE + "cache_reset.py",
        "records_dropped = self._controller.deferred.drop_open() if idle else 0",
        "records_dropped = 0",
        DEFERRED,
    ),
)
