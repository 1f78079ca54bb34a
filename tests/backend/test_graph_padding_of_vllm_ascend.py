# SPDX-License-Identifier: Apache-2.0
"""The padding rules of vllm-ascend against its own code, for every token count from 1 to 8,192 over a grid of settings.

The functions are cut out of the wheels of vllm-ascend 0.18.0 and 0.23.0, over the code of the vLLM each was made for,
with vllm-ascend's patch of its dispatcher, and run with stand-ins for the rest of an engine. Nothing is imported.
"""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from ascend_releases import RELEASES, text_of
from compared import Compared
from graph_batches import MAX_TOKENS, every_step, is_eager, num_steps, ranks_of

from omni_core.backend.graph_padding import (
    EAGER_ONLY,
    Ascend310pGraphPadding,
    AscendConfig,
    AscendGraphPadding,
    AttentionState,
    CaptureMode,
    CaptureSettings,
    GraphConfig,
    GraphMode,
    SequenceParallel,
    captured_sizes,
    kept_for_sequence_parallel,
    rounded_for_decodes,
)

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=RELEASES, ids=lambda release: release.version)
def release(request):
    return request.param


@pytest.fixture(scope="module")
def text(release):
    return text_of(release)


COUNTS = range(1, MAX_TOKENS + 1)
ALL_KINDS = {"all_kinds_up_to": 1024}
"""No graph is larger."""


def graph_config(release, ascend, mode, query_len, max_num_seqs):
    sizes = captured_sizes(
        CaptureSettings(max_num_seqs=max_num_seqs, max_num_batched_tokens=4096, query_len=query_len), release.rules
    )
    sequence_parallel_size = 1
    if ascend.sequence_parallel is SequenceParallel.FLASHCOMM1:
        sequence_parallel_size = ascend.tensor_parallel_size
        sizes = kept_for_sequence_parallel(sizes, sequence_parallel_size)
    # vLLM 0.18 leaves the sizes where all steps have full graphs.
    if mode.separate_decode_graphs or (mode is CaptureMode.FULL and release.version != "0.18.0"):
        sizes = rounded_for_decodes(sizes, query_len, sequence_parallel_size=sequence_parallel_size)
    return GraphConfig(capture_sizes=sizes, capture_mode=mode, max_num_seqs=max_num_seqs, query_len=query_len)


def runner_class(text, release, ascend):
    flashcomm = ascend.sequence_parallel is SequenceParallel.FLASHCOMM1
    by_pass = ascend.sequence_parallel is SequenceParallel.COMPILE_PASS
    return text.runner_class(
        release.sync,
        enable_sp=lambda *_: flashcomm,
        enable_sp_by_pass=lambda: by_pass,
        should_skip_allreduce_across_dp_group=lambda *_: not ascend.ranks_agree,
        oproj_tp_enable=lambda: ascend.fine_grained_tp,
        embedding_tp_enable=lambda: False,
    )


def caller(runner_class, text, config, ascend, num_ranks, *, query_len=None, states=None):
    """Asks the runner of one rank for its batch."""
    vllm_config = text.vllm.vllm_config(config)
    dispatcher = text.vllm.dispatcher(vllm_config)
    query_len = config.query_len if query_len is None else query_len
    speculative = SimpleNamespace(method="ngram") if query_len > 1 else None

    def call(rank, batch):
        parallel = SimpleNamespace(
            tensor_parallel_size=ascend.tensor_parallel_size,
            data_parallel_size=num_ranks,
            data_parallel_rank=rank,
        )
        computed = np.ones(batch.num_reqs, dtype=np.int32)
        computed[: batch.num_first_chunks] = 0
        runner = runner_class(
            vllm_config=SimpleNamespace(
                parallel_config=parallel, observability_config=vllm_config.observability_config
            ),
            parallel_config=parallel,
            dp_size=num_ranks,
            dp_rank=rank,
            ascend_config=SimpleNamespace(dp_allreduce_on_npu=False),
            input_batch=SimpleNamespace(num_computed_tokens_cpu=computed, lora_id_to_lora_request={}),
            speculative_config=speculative,
            uniform_decode_query_len=query_len,
            model_config=vllm_config.model_config,
            cudagraph_dispatcher=dispatcher,
            attn_state=states and states[batch.attention_state],
        )
        mode, descriptor, split, _, _ = runner._determine_batch_execution_and_padding(
            num_tokens=batch.num_tokens,
            num_reqs=batch.num_reqs,
            num_scheduled_tokens_np=None,
            max_num_scheduled_tokens=batch.max_query_len,
            use_cascade_attn=GraphMode.FULL not in batch.allowed,
            force_eager=is_eager(batch),
        )
        assert not split
        return mode.value, descriptor.num_tokens, descriptor.num_reqs if mode.name == "FULL" else None

    return call


def answer(padded):
    return padded.mode.value, padded.num_tokens, padded.num_reqs


SHAPES = [
    AscendConfig(),
    AscendConfig(tensor_parallel_size=4),
    AscendConfig(tensor_parallel_size=4, sequence_parallel=SequenceParallel.FLASHCOMM1),
    AscendConfig(tensor_parallel_size=3, sequence_parallel=SequenceParallel.COMPILE_PASS),
    AscendConfig(tensor_parallel_size=8, sequence_parallel=SequenceParallel.COMPILE_PASS),
]
MODES = {
    "0.18.0": (CaptureMode.NONE, CaptureMode.PIECEWISE, CaptureMode.FULL_DECODE_ONLY, CaptureMode.FULL),
    "0.23.0": (
        CaptureMode.NONE,
        CaptureMode.PIECEWISE,
        CaptureMode.FULL_DECODE_ONLY,
        CaptureMode.FULL,
        CaptureMode.FULL_AND_PIECEWISE,
    ),
}
STEP_GRID = [(SHAPES[0], 4), (SHAPES[1], 1), (SHAPES[2], 2), (SHAPES[3], 2), (SHAPES[4], 1)]


def test_a_rank_pads_as_ours(text, release):
    compared = Compared(f"AscendGraphPadding, NPUModelRunner {release.version}")
    modes = MODES[release.version]
    for (ascend, query_len), mode in product(STEP_GRID, modes):
        config = graph_config(release, ascend, mode, query_len, 100)
        ours = AscendGraphPadding(config, ascend)
        call = caller(runner_class(text, release, ascend), text, config, ascend, 1)
        for batch in every_step(query_len, **ALL_KINDS):
            compared.add((ascend, mode, batch), answer(ours.padded_step(batch)), call(0, batch))
    compared.assert_same(cases=len(STEP_GRID) * len(modes) * num_steps(**ALL_KINDS))


def test_an_eager_step_is_padded_as_ours(text, release):
    compared = Compared(f"AscendGraphPadding of eager steps, NPUModelRunner {release.version}")
    for ascend in SHAPES:
        config = graph_config(release, ascend, CaptureMode.PIECEWISE, 1, 100)
        ours = AscendGraphPadding(config, ascend)
        call = caller(runner_class(text, release, ascend), text, config, ascend, 1)
        for batch in every_step(1, all_kinds_up_to=0):
            batch = replace(batch, allowed=EAGER_ONLY)
            compared.add((ascend, batch), answer(ours.padded_step(batch)), call(0, batch))
    compared.assert_same(cases=len(SHAPES) * MAX_TOKENS)


RANK_GRID = [
    (CaptureMode.PIECEWISE, 1, AscendConfig(), 2),
    (CaptureMode.FULL_DECODE_ONLY, 2, AscendConfig(), 3),
    (CaptureMode.FULL, 2, AscendConfig(tensor_parallel_size=4, sequence_parallel=SequenceParallel.FLASHCOMM1), 2),
    (
        CaptureMode.PIECEWISE,
        1,
        AscendConfig(tensor_parallel_size=4, sequence_parallel=SequenceParallel.COMPILE_PASS),
        2,
    ),
    (CaptureMode.PIECEWISE, 1, AscendConfig(ranks_agree=False), 2),
]
NEWER_RANK_GRID = [(CaptureMode.FULL_AND_PIECEWISE, 2, AscendConfig(fine_grained_tp=True), 2)]
"""What 0.18 does not ask."""


def test_ranks_agree_as_ours(text, release):
    grid = RANK_GRID + (NEWER_RANK_GRID if release.version == "0.23.0" else [])
    compared = Compared(f"AscendGraphPadding, NPUModelRunner {release.version} on 2 and 3 ranks")
    for mode, query_len, ascend, num_ranks in grid:
        config = graph_config(release, ascend, mode, query_len, 256)
        ours = AscendGraphPadding(config, ascend)
        call = caller(runner_class(text, release, ascend), text, config, ascend, num_ranks)
        for num_tokens in COUNTS:
            batches = ranks_of(num_tokens, query_len, num_ranks)
            theirs = text.vllm.reduce.results([bound(call, rank, batch) for rank, batch in enumerate(batches)])
            compared.add(batches, [answer(padded) for padded in ours.padded_ranks(batches)], theirs)
    compared.assert_same(cases=len(grid) * MAX_TOKENS)


def bound(call, rank, batch):
    return lambda: call(rank, batch)


GRID_310P = [
    (CaptureMode.FULL_DECODE_ONLY, 1, 1),
    (CaptureMode.FULL_DECODE_ONLY, 3, 3),
    (CaptureMode.FULL_DECODE_ONLY, 1, 3),  # n-gram drafts: graphs of single tokens
    (CaptureMode.PIECEWISE, 1, 1),
]


def test_the_310p_runner_pads_as_ours(text, release):
    ascend = AscendConfig()
    class_ = text.runner_310p_class(runner_class(text, release, ascend))
    theirs = {state.name: state for state in text.attention_states}
    names = dict(
        zip(
            AttentionState,
            ("PrefillNoCache", "PrefillCacheHit", "DecodeOnly", "ChunkedPrefill", "SpecDecoding"),
            strict=True,
        )
    )
    states = {ours: theirs[name] for ours, name in names.items()}
    compared = Compared(f"Ascend310pGraphPadding, NPUModelRunner310 {release.version}")
    for mode, graph_query_len, query_len in GRID_310P:
        config = graph_config(release, ascend, mode, graph_query_len, 100)
        ours = Ascend310pGraphPadding(
            config, ascend, query_len=query_len, spec_decode_graphs=release.spec_decode_graphs
        )
        call = caller(class_, text, config, ascend, 1, query_len=query_len, states=states)
        for batch in every_step(query_len, **ALL_KINDS):
            for state in AttentionState:
                batch = replace(batch, attention_state=state)
                compared.add((mode, batch), answer(ours.padded_step(batch)), call(0, batch))
    compared.assert_same(cases=len(GRID_310P) * num_steps(**ALL_KINDS) * len(AttentionState))
