# SPDX-License-Identifier: Apache-2.0
"""Every owner of keys and values gives the outputs of one that recomputes, with and without a hit, at every step.

Gates of `docs/diffusion-kv-accuracy.md`: bitwise where the same call is made on the same bits, else relative.
"""

from dataclasses import replace

import pytest
import torch
from diffusion_kv.worker_rig import (
    BLOCK,
    HIT,
    KERNEL_TEST,
    LAYOUT,
    MID_SPAN_HIT,
    OWNERS,
    PAGES_PER_ROW,
    SHAPE,
    RowTensors,
    brute_force,
    compute,
    dense,
    keys_of,
    opened_owner,
    pages_from,
    relative_error,
    run,
    snapshot,
)

from omni_core.diffusion_kv.errors import DiffusionKVConfigError
from omni_core.diffusion_kv.rows import RowGeometry, RowLayout
from omni_core.diffusion_kv.worker.device_memory import BackendMemory

GEOMETRY = LAYOUT.geometry
COLD = (pages_from(1), pages_from(9))


def pages_behind(hit, first):
    """Rows that hit the pages of `COLD` and write pages of their own from `first` on."""
    shared = hit // BLOCK
    own = PAGES_PER_ROW - shared
    return tuple((*pages[:shared], *pages_from(first + number * own, own)) for number, pages in enumerate(COLD))


def recomputed(rows, tensors, later_steps=1):
    """Plain attention over the whole row at every step: what no owner is needed for. Float64."""
    shared = SHAPE.num_query_heads // SHAPE.num_kv_heads
    outputs = []
    for number in range(later_steps + 1):
        start, end = (0, GEOMETRY.total_tokens) if number == 0 else (GEOMETRY.prefix_tokens, GEOMETRY.target_end)
        mask = torch.tensor(brute_force(LAYOUT, start, end))
        layers = []
        for layer in range(SHAPE.num_layers):
            query, key, value = (tensor.double() for tensor in tensors.batch(rows, layer, 0, end, number))
            first = tensors.batch(rows, layer, 0, GEOMETRY.prefix_tokens, 0)
            key[:, : GEOMETRY.prefix_tokens], value[:, : GEOMETRY.prefix_tokens] = first[1].double(), first[2].double()
            keys, values = (tensor.repeat_interleave(shared, dim=2) for tensor in (key, value))
            scores = torch.einsum("rqhd,rkhd->rhqk", query[:, start:], keys) / SHAPE.head_size**0.5
            weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
            layers.append(torch.einsum("rhqk,rkhd->rqhd", weights, values))
        outputs.append(torch.stack(layers))
    return outputs


@pytest.mark.parametrize("kind", ["dense", *OWNERS])
def test_every_owner_attends_as_plain_attention_does(kind):
    tensors, rows = RowTensors(), keys_of("a")
    wanted = recomputed(rows, tensors, later_steps=2)
    if kind == "dense":
        got = run(dense(), rows, tensors, later_steps=2)
    else:
        with opened_owner(kind) as owner:
            owner.worker.install(snapshot("a", *COLD))
            got = run(owner, rows, tensors, later_steps=2)
    for step_got, step_wanted in zip(got, wanted, strict=True):
        assert relative_error(step_got, step_wanted) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gathered_pages_without_a_hit_are_dense_bit_for_bit(dtype):
    shape = replace(SHAPE, dtype=dtype)
    tensors, rows = RowTensors(shape), keys_of("a")
    wanted = run(dense(shape), rows, tensors)
    with opened_owner("gathered", shape) as owner:
        owner.worker.install(snapshot("a", *COLD))
        got = run(owner, rows, tensors)
    for step_got, step_wanted in zip(got, wanted, strict=True):
        assert torch.equal(step_got, step_wanted)


@pytest.mark.parametrize("hit", [BLOCK, MID_SPAN_HIT, HIT])
@pytest.mark.parametrize("kind", OWNERS)
def test_a_hit_gives_what_a_miss_gives(kind, hit):
    tensors = RowTensors()
    with opened_owner(kind, num_blocks=60) as owner:
        owner.worker.install(snapshot("a-cold", *COLD))
        missed = run(owner, keys_of("a-cold"), tensors, later_steps=2)
        owner.worker.install(snapshot("a-warm", *pages_behind(hit, 17), hit=hit))
        first, *later = run(owner, keys_of("a-warm"), tensors, later_steps=2)
    assert first.shape[2] == GEOMETRY.total_tokens - hit
    assert relative_error(first, missed[0][:, :, hit:]) <= 1e-5
    for step, wanted in zip(later, missed[1:], strict=True):
        assert relative_error(step, wanted) <= 1e-5


@pytest.mark.parametrize(
    ("dtype", "gate"), [(torch.float64, 1e-13), (torch.bfloat16, 2e-2)], ids=["float64", "bfloat16"]
)
def test_a_hit_gives_what_a_miss_gives_in_other_types(dtype, gate):
    shape = replace(SHAPE, dtype=dtype)
    tensors = RowTensors(shape)
    with opened_owner("gathered", shape, num_blocks=60) as owner:
        owner.worker.install(snapshot("a-cold", *COLD))
        missed = run(owner, keys_of("a-cold"), tensors)
        owner.worker.install(snapshot("a-warm", *pages_behind(HIT, 17), hit=HIT))
        first, later = run(owner, keys_of("a-warm"), tensors)
    assert relative_error(first, missed[0][:, :, HIT:]) <= gate
    assert relative_error(later, missed[1]) <= gate


@pytest.mark.parametrize("kind", OWNERS)
def test_a_row_without_a_trailer_keeps_the_prefix_that_shares_its_last_page(kind):
    layout = RowLayout(RowGeometry(prefix_tokens=70, target_tokens=5, total_tokens=75), LAYOUT.spans[:1])
    tensors, rows = RowTensors(layout=layout), keys_of("a")
    wanted = run(dense(), rows, tensors, layout=layout, later_steps=2)
    with opened_owner(kind) as owner:
        owner.worker.install(snapshot("a", pages_from(1, 5), pages_from(6, 5), layout=layout))
        got = run(owner, rows, tensors, layout=layout, later_steps=2)
    for step_got, step_wanted in zip(got, wanted, strict=True):
        assert relative_error(step_got, step_wanted) <= 1e-5


@pytest.mark.parametrize("kind", OWNERS)
def test_two_runs_at_one_boundary_are_equal_bit_for_bit(kind):
    tensors, runs = RowTensors(), []
    with opened_owner(kind, num_blocks=60, max_num_seqs=6) as owner:
        owner.worker.install(snapshot("a-cold", *COLD))
        run(owner, keys_of("a-cold"), tensors)
        for name, first_page in (("a-second", 17), ("a-third", 30)):
            owner.worker.install(snapshot(name, *pages_behind(HIT, first_page), hit=HIT))
            runs.append(run(owner, keys_of(name), tensors))
    for second, third in zip(*runs, strict=True):
        assert torch.equal(second, third)


@pytest.mark.parametrize("kind", OWNERS)
def test_hit_pages_are_read_and_never_written(kind):
    tensors = RowTensors()
    with opened_owner(kind, num_blocks=60) as owner:
        owner.worker.install(snapshot("a-cold", *COLD))
        run(owner, keys_of("a-cold"), tensors)
        hit_pages = [page for pages in COLD for page in pages[: HIT // BLOCK]]
        before = [layer[hit_pages].clone() for layer in owner.worker.pool.layers]
        owner.worker.install(snapshot("a-warm", *pages_behind(HIT, 17), hit=HIT))
        run(owner, keys_of("a-warm"), tensors, later_steps=2)
        for layer, held in zip(owner.worker.pool.layers, before, strict=True):
            assert torch.equal(layer[hit_pages], held)


@pytest.mark.parametrize("kind", OWNERS)
def test_what_no_row_holds_is_neither_read_nor_written(kind):
    """Free pages and the null page hold NaN, and hold it still after a miss and a hit."""
    tensors = RowTensors()
    with opened_owner(kind, num_blocks=60) as owner:
        for layer in owner.worker.pool.layers:
            layer.fill_(float("nan"))
        owner.worker.install(snapshot("a-cold", *COLD))
        missed = run(owner, keys_of("a-cold"), tensors)
        owner.worker.remove("a-cold", 1)
        hit_pages = {page for pages in COLD for page in pages[: HIT // BLOCK]}
        dropped = [page for pages in COLD for page in pages if page not in hit_pages]
        for layer in owner.worker.pool.layers:
            layer[dropped] = float("nan")
        warm = pages_behind(HIT, 17)
        owner.worker.install(snapshot("a-warm", *warm, hit=HIT))
        first, later = run(owner, keys_of("a-warm"), tensors)
        assert relative_error(first, missed[0][:, :, HIT:]) <= 1e-5
        assert relative_error(later, missed[1]) <= 1e-5
        nobodys = sorted(set(range(60)) - hit_pages - {page for pages in warm for page in pages})
        for layer in owner.worker.pool.layers:
            assert layer[nobodys].isnan().all()


@pytest.mark.parametrize("kind", ["dense", *OWNERS])
def test_requests_that_share_a_forward_get_what_they_get_alone(kind):
    tensors = RowTensors()
    rows = (*keys_of("a"), *keys_of("b"))

    def outputs(owner, install):
        install("a", *COLD)
        install("b", pages_from(17), pages_from(25))
        return run(owner, rows, tensors)

    if kind == "dense":
        together = outputs(dense(), lambda *_: None)
        alone = [run(dense(), keys_of(name), tensors) for name in "ab"]
    else:
        with opened_owner(kind) as owner:
            together = outputs(owner, lambda *of_request: owner.worker.install(snapshot(*of_request)))
        alone = []
        for name in "ab":
            with opened_owner(kind) as owner:
                owner.worker.install(snapshot(name, *COLD))
                alone.append(run(owner, keys_of(name), tensors))
    for step, of_a, of_b in zip(together, *alone, strict=True):
        assert relative_error(step, torch.cat([of_a, of_b], dim=1)) <= 1e-6
    assert relative_error(together[0][:, :2], together[0][:, 2:]) > 0.5  # the two are told apart


@pytest.mark.parametrize("kind", OWNERS)
def test_the_step_path_asks_for_no_device_memory(kind, monkeypatch):
    tensors = RowTensors()
    with opened_owner(kind) as owner:
        monkeypatch.delattr(BackendMemory, "allocate")
        owner.worker.install(snapshot("a", *COLD))
        run(owner, keys_of("a"), tensors)


@pytest.mark.engine
@pytest.mark.filterwarnings("default")
@pytest.mark.timeout(300)
def test_the_kernel_and_the_reference_agree_in_bfloat16():
    shape = replace(SHAPE, dtype=torch.bfloat16)
    tensors, outputs = RowTensors(shape), []
    for kind in ("gathered", "kernel"):
        with opened_owner(kind, shape) as owner:
            owner.worker.install(snapshot("a", *COLD))
            outputs.append(run(owner, keys_of("a"), tensors))
    for gathered, kernel in zip(*outputs, strict=True):
        assert relative_error(kernel, gathered) <= 2e-2


KERNEL_REFUSALS = {
    "dtype": ({"dtype": torch.float64}, {}, "torch.float64 is none of .*; use attention_owner=gathered"),
    "head size": ({"head_size": 24}, {}, "head_size=24 is none of .*; use attention_owner=gathered"),
    "block size": ({}, {"block_size": 24}, "block_size=24 is no multiple of 16"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=KERNEL_TEST) for name in KERNEL_REFUSALS])
def test_what_the_kernel_cannot_serve_is_refused_at_the_start(name):
    shape, sizes, message = KERNEL_REFUSALS[name]
    with pytest.raises(DiffusionKVConfigError, match=message), opened_owner("kernel", replace(SHAPE, **shape), **sizes):
        pass


def test_a_dense_request_is_dropped_when_it_is_released():
    owner, tensors = dense(), RowTensors()
    compute(owner.first_step(keys_of("a"), LAYOUT), tensors)
    assert owner.request_ids == ("a",)
    assert owner.nbytes > 0
    owner.release("a")
    owner.release("a")
    assert owner.request_ids == ()
    assert owner.nbytes == 0
