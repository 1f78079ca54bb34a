# SPDX-License-Identifier: Apache-2.0
"""Which graph a step runs in, and at how many tokens, on small cases: vLLM's two runners, and what backends give."""

from dataclasses import replace

import pytest
from omni_core_cpu_sim import CaptureSizePadding
from omni_core_cuda._graph import graph_padding as cuda_graph_padding
from omni_core_npu._graph import graph_padding as npu_graph_padding

from omni_core.backend.graph_padding import (
    EAGER_ONLY,
    NO_FULL_GRAPH,
    AscendConfig,
    BatchShape,
    CaptureMode,
    CaptureSizes,
    DecodeGraphs,
    GraphConfig,
    GraphMode,
    LoraCapture,
    LoraGraphs,
    Microbatches,
    MixedGraphs,
    PaddedBatch,
    Prefills,
    UniformDecode,
    V1Dispatcher,
    V1GraphPadding,
    V2Config,
    V2GraphPadding,
)

NONE, PIECEWISE, FULL = GraphMode


def config(mode, *, sizes=(2, 4, 8, 16), max_num_seqs=8, query_len=1, **more):
    return GraphConfig(
        capture_sizes=CaptureSizes(sizes), capture_mode=mode, max_num_seqs=max_num_seqs, query_len=query_len, **more
    )


def prefill(num_tokens):
    return BatchShape(
        num_tokens=num_tokens, num_reqs=1, max_query_len=num_tokens, num_first_chunks=1, prefills=Prefills.SOME
    )


def decodes(num_reqs, query_len=1):
    return BatchShape(num_tokens=num_reqs * query_len, num_reqs=num_reqs, max_query_len=query_len)


def ran(mode, num_tokens, num_reqs=None):
    return PaddedBatch(mode=mode, num_tokens=num_tokens, num_reqs=num_reqs)


RUNNERS = [V1GraphPadding, V2GraphPadding]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(("num_tokens", "padded"), [(1, 2), (2, 2), (5, 8), (16, 16), (17, 17), (8192, 8192)])
def test_a_step_is_padded_to_the_smallest_size_that_holds_it_and_a_larger_one_not(runner, num_tokens, padded):
    assert runner(config(CaptureMode.PIECEWISE)).padded(num_tokens) == padded
    assert runner(config(CaptureMode.NONE)).padded(num_tokens) == num_tokens
    assert runner(config(CaptureMode.PIECEWISE, sizes=())).padded(num_tokens) == num_tokens


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    ("mode", "step", "expected"),
    [
        (CaptureMode.FULL_AND_PIECEWISE, decodes(3), ran(FULL, 4, 4)),
        (CaptureMode.FULL_AND_PIECEWISE, prefill(3), ran(PIECEWISE, 4)),
        (CaptureMode.FULL_DECODE_ONLY, decodes(3), ran(FULL, 4, 4)),
        (CaptureMode.FULL_DECODE_ONLY, prefill(3), ran(NONE, 3)),
        (CaptureMode.FULL, decodes(3), ran(FULL, 4, 4)),
        (CaptureMode.FULL, prefill(9), ran(FULL, 16, 8)),
        (CaptureMode.PIECEWISE, decodes(3), ran(PIECEWISE, 4)),
        (CaptureMode.FULL_AND_PIECEWISE, replace(decodes(3), allowed=EAGER_ONLY), ran(NONE, 3)),
    ],
)
def test_decodes_and_mixed_steps_have_the_graphs_the_mode_says(runner, mode, step, expected):
    assert runner(config(mode)).padded_step(step) == expected


def test_a_step_with_encoder_output_runs_in_no_full_graph():
    step = replace(decodes(3), allowed=NO_FULL_GRAPH)
    assert V1GraphPadding(config(CaptureMode.FULL_AND_PIECEWISE)).padded_step(step) == ran(PIECEWISE, 4)
    with pytest.raises(ValueError, match="eager only"):
        V2GraphPadding(config(CaptureMode.FULL_AND_PIECEWISE)).padded_step(step)


def test_decodes_beyond_the_largest_number_of_requests_fall_back_to_piecewise():
    few = config(CaptureMode.FULL_AND_PIECEWISE, max_num_seqs=4)
    assert V1GraphPadding(few).padded_step(decodes(5)) == ran(PIECEWISE, 8)
    assert V2GraphPadding(few).padded_step(decodes(5)) == ran(PIECEWISE, 8)


def test_the_v1_runner_wants_sizes_that_whole_decodes_fill():
    with pytest.raises(ValueError, match=r"\[2, 4, 8, 16\] are no multiples of query_len=3"):
        V1Dispatcher(config(CaptureMode.FULL_DECODE_ONLY, query_len=3))


def test_the_v2_runner_rounds_the_sizes_of_decodes_itself():
    padding = V2GraphPadding(config(CaptureMode.FULL_AND_PIECEWISE, query_len=3))
    assert padding.padded_step(decodes(1, 3)) == ran(FULL, 3, 1)
    assert padding.padded_step(decodes(2, 3)) == ran(FULL, 6, 2)
    assert padding.padded_step(decodes(4, 3)) == ran(PIECEWISE, 16)  # 16 rounds up to 18, which is too large
    assert padding.padded_step(prefill(6)) == ran(PIECEWISE, 8)


def test_a_dispatcher_that_may_not_run_eagerly_says_so():
    with pytest.raises(ValueError, match=r"num_tokens=17.*eager is not allowed"):
        V1Dispatcher(config(CaptureMode.PIECEWISE)).dispatch(17, uniform_decode=False, allowed=frozenset({PIECEWISE}))


def test_a_runner_can_be_told_whether_a_step_is_one_of_decodes():
    padding = V1GraphPadding(config(CaptureMode.FULL_DECODE_ONLY))
    assert padding.padded_step(replace(prefill(3), uniform_decode=UniformDecode.FORCED)) == ran(FULL, 4, 4)
    assert padding.padded_step(replace(decodes(3), uniform_decode=UniformDecode.EXCLUDED)) == ran(NONE, 3)


@pytest.mark.parametrize(
    ("capture", "active", "mode"),
    [
        (LoraCapture.ONLY_ACTIVE, 0, NONE),
        (LoraCapture.ONLY_ACTIVE, 1, PIECEWISE),
        (LoraCapture.WITH_AND_WITHOUT, 0, PIECEWISE),
        (LoraCapture.WITH_AND_WITHOUT, 3, PIECEWISE),
        (LoraCapture.BY_COUNT, 3, PIECEWISE),
    ],
)
def test_graphs_are_captured_per_number_of_adapters(capture, active, mode):
    lora = LoraGraphs.captured(capture, max_loras=5)
    padding = V1GraphPadding(config(CaptureMode.PIECEWISE, lora=lora))
    assert padding.padded_step(replace(prefill(3), num_active_loras=active)).mode is mode


def test_the_numbers_of_adapters_are_powers_of_two_and_the_largest():
    assert LoraGraphs.captured(LoraCapture.BY_COUNT, max_loras=5).counts == (0, 1, 2, 4, 6)
    assert LoraGraphs.captured(LoraCapture.BY_COUNT, max_loras=5).serving(3) == 4
    assert LoraGraphs.captured(LoraCapture.BY_COUNT, max_loras=5).serving(7) is None
    with pytest.raises(ValueError, match="must rise strictly"):
        LoraGraphs((1, 1))


def test_an_engine_without_adapters_has_no_graph_for_one():
    step = replace(prefill(3), num_active_loras=1)
    assert V1GraphPadding(config(CaptureMode.PIECEWISE)).padded_step(step) == ran(NONE, 3)
    assert V2GraphPadding(config(CaptureMode.PIECEWISE)).padded_step(step) == ran(NONE, 3)


def test_the_v2_runner_serves_more_adapters_than_it_captured_with_the_largest_graph():
    lora = LoraGraphs.captured(LoraCapture.BY_COUNT, max_loras=5)
    step = replace(prefill(3), num_active_loras=7)
    assert V2GraphPadding(config(CaptureMode.PIECEWISE, lora=lora)).padded_step(step) == ran(PIECEWISE, 4)


def test_a_full_graph_of_the_v2_runner_holds_no_more_requests_than_it_was_captured_for():
    few = V2GraphPadding(config(CaptureMode.FULL, max_num_seqs=4))
    assert few.padded_step(decodes(4)) == ran(FULL, 4, 4)
    assert few.padded_step(decodes(5)) == ran(NONE, 5)


def test_varying_decodes_share_a_graph_unless_one_is_a_prefill():
    padding = V2GraphPadding(
        config(CaptureMode.FULL_DECODE_ONLY, query_len=4), V2Config(decode_graphs=DecodeGraphs.VARYING)
    )
    step = BatchShape(num_tokens=5, num_reqs=2, max_query_len=4)
    assert padding.padded_step(step) == ran(FULL, 8, 8)
    assert padding.padded_step(replace(step, prefills=Prefills.LIKE_DECODES)) == ran(NONE, 5)
    assert padding.padded_step(BatchShape(num_tokens=6, num_reqs=2, max_query_len=5)) == ran(NONE, 6)


def test_prefills_that_add_one_token_run_as_uniform_decodes_in_the_v2_runner():
    padding = V2GraphPadding(config(CaptureMode.FULL_DECODE_ONLY))
    assert padding.padded_step(replace(decodes(3), prefills=Prefills.LIKE_DECODES)) == ran(FULL, 4, 4)
    assert padding.padded_step(replace(decodes(3), prefills=Prefills.SOME)) == ran(NONE, 3)


def test_each_length_of_a_schedule_of_drafts_has_its_graphs():
    padding = V2GraphPadding(config(CaptureMode.FULL_DECODE_ONLY, query_len=4), V2Config(query_lens=(2, 4)))
    assert padding.padded_step(decodes(2, 2)) == ran(FULL, 4, 2)
    assert padding.padded_step(decodes(1, 4)) == ran(FULL, 4, 1)
    with pytest.raises(ValueError, match="query_lens"):
        V2Config(query_lens=(4, 2))


def test_mixed_graphs_may_end_where_decodes_do():
    short = V2Config(mixed_graphs=MixedGraphs.DECODE_SIZES)
    padding = V2GraphPadding(config(CaptureMode.PIECEWISE, max_num_seqs=4), short)
    assert (padding.padded(3), padding.padded(5)) == (4, 5)


@pytest.mark.parametrize(
    "counts",
    [
        {"num_tokens": 2, "num_reqs": 3, "max_query_len": 1},
        {"num_tokens": 9, "num_reqs": 2, "max_query_len": 4},
        {"num_tokens": 2, "num_reqs": 1, "max_query_len": 2, "num_first_chunks": 2},
        {"num_tokens": 2, "num_reqs": 1, "max_query_len": 2, "num_active_loras": -1},
        {"num_tokens": 2, "num_reqs": 1, "max_query_len": 2, "allowed": frozenset({FULL})},
    ],
)
def test_a_step_that_cannot_be_is_refused(counts):
    with pytest.raises(ValueError, match=list(counts)[-1]):
        BatchShape(**counts)


@pytest.mark.parametrize("counts", [{"max_num_seqs": 0}, {"query_len": 0}])
def test_settings_below_one_are_refused(counts):
    with pytest.raises(ValueError, match=f"{next(iter(counts))}=0"):
        config(CaptureMode.PIECEWISE, **counts)
    with pytest.raises(ValueError, match="num_ubatches=0"):
        Microbatches(num_ubatches=0)
    with pytest.raises(ValueError, match="tensor_parallel_size=0"):
        AscendConfig(tensor_parallel_size=0)


# What the backends give


SIZES = (1, 2, 4, 8, 24)


def test_every_backend_without_more_settings_pads_alike():
    paddings = [CaptureSizePadding(SIZES), cuda_graph_padding(SIZES), npu_graph_padding(SIZES)]
    for num_tokens in range(1, 40):
        assert len({padding.padded(num_tokens) for padding in paddings}) == 1, num_tokens
    assert [padding.padded(25) for padding in paddings] == [25, 25, 25]


@pytest.mark.parametrize("graph_padding", [cuda_graph_padding, npu_graph_padding])
def test_the_backends_refuse_what_the_simulator_refuses(graph_padding):
    with pytest.raises(ValueError, match="must rise strictly"):
        graph_padding((2, 1))
    with pytest.raises(ValueError, match="num_tokens=0"):
        graph_padding(SIZES).padded(0)
