# SPDX-License-Identifier: Apache-2.0
"""Bugs in how a backend's streams and events are used, and in a backend itself."""

from mutants.model import CORE, CPU_SIM, WORKLOADS, bug, files

CONFORMANCE = files("backend/test_conformance_of_cpu_sim.py")
COPIES = files("core/test_reads_and_rescue.py", "core/test_failure_and_waits.py", "faults/test_copies_and_threads.py")

BACKEND = (
    bug(
        "event-recorded-before-its-copy",
        "the event a step waits for was recorded before the copy was queued, so it is complete at once",
        CORE + "step_record.py",
        "copy_done=backend.copy_to_host(device_part, ring.used(), stream) if ring.used_bytes else None,",
        "copy_done=(stream.record(), backend.copy_to_host(device_part, ring.used(), stream))[0]"
        " if ring.used_bytes else None,",
        WORKLOADS,
        COPIES,
        listed_as="event waited unrecorded",
        note="our events are made by recording them; the nearest is one recorded at the wrong place",
    ),
    bug(
        "copy-event-complete-at-once",
        "the backend's event of a copy is complete before the copy has run",
        CPU_SIM + "_streams.py",
        "event = StreamEvent(self, self._queued_count + 1)",
        "event = StreamEvent(self, self._queued_count)",
        CONFORMANCE,
        listed_as="event waited unrecorded",
    ),
    bug(
        "stream-does-not-wait-for-the-producer",
        "a copy stream told to wait for the producer's event goes on without",
        CPU_SIM + "_streams.py",
        """\
        self._event.wait_on_worker()
""",
        """\
        return None
""",
        CONFORMANCE,
        listed_as="copy stream not waiting for the producer",
    ),
    bug(
        "snapshot-is-no-clone",
        "a snapshot is the engine's own buffer, which the next step overwrites",
        "omni_core/backend/base.py",
        """\
        self.refresh_snapshot(clone, tensor)
        return clone
""",
        """\
        self.refresh_snapshot(clone, tensor)
        return tensor
""",
        CONFORMANCE,
    ),
    bug(
        "failed-copy-reported-as-done",
        "a copy that failed completes its event without an error",
        CPU_SIM + "_streams.py",
        """\
            self._event.fail(message, error)
            self._next_record.fail(message, error)
""",
        """\
            self._next_record.fail(message, error)
""",
        COPIES,
        files("backend/test_cpu_sim_streams.py"),
    ),
)
