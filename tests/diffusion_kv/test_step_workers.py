# SPDX-License-Identifier: Apache-2.0
"""One worker as an engine calls it: what belongs to the other mode is refused."""

import numpy as np
import pytest
from diffusion_kv.worker_rig import BLOCK, LAYOUT, dense, keys_of, opened_owner, pages_from, snapshot

from omni_core.diffusion_kv.errors import KVWorkerError
from omni_core.diffusion_kv.worker.slot_mapping import SlotMapping
from omni_core.diffusion_kv.worker.step_workers import DenseStepWorker, PagedStepWorker

PAGES = (pages_from(1), pages_from(9))


def test_a_dense_worker_takes_no_pages():
    worker = DenseStepWorker(dense())
    with pytest.raises(KVWorkerError, match="'a': a snapshot of pages for a worker of diffusion_kv_mode=dense_legacy"):
        worker.install(snapshot("a", *PAGES))


def test_a_dense_worker_drops_a_request_of_whatever_generation():
    worker = DenseStepWorker(dense())
    worker.owner.first_step(keys_of("a"), LAYOUT)
    worker.remove("a", None)
    worker.remove("a", None)
    assert "a" not in worker.owner.request_ids


def test_a_paged_worker_wants_the_generation_it_is_to_drop():
    with opened_owner("gathered") as owner:
        worker = PagedStepWorker(owner)
        worker.install(snapshot("a", *PAGES))
        with pytest.raises(KVWorkerError, match="'a': rows in pages are removed by their generation; none was given"):
            worker.remove("a", None)
        assert worker.kv_worker.request_ids == ("a",)
        worker.remove("a", 1)
        assert worker.kv_worker.request_ids == ()


@pytest.mark.parametrize(("start", "end"), [(0, 113), (64, 113), (70, 110), (15, 17), (16, 32), (112, 113)])
def test_a_token_is_written_to_its_rows_page_and_place(start, end):
    with opened_owner("gathered") as owner:
        scattered = (tuple(range(20, 4, -2)), tuple(range(5, 21, 2)))
        owner.worker.install(snapshot("a", *scattered))
        table_rows = np.array([owner.worker.row(key).table_row for key in keys_of("a")])
        slots = SlotMapping(owner.worker).map(table_rows, start, end)
    wanted = [
        pages[position // BLOCK] * BLOCK + position % BLOCK for pages in scattered for position in range(start, end)
    ]
    assert slots.tolist() == wanted
