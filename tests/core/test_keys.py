# SPDX-License-Identifier: Apache-2.0
"""Outputs of a step: which are rows per token, how they are told apart, and that each keeps its shape and dtype."""

import logging

import pytest
import torch
from cache_rig import more, new
from row_values import assert_rows, row_values

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.errors import KeyShapeChangedError, LayoutMismatchError
from omni_core.prefix_cache.policy import ModelCachePolicy

MANY_KEYS = {
    "wide": ((200,), torch.float16),
    "odd": ((3,), torch.bfloat16),
    "bytes": ((5,), torch.uint8),
    "ids": ((), torch.int64),
    "score": ((), torch.float32),
    "pair": ((2,), torch.int32),
    "grid": ((2, 3), torch.float32),
    "cube": ((2, 2, 2), torch.bfloat16),
    "double": ((4,), torch.float64),
}


def assert_all_keys(rig, rows, *pieces):
    for key, (trailing, dtype) in rig.keys.items():
        assert_rows(rows, *pieces, key=key, trailing=trailing, dtype=dtype)


@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16])
def test_keys_of_every_width_rank_and_dtype_are_joined_bit_for_bit(make_rig, hidden_dtype):
    rig = make_rig(keys=MANY_KEYS, hidden=6, dtype=hidden_dtype, extra_row_bytes=1024)
    assert_all_keys(rig, rig.run(new("A", [1, 2], run=6))["A"], ("A", 0, 6))
    taken = rig.run(new("C", [1, 2, 3], hit=6, run=3), new("D", [1, 4], hit=4, run=2), more("A", 2))
    assert_all_keys(rig, taken["C"], ("A", 0, 6), ("C", 6, 9))
    assert_all_keys(rig, taken["D"], ("A", 0, 4), ("D", 4, 6))
    assert_all_keys(rig, taken["A"], ("A", 6, 8))
    row_bytes = {key: row_values("A", [0], key, *spec).numel() * spec[1].itemsize for key, spec in rig.keys.items()}
    assert rig.cache.stats().key_row_bytes == row_bytes


def test_padded_and_unpadded_keys_of_one_step_are_stored_by_their_real_rows(make_rig):
    rig = make_rig(keys={"padded": ((4,), torch.int64), "real": ((2, 2), torch.bfloat16)})
    rig.begin(new("A", [1, 2], run=5))
    rig.take(rig.save({"padded": rig.rows("padded", pad=3), "real": rig.rows("real")}, keys=(), pad=3))
    # The next step is padded the other way round.
    rig.begin(new("C", [1, 3], hit=4, run=2))
    rows = rig.take(rig.save({"padded": rig.rows("padded"), "real": rig.rows("real", pad=6)}, keys=(), pad=6))["C"]
    assert_all_keys(rig, rows, ("A", 0, 4), ("C", 4, 6))


def test_hidden_rows_may_come_without_the_graphs_padding(rig):
    rig.begin(new("A", [1], run=3))
    rows = rig.take(rig.save(hidden=rig.rows(), padded=8))["A"]
    assert_rows(rows, ("A", 0, 3))


def test_nested_outputs_are_named_with_dots(make_rig):
    rig = make_rig(keys={"codes.audio": ((4,), torch.int64), "codes.text.ids": ((), torch.int64)})
    rig.begin(new("A", [1]))
    audio, ids = rig.rows("codes.audio"), rig.rows("codes.text.ids")
    nested = {"codes": {"audio": audio, "text": {"ids": ids, "lang": "en"}}}
    rows = rig.take(rig.save(nested, keys=()))["A"]
    assert_all_keys(rig, rows, ("A", 0, 4))
    assert rows.leftovers == {"codes.text.lang": "en"}


def test_a_step_of_one_token_decides_nothing(make_rig):
    rig = make_rig(keys={"codes": ((4,), torch.float32)})
    rows = rig.run(new("A", [1], run=1))["A"]
    assert "codes" not in rows.rows
    assert torch.equal(rows.leftovers["codes"], row_values("A", [0], "codes", (4,)))
    assert set(rig.cache.stats().key_row_bytes) == {HIDDEN_KEY}
    assert_rows(rig.run(more("A", 3))["A"], ("A", 1, 4), key="codes", trailing=(4,))
    assert_rows(rig.run(more("A", 1, blocks=[2]))["A"], ("A", 4, 5), key="codes", trailing=(4,))


def test_a_step_of_one_token_per_request_decides_nothing_and_gives_each_its_slice(make_rig):
    rig = make_rig(keys={"codes": ((4,), torch.float32)})
    rig.begin(new("A", [1], run=1), new("B", [2], run=1), new("C", [3], run=1))
    taken = rig.take(rig.save(pad=5))
    for req_id in ("A", "B", "C"):
        assert torch.equal(taken[req_id].leftovers["codes"], row_values(req_id, [0], "codes", (4,)))
    assert set(rig.cache.stats().key_row_bytes) == {HIDDEN_KEY}


def test_a_declared_token_key_is_stored_from_its_first_token(make_rig):
    rig = make_rig(keys={"codes": ((4,), torch.float32)}, policy=ModelCachePolicy(token_keys={"codes"}))
    for _ in range(4):
        run = more("A", 1) if rig.batch else new("A", [1], run=1)
        assert_rows(rig.run(run)["A"], ("A", rig.batch[0].first, rig.batch[0].last), key="codes", trailing=(4,))
    rows = rig.run(new("C", [1, 2], hit=4))["C"]
    assert_rows(rows, ("A", 0, 4), ("C", 4, 8), key="codes", trailing=(4,))


def test_a_key_that_was_no_row_per_token_when_decided_is_passed_on_whole(rig):
    rig.begin(new("A", [1], run=3))
    rig.take(rig.save({"meta": torch.arange(7.0)}))
    rig.begin(more("A", 2, blocks=[2]))
    value = torch.arange(2.0)
    rows = rig.take(rig.save({"meta": value}))["A"]
    assert torch.equal(rows.leftovers["meta"], value)
    assert set(rig.cache.stats().key_row_bytes) == {HIDDEN_KEY}


def test_a_contradiction_is_logged_once_and_fails_no_step(make_rig, caplog):
    rig = make_rig(keys={"codes": ((4,), torch.float32)})
    rig.run(new("A", [1, 2], run=4))
    odd = torch.ones(9)
    with caplog.at_level(logging.ERROR, logger="omni_core"):
        for _ in range(2):
            rig.begin(more("A", 2))
            rows = rig.take(rig.save({"codes": odd}, keys=()))["A"]
            assert torch.equal(rows.leftovers["codes"], odd)
            assert "codes" not in rows.rows
    assert [record.getMessage().split(" ")[1] for record in caplog.records] == ["'codes'"]
    rows = rig.run(new("C", [1, 2, 3], hit=8))["C"]
    assert_rows(rows, ("A", 0, 8), ("C", 8, 12))
    # The two steps brought no row of the key: behind the hit those positions read zeros, and say so.
    assert rows.zero_ranges == {"codes": ((4, 8),)}
    expected = torch.cat(
        [row_values("A", range(4), "codes", (4,)), torch.zeros(4, 4), row_values("C", range(8, 12), "codes", (4,))]
    )
    assert torch.equal(rows["codes"], expected)


def test_a_key_with_no_rows_behind_a_hit_reads_zeros_and_says_where(make_rig):
    rig = make_rig(keys={"codes": ((2, 2), torch.bfloat16)})
    rig.run(new("A", [1, 2], run=5), keys=())
    rig.run(more("A", 3))
    rows = rig.run(new("C", [1, 2, 3], hit=8, run=2))["C"]
    assert_rows(rows, ("A", 0, 8), ("C", 8, 10))
    assert rows.zero_ranges == {"codes": ((0, 5),)}
    assert not rows["codes"][:5].any()
    expected = torch.cat(
        [
            row_values("A", range(5, 8), "codes", (2, 2), torch.bfloat16),
            row_values("C", range(8, 10), "codes", (2, 2), torch.bfloat16),
        ]
    )
    assert torch.equal(rows["codes"][5:], expected)


def test_a_key_that_appears_with_the_hit_itself_reads_zeros_behind_it(make_rig):
    rig = make_rig(keys={"codes": ((4,), torch.float32)})
    rig.run(new("A", [1], run=4), keys=())
    rows = rig.run(new("C", [1, 2], hit=4))["C"]
    assert rows.zero_ranges == {"codes": ((0, 4),)}
    assert not rows["codes"][:4].any()
    assert torch.equal(rows["codes"][4:], row_values("C", range(4, 8), "codes", (4,)))


def test_a_stored_key_that_the_step_does_not_bring_is_still_read_behind_the_hit(make_rig):
    rig = make_rig(keys={"codes": ((4,), torch.float32)})
    rig.run(new("A", [1], run=4))
    rows = rig.run(new("C", [1, 2], hit=4, run=2), keys=())["C"]
    assert_rows(rows, ("A", 0, 4), ("C", 4, 6))
    assert torch.equal(rows["codes"][:4], row_values("A", range(4), "codes", (4,)))
    assert rows.zero_ranges == {"codes": ((4, 6),)}
    assert not rows["codes"][4:].any()


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(4, 5),
        torch.zeros(4),
        torch.zeros(4, 4, 1),
        torch.zeros(4, 4, dtype=torch.float64),
    ],
    ids=["width", "rank-down", "rank-up", "dtype"],
)
def test_a_key_of_another_shape_or_dtype_is_refused_before_anything_changes(make_rig, value):
    rig = make_rig(keys={"codes": ((4,), torch.float32)})
    rig.run(new("A", [1]))
    rig.begin(new("B", [2]))
    before = rig.stats()
    with pytest.raises(KeyShapeChangedError, match=r"'codes'.*\(4,\) of torch.float32"):
        rig.save({"codes": value}, keys=())
    assert rig.stats() == before
    assert_rows(rig.take(rig.save())["B"], ("B", 0, 4), key="codes", trailing=(4,))


def test_a_shape_that_was_never_saved_binds_nobody(make_rig):
    rig = make_rig(keys={"codes": ((4,), torch.float32)})
    rig.begin(new("A", [1]))
    with pytest.raises(LayoutMismatchError):
        rig.save({"codes": torch.zeros(4, 9)}, keys=(), hidden=torch.zeros(3, 3))
    assert_rows(rig.take(rig.save())["A"], ("A", 0, 4), key="codes", trailing=(4,))


def test_the_hidden_keys_name_is_not_free_for_others(rig):
    rig.begin(new("A", [1]))
    with pytest.raises(LayoutMismatchError, match=HIDDEN_KEY):
        rig.save({HIDDEN_KEY: torch.zeros(4, 3)})
