# SPDX-License-Identifier: Apache-2.0
"""What data-parallel ranks agree on, on small cases: a step may be padded by another rank's, and though it is eager."""

from dataclasses import replace

import pytest

from omni_core.backend.graph_padding import (
    AscendConfig,
    AscendGraphPadding,
    BatchShape,
    CaptureMode,
    CaptureSizes,
    DecodeGraphs,
    GraphConfig,
    GraphMode,
    Microbatches,
    PaddedBatch,
    Prefills,
    SequenceParallel,
    V1GraphPadding,
    V2Config,
    V2GraphPadding,
)

NONE, PIECEWISE, FULL = GraphMode


def config(mode=CaptureMode.FULL_AND_PIECEWISE, sizes=(4, 8, 16, 32)):
    return GraphConfig(capture_sizes=CaptureSizes(sizes), capture_mode=mode, max_num_seqs=32)


def prefill(num_tokens, **more):
    return BatchShape(num_tokens=num_tokens, num_reqs=1, max_query_len=num_tokens, prefills=Prefills.SOME, **more)


def decodes(num_reqs):
    return BatchShape(num_tokens=num_reqs, num_reqs=num_reqs, max_query_len=1)


def modes_and_tokens(padded):
    return [(each.mode, each.num_tokens) for each in padded]


@pytest.mark.parametrize("runner", [V1GraphPadding, V2GraphPadding])
def test_ranks_that_decode_run_the_graph_of_the_largest(runner):
    padded = runner(config()).padded_ranks([decodes(3), decodes(9)])
    assert padded == (PaddedBatch(mode=FULL, num_tokens=16, num_reqs=16),) * 2


@pytest.mark.parametrize("runner", [V1GraphPadding, V2GraphPadding])
def test_a_prefill_on_one_rank_makes_both_piecewise(runner):
    assert modes_and_tokens(runner(config()).padded_ranks([decodes(3), prefill(9)])) == [(PIECEWISE, 16)] * 2


def test_a_v1_rank_stays_padded_though_another_made_it_eager():
    padded = V1GraphPadding(config()).padded_ranks([decodes(3), prefill(33)])
    assert modes_and_tokens(padded) == [(NONE, 4), (NONE, 33)]


def test_a_v2_rank_drops_its_padding_if_another_made_it_eager():
    padded = V2GraphPadding(config()).padded_ranks([decodes(3), prefill(33)])
    assert modes_and_tokens(padded) == [(NONE, 3), (NONE, 33)]


def test_an_ascend_rank_that_had_a_graph_pads_to_the_largest_though_eager():
    padded = AscendGraphPadding(config(), AscendConfig()).padded_ranks([decodes(3), prefill(33)])
    assert modes_and_tokens(padded) == [(NONE, 33), (NONE, 33)]
    padded = AscendGraphPadding(config(), AscendConfig()).padded_ranks([decodes(3), prefill(33), prefill(40)])
    assert modes_and_tokens(padded) == [(NONE, 40), (NONE, 33), (NONE, 40)]


@pytest.mark.parametrize(
    "ascend",
    [
        AscendConfig(tensor_parallel_size=4, sequence_parallel=SequenceParallel.FLASHCOMM1),
        AscendConfig(fine_grained_tp=True),
    ],
)
def test_ascend_ranks_that_share_weights_or_tokens_pad_alike_in_eager_mode(ascend):
    padded = AscendGraphPadding(config(), ascend).padded_ranks([prefill(34), prefill(40)])
    assert modes_and_tokens(padded) == [(NONE, 40), (NONE, 40)]


def test_ascend_ranks_that_exchange_nothing_keep_their_own():
    padding = AscendGraphPadding(config(), AscendConfig(ranks_agree=False))
    assert modes_and_tokens(padding.padded_ranks([decodes(3), prefill(33)])) == [(FULL, 4), (NONE, 33)]


SPLIT = Microbatches(num_ubatches=2, decode_threshold_tokens=8, prefill_threshold_tokens=16)


def test_v1_ranks_split_only_together_and_then_pad_alike_though_eager():
    padding = V1GraphPadding(config(), SPLIT)
    split = padding.padded_ranks([prefill(40), prefill(50)])
    assert split == (PaddedBatch(mode=NONE, num_tokens=50, num_ubatches=2),) * 2
    whole = padding.padded_ranks([prefill(40), prefill(50, may_split=False)])
    assert whole == (PaddedBatch(mode=NONE, num_tokens=40), PaddedBatch(mode=NONE, num_tokens=50))
    short = padding.padded_ranks([prefill(15), prefill(16)])
    assert short == (PaddedBatch(mode=PIECEWISE, num_tokens=16),) * 2


def test_no_rank_splits_if_a_part_would_be_padding_only():
    padded = V1GraphPadding(config(), SPLIT).padded_ranks([prefill(16), prefill(32)])
    assert padded == (PaddedBatch(mode=PIECEWISE, num_tokens=32),) * 2


def test_v2_ranks_that_split_run_a_graph_made_for_it_or_eagerly():
    padding = V2GraphPadding(config(), V2Config(microbatches=SPLIT))
    graph = padding.padded_ranks([decodes(9), decodes(12)])
    assert graph == (PaddedBatch(mode=FULL, num_tokens=16, num_reqs=16, num_ubatches=2),) * 2
    eager = padding.padded_ranks([prefill(16), prefill(33)])
    assert eager == (PaddedBatch(mode=NONE, num_tokens=33, num_ubatches=2),) * 2
    uneven = padding.padded_ranks([decodes(8), decodes(20)])  # the graph of 32 would leave the first a part of padding
    assert uneven == (PaddedBatch(mode=NONE, num_tokens=20, num_ubatches=2),) * 2


def test_v2_ranks_that_split_mixed_steps_need_the_same_number_of_tokens_per_request():
    padding = V2GraphPadding(config(CaptureMode.FULL), V2Config(microbatches=SPLIT))
    graph = padding.padded_ranks([decodes(9), decodes(12)])
    assert graph == (PaddedBatch(mode=FULL, num_tokens=16, num_reqs=16, num_ubatches=2),) * 2
    assert modes_and_tokens(padding.padded_ranks([prefill(16), prefill(30)])) == [(NONE, 30)] * 2


def test_v2_ranks_with_decodes_of_varying_lengths_take_the_longest():
    padding = V2GraphPadding(
        GraphConfig(
            capture_sizes=CaptureSizes((4, 8, 16)),
            capture_mode=CaptureMode.FULL_DECODE_ONLY,
            max_num_seqs=8,
            query_len=3,
        ),
        V2Config(decode_graphs=DecodeGraphs.VARYING),
    )
    steps = [decodes(3), BatchShape(num_tokens=7, num_reqs=3, max_query_len=3)]
    assert modes_and_tokens(padding.padded_ranks(steps)) == [(FULL, 8)] * 2


def test_v2_ranks_without_any_work_run_nothing():
    idle = BatchShape(num_tokens=0, num_reqs=0, max_query_len=0)
    assert modes_and_tokens(V2GraphPadding(config()).padded_ranks([idle, idle])) == [(NONE, 0)] * 2
    assert modes_and_tokens(V2GraphPadding(config()).padded_ranks([idle, decodes(3)])) == [(NONE, 0), (NONE, 3)]


RUNNERS = [V1GraphPadding(config()), V2GraphPadding(config()), AscendGraphPadding(config(), AscendConfig())]


@pytest.mark.parametrize("padding", RUNNERS)
def test_one_rank_agrees_with_itself(padding):
    for step in (decodes(3), prefill(9), prefill(33)):
        assert padding.padded_ranks([step]) == (padding.padded_step(step),)


@pytest.mark.parametrize("padding", RUNNERS)
def test_no_rank_loses_rows(padding):
    steps = [decodes(3), decodes(31), prefill(7), prefill(33), replace(prefill(30), may_split=False)]
    for first in steps:
        for second in steps:
            padded = padding.padded_ranks([first, second])
            assert all(each.num_tokens >= step.num_tokens for each, step in zip(padded, (first, second), strict=True))


@pytest.mark.parametrize("padding", RUNNERS)
def test_no_rank_at_all_is_refused(padding):
    with pytest.raises(ValueError, match="there is no rank"):
        padding.padded_ranks([])
