# SPDX-License-Identifier: Apache-2.0
"""The padding rules of vLLM's V2 runner against its own code, for every token count from 1 to 8,192.

The settings are a grid. The code is cut out of vLLM's sources and run with stand-ins for the rest of an engine: that of
the installed release, and that of 0.33 out of its wheel, of which there is no CPU build (`make soak`).
"""

from itertools import product

import pytest
from compared import Compared
from graph_batches import MAX_TOKENS, every_step, is_eager, num_steps, ranks_of
from graph_grids import (
    ALL_KINDS,
    COUNTS,
    MAX_LORAS,
    RANK_MODES,
    SPLITS,
    USER_SIZES,
    answer,
    bound,
    graph_config,
    parallel_config,
    their_answer,
)
from vllm_releases import RELEASES, text_of

from omni_core.backend.graph_padding import (
    BatchShape,
    CaptureMode,
    DecodeGraphs,
    DraftRange,
    LoraCapture,
    LoraGraphs,
    MixedGraphs,
    Prefills,
    V2Config,
    V2GraphPadding,
    decode_tiers,
)


@pytest.fixture(scope="module", params=RELEASES)
def vllm_text(request, tmp_path_factory):
    return text_of(request.param, tmp_path_factory)


V2_OPTIONS = {
    "plain": V2Config(),
    "varying decodes": V2Config(decode_graphs=DecodeGraphs.VARYING),
    "short mixed graphs": V2Config(mixed_graphs=MixedGraphs.DECODE_SIZES),
    "split": V2Config(microbatches=SPLITS[1]),
    "schedule of drafts": V2Config(query_lens=(1, 3, 4)),
}
SCHEDULE_OF_DRAFTS = [(1, 16, 3), (17, 64, 2), (65, 256, 0)]


def v2_manager(text, code, config, v2, num_ranks=1):
    vllm_config = text.vllm_config(config)
    vllm_config.parallel_config = parallel_config(v2.microbatches, num_ranks, 0)
    vllm_config.cache_config.use_kda_recoverssm = v2.mixed_graphs is MixedGraphs.DECODE_SIZES
    if v2.query_lens:
        vllm_config.speculative_config.uses_dynamic_speculative_decoding = lambda: True
        vllm_config.speculative_config.num_speculative_tokens_per_batch_size = SCHEDULE_OF_DRAFTS
    manager = code.CudaGraphManager(
        vllm_config,
        "cpu",
        vllm_config.compilation_config.cudagraph_mode,
        config.query_len,
        lora_capture_cases=list(config.lora.counts),
        varlen_decode=v2.decode_graphs is DecodeGraphs.VARYING,
        ubatch_runner=object() if v2.microbatches.num_ubatches > 1 else None,
    )
    manager._graphs_captured = True
    return manager


def v2_call(code, manager, config, v2, num_ranks):
    """Asks the dispatch of one rank for its batch, with what `execute_model` passes it."""

    def call(rank, batch):
        uniform = code.get_uniform_decode_token_count(
            batch.num_reqs, batch.num_tokens, batch.max_query_len, batch.prefills is not Prefills.SOME
        )
        descriptor, _ = code.dispatch_cg_and_sync_dp(
            manager,
            batch.num_reqs,
            batch.num_tokens,
            uniform if batch.num_reqs else None,
            num_ranks,
            rank,
            max_query_len=batch.max_query_len if batch.prefills is Prefills.NONE else None,
            need_eager=is_eager(batch),
            num_active_loras=batch.num_active_loras,
            parallel_config=parallel_config(v2.microbatches, num_ranks, rank),
            allow_ubatching=v2.microbatches.num_ubatches > 1 and batch.may_split,
            uniform_decode=uniform == config.query_len,
        )
        return their_answer(descriptor.cg_mode, descriptor, descriptor.num_ubatches)

    return call


@pytest.mark.parametrize("option", V2_OPTIONS)
def test_the_v2_runner_dispatches_as_ours(vllm_text, option):
    v2 = V2_OPTIONS[option]
    code = vllm_text.v2_code()
    compared = Compared(f"V2GraphPadding ({option}), CudaGraphManager")
    modes = tuple(CaptureMode) if option == "plain" else RANK_MODES
    for mode, max_num_seqs in product(modes, (8, 256)):
        config = graph_config(mode, 4, max_num_seqs, USER_SIZES if max_num_seqs == 8 else None)
        ours = V2GraphPadding(config, schedule_for(v2, max_num_seqs))
        call = v2_call(code, v2_manager(vllm_text, code, config, v2), config, v2, 1)
        for batch in every_step(4, **ALL_KINDS):
            compared.add((mode, batch), answer(ours.padded_step(batch)), call(0, batch))
    compared.assert_same(cases=len(modes) * 2 * num_steps(**ALL_KINDS))


def schedule_for(v2, max_num_seqs):
    """The option, with the query lengths its schedule has for so many requests."""
    if not v2.query_lens:
        return v2
    ranges = [DraftRange(*each) for each in SCHEDULE_OF_DRAFTS]
    return V2Config(query_lens=tuple(sorted(decode_tiers(ranges, max_num_seqs=max_num_seqs, max_drafts=3))))


def test_the_v2_runner_serves_adapters_as_ours(vllm_text):
    code = vllm_text.v2_code()
    compared = Compared("V2GraphPadding with adapters, CudaGraphManager")
    captures = (LoraCapture.WITH_AND_WITHOUT, LoraCapture.BY_COUNT)
    for capture in captures:
        lora = LoraGraphs.captured(capture, max_loras=MAX_LORAS)
        config = graph_config(CaptureMode.FULL_AND_PIECEWISE, 1, 64, None, lora)
        ours = V2GraphPadding(config)
        call = v2_call(code, v2_manager(vllm_text, code, config, V2Config()), config, V2Config(), 1)
        for num_tokens, active in product(COUNTS, range(MAX_LORAS + 3)):
            batch = BatchShape(num_tokens=num_tokens, num_reqs=num_tokens, max_query_len=1, num_active_loras=active)
            compared.add(batch, answer(ours.padded_step(batch)), call(0, batch))
    compared.assert_same(cases=len(captures) * MAX_TOKENS * (MAX_LORAS + 3))


V2_RANK_GRID = [
    (CaptureMode.FULL_AND_PIECEWISE, 1, "plain", 3),
    (CaptureMode.FULL_AND_PIECEWISE, 3, "split", 2),
    (CaptureMode.FULL, 1, "split", 2),
    (CaptureMode.FULL_DECODE_ONLY, 3, "varying decodes", 2),
]


@pytest.mark.parametrize(("mode", "query_len", "option", "num_ranks"), V2_RANK_GRID)
def test_ranks_of_the_v2_runner_agree_as_ours(vllm_text, mode, query_len, option, num_ranks):
    v2 = V2_OPTIONS[option]
    config = graph_config(mode, query_len, 256, None)
    code = vllm_text.v2_code()
    call = v2_call(code, v2_manager(vllm_text, code, config, v2, num_ranks), config, v2, num_ranks)
    ours = V2GraphPadding(config, v2)
    compared = Compared(f"V2GraphPadding ({option}), dispatch_cg_and_sync_dp on {num_ranks} ranks")
    for num_tokens in COUNTS:
        batches = ranks_of(num_tokens, query_len, num_ranks, idle=True)
        theirs = vllm_text.reduce.results([bound(call, rank, batch) for rank, batch in enumerate(batches)])
        compared.add(batches, [answer(padded) for padded in ours.padded_ranks(batches)], theirs)
    compared.assert_same(cases=MAX_TOKENS)
