# SPDX-License-Identifier: Apache-2.0
"""The token counts an engine captures graphs at, on small cases."""

import pytest

from omni_core.backend.graph_padding import (
    ASCEND_0_18,
    ASCEND_0_23,
    VLLM_0_18,
    VLLM_0_23,
    VLLM_0_32,
    VLLM_0_32_BLACKWELL,
    AclStreams,
    CaptureMode,
    CaptureSettings,
    CaptureSizes,
    DraftRange,
    HcclExpansion,
    PerformanceMode,
    ascend_capture_mode_0_18,
    captured_sizes,
    decode_tiers,
    kept_for_sequence_parallel,
    rounded_for_decodes,
    thinned,
)


def sizes_of(rules, **settings):
    return captured_sizes(CaptureSettings(**{"max_num_batched_tokens": 2048, **settings}), rules).sizes


def test_the_default_grid_goes_in_eights_to_256_and_then_in_sixteens():
    sizes = sizes_of(VLLM_0_32, max_num_seqs=256)
    assert sizes[:6] == (1, 2, 4, 8, 16, 24)
    assert [size for size in sizes if 240 <= size <= 300] == [240, 248, 256, 272, 288]
    assert (len(sizes), sizes[-1]) == (51, 512)


@pytest.mark.parametrize(
    ("rules", "largest"),
    [(VLLM_0_32, 512), (VLLM_0_32_BLACKWELL, 1024), (ASCEND_0_18, 512), (ASCEND_0_23, 512)],
)
def test_the_default_largest_size_has_a_ceiling(rules, largest):
    assert sizes_of(rules, max_num_seqs=2000)[-1] == largest


@pytest.mark.parametrize(("rules", "largest"), [(VLLM_0_18, 24), (VLLM_0_32, 24), (ASCEND_0_18, 8), (ASCEND_0_23, 8)])
def test_vllm_captures_two_largest_decode_steps_and_vllm_ascend_one(rules, largest):
    assert sizes_of(rules, max_num_seqs=12)[-1] == largest


@pytest.mark.parametrize(
    ("rules", "expected"),
    [(VLLM_0_18, False), (VLLM_0_23, True), (VLLM_0_32, True), (ASCEND_0_18, False), (ASCEND_0_23, True)],
)
def test_the_largest_step_is_captured_since_0_23(rules, expected):
    assert (101 in sizes_of(rules, max_num_seqs=128, max_num_batched_tokens=101)) is expected


@pytest.mark.parametrize(("rules", "expected"), [(VLLM_0_23, False), (VLLM_0_32, True)])
def test_the_largest_decode_step_is_captured_since_0_32(rules, expected):
    assert (100 in sizes_of(rules, max_num_seqs=100)) is expected


def test_decodes_with_drafts_are_captured_in_whole_requests():
    sizes = set(sizes_of(VLLM_0_32, max_num_seqs=50, query_len=3))
    assert {3, 6, 12, 24, 48, 150} < sizes


def test_no_size_exceeds_the_largest_step():
    assert sizes_of(VLLM_0_32, max_num_seqs=50, query_len=3, max_num_batched_tokens=100)[-2:] == (96, 100)


def test_a_user_who_sets_the_largest_size_gets_no_decode_sizes():
    assert sizes_of(VLLM_0_32, max_num_seqs=100, max_size=20) == (1, 2, 4, 8, 16)


def test_a_users_sizes_are_sorted_and_those_no_step_reaches_are_dropped():
    assert sizes_of(VLLM_0_32, max_num_seqs=8, sizes=(64, 3, 3, 4096)) == (3, 64)


def test_a_largest_size_beside_sizes_must_agree_with_them():
    with pytest.raises(ValueError, match=r"max_cudagraph_capture_size=100.*is 64"):
        sizes_of(VLLM_0_32, max_num_seqs=8, sizes=(64, 3), max_size=100)


def test_interactivity_captures_every_small_size():
    assert sizes_of(VLLM_0_32, max_num_seqs=20, performance_mode=PerformanceMode.INTERACTIVITY) == (
        *range(1, 33),
        40,
    )


@pytest.mark.parametrize(
    "settings",
    [{"max_num_seqs": 0}, {"max_num_seqs": 1, "query_len": 0}, {"max_num_seqs": 1, "sizes": ()}],
)
def test_counts_below_one_are_refused_by_name(settings):
    with pytest.raises(ValueError, match=f"{list(settings)[-1]}: 0 must be at least 1"):
        sizes_of(VLLM_0_32, **settings)


def test_a_schedule_of_drafts_says_how_many_requests_each_length_has():
    schedule = [DraftRange(1, 16, 4), DraftRange(33, 64, 2), DraftRange(65, 256, 0)]
    assert decode_tiers(schedule, max_num_seqs=100, max_drafts=3) == {4: 32, 3: 64, 1: 100}


@pytest.mark.parametrize(
    "schedule",
    [
        [],
        [DraftRange(2, 4, 1)],
        [DraftRange(1, 4, 1), DraftRange(4, 8, 2)],
        [DraftRange(1, 4, -1)],
        [DraftRange(1, 8, 1), DraftRange(10, 9, 2)],
    ],
)
def test_a_schedule_with_no_answer_or_two_is_refused(schedule):
    with pytest.raises(ValueError, match="draft schedule"):
        decode_tiers(schedule, max_num_seqs=8, max_drafts=2)


@pytest.mark.parametrize(
    ("sizes", "query_len", "sequence_parallel_size", "expected"),
    [
        ((1, 2, 4, 8), 1, 1, (1, 2, 4, 8)),
        ((1, 2, 4, 8), 3, 1, (3, 6)),
        ((1, 2, 4, 8), 2, 4, (4, 8)),
        ((7,), 4, 1, (4,)),
        ((), 4, 1, ()),
    ],
)
def test_sizes_become_multiples_and_never_larger(sizes, query_len, sequence_parallel_size, expected):
    rounded = rounded_for_decodes(CaptureSizes(sizes), query_len, sequence_parallel_size=sequence_parallel_size)
    assert rounded.sizes == expected


def test_a_decode_longer_than_every_size_is_refused():
    with pytest.raises(ValueError, match="none is at least 9"):
        rounded_for_decodes(CaptureSizes((1, 8)), 9)


def test_lengths_that_do_not_divide_each_other_are_refused():
    with pytest.raises(ValueError, match="query_len=3 sequence_parallel_size=4"):
        rounded_for_decodes(CaptureSizes((8,)), 3, sequence_parallel_size=4)


@pytest.mark.parametrize("sizes", [(0, 1), (2, 2), (4, 2), (-1,)])
def test_sizes_that_do_not_rise_are_refused(sizes):
    with pytest.raises(ValueError, match="must rise strictly"):
        CaptureSizes(sizes)


def test_sequence_parallel_keeps_multiples_only():
    assert kept_for_sequence_parallel(CaptureSizes((1, 2, 4, 8, 10)), 4).sizes == (4, 8)
    with pytest.raises(ValueError, match="tensor_parallel_size=16"):
        kept_for_sequence_parallel(CaptureSizes((1, 2, 4, 8)), 16)


@pytest.mark.parametrize(
    ("mode", "encoder_decoder", "expected"),
    [
        (CaptureMode.FULL_AND_PIECEWISE, False, CaptureMode.PIECEWISE),
        (CaptureMode.FULL_DECODE_ONLY, False, CaptureMode.FULL_DECODE_ONLY),
        (CaptureMode.FULL_DECODE_ONLY, True, CaptureMode.PIECEWISE),
    ],
)
def test_vllm_ascend_0_18_has_no_two_kinds_of_graphs_at_once(mode, encoder_decoder, expected):
    assert ascend_capture_mode_0_18(mode, encoder_decoder=encoder_decoder) is expected


@pytest.mark.parametrize(
    ("streams", "expected"),
    [
        (AclStreams(num_hidden_layers=48), 36),  # 1800 / 49
        (AclStreams(num_hidden_layers=48, tensor_parallel_size=4), 11),  # (1800 - 40) / 49 / 3
        (AclStreams(num_hidden_layers=48, tensor_parallel_size=4, decode_context_parallel_size=2), 11),  # 1660 / 147
        (AclStreams(num_hidden_layers=48, draft_hidden_layers=1), 35),  # 1800 / 51
        (AclStreams(num_hidden_layers=48, tensor_parallel_size=4, expansion=HcclExpansion.AIV), 17),  # 1702 / 98
        (AclStreams(num_hidden_layers=48, tensor_parallel_size=4, moe=True, expansion=HcclExpansion.AIV), 18),
        (
            AclStreams(num_hidden_layers=48, data_parallel_size=2, moe=True, expansion=HcclExpansion.AIV),
            12,
        ),  # 1800 / 147
    ],
)
def test_streams_bound_the_number_of_sizes(streams, expected):
    assert streams.max_sizes == expected


def test_thinning_keeps_the_first_the_last_and_even_steps():
    sizes = CaptureSizes(tuple(range(1, 12)))
    assert thinned(sizes, 3).sizes == (1, 6, 11)
    assert thinned(sizes, 2).sizes == (1, 11)
    assert thinned(sizes, 11) == sizes
    with pytest.raises(ValueError, match="max_sizes=1"):
        thinned(sizes, 1)
