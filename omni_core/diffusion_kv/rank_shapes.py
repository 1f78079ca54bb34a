# SPDX-License-Identifier: Apache-2.0
"""What a rank keeps of a model's keys and values: some of the heads of all tokens."""

from __future__ import annotations

from dataclasses import replace

from omni_core.diffusion_kv.attention.owner import KVShape
from omni_core.diffusion_kv.errors import DiffusionKVConfigError


def rank_shape(whole: KVShape, tensor_parallel_size: int) -> KVShape:
    """The shape on each of the ranks that share a model's heads.

    Args:
        whole: of the model on one rank.
        tensor_parallel_size: the ranks.

    Raises:
        DiffusionKVConfigError: the query or KV heads do not divide by the ranks, or the query heads by the KV heads.
    """
    for name, heads in (("num_query_heads", whole.num_query_heads), ("num_kv_heads", whole.num_kv_heads)):
        if heads % tensor_parallel_size:
            raise DiffusionKVConfigError(
                f"{name}={heads} does not divide by tensor_parallel_size={tensor_parallel_size}; block ids mean one "
                "page size on every rank"
            )
    if whole.num_query_heads % whole.num_kv_heads:
        raise DiffusionKVConfigError(
            f"num_query_heads={whole.num_query_heads} does not divide by num_kv_heads={whole.num_kv_heads}; each KV "
            "head serves the same number of query heads"
        )
    return replace(
        whole,
        num_query_heads=whole.num_query_heads // tensor_parallel_size,
        num_kv_heads=whole.num_kv_heads // tensor_parallel_size,
    )
