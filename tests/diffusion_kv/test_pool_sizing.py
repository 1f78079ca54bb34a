# SPDX-License-Identifier: Apache-2.0
"""The pool is what vLLM's own functions make of the memory; what cannot serve the stage is refused at start."""

from dataclasses import replace

import pytest
import torch
from diffusion_kv.native_pages import SHAPE, import_native

from omni_core.diffusion_kv.attention.owner import KVShape
from omni_core.diffusion_kv.errors import DiffusionKVConfigError

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]

MIB = 1 << 20
LAYERS = KVShape(num_layers=4, num_query_heads=2, num_kv_heads=1, head_size=64, dtype=torch.float32)
PAGE_BYTES = 4 * 2 * 32 * 64 * 4
"""Of all four layers, keys and values, 32 tokens."""


@pytest.fixture(scope="module")
def sizing():
    return import_native().sizing


@pytest.fixture
def plan(sizing):
    def planned(*ranks, **changes):
        demand = {"block_size": 32, "max_rows": 1, "max_num_seqs": 4, "max_model_len": 2048} | changes
        memories = [sizing.RankMemory(shape, nbytes) for shape, nbytes in ranks]
        return sizing.plan_pool(memories, sizing.PoolDemand(**demand))

    return planned


def test_the_memory_is_divided_into_pages_of_all_layers(plan):
    pool = plan((LAYERS, 64 * MIB), max_rows=2)
    assert pool.num_blocks == 64 * MIB // PAGE_BYTES
    assert (pool.block_size, pool.max_model_len) == (32, 2048)
    (group,) = pool.kv_cache_config.kv_cache_groups
    assert group.kv_cache_spec.non_causal


def test_the_smallest_rank_decides(plan):
    assert plan((LAYERS, 64 * MIB), (LAYERS, 32 * MIB)).num_blocks == 32 * MIB // PAGE_BYTES


def test_a_number_of_pages_may_be_set_whatever_the_memory(plan):
    assert plan((LAYERS, 1), num_blocks=100).num_blocks == 100


def test_the_longest_row_that_fits_is_found_beside_the_null_page(plan, sizing):
    fit = {"max_model_len": sizing.AUTO_FIT, "longest_row_tokens": 1 << 20}
    assert plan((LAYERS, 64 * PAGE_BYTES), **fit).max_model_len == 2016
    assert plan((LAYERS, 64 * PAGE_BYTES), **fit | {"longest_row_tokens": 802}).max_model_len == 802


def test_all_rows_of_a_request_must_fit_at_once(plan, sizing):
    with pytest.raises(
        DiffusionKVConfigError, match="63 pages of 32 tokens and cannot hold one request of 2 rows of 1024"
    ):
        plan((LAYERS, 64 * PAGE_BYTES), max_rows=2, longest_row_tokens=1024, max_model_len=1024)
    assert plan((LAYERS, 64 * PAGE_BYTES), max_rows=2, longest_row_tokens=992, max_model_len=1024).num_blocks == 64
    fit = {"max_model_len": sizing.AUTO_FIT, "longest_row_tokens": 1024}
    assert plan((LAYERS, 64 * PAGE_BYTES), max_rows=2, **fit).max_model_len == 992


@pytest.mark.parametrize(
    ("ranks", "changes", "says"),
    [
        ([], {}, "no rank reported its KV shape"),
        ([(LAYERS, MIB)], {}, "cannot hold one row: max_model_len=2048, 1048576 bytes on the smallest of 1 ranks"),
        ([(LAYERS, 0)], {}, "cannot hold one row"),
        ([(LAYERS, 0)], {"max_model_len": -1, "longest_row_tokens": 802}, "cannot hold one row"),
        ([(LAYERS, MIB)], {"num_blocks": 10}, "cannot hold one row: max_model_len=2048, num_blocks=10"),
        ([(LAYERS, MIB), (SHAPE, MIB)], {}, "have 2 shapes, and one pool has one geometry"),
        ([(LAYERS, MIB), (replace(LAYERS, num_layers=3), MIB)], {}, "have 2 shapes"),
        ([(LAYERS, MIB)], {"max_model_len": 0}, "max_model_len=0; it is positive, or -1"),
        ([(LAYERS, MIB)], {"max_model_len": -2}, "max_model_len=-2"),
        ([(LAYERS, MIB)], {"max_model_len": -1}, "the model tells no longest row"),
        ([(LAYERS, MIB)], {"max_rows": True}, "max_rows=True; it is a positive int"),
        ([(LAYERS, MIB)], {"max_num_seqs": 0}, "max_num_seqs=0"),
        ([(LAYERS, MIB)], {"block_size": 0}, "block_size=0"),
        ([(LAYERS, MIB)], {"num_blocks": -1}, "num_blocks=-1"),
    ],
)
def test_what_cannot_serve_the_stage_is_refused(plan, ranks, changes, says):
    with pytest.raises(DiffusionKVConfigError, match=says):
        plan(*ranks, **changes)
