# SPDX-License-Identifier: Apache-2.0
"""tiny-hunyuan on several ranks of one process: threads that meet at each collective."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from diffusion_kv.plain_owner import PlainOwner, run
from diffusion_kv.tiny_requests import debug_pipeline, relative_error, request

from omni_core.diffusion_kv.errors import DiffusionKVConfigError, DiffusionKVError, RequestRefusedError
from omni_core.diffusion_kv.parallel import Ranks
from omni_core.diffusion_kv.tiny_hunyuan import TinyHunyuanOptions, TinyHunyuanPipeline

OPTIONS = TinyHunyuanOptions(layout="debug", dtype="float64")


class Meeting:
    """Where the ranks of a group leave their tensors for each other."""

    def __init__(self, size):
        self.left = [None] * size
        self.barrier = threading.Barrier(size, timeout=30)

    def exchange(self, rank, tensor):
        self.left[rank] = tensor.clone()
        self.barrier.wait()
        all_of_them = tuple(self.left)
        self.barrier.wait()
        return all_of_them


class ThreadGroup:
    def __init__(self, meeting, rank):
        self.meeting = meeting
        self.rank = rank
        self.size = len(meeting.left)
        self.reduced = 0
        self.gathered = 0

    def all_reduce_sum(self, tensor):
        self.reduced += 1
        return sum(self.meeting.exchange(self.rank, tensor))

    def all_gather(self, tensor):
        self.gathered += 1
        return self.meeting.exchange(self.rank, tensor)


def on_ranks(size, work):
    """`work(group)` on every rank at once; the results in rank order."""
    meeting = Meeting(size)
    groups = [ThreadGroup(meeting, rank) for rank in range(size)]
    with ThreadPoolExecutor(size) as threads:
        return groups, list(threads.map(work, groups))


def test_tensor_parallel_ranks_split_the_heads_and_agree():
    def work(group):
        pipeline = TinyHunyuanPipeline(OPTIONS, Ranks(tensor=group))
        owner = PlainOwner()
        return pipeline.kv_shape, owner, run(pipeline, [request()], owner)[0].latents

    groups, results = on_ranks(2, work)
    whole = PlainOwner()
    expected = run(debug_pipeline(), [request()], whole)[0].latents
    for shape, _, latents in results:
        assert (shape.num_query_heads, shape.num_kv_heads) == (2, 1)
        assert relative_error(latents, expected) <= 1e-13
    assert torch.equal(results[0][2], results[1][2])
    for key, kept in whole.kept.items():
        shares = torch.cat([owner.kept[key] for _, owner, _ in results], dim=-2)
        torch.testing.assert_close(shares, kept, rtol=0, atol=1e-11, equal_nan=True)
    assert [group.reduced for group in groups] == [2 * OPTIONS.transformer.num_layers * 3] * 2


def test_cfg_parallel_ranks_compute_a_row_each_and_agree():
    wave = [request("a"), request("b", seed=9, guidance_scale=4.0)]

    def work(group):
        owner = PlainOwner()
        states = run(TinyHunyuanPipeline(OPTIONS, Ranks(cfg=group)), wave, owner, rows=(group.rank,))
        return {key.row_index for key, _ in owner.kept}, [state.latents for state in states]

    groups, results = on_ranks(2, work)
    assert [rows for rows, _ in results] == [{0}, {1}]
    expected = [state.latents for state in run(debug_pipeline(), wave, PlainOwner())]
    for index in range(2):
        assert torch.equal(results[0][1][index], results[1][1][index])
        assert relative_error(results[0][1][index], expected[index]) <= 1e-13
    assert [group.gathered for group in groups] == [3, 3]


def test_a_random_seed_is_drawn_once_for_all_ranks():
    prepared = debug_pipeline().preprocess(request(seed=None))
    one, other = (debug_pipeline().start(prepared).latents for _ in range(2))
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (Ranks(tensor=ThreadGroup(Meeting(3), 0)), "num_query_heads=4 .* does not divide by 3"),
        (Ranks(tensor=ThreadGroup(Meeting(4), 0)), "num_kv_heads=2 .* does not divide by 4"),
        (Ranks(cfg=ThreadGroup(Meeting(3), 0)), "3 CFG-parallel ranks"),
    ],
)
def test_a_model_that_does_not_divide_is_refused_at_the_start(ranks, message):
    with pytest.raises(DiffusionKVConfigError, match=message):
        TinyHunyuanPipeline(OPTIONS, ranks)


def test_one_row_on_two_cfg_ranks_is_refused():
    pipeline = TinyHunyuanPipeline(OPTIONS, Ranks(cfg=ThreadGroup(Meeting(2), 0)))
    with pytest.raises(RequestRefusedError, match=r"guidance_scale=1\.0"):
        pipeline.preprocess(request(guidance_scale=1.0))
    state = pipeline.start(debug_pipeline().preprocess(request(guidance_scale=1.0)))
    step = PlainOwner().first_step((), state.prepared.rows[0].layout)
    with pytest.raises(DiffusionKVError, match="1 rows for 2 CFG-parallel ranks"):
        pipeline.denoise([state], 0, step)
