# SPDX-License-Identifier: Apache-2.0
"""A worker with pages, an owner of either kind over them, and rows whose tensors are told by request, row and layer."""

import importlib
import logging
import warnings
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from omni_core.backend.registry import backend_for_tensor
from omni_core.diffusion_kv.attention.dense import DenseAttention
from omni_core.diffusion_kv.attention.gathered import GatheredAttention
from omni_core.diffusion_kv.attention.owner import KVShape, RowKey
from omni_core.diffusion_kv.parallel import OneRank
from omni_core.diffusion_kv.rows import BidirectionalSpan, RowGeometry, RowLayout
from omni_core.diffusion_kv.snapshot import KVSnapshot, RowSnapshot
from omni_core.diffusion_kv.worker.device_memory import BackendMemory
from omni_core.diffusion_kv.worker.kv_worker import KVWorker
from omni_core.runtime import ThreadingRuntime

CPU = torch.device("cpu")
BLOCK = 16
LAYOUT = RowLayout(  # text, one reference, text; timestep, target image, trailer
    RowGeometry(prefix_tokens=70, target_tokens=40, total_tokens=113),
    (BidirectionalSpan(20, 58), BidirectionalSpan(71, 110)),
)
PAGES_PER_ROW = 8
HIT = 64
MID_SPAN_HIT = 48
SHAPE = KVShape(num_layers=2, num_query_heads=6, num_kv_heads=2, head_size=32, dtype=torch.float32)
KERNEL_TEST = (pytest.mark.engine, pytest.mark.filterwarnings("default"), pytest.mark.timeout(300))
OWNERS = ("gathered", pytest.param("kernel", marks=KERNEL_TEST))


def import_kernel():
    """The module of vLLM's CPU kernel. Imports vLLM, which takes some seconds; no worker, no engine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module("omni_core.integrations.diffusion.kernel_attention")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    return module


def owner_class(kind):
    return GatheredAttention if kind == "gathered" else import_kernel().KernelAttention


@contextmanager
def opened_backend():
    backend = backend_for_tensor(torch.empty(0), runtime=ThreadingRuntime())
    try:
        yield backend
    finally:
        backend.close()


@contextmanager
def opened_worker(shape=SHAPE, *, num_blocks=40, block_size=BLOCK, max_num_seqs=4, cfg=None, **limits):
    """A `KVWorker`, whose fresh pages hold NaN, as cpu_sim makes them."""
    sizes = {"max_rows": 2, "max_blocks_per_row": 10} | limits
    with ExitStack() as stack:
        backend = stack.enter_context(opened_backend())
        memory = BackendMemory(backend, CPU)
        stack.callback(memory.close)
        cfg = OneRank() if cfg is None else cfg
        yield KVWorker(shape, num_blocks, block_size, max_num_seqs=max_num_seqs, memory=memory, cfg=cfg, **sizes)


@contextmanager
def opened_owner(kind, shape=SHAPE, **sizes):
    with opened_worker(shape, **sizes) as worker:
        yield owner_class(kind)(worker)


def dense(shape=SHAPE):
    return DenseAttention(shape, CPU)


def snapshot(request_id, *rows_of_pages, hit=0, generation=1, layout=LAYOUT):
    return KVSnapshot(
        request_id,
        generation,
        tuple(RowSnapshot(index, layout.geometry, hit, (tuple(pages),)) for index, pages in enumerate(rows_of_pages)),
    )


def pages_from(first, count=PAGES_PER_ROW):
    return tuple(range(first, first + count))


def keys_of(request_id, num_rows=2):
    return tuple(RowKey(request_id, index) for index in range(num_rows))


@dataclass
class RowTensors:
    """Queries, keys and values of whole rows; equal names give equal tensors."""

    shape: KVShape = SHAPE
    layout: RowLayout = LAYOUT
    made: dict = field(default_factory=dict)

    def of(self, name, row, layer, step=0):
        """`(query, key, value)` of one row, `[total, heads, head_size]`; the prefix's are the same in every step."""
        key = (name, row, layer, step)
        if key not in self.made:
            generator = torch.Generator().manual_seed(hash((sum(name.encode()) * 31 + len(name), row, layer, step)))
            heads = (self.shape.num_query_heads, self.shape.num_kv_heads, self.shape.num_kv_heads)
            drawn = tuple(
                torch.randn(
                    self.layout.geometry.total_tokens,
                    count,
                    self.shape.head_size,
                    generator=generator,
                    dtype=torch.float64,
                ).to(self.shape.dtype)
                for count in heads
            )
            self.made[key] = drawn
        return self.made[key]

    def batch(self, rows, layer, start, end, step=0):
        """Query, key and value of a forward; a row is told by its request's first letters before a dash."""
        of_rows = [self.of(row.request_id.partition("-")[0], row.row_index, layer, step) for row in rows]
        return tuple(torch.stack([of_row[index][start:end] for of_row in of_rows]) for index in range(3))


def compute(step, tensors, number=0):
    """Every layer of one forward; its outputs, `[layers, rows, queries, heads, head_size]`."""
    start, end = step.query_start_tokens, step.query_start_tokens + step.num_query_tokens
    return torch.stack(
        [
            step.attend(layer, *tensors.batch(step.rows, layer, start, end, number))
            for layer in range(tensors.shape.num_layers)
        ]
    )


def run(owner, rows, tensors, *, layout=LAYOUT, later_steps=1):
    """A first step and some later ones; the outputs of each."""
    outputs = [compute(owner.first_step(rows, layout), tensors)]
    outputs += [compute(owner.later_step(rows, layout), tensors, number) for number in range(1, later_steps + 1)]
    return outputs


def brute_force(layout, start, end):
    """Which keys `[0, end)` the queries `[start, end)` see, by the rule of the layout, one pair at a time."""

    def sees(query, key):
        both_ways = any(span.start <= query < span.end and span.start <= key < span.end for span in layout.spans)
        return key <= query or both_ways

    return [[sees(query, key) for key in range(end)] for query in range(start, end)]


def relative_error(ours, reference):
    ours, reference = ours.double(), reference.double()
    return float((ours - reference).norm() / reference.norm())
