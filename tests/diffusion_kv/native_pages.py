# SPDX-License-Identifier: Apache-2.0
"""Pools on vLLM's own KV manager, and rows of the layout that the manager was first driven by hand with.

Prefix 70, target 40, trailer 3, total 113; pages of 16 tokens: 8 pages a row, 4 of them full prefix pages. One image
lies at [20, 58): it touches pages 1 to 3.
"""

import importlib
import logging
import warnings
from dataclasses import replace
from types import SimpleNamespace

import torch

from omni_core.diffusion_kv.attention.owner import KVShape
from omni_core.diffusion_kv.reservations import RowDemand
from omni_core.diffusion_kv.rows import ImageFeature, RowGeometry, RowIdentity

BLOCK = 16
GEOMETRY = RowGeometry(70, 40, 113)
PAGES_PER_ROW = 8
HIT = 64
IMAGE = ImageFeature("a fox, seed 7", 20, 58)
IDENTITY = RowIdentity(tuple(range(1000, 1113)), (IMAGE,), b"tiny model, no adapter")
SHAPE = KVShape(num_layers=2, num_query_heads=2, num_kv_heads=1, head_size=8, dtype=torch.float32)


def import_native():
    """The modules that drive vLLM. Imports vLLM, which takes some seconds; no worker, no device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = "omni_core.integrations.diffusion"
        names = ("block_hashing", "kv_manager", "row_request", "sizing")
        modules = {name: importlib.import_module(f"{package}.{name}") for name in names}
    logging.getLogger("vllm").setLevel(logging.ERROR)
    return SimpleNamespace(**modules)


def pool_of(usable_pages, *, block_size=BLOCK, max_model_len=None):
    """A pool by vLLM's own sizing, vLLM's null page beside the usable ones."""
    sizing = import_native().sizing
    demand = sizing.PoolDemand(
        block_size=block_size,
        max_rows=2,
        max_num_seqs=4,
        max_model_len=max_model_len or usable_pages * block_size,
        num_blocks=usable_pages + 1,
    )
    return sizing.plan_pool([sizing.RankMemory(SHAPE, 1)], demand)


def reservations(usable_pages=64, *, block_size=BLOCK, max_model_len=None, caching=True, **options):
    pool = pool_of(usable_pages, block_size=block_size, max_model_len=max_model_len)
    return import_native().kv_manager.VllmKVReservations(
        pool, **{"max_rows": 2, "enable_prefix_caching": caching} | options
    )


def row(identity=IDENTITY, geometry=GEOMETRY):
    return RowDemand(geometry, identity)


def differing(position, identity=IDENTITY):
    """The same row with another token at `position`."""
    tokens = list(identity.token_ids)
    tokens[position] = 7
    return row(replace(identity, token_ids=tuple(tokens)))


def other_image(**changes):
    """The same row with its image changed."""
    return row(replace(IDENTITY, features=(replace(IMAGE, **changes),)))


def nobody(num_pages):
    """A row of so many pages, without identity: it fills the pool and is never found."""
    return RowDemand(RowGeometry(0, num_pages * BLOCK, num_pages * BLOCK), None)


def warmed(pages, *rows, request_id="warm"):
    """Run a request of these rows to its end."""
    run(pages, request_id, rows or (row(),))
    return pages


def run(pages, request_id, rows):
    snapshot = pages.reserve(request_id, rows)
    pages.publish(request_id, snapshot.generation)
    pages.free(request_id, snapshot.generation)
    return snapshot


def hit_of(snapshot):
    (hit,) = {one.cached_prefix_tokens for one in snapshot.rows}
    return hit


def found(pages, *rows):
    """The hit of rows that ask and go away again unpublished."""
    snapshot = pages.reserve("probe", rows)
    pages.free("probe", snapshot.generation)
    return hit_of(snapshot)


def page_ids(snapshot, index=0):
    (ids,) = snapshot.rows[index].block_ids
    return ids


def all_free(pages):
    stats = pages.stats()
    return stats.free_pages == stats.total_pages
