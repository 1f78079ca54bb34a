# SPDX-License-Identifier: Apache-2.0
"""Steps of one form, as a decode phase brings them: what the first taught holds for the next, and no longer."""

import pytest
import torch
from cache_rig import more, new
from row_values import assert_rows

from omni_core.backend import NoBackendForTensorError
from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.errors import KeyShapeChangedError
from omni_core.prefix_cache.policy import ModelCachePolicy

CODES = {"codes": ((2,), torch.int64)}
DEPTH = 4


def decode(rig, first, count, pad=0):
    """`count` steps of A and B, one row each, all saved before the first is taken."""
    saved = [rig.step(more("A"), more("B"), pad=pad) for _ in range(count)]
    for number, step in enumerate(saved):
        taken = rig.take(step, "A", "B")
        for req_id in ("A", "B"):
            assert_rows(taken[req_id], (req_id, first + number, first + number + 1))
            assert_rows(
                taken[req_id],
                (req_id, first + number, first + number + 1),
                key="codes",
                trailing=(2,),
                dtype=torch.int64,
            )
        taken.release()


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("pad", [0, 3])
def test_open_steps_of_one_form_keep_their_own_rows(make_rig, deferred, pad):
    policy = ModelCachePolicy(**{"deferred_keys" if deferred else "token_keys": {"codes"}})
    rig = make_rig(keys=CODES, policy=policy, staging_depth=DEPTH, block_size=16)
    rig.run(new("A", [1, 2], run=4), new("B", [3, 4], run=4)).release()
    for first in (4, 8, 12, 16, 20):
        decode(rig, first, DEPTH, pad)
    hit = rig.run(new("C", [1, 5], hit=16, run=1))
    assert_rows(hit["C"], ("A", 0, 16), ("C", 16, 17))
    assert_rows(hit["C"], ("A", 0, 16), ("C", 16, 17), key="codes", trailing=(2,), dtype=torch.int64)


def test_rows_are_right_whether_or_not_the_device_has_room_for_them(make_rig):
    """Two records fit on the device: which of four steps of one form finds room depends on the committer's pace."""
    rig = make_rig(
        keys=CODES,
        policy=ModelCachePolicy(deferred_keys={"codes"}),
        staging_depth=DEPTH,
        block_size=16,
        device_staging_bytes=128,
    )
    rig.run(new("A", [1, 2], run=4), new("B", [3, 4], run=4)).release()
    before = rig.cache.stats().deferred_copies
    for first in (4, 8, 12, 16, 20):
        decode(rig, first, DEPTH)
    assert rig.cache.stats().deferred_copies > before


def test_a_key_of_a_known_form_that_changes_is_refused_as_ever(make_rig):
    rig = make_rig(keys=CODES, policy=ModelCachePolicy(token_keys={"codes"}), staging_depth=DEPTH)
    rig.run(new("A", [1, 2], run=4)).release()
    for _ in range(2 * DEPTH):
        rig.run(new("B", [3], run=1), finish=["B"]).release()
    for codes in (torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int32)):
        rig.begin(new("B", [3], run=1), finish=["B"])
        with pytest.raises(KeyShapeChangedError, match="'codes'"):
            rig.save({"codes": codes}, keys=())
    rig.begin(new("B", [3], run=1), finish=["B"])
    with pytest.raises(NoBackendForTensorError, match="'codes' lies on device meta"):
        rig.save({"codes": torch.zeros(1, 2, dtype=torch.int64, device="meta")}, keys=())
    rig.begin(new("B", [3], run=1), finish=["B"])
    taken = rig.take(rig.save())
    assert_rows(taken["B"], ("B", 0, 1))


def test_outputs_that_want_gradients_are_copied_without_them(make_rig):
    rig = make_rig(staging_depth=DEPTH)
    rig.run(new("A", [1, 2], run=1)).release()
    with torch.enable_grad():
        for number in range(1, 2 * DEPTH):
            rig.begin(more("A"))
            hidden = rig.rows().requires_grad_()
            taken = rig.take(rig.save(hidden=hidden))
            assert not taken["A"].rows[HIDDEN_KEY].requires_grad
            assert_rows(taken["A"], ("A", number, number + 1))
            taken.release()


LAYOUTS = {
    "columns first": lambda rows: rows.t().contiguous().t(),
    "every other row": lambda rows: rows.repeat_interleave(2, 0)[::2],
    "as usual": torch.clone,
}


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_rows_are_right_however_they_lie_in_memory_and_whatever_mode_made_them(make_rig, make, deferred):
    policy = ModelCachePolicy(**{"deferred_keys" if deferred else "token_keys": {"codes"}})
    rig = make_rig(keys=CODES, policy=policy, staging_depth=DEPTH, block_size=16)
    rig.run(new("A", [1, 2], run=2)).release()
    for number in range(2, 2 + 3 * DEPTH, 2):
        with torch.inference_mode(number % 4 == 0):
            rig.begin(more("A", 2))
            taken = rig.take(rig.save({"codes": make(rig.rows("codes"))}, hidden=make(rig.rows()), keys=()))
        assert_rows(taken["A"], ("A", number, number + 2))
        assert_rows(taken["A"], ("A", number, number + 2), key="codes", trailing=(2,), dtype=torch.int64)


def test_keys_in_another_order_are_another_form(make_rig):
    keys = CODES | {"marks": ((2,), torch.int64)}
    rig = make_rig(keys=keys, policy=ModelCachePolicy(token_keys=keys), staging_depth=DEPTH, block_size=16)
    rig.run(new("A", [1, 2], run=1)).release()
    for number in range(1, 1 + 3 * DEPTH):
        order = ("codes", "marks") if number % 2 else ("marks", "codes")
        rig.begin(more("A"))
        taken = rig.take(rig.save({key: rig.rows(key) for key in order}, keys=()))
        for key in keys:
            assert_rows(taken["A"], ("A", number, number + 1), key=key, trailing=(2,), dtype=torch.int64)


def test_more_forms_than_are_remembered(make_rig):
    rig = make_rig(staging_depth=DEPTH, block_size=16, num_blocks=128, max_num_tokens=128)
    for _ in range(2):
        for rows in range(1, 100):
            taken = rig.run(new("A", range(1, 9), run=rows), finish=["A"])
            assert_rows(taken["A"], ("A", 0, rows))
            taken.release()


def test_a_new_policy_is_understood_anew(make_rig):
    rig = make_rig(keys=CODES, policy=ModelCachePolicy(request_keys={"codes"}))
    rig.cache.register_policy(ModelCachePolicy(token_keys={"codes"}))
    taken = rig.run(new("A", [1], run=4))
    assert_rows(taken["A"], ("A", 0, 4), key="codes", trailing=(2,), dtype=torch.int64)
