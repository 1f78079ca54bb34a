# SPDX-License-Identifier: Apache-2.0
"""Pages of all rows or of none: the boundary of all rows, what is refused, and that nothing is half done."""

from dataclasses import replace

import pytest
from diffusion_kv.native_pages import (
    GEOMETRY,
    HIT,
    IDENTITY,
    PAGES_PER_ROW,
    all_free,
    differing,
    found,
    hit_of,
    import_native,
    nobody,
    page_ids,
    reservations,
    row,
    run,
    warmed,
)

from omni_core.diffusion_kv.errors import RequestRefusedError
from omni_core.diffusion_kv.rows import ImageFeature, RowGeometry

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]

NEGATIVE = row(replace(IDENTITY, token_ids=tuple(range(5000, 5113))))
"""Another prompt: no page of it is any page of `row()`."""


@pytest.fixture(scope="module", autouse=True)
def vllm():
    import_native()


def test_a_first_request_hits_nothing_and_holds_all_its_pages():
    pages = reservations(20)
    snapshot = pages.reserve("a", [row()])
    assert hit_of(snapshot) == 0
    assert len(page_ids(snapshot)) == PAGES_PER_ROW
    assert 0 not in page_ids(snapshot)
    assert pages.stats().free_pages == 12


def test_a_second_request_shares_the_prefix_pages_and_owns_its_tail():
    pages = reservations()
    first = run(pages, "a", [row()])
    second = pages.reserve("b", [row()])
    assert hit_of(second) == HIT
    assert page_ids(second)[:4] == page_ids(first)[:4]
    assert found(pages, differing(66)) == HIT  # the stray tokens behind the last full page identify nothing


def test_the_snapshot_tells_every_row_in_order():
    rows = [row(), row(None, RowGeometry(20, 30, 52))]
    snapshot = reservations().reserve("a", rows)
    assert [one.row_index for one in snapshot.rows] == [0, 1]
    assert [one.geometry for one in snapshot.rows] == [GEOMETRY, RowGeometry(20, 30, 52)]
    assert [len(page_ids(snapshot, index)) for index in range(2)] == [8, 4]
    assert not set(page_ids(snapshot, 0)) & set(page_ids(snapshot, 1))


def test_rows_start_at_the_lowest_hit_of_all():
    pages = warmed(reservations())
    snapshot = pages.reserve("a", [differing(48), row()])
    assert hit_of(snapshot) == 48
    assert page_ids(snapshot, 0)[:3] == page_ids(snapshot, 1)[:3]
    assert len({*page_ids(snapshot, 0), *page_ids(snapshot, 1)}) == 3 + 5 + 5


def test_a_row_without_identity_keeps_the_others_from_hitting():
    pages = warmed(reservations())
    assert hit_of(pages.reserve("a", [row(), row(None)])) == 0


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("prefix", [512, 543, 544])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_a_full_hit_is_every_full_page_of_the_prefix(block_size, prefix, rows):
    geometry = RowGeometry(prefix, 257, prefix + 259)
    identity = replace(IDENTITY, token_ids=tuple(range(prefix)), features=(ImageFeature("fox", 37, 490),))
    negative = replace(identity, token_ids=tuple(range(10, prefix + 10)))
    demands = [row(one, geometry) for one in (identity, negative)[:rows]]
    pages = reservations(4096 // block_size, block_size=block_size)
    assert hit_of(run(pages, "a", demands)) == 0
    assert hit_of(run(pages, "b", demands)) == prefix // block_size * block_size
    assert all_free(pages)


def test_a_full_pool_says_wait_and_takes_nothing():
    pages = reservations(20)
    pages.reserve("a", [row()])
    assert pages.reserve("b", [row(), row()]) is None
    assert pages.stats().free_pages == 12
    pages.free("a", 1)
    assert pages.reserve("b", [row(), row()]) is not None


def test_a_request_that_waits_evicts_nothing():
    """Its first row alone would fit, on published pages of others."""
    pages = warmed(reservations(20))
    pages.reserve("a", [nobody(12)])
    assert pages.reserve("b", [nobody(5), nobody(5)]) is None
    assert pages.stats().evicted_pages == 0
    assert found(pages, row()) == HIT


def test_a_request_that_waits_is_hashed_once(monkeypatch):
    from omni_core.integrations.diffusion import kv_manager

    hashed = []
    hash_prefix_blocks = kv_manager.hash_prefix_blocks
    monkeypatch.setattr(
        kv_manager, "hash_prefix_blocks", lambda one, *rest: hashed.append(one) or hash_prefix_blocks(one, *rest)
    )
    pages = reservations(20)
    full = pages.reserve("full", [nobody(20)])
    assert [pages.reserve("a", [row()]) for _ in range(3)] == [None] * 3
    pages.free("full", full.generation)
    assert pages.reserve("a", [row()]) is not None
    assert len(hashed) == 1


def test_a_request_that_waits_may_be_identified_anew():
    """The weights changed while it waited."""
    pages = warmed(reservations(20))
    full = pages.reserve("full", [nobody(16)])
    assert pages.reserve("a", [row()]) is None
    pages.free("full", full.generation)
    assert hit_of(pages.reserve("a", [row(replace(IDENTITY, namespace=b"new weights"))])) == 0


def test_pages_it_hits_are_not_counted_as_room_for_its_tail():
    pages = warmed(reservations(24))
    warmed(pages, NEGATIVE, request_id="other")
    pages.reserve("a", [nobody(14)])
    assert pages.stats().free_pages == 10  # four of them its own prefix
    assert pages.reserve("b", [row(), row()]) is None
    assert pages.stats().evicted_pages == 0


def test_what_never_fits_is_refused_rather_than_told_to_wait():
    pages = reservations(15)
    with pytest.raises(RequestRefusedError, match="'b': it needs 16 pages of 16 tokens, and the whole pool has 15"):
        pages.reserve("b", [row(), row()])
    assert all_free(pages)


def test_pages_it_hits_count_where_the_whole_pool_is_too_small():
    pages = warmed(reservations(15))
    warmed(pages, NEGATIVE, request_id="other")
    with pytest.raises(RequestRefusedError, match="it needs 16 pages"):
        pages.reserve("b", [row(), NEGATIVE])


def test_a_request_is_not_too_large_for_a_pool_that_holds_its_prefix_already():
    pages = warmed(reservations(12))
    assert hit_of(pages.reserve("a", [row(), row()])) == HIT  # 4 pages of both, and 4 of each


class TestNativeRefusal:
    """vLLM answers no, or breaks, at the second row, after the first has its pages."""

    @pytest.fixture
    def at_second_row(self, monkeypatch):
        from vllm.v1.core.kv_cache_manager import KVCacheManager

        allocate = KVCacheManager.allocate_slots

        def arm(answer):
            def refusing(manager, request, *args, **kwargs):
                if request.request_id.endswith("/row1"):
                    return answer()
                return allocate(manager, request, *args, **kwargs)

            monkeypatch.setattr(KVCacheManager, "allocate_slots", refusing)

        return arm

    def test_none_gives_the_first_rows_pages_back(self, at_second_row, monkeypatch):
        pages = warmed(reservations())
        at_second_row(lambda: None)
        assert pages.reserve("a", [row(), row()]) is None
        assert all_free(pages)
        monkeypatch.undo()
        snapshot = pages.reserve("a", [row(), row()])
        assert hit_of(snapshot) == HIT
        assert pages.stats().free_pages == 64 - 12  # the failed attempt left no count of computed tokens behind

    def test_an_error_gives_them_back_too(self, at_second_row, monkeypatch):
        def fail():
            raise KeyError("broken")

        pages = warmed(reservations())
        at_second_row(fail)
        with pytest.raises(KeyError, match="broken"):
            pages.reserve("a", [row(), row()])
        assert all_free(pages)
        monkeypatch.undo()
        assert hit_of(pages.reserve("a", [row(), row()])) == HIT

    def test_it_is_not_counted(self, at_second_row):
        pages = reservations()
        at_second_row(lambda: None)
        before = pages.stats()
        pages.reserve("a", [row(), row()])
        assert pages.stats() == before


def test_one_row_never_gets_a_page_that_was_promised_to_the_next():
    """The second row's pages are the oldest that are free: without a pin the first row's new pages would be them."""
    pages = reservations(24)
    warmed(pages, row(), NEGATIVE)
    younger = [row(replace(IDENTITY, namespace=name)) for name in (b"x", b"y")]
    warmed(pages, *younger, request_id="younger")
    pages.reserve("plain", [nobody(8)])
    assert pages.stats().evicted_pages == 0
    snapshot = pages.reserve("a", [row(), NEGATIVE])
    assert hit_of(snapshot) == HIT
    assert len({*page_ids(snapshot, 0), *page_ids(snapshot, 1)}) == 16


def test_a_hit_other_than_the_waves_takes_and_evicts_nothing():
    pages = warmed(reservations(12))
    assert pages.reserve("a", [differing(48)], only_at_hit_tokens=HIT) is None
    assert all_free(pages)
    assert pages.stats().requests == 1
    assert hit_of(pages.reserve("a", [differing(48)], only_at_hit_tokens=48)) == 48


def test_generations_grow_and_a_late_end_of_an_earlier_one_is_let_pass():
    pages = reservations()
    first = pages.reserve("a", [row()])
    pages.free("a", first.generation)
    second = pages.reserve("a", [row()])
    assert second.generation > first.generation
    pages.free("a", first.generation)
    assert pages.stats().free_pages == 64 - 8
    pages.free("a", second.generation)
    pages.free("a", second.generation)
    assert all_free(pages)


def test_a_live_id_is_refused_and_its_reservation_is_had_by_asking_for_it():
    pages = reservations()
    snapshot = pages.reserve("a", [row()])
    with pytest.raises(RequestRefusedError, match="'a': it holds pages already, in generation 1"):
        pages.reserve("a", [row()])
    assert pages.snapshot("a") is snapshot
    pages.free("a", snapshot.generation)
    assert pages.snapshot("a") is None


@pytest.mark.parametrize(
    ("request_id", "rows", "says"),
    [
        ("", [row()], "an empty id"),
        ("a", [], "it has no row"),
        ("a", [row()] * 3, "3 rows, and diffusion_kv_max_rows_per_request=2"),
        ("a", [row(), row(None, RowGeometry(70, 40, 129))], "row 1 has 129 tokens, and max_model_len=128"),
        ("a", [row(replace(IDENTITY, token_ids=(1, 2), features=()))], "row 0: 2 token ids identify a prefix of 70"),
        (
            "a",
            [row(replace(IDENTITY, features=(ImageFeature("x", 60, 114),)))],
            "row 0: image feature .* beyond the row",
        ),
    ],
)
def test_malformed_requests_are_refused_with_nothing_changed(request_id, rows, says):
    pages = reservations(max_model_len=128)
    before = pages.stats()
    with pytest.raises(RequestRefusedError, match=says):
        pages.reserve(request_id, rows)
    assert pages.stats() == before


def test_a_request_reserved_again_takes_as_many_pages_as_the_first_time():
    """A count of computed tokens left from the first time would make it twelve."""
    pages = warmed(reservations())
    for attempt in range(3):
        snapshot = pages.reserve("a", [row()])
        assert pages.stats().free_pages == 64 - 8, attempt
        pages.free("a", snapshot.generation)


@pytest.mark.parametrize(("span_safe", "hit"), [(False, 48), (True, 16)])
def test_a_hit_may_be_kept_from_ending_inside_an_image(span_safe, hit):
    pages = warmed(reservations(span_safe_hits=span_safe))
    assert found(pages, differing(60)) == hit


def test_a_hit_that_ends_behind_an_image_is_span_safe():
    assert found(warmed(reservations(span_safe_hits=True)), row()) == HIT


def test_cutting_before_one_image_may_end_inside_another_ones_page():
    """Page 2 holds the end of the first image and the start of the second, so the cut goes on before the first."""
    images = (ImageFeature("one", 8, 34), ImageFeature("two", 36, 66))
    both = row(replace(IDENTITY, features=images))
    assert found(warmed(reservations(), both), both) == HIT
    assert found(warmed(reservations(span_safe_hits=True), both), both) == 0
