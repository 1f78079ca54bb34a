# SPDX-License-Identifier: Apache-2.0
"""Bugs in what becomes absent when weights or adapters change, and in whose a block is."""

from mutants.model import CORE, WORKLOADS, Edit, Mutant, bug, files

VERSIONS = files("core/test_weight_versions.py")

WEIGHT_VERSIONS = (
    bug(
        "new-weights-miss-a-key",
        "rows of further keys stay present when the weights change",
        CORE + "slot_table.py",
        """\
        if self._any_version:
            present""",
        """\
        if self._any_version and key == "__hidden_states__":
            present""",
        VERSIONS,
    ),
    bug(
        "new-weights-miss-a-block",
        "one block keeps its rows when the weights change",
        CORE + "slot_table.py",
        """\
            self._version_floor[:] = self.last_id
""",
        """\
            self._version_floor[2:] = self.last_id
""",
        WORKLOADS,
        VERSIONS,
    ),
    bug(
        "new-adapter-takes-every-row",
        "a new version of an adapter makes the rows of all others absent",
        CORE + "slot_table.py",
        """\
            self._version_floor[self._adapters == adapter_id] = self.last_id
""",
        """\
            self._version_floor[:] = self.last_id
""",
        WORKLOADS,
        VERSIONS,
    ),
    bug(
        "new-weights-are-tenancies",
        "when the weights change, live requests lose what they write in the blocks they hold",
        CORE + "slot_table.py",
        """\
            self._version_floor[:] = self.last_id
""",
        """\
            self.start_all_tenancies()
""",
        VERSIONS,
    ),
    bug(
        "new-weights-forgotten-under-way",
        "weights that change while a step is under way leave everything present",
        CORE + "step_intake.py",
        """\
        self._new_versions.append(adapter_id)
        return True
""",
        """\
        return True
""",
        WORKLOADS,
        VERSIONS,
    ),
    bug(
        "step-under-way-is-of-new-weights",
        "rows of a step that is under way when the weights change stay present",
        CORE + "step_intake.py",
        """\
        if not self.step_under_way:
            self._table.expire_version(adapter_id)
            return True
""",
        """\
        if True:
            self._table.expire_version(adapter_id)
            return True
""",
        WORKLOADS,
        VERSIONS,
    ),
    bug(
        "appended-blocks-are-nobodys",
        "blocks that an adapter's request gets later do not count as the adapter's",
        CORE + "step_intake.py",
        """\
        if self._requests.adapters:
""",
        """\
        if False:
""",
        VERSIONS,
    ),
    Mutant(
        "adapters-in-event-order",
        "a hit on a block that an adapter begins in the same step depends on the order of the events",
        (
            Edit(
                CORE + "step_intake.py",
                """\
                self._entrance.fill_blocks(request)
""",
                """\
                pass
""",
            ),
            Edit(
                CORE + "entrance.py",
                """\
        adapter_id = request.adapter_id
        if adapter_id != NO_ADAPTER or self._table.any_adapter:
            adapter_id""",
                """\
        self.fill_blocks(request)
        adapter_id = request.adapter_id
        if adapter_id != NO_ADAPTER or self._table.any_adapter:
            adapter_id""",
            ),
        ),
        (WORKLOADS,),
    ),
    bug(
        "hit-on-another-adapters-block",
        "a hit finds the rows of another adapter",
        CORE + "entrance.py",
        """\
            withheld = withheld | self._table.of_other_adapter(blocks, adapter_id)
""",
        """\
            pass
""",
        VERSIONS,
    ),
    bug(
        "copied-block-is-nobodys",
        "a copied block does not count as the adapter's whose rows it holds",
        CORE + "step_intake.py",
        """\
        self._table.copy_adapter(source, destination)
""",
        "",
        VERSIONS,
    ),
)
