# SPDX-License-Identifier: Apache-2.0
"""Bugs in what a step brought: padding, batch order, slots that are not stored, dtypes, widths, leftovers."""

from mutants.model import CORE, WORKLOADS, bug, files

ROWS = files("core/test_keys.py", "core/test_hits.py", "faults/test_rows_slots_and_shapes.py")
SLOTS = files("core/test_mutant_slots.py")
INPUT = files("core/test_bad_input.py", "faults/test_rows_slots_and_shapes.py")
LEFTOVERS = files("core/test_leftovers.py", "core/test_nested_leftovers.py")

VALUES = (
    bug(
        "padded-rows-stored",
        "of a padded output the last rows are taken, which are padding, instead of the first",
        CORE + "step_inputs.py",
        "return value if value.shape[0] == num_tokens else value[:num_tokens]",
        "return value if value.shape[0] == num_tokens else value[-num_tokens:]",
        ROWS,
        INPUT,
        listed_as="padded rows stored",
    ),
    bug(
        "slot-minus-one-claimed",
        "a row that is not stored is claimed in the pool's last slot",
        CORE + "step_intake.py",
        "stored_slots = slots if all_stored else slots[slots >= 0]",
        "stored_slots = slots",
        SLOTS,
        listed_as="-1 slot written",
    ),
    bug(
        "slot-minus-one-written",
        "a row that is not stored is written to the pool's last slot",
        CORE + "pool_writer.py",
        """\
        stored = slots >= 0
        self._last_row[slots[stored]] = rows[stored]
        kept = stored & (self._last_row[slots] == rows)
        return None if kept.all() else np.flatnonzero(kept)
""",
        """\
        slots[slots < 0] += len(self._last_row)
        self._last_row[slots] = rows
        kept = self._last_row[slots] == rows
        return None if kept.all() else np.flatnonzero(kept)
""",
        SLOTS,
        listed_as="-1 slot written",
    ),
    bug(
        "batch-order-taken-for-schedule-order",
        "rows are shared out in the order in which the requests started, not in the batch's",
        CORE + "step_context.py",
        "every = zip(count(), self.req_ids, firsts.tolist(), lasts.tolist(), positions.tolist())",
        "by_start = sorted(self.req_ids, key=lambda r: int(self.serials[self.req_ids.index(r)]))\n"
        "        every = zip(count(), by_start, firsts.tolist(), lasts.tolist(), positions.tolist())",
        ROWS,
        files("core/test_sim_engine.py"),
        listed_as="batch order taken for schedule order",
    ),
    bug(
        "width-change-accepted",
        "a key that comes in another width is stored beside the old rows",
        CORE + "step_inputs.py",
        "if known is not None and (known.trailing_shape != rows.shape[1:] or known.dtype != rows.dtype):",
        "if known is not None and known.dtype != rows.dtype:",
        INPUT,
        listed_as="width change accepted",
    ),
    bug(
        "dtype-change-accepted",
        "a key that comes in another dtype is stored beside the old rows",
        CORE + "step_inputs.py",
        "if known is not None and (known.trailing_shape != rows.shape[1:] or known.dtype != rows.dtype):",
        "if known is not None and known.trailing_shape != rows.shape[1:]:",
        INPUT,
    ),
    bug(
        "leftover-read-late",
        "an output without a row per token is read when the step is materialised, not when it is saved",
        CORE + "leftovers.py",
        """\
            return StagedTensor(stage((leaf,)))
        return leaf.copy()""",
        """\
            return leaf
        return leaf.copy()""",
        LEFTOVERS,
        listed_as="leftover read late",
    ),
    bug(
        "leftover-left-in-the-page",
        "a delivered leftover lies in the step's page, which the next step overwrites",
        CORE + "leftovers.py",
        "return map_leaves(self.value, lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf)",
        "return self.value",
        WORKLOADS,
        LEFTOVERS,
        listed_as="leftover read late",
    ),
    bug(
        "rows-cast",
        "rows go into the pool through another dtype",
        CORE + "task.py",
        "self._words = self.rows.view(-1).view(spec.word)",
        "self._words = self.rows.to(torch.bfloat16).to(self.rows.dtype).view(-1).view(spec.word)",
        files("core/test_dtypes.py"),
        ROWS,
        listed_as="dtype cast",
    ),
    bug(
        "rows-not-cloned",
        "a step's rows are copied from the engine's own buffers, which the next step overwrites",
        CORE + "step_record.py",
        """\
                clones.append(backend.snapshot(block[0], ring))
""",
        """\
                clones.append(ring.take(block[0].shape, block[0].dtype))
                views[number].copy_(block[0])
""",
        files("core/test_sim_engine.py"),
        ROWS,
    ),
    bug(
        "known-form-not-cloned",
        "a step of a form that was recorded before is not cloned again: the rows of the earlier step are copied",
        CORE + "step_record.py",
        "        backend.refresh_snapshot(clone, inputs.rows[number])\n",
        "        pass\n",
        files("core/test_sim_engine.py"),
        ROWS,
    ),
    bug(
        "places-of-another-slot",
        "a form remembers one place for all staging slots: two open steps share a page",
        CORE + "controller.py",
        "inputs.form.places.get((slot.index, place is not None))",
        "inputs.form.places.get((0, place is not None))",
        files("core/test_known_forms.py"),
        ROWS,
    ),
)
