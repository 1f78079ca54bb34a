# SPDX-License-Identifier: Apache-2.0
"""What the worker does with a snapshot, and what it refuses of one without having changed anything."""

from dataclasses import replace

import pytest
import torch
from diffusion_kv.worker_rig import (
    BLOCK,
    HIT,
    LAYOUT,
    PAGES_PER_ROW,
    keys_of,
    opened_backend,
    opened_worker,
    pages_from,
    snapshot,
)

from omni_core.diffusion_kv.errors import DiffusionKVConfigError, KVWorkerError
from omni_core.diffusion_kv.rows import RowGeometry
from omni_core.diffusion_kv.worker.device_memory import BackendMemory

PAGES = (pages_from(1), pages_from(9))
OTHER_PAGES = (pages_from(17), pages_from(25))


@pytest.fixture
def worker():
    with opened_worker() as worker:
        yield worker


def held(worker):
    """Everything a caller can see of what is installed."""
    rows = {key: worker.row(key) for request_id in worker.request_ids for key in keys_of(request_id)}
    return (
        {request_id: worker.generation(request_id) for request_id in worker.request_ids},
        {key: (row.page_ids, row.table_row, row.first_step_done) for key, row in rows.items() if row is not None},
        worker.tables.num_free_rows,
        worker.tables.host.tolist(),
        worker.cached_readers.tolist(),
    )


class TestTheTableOfGenerations:
    def test_a_request_that_holds_nothing_takes_free_rows(self, worker):
        worker.install(snapshot("a", *PAGES))
        assert worker.generation("a") == 1
        for key, pages in zip(keys_of("a"), PAGES, strict=True):
            row = worker.row(key)
            assert row.page_ids == pages
            assert worker.tables.host[row.table_row, :PAGES_PER_ROW].tolist() == list(pages)
            assert worker.tables.device[row.table_row].tolist() == worker.tables.host[row.table_row].tolist()
        assert worker.tables.num_free_rows == 2

    def test_the_same_generation_with_the_same_content_changes_nothing(self, worker):
        worker.install(snapshot("a", *PAGES))
        worker.row(keys_of("a")[0]).first_step_done = True
        before = held(worker)
        worker.install(snapshot("a", *PAGES))
        assert held(worker) == before

    def test_the_same_generation_with_other_content_is_a_conflict(self, worker):
        worker.install(snapshot("a", *PAGES))
        before = held(worker)
        with pytest.raises(KVWorkerError, match="'a': generation 1 is installed with other rows"):
            worker.install(snapshot("a", *OTHER_PAGES))
        assert held(worker) == before

    def test_a_newer_generation_of_the_same_content_raises_the_generation_alone(self, worker):
        worker.install(snapshot("a", *PAGES))
        table_rows = [worker.row(key).table_row for key in keys_of("a")]
        worker.install(snapshot("a", *PAGES, generation=5))
        assert worker.generation("a") == 5
        assert [worker.row(key).table_row for key in keys_of("a")] == table_rows
        assert worker.tables.num_free_rows == 2

    def test_a_newer_generation_begins_again_with_a_first_step(self, worker):
        worker.install(snapshot("a", *PAGES))
        worker.row(keys_of("a")[0]).first_step_done = True
        worker.install(snapshot("a", *PAGES, generation=2))
        assert not worker.row(keys_of("a")[0]).first_step_done

    @pytest.mark.parametrize("pages", [PAGES, OTHER_PAGES])
    def test_an_older_generation_is_stale(self, worker, pages):
        worker.install(snapshot("a", *PAGES, generation=6))
        before = held(worker)
        with pytest.raises(KVWorkerError, match="'a': a stale snapshot of generation 5; generation 6 is installed"):
            worker.install(snapshot("a", *pages, generation=5))
        assert held(worker) == before

    def test_a_newer_generation_of_other_content_needs_a_removal_first(self, worker):
        worker.install(snapshot("a", *PAGES))
        before = held(worker)
        with pytest.raises(
            KVWorkerError, match=r"'a': generation 2 has other pages .* generation 1, which was not rem"
        ):
            worker.install(snapshot("a", *OTHER_PAGES, generation=2))
        assert held(worker) == before
        worker.remove("a", 1)
        worker.install(snapshot("a", *OTHER_PAGES, generation=2))
        assert worker.row(keys_of("a")[1]).page_ids == OTHER_PAGES[1]


class TestRemoval:
    def test_a_removal_gives_the_table_rows_back(self, worker):
        worker.install(snapshot("a", *PAGES, hit=HIT))
        worker.remove("a", 1)
        assert worker.request_ids == ()
        assert worker.row(keys_of("a")[0]) is None
        assert worker.tables.num_free_rows == 4
        assert not worker.tables.host.any()
        assert not worker.tables.device.any()
        assert not worker.cached_readers.any()

    def test_a_late_removal_of_an_earlier_generation_does_nothing(self, worker):
        worker.install(snapshot("a", *PAGES, generation=6))
        before = held(worker)
        worker.remove("a", 5)
        assert held(worker) == before

    def test_a_removal_of_a_later_generation_drops_the_earlier_one_too(self, worker):
        worker.install(snapshot("a", *PAGES, generation=5))
        worker.remove("a", 6)
        assert worker.request_ids == ()

    def test_a_request_that_holds_nothing_is_removed_twice_without_harm(self, worker):
        worker.install(snapshot("a", *PAGES))
        before = held(worker)
        worker.remove("b", 1)
        worker.remove("b", 1)
        assert held(worker) == before

    def test_a_table_row_is_used_again_and_holds_nothing_of_the_one_before(self, worker):
        for number in range(20):
            long, short = pages_from(1, 8), pages_from(9 + number, 2)
            worker.install(snapshot(f"long {number}", long))
            worker.remove(f"long {number}", 1)
            tiny = replace(LAYOUT, geometry=RowGeometry(10, 12, 22), spans=())
            worker.install(snapshot("short", short, layout=tiny, generation=number + 1))
            row = worker.tables.host[worker.row(keys_of("short")[0]).table_row]
            assert row.tolist() == [*short, *[0] * 8]
            worker.remove("short", number + 1)
        assert worker.tables.num_free_rows == 4


def changed(only_row=None, /, **changes):
    """A two-row snapshot with one thing of one row changed, or of both."""
    good = snapshot("a", *PAGES, hit=HIT)
    rows = tuple(replace(row, **changes) if only_row in (None, row.row_index) else row for row in good.rows)
    return replace(good, rows=rows)


MALFORMED = {
    "no id": (snapshot("", *PAGES), "without a request id"),
    "generation is no int": (snapshot("a", *PAGES, generation=True), "generation=True; it is an int from 1"),
    "generation 0": (snapshot("a", *PAGES, generation=0), "generation=0; it is an int from 1"),
    "no rows": (snapshot("a"), "'a' has no row"),
    "more rows than a request may have": (
        snapshot("a", *PAGES, pages_from(17)),
        "'a' has 3 rows and diffusion_kv_max_rows_per_request=2",
    ),
    "rows out of order": (changed(0, row_index=1), "row 1 stands in place 0"),
    "hit is no int": (changed(cached_prefix_tokens=64.0), "cached_prefix_tokens=64.0 is a float"),
    "hit is a bool": (changed(cached_prefix_tokens=False), "cached_prefix_tokens=False is a bool"),
    "hit is negative": (changed(cached_prefix_tokens=-16), "cached_prefix_tokens=-16 is not within its prefix of 70"),
    "hit beyond the prefix": (changed(cached_prefix_tokens=80), "=80 is not within its prefix of 70"),
    "hit of no whole pages": (changed(cached_prefix_tokens=70), "=70 are no whole pages of block_size=16"),
    "rows of different hits": (changed(1, cached_prefix_tokens=48), r"its rows hit \[48, 64\] tokens"),
    "two cache groups": (changed(1, block_ids=(PAGES[1], PAGES[1])), "row 1: pages of 2 KV cache groups"),
    "no cache group": (changed(1, block_ids=()), "row 1: pages of 0 KV cache groups"),
    "a page too few": (changed(1, block_ids=(PAGES[1][:-1],)), "row 1: 7 pages for 113 tokens; .* makes it 8"),
    "a page too many": (changed(1, block_ids=((*PAGES[1], 17),)), "row 1: 9 pages for 113 tokens; .* makes it 8"),
    "the null page": (changed(1, block_ids=((0, *PAGES[1][1:]),)), "row 1: page 0 is vLLM's null page"),
    "a negative page": (changed(1, block_ids=((-1, *PAGES[1][1:]),)), "row 1: page id -1 is outside the pool of num_b"),
    "a page past the pool": (changed(1, block_ids=((40, *PAGES[1][1:]),)), "page id 40 is outside the pool of num_b"),
    "a page id that is no int": (changed(1, block_ids=((9.0, *PAGES[1][1:]),)), "row 1: page id 9.0 is a float"),
    "a page twice in what a row writes": (
        changed(1, block_ids=((*PAGES[1][:7], PAGES[1][6]),)),
        "a page that one row writes stands twice in the rows",
    ),
    "two rows that write one page": (
        changed(1, block_ids=((*PAGES[1][:7], PAGES[0][7]),)),
        "a page that one row writes stands twice in the rows",
    ),
    "a page that one row hits and the other writes": (
        changed(1, block_ids=((*PAGES[1][:7], PAGES[0][0]),)),
        "a page that one row writes stands among the cached pages",
    ),
    "a row longer than a table row": (
        snapshot("a", pages_from(1, 11), layout=replace(LAYOUT, geometry=RowGeometry(70, 40, 170), spans=())),
        "11 pages, and a block-table row has room for max_blocks_per_row=10",
    ),
}


class TestRefusals:
    @pytest.mark.parametrize("name", MALFORMED)
    def test_a_malformed_snapshot_changes_nothing(self, worker, name):
        worker.install(snapshot("b", pages_from(30, 8), hit=HIT))
        before = held(worker)
        wrong, message = MALFORMED[name]
        with pytest.raises(KVWorkerError, match=message):
            worker.install(wrong)
        assert held(worker) == before

    def test_rows_may_share_the_pages_they_hit(self, worker):
        cached = pages_from(1, HIT // BLOCK)
        worker.install(snapshot("a", (*cached, *pages_from(9, 4)), (*cached, *pages_from(13, 4)), hit=HIT))
        assert worker.cached_readers[list(cached)].tolist() == [2] * 4

    def test_more_rows_than_the_tables_have_free(self, worker):
        worker.install(snapshot("a", *PAGES))
        worker.install(snapshot("b", pages_from(17)))
        before = held(worker)
        with pytest.raises(KVWorkerError, match=r"'c' needs 2 block-table rows and 1 of 4 are free.*: 'a', 'b'"):
            worker.install(snapshot("c", pages_from(25), pages_from(9)))
        assert held(worker) == before

    def test_a_closed_worker(self, worker):
        worker.close()
        worker.close()
        with pytest.raises(KVWorkerError, match="install: the worker was closed"):
            worker.install(snapshot("a", *PAGES))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"max_rows": 0}, "max_rows=0; it is a positive int"),
            ({"max_num_seqs": True}, "max_num_seqs=True; it is a positive int"),
            ({"max_blocks_per_row": -1}, "max_blocks_per_row=-1; it is a positive int"),
            ({"num_blocks": 1}, "num_blocks=1: page 0 is vLLM's null page"),
            ({"block_size": 0}, "block_size=0; a page holds at least one token"),
        ],
    )
    def test_sizes_that_hold_nothing(self, changes, message):
        with pytest.raises(DiffusionKVConfigError, match=message), opened_worker(**changes):
            pass

    def test_a_device_that_the_backend_does_not_own(self):
        with (
            opened_backend() as backend,
            pytest.raises(DiffusionKVConfigError, match=r"backend 'cpu_sim' owns 'cpu' tensors .* on 'meta'"),
        ):
            BackendMemory(backend, torch.device("meta"))


class CfgRank:
    """A place in a group; nothing is said to the other ranks."""

    def __init__(self, rank, size=2):
        self.rank, self.size = rank, size


class TestCfgParallel:
    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_rank_holds_the_row_of_its_number_alone(self, rank):
        with opened_worker(cfg=CfgRank(rank)) as worker:
            worker.install(snapshot("a", *PAGES))
            assert worker.row(keys_of("a")[rank]).page_ids == PAGES[rank]
            assert worker.row(keys_of("a")[1 - rank]) is None
            assert worker.tables.num_free_rows == 3
            worker.install(snapshot("a", *PAGES))
            with pytest.raises(KVWorkerError, match="'a': generation 1 is installed with other rows"):
                worker.install(snapshot("a", *OTHER_PAGES))

    def test_rows_for_another_number_of_ranks(self):
        with (
            opened_worker(cfg=CfgRank(0)) as worker,
            pytest.raises(KVWorkerError, match="'a' has 1 CFG rows for 2 CFG-parallel ranks; each rank computes one"),
        ):
            worker.install(snapshot("a", PAGES[0]))
