# SPDX-License-Identifier: Apache-2.0
"""The shortest prompt that can hit, as the warning says it, is the shortest that vLLM's own KV-cache manager finds."""

from types import SimpleNamespace

import pytest
import torch
from real_scheduler import import_simulation

from omni_core.integrations.vllm.effective_block import effective_block

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]

NO_SPECULATION = None
DROPS = SimpleNamespace(use_eagle=lambda: True, use_eagle_block_drop=lambda: True)
FULL, WINDOW = "full_attention", "sliding_window"


@pytest.fixture(scope="module", autouse=True)
def vllm():
    import_simulation()


def kv_cache_config(groups, drafts):
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    def spec(kind, size):
        told = {"block_size": size, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
        return FullAttentionSpec(**told) if kind == FULL else SlidingWindowSpec(**told, sliding_window=size)

    made = [
        KVCacheGroupSpec([f"layer {index}"], spec(*group), is_eagle_group=index in drafts)
        for index, group in enumerate(groups)
    ]
    return KVCacheConfig(num_blocks=100, kv_cache_tensors=[], kv_cache_groups=made)


def hit_tokens(config, num_tokens, *, alignment, hash_block, drops):
    """What a prompt of so many tokens hits when the same one was computed before."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    manager = KVCacheManager(
        config,
        max_model_len=512,
        max_in_flight_tokens=512,
        enable_caching=True,
        use_eagle=drops,
        scheduler_block_size=alignment,
        hash_block_size=hash_block,
    )
    first, second = (
        Request(
            request_id=name,
            prompt_token_ids=list(range(num_tokens)),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=get_request_block_hasher(hash_block, sha256),
        )
        for name in ("first", "second")
    )
    assert manager.allocate_slots(first, num_tokens) is not None
    return manager.get_computed_blocks(second)[1]


@pytest.mark.parametrize("speculative", [NO_SPECULATION, DROPS], ids=["plain", "speculative"])
@pytest.mark.parametrize(
    ("groups", "drafts", "alignment", "hash_block"),
    [
        ([(FULL, 16)], (), 16, 16),
        ([(FULL, 16), (WINDOW, 48)], (), 48, 16),
        ([(FULL, 16), (WINDOW, 48)], (0,), 48, 16),
        ([(FULL, 16), (WINDOW, 48)], (1,), 48, 16),
        ([(FULL, 16), (WINDOW, 24)], (), 48, 8),
    ],
)
def test_one_token_less_cannot_hit(speculative, groups, drafts, alignment, hash_block):
    drops = speculative is DROPS
    config = kv_cache_config(groups, drafts if drops else ())
    config.cache_hit_alignment_tokens = alignment
    told = SimpleNamespace(speculative_config=speculative)
    block = effective_block([kind for kind, _ in groups], config, told)
    found = [
        hit_tokens(config, num_tokens, alignment=alignment, hash_block=hash_block, drops=drops)
        for num_tokens in (block.fewest_prompt_tokens - 1, block.fewest_prompt_tokens)
    ]
    assert found == [0, alignment]
