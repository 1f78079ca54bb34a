# SPDX-License-Identifier: Apache-2.0
"""The padding rules against vLLM's own code, for every token count from 1 to 8,192 over a grid of settings.

vLLM's functions and classes are cut out of its sources and run with stand-ins for the rest of an engine: those of the
installed release, and those of 0.33 out of its wheel, of which there is no CPU build (`make soak`). One test asks the
installed dispatcher as it is imported, with a real `VllmConfig`.
"""

import importlib.metadata
import importlib.util
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from compared import Compared
from graph_batches import MAX_TOKENS, every_step, is_eager, num_steps, ranks_of
from graph_sources import VLLM_MODULES, VllmText
from next_vllm import modules_of_next_vllm

from omni_core.backend.graph_padding import (
    EAGER_ONLY,
    NO_FULL_GRAPH,
    VLLM_0_32,
    VLLM_0_32_BLACKWELL,
    BatchShape,
    CaptureMode,
    CaptureSettings,
    CaptureSizes,
    DecodeGraphs,
    DraftRange,
    GraphConfig,
    GraphMode,
    LoraCapture,
    LoraGraphs,
    Microbatches,
    MixedGraphs,
    PaddedBatch,
    PerformanceMode,
    Prefills,
    V1Dispatcher,
    V1GraphPadding,
    V2Config,
    V2GraphPadding,
    captured_sizes,
    decode_tiers,
    rounded_for_decodes,
)

COUNTS = range(1, MAX_TOKENS + 1)
ALL_KINDS = {"all_kinds_up_to": 3072}
"""No graph is larger."""
USER_SIZES = (1, 3, 7, 60, 61, 120, 500, 1000, 3000)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("installed", marks=pytest.mark.engine),
        pytest.param("0.33", marks=[pytest.mark.slow, pytest.mark.timeout(1000)]),
    ],
)
def vllm_text(request, tmp_path_factory):
    if request.param == "installed":
        return VllmText(installed_package())
    return VllmText(modules_of_next_vllm(VLLM_MODULES, tmp_path_factory.mktemp("vllm")))


def installed_package():
    [distribution, *_] = importlib.metadata.packages_distributions()["vllm"]
    release = importlib.metadata.version(distribution)
    if not release.startswith(("0.32.", "0.33.")):
        pytest.skip(f"vLLM {release} pads by other rules")
    [folder] = importlib.util.find_spec("vllm").submodule_search_locations
    return Path(folder)


def graph_config(mode, query_len, max_num_seqs, sizes, lora=None):
    chosen = captured_sizes(
        CaptureSettings(max_num_seqs=max_num_seqs, max_num_batched_tokens=4096, query_len=query_len, sizes=sizes),
        VLLM_0_32,
    )
    return GraphConfig(
        capture_sizes=chosen,
        capture_mode=mode,
        max_num_seqs=max_num_seqs,
        query_len=query_len,
        **({} if lora is None else {"lora": lora}),
    )


def v1_config(mode, query_len, max_num_seqs, sizes, lora=None):
    config = graph_config(mode, query_len, max_num_seqs, sizes, lora)
    if mode.decode is not GraphMode.FULL:
        return config
    return GraphConfig(
        capture_sizes=rounded_for_decodes(config.capture_sizes, query_len),
        capture_mode=mode,
        max_num_seqs=max_num_seqs,
        query_len=query_len,
        lora=config.lora,
    )


def answer(padded: PaddedBatch):
    return padded.mode.value, padded.num_tokens, padded.num_reqs, padded.num_ubatches


def their_answer(mode, descriptor, num_ubatches=1):
    num_reqs = descriptor.num_reqs if mode.name == "FULL" else None
    return mode.value, descriptor.num_tokens, num_reqs, num_ubatches


# Capture sizes


def their_sizes(text, set_sizes, settings, *, drafts=None):
    compilation = SimpleNamespace(
        cudagraph_mode=text.mode.FULL_AND_PIECEWISE,
        cudagraph_capture_sizes=None if settings.sizes is None else list(settings.sizes),
        max_cudagraph_capture_size=settings.max_size,
        post_init_cudagraph_sizes=lambda: None,
    )
    stand_in = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=False),
        compilation_config=compilation,
        scheduler_config=SimpleNamespace(
            max_num_seqs=settings.max_num_seqs, max_num_batched_tokens=settings.max_num_batched_tokens
        ),
        uniform_decode_query_len=settings.query_len,
        num_speculative_tokens=settings.query_len - 1,
        speculative_config=SimpleNamespace(
            uses_dynamic_speculative_decoding=lambda: drafts is not None, num_speculative_tokens_per_batch_size=drafts
        ),
        performance_mode=settings.performance_mode.name.lower(),
    )
    try:
        set_sizes(stand_in)
    except ValueError:
        return "refused"
    assert compilation.max_cudagraph_capture_size == max(compilation.cudagraph_capture_sizes, default=0)
    return compilation.cudagraph_capture_sizes


def our_sizes(settings, rules):
    try:
        return list(captured_sizes(settings, rules).sizes)
    except ValueError:
        return "refused"


MAX_NUM_SEQS = (1, 2, 3, 7, 8, 31, 64, 100, 255, 256, 257, 500, 512, 1000, 1024, 2000)
BATCHED_TOKENS = (1, 3, 5, 32, 100, 257, 500, 512, 1024, 2048, 8192)
QUERY_LENS = (1, 2, 3, 4, 8, 17)
USERS = (
    (None, None),
    (None, 1),
    (None, 4),
    (None, 20),
    (None, 300),
    (None, 1001),
    ((8, 4, 4, 1), None),
    (USER_SIZES, None),
    (USER_SIZES, 3000),
    (USER_SIZES, 500),
)


@pytest.mark.parametrize(("blackwell", "rules"), [(False, VLLM_0_32), (True, VLLM_0_32_BLACKWELL)])
def test_sizes_are_captured_as_vllm_chooses_them(vllm_text, blackwell, rules):
    set_sizes = vllm_text.size_setter(blackwell=blackwell)
    compared = Compared("captured_sizes, _set_cudagraph_sizes")
    grid = product(MAX_NUM_SEQS, BATCHED_TOKENS, QUERY_LENS, USERS, PerformanceMode)
    for max_num_seqs, batched_tokens, query_len, (sizes, max_size), mode in grid:
        settings = CaptureSettings(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=batched_tokens,
            query_len=query_len,
            sizes=sizes,
            max_size=max_size,
            performance_mode=mode,
        )
        compared.add(settings, our_sizes(settings, rules), their_sizes(vllm_text, set_sizes, settings))
    compared.assert_same(cases=len(MAX_NUM_SEQS) * len(BATCHED_TOKENS) * len(QUERY_LENS) * len(USERS) * 2)


SCHEDULES = (
    [(1, 4, 3)],
    [(1, 16, 4), (17, 64, 2), (65, 256, 0)],
    [(1, 16, 3), (32, 128, 2)],
    [(33, 200, 1), (1, 32, 16)],
    [(1, 8, 2), (9, 16, 5), (20, 2000, 2)],
)


def test_sizes_follow_a_schedule_of_drafts_as_in_vllm(vllm_text):
    set_sizes = vllm_text.size_setter()
    compared = Compared("captured_sizes with decode_tiers, _set_cudagraph_sizes")
    query_lens = [query_len for query_len in QUERY_LENS if query_len > 1]
    for schedule, max_num_seqs, query_len in product(SCHEDULES, MAX_NUM_SEQS, query_lens):
        tiers = decode_tiers(
            [DraftRange(*each) for each in schedule], max_num_seqs=max_num_seqs, max_drafts=query_len - 1
        )
        settings = CaptureSettings(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=8192, query_len=query_len, decode_tiers=tiers
        )
        theirs = their_sizes(vllm_text, set_sizes, settings, drafts=schedule)
        compared.add(settings, our_sizes(settings, VLLM_0_32), theirs)
    compared.assert_same(cases=len(SCHEDULES) * len(MAX_NUM_SEQS) * len(query_lens))


def test_sizes_are_rounded_for_decodes_as_in_vllm(vllm_text):
    compared = Compared("rounded_for_decodes, adjust_cudagraph_sizes_for_spec_decode")
    lists = [(1,), (1, 2, 4), (3, 5, 7), USER_SIZES, tuple(range(8, 257, 8)), (16,), (511, 512)]
    for sizes, query_len in product(lists, range(1, 40)):
        try:
            ours = list(rounded_for_decodes(CaptureSizes(sizes), query_len).sizes)
        except ValueError:
            ours = "refused"
        try:
            theirs = vllm_text.rounded_sizes(sizes, query_len)
        except ValueError:
            theirs = "refused"
        compared.add((sizes, query_len), ours, theirs)
    compared.assert_same(cases=len(lists) * 39)


# The V1 runner


V1_GRID = [
    v1_config(mode, query_len, max_num_seqs, sizes)
    for mode, query_len, max_num_seqs, sizes in product(CaptureMode, (1, 2, 4), (8, 256), (None, USER_SIZES))
]


def compare_dispatch(compared, config, dispatcher):
    """Every count as a mixed step, and as one of decodes where it can be one."""
    ours = V1Dispatcher(config)
    for num_tokens in COUNTS:
        for uniform in (False, True) if num_tokens % config.query_len == 0 else (False,):
            padded = ours.dispatch(num_tokens, uniform_decode=uniform)
            theirs = their_answer(*dispatcher.dispatch(num_tokens, uniform_decode=uniform))
            compared.add((config, num_tokens, uniform), answer(padded), theirs)


def dispatch_cases(configs):
    return sum(MAX_TOKENS + MAX_TOKENS // config.query_len for config in configs)


def test_the_v1_runner_dispatches_as_ours(vllm_text):
    compared = Compared("V1Dispatcher, CudagraphDispatcher")
    for config in V1_GRID:
        compare_dispatch(compared, config, vllm_text.dispatcher(vllm_text.vllm_config(config)))
    compared.assert_same(cases=dispatch_cases(V1_GRID))


@pytest.mark.parametrize("allowed", [NO_FULL_GRAPH, EAGER_ONLY])
def test_the_v1_runner_forbids_modes_as_ours(vllm_text, allowed):
    valid_modes = frozenset(vllm_text.mode(mode.value) for mode in allowed)
    compared = Compared("V1Dispatcher with forbidden modes, CudagraphDispatcher")
    configs = [config for config in V1_GRID if config.query_len == 2]
    for config in configs:
        ours = V1Dispatcher(config)
        theirs = vllm_text.dispatcher(vllm_text.vllm_config(config))
        for num_tokens in COUNTS:
            padded = ours.dispatch(num_tokens, uniform_decode=num_tokens % 2 == 0, allowed=allowed)
            chosen = theirs.dispatch(num_tokens, uniform_decode=num_tokens % 2 == 0, valid_modes=valid_modes)
            compared.add((config, num_tokens), answer(padded), their_answer(*chosen))
    compared.assert_same(cases=len(configs) * MAX_TOKENS)


LORA = [
    (LoraCapture.ONLY_ACTIVE, False),
    (LoraCapture.WITH_AND_WITHOUT, False),
    (LoraCapture.BY_COUNT, True),
]
MAX_LORAS = 5


def test_the_v1_runner_serves_adapters_as_ours(vllm_text):
    compared = Compared("V1Dispatcher with adapters, CudagraphDispatcher")
    modes = (CaptureMode.FULL, CaptureMode.FULL_AND_PIECEWISE)
    for mode, (capture, specialize) in product(modes, LORA):
        config = v1_config(mode, 1, 64, None, LoraGraphs.captured(capture, max_loras=MAX_LORAS))
        ours = V1Dispatcher(config)
        theirs = vllm_text.dispatcher(vllm_text.vllm_config(config, specialize_lora=specialize, max_loras=MAX_LORAS))
        for num_tokens, active in product(COUNTS, range(MAX_LORAS + 1)):
            padded = ours.dispatch(num_tokens, uniform_decode=True, num_active_loras=active)
            chosen = theirs.dispatch(num_tokens, uniform_decode=True, has_lora=active > 0, num_active_loras=active)
            compared.add((config, num_tokens, active), answer(padded), their_answer(*chosen))
    compared.assert_same(cases=len(modes) * len(LORA) * MAX_TOKENS * (MAX_LORAS + 1))


@pytest.mark.engine
@pytest.mark.filterwarnings("default")
def test_the_imported_dispatcher_agrees():
    """With a `VllmConfig` as vLLM makes it, given the sizes a CUDA platform would leave in it."""
    installed_package()
    from vllm.config import CUDAGraphMode, SchedulerConfig, VllmConfig
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    compared = Compared("V1Dispatcher, CudagraphDispatcher as imported")
    configs = [config for config in V1_GRID if config.query_len == 1]
    for config in configs:
        scheduler = SchedulerConfig(
            max_model_len=8192,
            max_num_batched_tokens=8192,
            max_num_seqs=config.max_num_seqs,
            is_encoder_decoder=False,
        )
        vllm_config = VllmConfig(scheduler_config=scheduler)
        compilation = vllm_config.compilation_config
        compilation.cudagraph_capture_sizes = list(config.capture_sizes.sizes)
        compilation.max_cudagraph_capture_size = config.capture_sizes.largest
        dispatcher = CudagraphDispatcher(vllm_config)
        dispatcher.initialize_cudagraph_keys(CUDAGraphMode[config.capture_mode.name], config.query_len)
        compare_dispatch(compared, config, dispatcher)
    compared.assert_same(cases=dispatch_cases(configs))


SPLITS = [
    Microbatches(num_ubatches=1),
    Microbatches(num_ubatches=2, decode_threshold_tokens=32, prefill_threshold_tokens=128),
    Microbatches(num_ubatches=3, decode_threshold_tokens=8, prefill_threshold_tokens=8),
]


def parallel_config(microbatches, num_ranks, rank):
    return SimpleNamespace(
        data_parallel_size=num_ranks,
        data_parallel_rank=rank,
        tensor_parallel_size=1,
        disable_nccl_for_dp_synchronization=True,
        use_ubatching=microbatches.num_ubatches > 1,
        num_ubatches=microbatches.num_ubatches,
        dbo_decode_token_threshold=microbatches.decode_threshold_tokens,
        dbo_prefill_token_threshold=microbatches.prefill_threshold_tokens,
    )


def v1_call(runner_class, vllm_config, dispatcher, config, microbatches, num_ranks):
    """Asks the runner of one rank for its batch."""

    def call(rank, batch):
        parallel = parallel_config(microbatches, num_ranks, rank)
        runner = runner_class(
            uniform_decode_query_len=config.query_len,
            model_config=vllm_config.model_config,
            input_batch=SimpleNamespace(lora_id_to_lora_request={}),
            cudagraph_dispatcher=dispatcher,
            parallel_config=parallel,
            vllm_config=SimpleNamespace(
                parallel_config=parallel, observability_config=vllm_config.observability_config
            ),
        )
        mode, descriptor, split, _, _ = runner._determine_batch_execution_and_padding(
            num_tokens=batch.num_tokens,
            num_reqs=batch.num_reqs,
            num_scheduled_tokens_np=None,
            max_num_scheduled_tokens=batch.max_query_len,
            allow_microbatching=batch.may_split,
            force_eager=is_eager(batch),
        )
        return their_answer(mode, descriptor, microbatches.num_ubatches if split else 1)

    return call


RANK_MODES = (CaptureMode.FULL_AND_PIECEWISE, CaptureMode.FULL, CaptureMode.FULL_DECODE_ONLY)
RANK_GRID = [
    (CaptureMode.FULL_AND_PIECEWISE, 1, SPLITS[0], 2),
    (CaptureMode.FULL_AND_PIECEWISE, 3, SPLITS[1], 2),
    (CaptureMode.FULL, 1, SPLITS[2], 3),
    (CaptureMode.FULL_DECODE_ONLY, 3, SPLITS[1], 2),
]


@pytest.mark.parametrize(("mode", "query_len", "microbatches", "num_ranks"), RANK_GRID)
def test_ranks_of_the_v1_runner_agree_as_ours(vllm_text, mode, query_len, microbatches, num_ranks):
    config = v1_config(mode, query_len, 256, None)
    vllm_config = vllm_text.vllm_config(config)
    dispatcher = vllm_text.dispatcher(vllm_config)
    call = v1_call(vllm_text.v1_runner_class(), vllm_config, dispatcher, config, microbatches, num_ranks)
    ours = V1GraphPadding(config, microbatches)
    compared = Compared(f"V1GraphPadding, GPUModelRunner on {num_ranks} ranks")
    for num_tokens in COUNTS:
        batches = ranks_of(num_tokens, query_len, num_ranks)
        theirs = vllm_text.reduce.results([bound(call, rank, batch) for rank, batch in enumerate(batches)])
        compared.add(batches, [answer(padded) for padded in ours.padded_ranks(batches)], theirs)
    compared.assert_same(cases=MAX_TOKENS)


def bound(call, rank, batch):
    return lambda: call(rank, batch)


def test_one_rank_of_the_v1_runner_agrees_with_ours(vllm_text):
    compared = Compared("V1GraphPadding, GPUModelRunner on one rank")
    configs = [config for config in V1_GRID if config.capture_mode in RANK_MODES and config.query_len > 1][::3]
    for config in configs:
        vllm_config = vllm_text.vllm_config(config)
        dispatcher = vllm_text.dispatcher(vllm_config)
        call = v1_call(vllm_text.v1_runner_class(), vllm_config, dispatcher, config, SPLITS[1], 1)
        ours = V1GraphPadding(config, SPLITS[1])
        for batch in every_step(config.query_len, **ALL_KINDS):
            compared.add(batch, answer(ours.padded_step(batch)), call(0, batch))
    compared.assert_same(cases=len(configs) * num_steps(**ALL_KINDS))


# The V2 runner


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
