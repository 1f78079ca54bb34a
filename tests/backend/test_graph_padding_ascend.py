# SPDX-License-Identifier: Apache-2.0
"""At how many tokens steps run in vllm-ascend, on small cases: sequence parallel, drafts, the 310P."""

from dataclasses import replace

import pytest
from omni_core_npu._graph import graph_padding as npu_graph_padding

from omni_core.backend.graph_padding import (
    Ascend310pGraphPadding,
    AscendConfig,
    AscendGraphPadding,
    AttentionState,
    BatchShape,
    CaptureMode,
    CaptureSizes,
    GraphConfig,
    GraphMode,
    PaddedBatch,
    Prefills,
    SequenceParallel,
    SpecDecodeGraphs,
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


FLASHCOMM1 = AscendConfig(tensor_parallel_size=4, sequence_parallel=SequenceParallel.FLASHCOMM1)
COMPILE_PASS = AscendConfig(tensor_parallel_size=4, sequence_parallel=SequenceParallel.COMPILE_PASS)


@pytest.mark.parametrize(("num_tokens", "padded"), [(1, 4), (4, 4), (5, 8), (9, 16), (17, 20), (20, 20), (21, 24)])
def test_sequence_parallel_rounds_up_before_the_graph_is_chosen_and_in_eager_mode_too(num_tokens, padded):
    padding = AscendGraphPadding(config(CaptureMode.PIECEWISE, sizes=(4, 8, 16)), FLASHCOMM1)
    assert padding.padded(num_tokens) == padded
    eager = AscendGraphPadding(config(CaptureMode.NONE, sizes=()), FLASHCOMM1)
    assert eager.padded(num_tokens) == -(-num_tokens // 4) * 4


def test_the_compile_pass_may_land_on_any_size():
    padding = AscendGraphPadding(config(CaptureMode.PIECEWISE, sizes=(2, 6, 10)), COMPILE_PASS)
    assert [padding.padded(count) for count in (1, 4, 5, 9, 11)] == [6, 6, 10, 12, 12]


def test_flashcomm1_refuses_sizes_it_would_have_dropped():
    with pytest.raises(ValueError, match=r"\[2\] are no multiples of tensor_parallel_size=4"):
        AscendGraphPadding(config(CaptureMode.PIECEWISE, sizes=(2, 4)), FLASHCOMM1)


def test_a_first_chunk_as_long_as_a_decode_with_drafts_is_no_decode():
    drafts = AscendGraphPadding(config(CaptureMode.FULL_DECODE_ONLY, query_len=2), AscendConfig())
    step = decodes(2, 2)
    assert drafts.padded_step(step) == ran(FULL, 4, 2)
    assert drafts.padded_step(replace(step, num_first_chunks=1)) == ran(NONE, 4)
    plain = AscendGraphPadding(config(CaptureMode.FULL_DECODE_ONLY), AscendConfig())
    assert plain.padded_step(replace(decodes(3), num_first_chunks=1)) == ran(FULL, 4, 4)


def runner_310p(rule=SpecDecodeGraphs.ANY_STEP, *, graphs=1, query_len=1):
    return Ascend310pGraphPadding(
        config(CaptureMode.FULL_DECODE_ONLY, query_len=graphs),
        AscendConfig(),
        query_len=query_len,
        spec_decode_graphs=rule,
    )


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (AttentionState.DECODE_ONLY, ran(FULL, 4, 4)),
        (AttentionState.CHUNKED_PREFILL, ran(NONE, 3)),
        (AttentionState.PREFILL_CACHE_HIT, ran(NONE, 3)),
    ],
)
def test_the_310p_runs_no_prefill_in_a_graph(state, expected):
    assert runner_310p().padded_step(replace(decodes(3), attention_state=state)) == expected


def test_the_310p_with_ngram_drafts_has_graphs_of_single_tokens():
    step = replace(decodes(3), attention_state=AttentionState.DECODE_ONLY)
    assert runner_310p(query_len=3).padded_step(step) == ran(FULL, 4, 4)
    assert runner_310p(query_len=3).padded_step(replace(step, num_first_chunks=1)) == ran(NONE, 3)


def test_since_0_23_the_310p_runs_only_whole_drafts_in_a_graph():
    runner = runner_310p(SpecDecodeGraphs.UNIFORM_DRAFTS, graphs=2, query_len=2)
    assert runner.padded_step(replace(decodes(2, 2), attention_state=AttentionState.SPEC_DECODING)) == ran(FULL, 4, 2)
    assert runner.padded_step(replace(decodes(3), attention_state=AttentionState.DECODE_ONLY)) == ran(NONE, 3)
    assert runner.padded_step(replace(decodes(2, 2), attention_state=AttentionState.PREFILL_NO_CACHE)) == ran(NONE, 4)


def test_a_first_chunk_with_the_length_of_drafts_is_no_decode_on_the_310p_either():
    step = replace(decodes(2, 2), attention_state=AttentionState.SPEC_DECODING)
    runner = runner_310p(graphs=2, query_len=2)
    assert runner.padded_step(step) == ran(FULL, 4, 2)
    assert runner.padded_step(replace(step, num_first_chunks=1)) == ran(NONE, 4)


def test_the_310p_must_be_told_the_attention_state():
    with pytest.raises(ValueError, match="attention_state=None"):
        runner_310p().padded_step(decodes(3))
    assert runner_310p().padded(3) == 3


def test_the_npu_backend_can_be_told_how_the_engine_splits_tokens():
    assert npu_graph_padding((4, 8), FLASHCOMM1).padded(9) == 12
