# SPDX-License-Identifier: Apache-2.0
"""The padding rules of vLLM's V1 runner against its own code, for every token count from 1 to 8,192.

The settings are a grid. The code is cut out of vLLM's sources and run with stand-ins for the rest of an engine: that of
the installed release, and that of 0.33 out of its wheel, of which there is no CPU build (`make soak`). One test asks
the installed dispatcher as it is imported, with a real `VllmConfig`.
"""

from itertools import product
from types import SimpleNamespace

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
    parallel_config,
    their_answer,
    v1_config,
)
from vllm_releases import RELEASES, installed_package, text_of

from omni_core.backend.graph_padding import (
    EAGER_ONLY,
    NO_FULL_GRAPH,
    CaptureMode,
    LoraCapture,
    LoraGraphs,
    V1Dispatcher,
    V1GraphPadding,
)


@pytest.fixture(scope="module", params=RELEASES)
def vllm_text(request, tmp_path_factory):
    return text_of(request.param, tmp_path_factory)


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
# torch warns of its own `torch.jit` where vLLM imports it.
@pytest.mark.filterwarnings("default:.*torch.jit.script_method.* is deprecated:DeprecationWarning")
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
