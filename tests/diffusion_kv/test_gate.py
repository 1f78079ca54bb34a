# SPDX-License-Identifier: Apache-2.0
"""What only the model and its ranks can tell is checked before pages are made."""

from dataclasses import replace

import pytest
import torch

from omni_core.diffusion_kv.attention.owner import KVShape
from omni_core.diffusion_kv.config import DiffusionKVConfig
from omni_core.diffusion_kv.errors import DiffusionKVConfigError
from omni_core.diffusion_kv.gate import ModelKVFacts, RankKVFacts, check_model

CONFIG = DiffusionKVConfig(diffusion_kv_mode="paged_scheduler", diffusion_kv_max_rows_per_request=2)
TWO_RANKS = replace(CONFIG, tensor_parallel_size=2)
SHAPE = KVShape(num_layers=3, num_query_heads=6, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
FACTS = ModelKVFacts(
    architecture="toy",
    num_query_heads=6,
    num_kv_heads=2,
    ranks=(RankKVFacts.of(0, SHAPE),),
    profile_rows=2,
    profile_total_tokens=802,
    max_model_len=802,
)
ON_TWO_RANKS = replace(FACTS, ranks=(RankKVFacts.of(0, SHAPE), RankKVFacts.of(1, SHAPE)))


def with_layer(facts, rank, index, **changed):
    """`facts` with one layer of one rank changed."""
    layers = list(facts.ranks[rank].layers)
    layers[index] = replace(layers[index], **changed)
    ranks = list(facts.ranks)
    ranks[rank] = replace(ranks[rank], layers=tuple(layers))
    return replace(facts, ranks=tuple(ranks))


def without_layer(facts, rank, index):
    layers = facts.ranks[rank].layers
    ranks = list(facts.ranks)
    ranks[rank] = replace(ranks[rank], layers=layers[:index] + layers[index + 1 :])
    return replace(facts, ranks=tuple(ranks))


REFUSED = {
    "custom_attention_owns_a_cache_role": (
        CONFIG,
        with_layer(FACTS, 0, 1, cache_role="cross"),
        r"layer 'layers\.1' on rank 0 keeps 'cross' in an attention of its own.*dense_legacy",
    ),
    "query_heads_do_not_divide": (
        TWO_RANKS,
        replace(ON_TWO_RANKS, num_query_heads=7),
        r"7 query heads do not divide by tensor_parallel_size=2.*divisor of 7",
    ),
    "kv_heads_do_not_divide": (
        TWO_RANKS,
        replace(ON_TWO_RANKS, num_kv_heads=1),
        r"1 KV heads do not divide by tensor_parallel_size=2",
    ),
    "a_rank_is_missing": (TWO_RANKS, FACTS, r"1 ranks told their layers, and tensor_parallel_size=2 .* are 2"),
    "a_rank_has_no_layer": (
        TWO_RANKS,
        replace(ON_TWO_RANKS, ranks=(FACTS.ranks[0], RankKVFacts(1, ()))),
        r"rank 1 has no layer with keys and values",
    ),
    "layer_sets_differ_between_ranks": (
        TWO_RANKS,
        without_layer(ON_TWO_RANKS, 1, 2),
        r"ranks 0 and 1 have different layers, 'layers\.2' on one",
    ),
    "k_and_v_head_sizes_differ": (
        CONFIG,
        with_layer(FACTS, 0, 2, value_head_size=32),
        r"layer 'layers\.2' on rank 0 has keys of head size 64 and values of 32",
    ),
    "several_geometries_of_heads": (
        CONFIG,
        with_layer(FACTS, 0, 1, num_kv_heads=4),
        r"several geometries: 2 KV heads of 64 .*'layers\.0' on rank 0\) and 4 KV heads of 64 .*'layers\.1' on rank 0",
    ),
    "several_geometries_of_dtypes": (
        CONFIG,
        with_layer(FACTS, 0, 1, dtype=torch.float32),
        r"several geometries: .*torch\.bfloat16.*torch\.float32",
    ),
    "several_geometries_between_ranks": (
        TWO_RANKS,
        with_layer(ON_TWO_RANKS, 1, 0, num_kv_heads=1),
        r"several geometries: .*'layers\.0' on rank 1",
    ),
    "max_model_len_cannot_be_derived": (
        CONFIG,
        replace(FACTS, max_model_len=None),
        r"max_model_len=-1, and the model does not say.*set max_model_len",
    ),
    "max_model_len_is_below_the_largest_request": (
        replace(CONFIG, max_model_len=801),
        FACTS,
        r"max_model_len=801, and a row of the largest request has 802",
    ),
    "more_rows_than_the_limit": (
        replace(CONFIG, diffusion_kv_max_rows_per_request=1),
        FACTS,
        r"diffusion_kv_max_rows_per_request=1, and the largest request has 2 rows",
    ),
    "native_max_num_seqs_does_not_divide": (
        CONFIG,
        replace(FACTS, native_max_num_seqs=3),
        r"vLLM's max_num_seqs=3 does not divide by diffusion_kv_max_rows_per_request=2.* = 2",
    ),
    "two_physical_layouts": (
        CONFIG,
        replace(FACTS, kv_cache_layouts=(("attention_owner=kernel", "LBHNC"), ("the connector", "LBNHC"))),
        r"two layouts.*LBHNC by attention_owner=kernel, LBNHC by the connector",
    ),
    "a_set_layout_against_the_owner": (
        replace(CONFIG, kv_cache_layout="LBNHC"),
        replace(FACTS, kv_cache_layouts=(("attention_owner=kernel", "LBHNC"),)),
        r"two layouts.*LBNHC by kv_cache_layout, LBHNC by attention_owner=kernel; unset kv_cache_layout",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    config, facts, told = REFUSED[name]
    with pytest.raises(DiffusionKVConfigError, match=rf"model 'toy': {told}"):
        check_model(config, facts)


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        (CONFIG, FACTS),
        (TWO_RANKS, ON_TWO_RANKS),
        (replace(CONFIG, cfg_parallel_size=2), ON_TWO_RANKS),
        (replace(CONFIG, max_model_len=802), replace(FACTS, max_model_len=None)),
        (CONFIG, replace(FACTS, native_max_num_seqs=8)),
        (CONFIG, replace(FACTS, kv_cache_layouts=(("a", "LBHNC"), ("b", "LBHNC")))),
    ],
)
def test_a_model_that_fits_passes(config, facts):
    check_model(config, facts)


@pytest.mark.parametrize("name", REFUSED)
def test_a_dense_stage_owns_its_keys_and_is_asked_nothing(name):
    check_model(DiffusionKVConfig(), REFUSED[name][1])
