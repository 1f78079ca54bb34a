# SPDX-License-Identifier: Apache-2.0
"""What is published and when, and what happens to published pages afterwards."""

from dataclasses import replace

import pytest
from diffusion_kv.native_pages import (
    HIT,
    IDENTITY,
    all_free,
    differing,
    found,
    hit_of,
    import_native,
    nobody,
    other_image,
    page_ids,
    reservations,
    row,
    run,
    warmed,
)

from omni_core.diffusion_kv.errors import DiffusionKVError
from omni_core.diffusion_kv.rows import RowGeometry

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module", autouse=True)
def vllm():
    import_native()


def hashed_pages(pages):
    """How many free pages somebody could still hit: those that are evicted when the whole pool is taken."""
    stats = pages.stats()
    snapshot = pages.reserve("everything", [nobody(stats.free_pages)])
    pages.free("everything", snapshot.generation)
    return pages.stats().evicted_pages - stats.evicted_pages


def test_nothing_is_found_before_it_is_published():
    pages = reservations()
    pages.reserve("a", [row()])
    assert found(pages, row()) == 0


def test_only_full_prefix_pages_are_published():
    """With vLLM's own hasher and without delay, pages of the target were offered too: 112 tokens of a prefix of 70."""
    pages = reservations()
    run(pages, "a", [row()])
    assert hashed_pages(pages) == 4


def test_publishing_again_changes_nothing():
    pages = reservations()
    snapshot = pages.reserve("a", [row()])
    for _ in range(3):
        pages.publish("a", snapshot.generation)
    assert pages.stats().published_requests == 1
    pages.free("a", snapshot.generation)
    assert hashed_pages(pages) == 4


def test_after_step_0_others_share_the_prefix_while_its_owner_still_runs():
    pages = reservations()
    owner = pages.reserve("owner", [row()])
    pages.publish("owner", owner.generation)
    other = pages.reserve("other", [row()])
    assert hit_of(other) == HIT
    assert page_ids(other)[:4] == page_ids(owner)[:4]
    assert not set(page_ids(other)[4:]) & set(page_ids(owner)[4:])
    pages.free("owner", owner.generation)  # aborted: what was published stays
    assert found(pages, row()) == HIT
    pages.free("other", other.generation)
    assert all_free(pages)


def test_a_request_that_was_not_published_leaves_nothing():
    pages = reservations()
    snapshot = pages.reserve("a", [row()])
    pages.free("a", snapshot.generation)
    assert found(pages, row()) == 0
    assert hashed_pages(pages) == 0


def test_twins_that_run_at_once_do_not_see_each_other_and_both_may_publish():
    pages = reservations()
    snapshots = {name: pages.reserve(name, [row()]) for name in "ab"}
    assert [hit_of(snapshot) for snapshot in snapshots.values()] == [0, 0]
    for name, snapshot in snapshots.items():
        pages.publish(name, snapshot.generation)
    for name, snapshot in snapshots.items():
        pages.free(name, snapshot.generation)
    assert found(pages, row()) == HIT
    assert all_free(pages)


def test_the_head_that_two_cfg_rows_share_is_kept_once():
    """Rows alike up to token 50 share three full pages: five hashes, where eight pages hold prefix."""
    pages = reservations()
    run(pages, "a", [row(), differing(50)])
    assert found(pages, row(), differing(50)) == HIT
    assert hashed_pages(pages) == 5


def test_of_twin_rows_that_are_wholly_alike_one_is_kept():
    pages = reservations()
    snapshot = pages.reserve("a", [row(), row()])
    pages.publish("a", snapshot.generation)
    second = pages.reserve("b", [row()])
    assert page_ids(second)[:4] == page_ids(snapshot, 0)[:4]
    pages.free("a", snapshot.generation)
    pages.free("b", second.generation)
    assert hashed_pages(pages) == 4


def test_publishing_wants_a_live_request_of_this_generation():
    pages = reservations()
    with pytest.raises(DiffusionKVError, match="publish: request 'a' of generation 1 holds no pages"):
        pages.publish("a", 1)
    pages.reserve("a", [row()])
    with pytest.raises(DiffusionKVError, match="'a' of generation 2 is in generation 1"):
        pages.publish("a", 2)


def test_rows_without_identity_publish_nothing_beside_one_that_has_it():
    """vLLM fails where a page it is told to publish has no hash."""
    pages = reservations()
    run(pages, "a", [row(None), row()])
    assert found(pages, row()) == HIT
    run(pages, "b", [row(None)])
    assert pages.stats().published_requests == 1


@pytest.mark.parametrize("prefix", [0, 15])
def test_a_prefix_shorter_than_a_page_publishes_nothing(prefix):
    pages = reservations()
    short = row(replace(IDENTITY, features=()), RowGeometry(prefix, 40, prefix + 40))
    assert hit_of(run(pages, "a", [short])) == hit_of(run(pages, "b", [short])) == 0
    assert hashed_pages(pages) == 0


@pytest.mark.parametrize(
    ("other", "hit"),
    [
        (other_image(identifier="a fox, seed 8"), 16),
        (other_image(start=21, end=59), 16),
        (differing(60), 48),
        (differing(0), 0),
        (row(replace(IDENTITY, namespace=b"tiny model, adapter 1 at 0.5")), 0),
    ],
    ids=["other image or seed", "image moved by one token", "text behind it", "first token", "namespace"],
)
def test_a_row_shares_what_is_the_same_up_to_the_first_difference(other, hit):
    pages = warmed(reservations())
    assert found(pages, other) == hit
    assert found(pages, row()) == HIT


def test_pages_nobody_can_find_go_first_and_a_prefix_erodes_from_its_end():
    hits = []
    for taken in range(12, 17):
        pages = warmed(reservations(16))
        plain = pages.reserve("plain", [nobody(taken)])
        assert pages.stats().evicted_pages == taken - 12
        pages.free("plain", plain.generation)
        hits.append(found(pages, row()))
    assert hits == [64, 48, 32, 16, 0]


def test_the_shared_head_of_two_rows_is_evicted_last():
    hits = []
    for taken in range(11, 17):
        pages = warmed(reservations(16), row(), differing(50))
        plain = pages.reserve("plain", [nobody(taken)])
        pages.free("plain", plain.generation)
        hits.append((found(pages, row()), found(pages, differing(50))))
    assert hits == [(64, 64), (64, 48), (48, 48), (32, 32), (16, 16), (0, 0)]


def test_asking_keeps_a_prefix_alive():
    pages = reservations(16)
    old, new = row(), row(replace(IDENTITY, namespace=b"another"))
    warmed(pages, old, request_id="old")
    warmed(pages, new, request_id="new")
    assert found(pages, old) == HIT  # now the younger of the two
    warmed(pages, nobody(12))
    assert found(pages, old) == HIT
    assert found(pages, new) == 0


def test_pages_of_a_live_request_are_never_evicted():
    pages = warmed(reservations(16))
    live = pages.reserve("live", [row()])
    assert pages.reserve("large", [nobody(9)]) is None
    warmed(pages, nobody(8))
    assert found_beside(pages, live) == HIT


def found_beside(pages, live):
    """A hit of another request beside the live one."""
    snapshot = pages.reserve("beside", [row()])
    assert page_ids(snapshot)[:4] == page_ids(live)[:4]
    pages.free("beside", snapshot.generation)
    return hit_of(snapshot)


def test_reset_forgets_everything_but_not_under_a_live_request():
    pages = reservations()
    snapshot = pages.reserve("a", [row()])
    pages.publish("a", snapshot.generation)
    assert pages.reset() is False
    assert found(pages, row()) == HIT
    pages.free("a", snapshot.generation)
    assert pages.reset() is True
    assert found(pages, row()) == 0


def test_statistics_count_each_reservation_once_and_probes_not_at_all():
    pages = reservations(20)
    first = pages.reserve("a", [row()])
    for _ in range(3):
        assert pages.reserve("b", [row(), row()]) is None
    pages.publish("a", first.generation)
    pages.free("a", first.generation)
    pages.reserve("b", [row(), row()])
    stats = pages.stats()
    assert stats.requests == 2
    assert stats.queried_tokens == 3 * 113
    assert stats.hit_tokens == 2 * 64
    assert (stats.free_pages, stats.total_pages) == (20 - 12, 20)


def test_with_caching_off_no_identity_is_hashed_nothing_hits_and_publishing_does_nothing(monkeypatch):
    from omni_core.integrations.diffusion import kv_manager

    def hashes(*_):
        raise AssertionError("an identity was hashed")

    monkeypatch.setattr(kv_manager, "hash_prefix_blocks", hashes)
    pages = reservations(caching=False)
    run(pages, "a", [row(), row()])
    assert hit_of(run(pages, "b", [row(), row()])) == 0
    stats = pages.stats()
    assert (stats.requests, stats.queried_tokens, stats.published_requests) == (2, 0, 0)
    assert all_free(pages)
