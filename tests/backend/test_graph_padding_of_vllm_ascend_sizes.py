# SPDX-License-Identifier: Apache-2.0
"""The capture sizes of our rules against those that vllm-ascend's own code chooses.

The functions are cut out of the wheels of vllm-ascend 0.18.0 and 0.23.0, over the code of the vLLM each was made for,
with vllm-ascend's patch of its dispatcher, and run with stand-ins for the rest of an engine. Nothing is imported.
What vllm-ascend does between those functions, in `check_and_update_config`, is done here by hand.
"""

from itertools import product
from types import SimpleNamespace

import pytest
from ascend_releases import RELEASES, text_of
from compared import Compared
from source_cuts import cut

from omni_core.backend.graph_padding import (
    ASCEND_0_18,
    ASCEND_0_23,
    ASCEND_950_SIZES,
    AclStreams,
    CaptureSettings,
    CaptureSizes,
    HcclExpansion,
    PerformanceMode,
    captured_sizes,
    kept_for_sequence_parallel,
    rounded_for_decodes,
    thinned,
)

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=RELEASES, ids=lambda release: release.version)
def release(request):
    return request.param


@pytest.fixture(scope="module")
def text(release):
    return text_of(release)


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
    text = text_of(RELEASES[0])
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
    prune = text_of(RELEASES[1]).pruner_for_950()
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
