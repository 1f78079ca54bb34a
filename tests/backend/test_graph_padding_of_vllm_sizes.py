# SPDX-License-Identifier: Apache-2.0
"""The capture sizes of our rules against those that vLLM's own code chooses.

The settings are a grid. The code is cut out of vLLM's sources and run with stand-ins for the rest of an engine: that of
the installed release, and that of 0.33 out of its wheel, of which there is no CPU build (`make soak`).
"""

from itertools import product
from types import SimpleNamespace

import pytest
from compared import Compared
from graph_grids import (
    USER_SIZES,
)
from vllm_releases import RELEASES, text_of

from omni_core.backend.graph_padding import (
    VLLM_0_32,
    VLLM_0_32_BLACKWELL,
    CaptureSettings,
    CaptureSizes,
    DraftRange,
    PerformanceMode,
    captured_sizes,
    decode_tiers,
    rounded_for_decodes,
)


@pytest.fixture(scope="module", params=RELEASES)
def vllm_text(request, tmp_path_factory):
    return text_of(request.param, tmp_path_factory)


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
