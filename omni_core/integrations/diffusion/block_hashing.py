# SPDX-License-Identifier: Apache-2.0
"""The hash chain of a row's full prefix blocks, by vLLM's own functions from a root of our own.

The root stands for the namespace: model, layout rule, hashing rule, adapter, weights. Each block adds its token ids
and, of every image that touches it, the identifier and where the image starts: `generate_block_hash_extra_keys`. Blocks
of the target are never hashed, so none of them can be published.
"""

from __future__ import annotations

from typing import Any

from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, hash_block_tokens

from omni_core.diffusion_kv.errors import DiffusionKVError
from omni_core.diffusion_kv.rows import RowIdentity
from omni_core.integrations.diffusion.row_request import RowRequest

_DOMAIN = "omni-core diffusion kv chain 1"


def chain_root(namespace: bytes) -> Any:
    """The parent of a row's first block, vLLM's `BlockHash`. CBOR, since pickles of equal values can differ."""
    return sha256_cbor((_DOMAIN, namespace))


def hash_prefix_blocks(row: RowRequest, identity: RowIdentity, block_size: int) -> None:
    """Give `row` the hashes of its `floor(prefix / block_size)` full blocks. A second call changes nothing.

    Args:
        row: not reserved yet.
        identity: the row's, checked against its geometry.
        block_size: tokens per page.

    Raises:
        DiffusionKVError: the row is reserved.
    """
    if row.num_computed_tokens:
        raise DiffusionKVError(f"row {row.request_id!r} is hashed after it was reserved; an internal error")
    if row.block_hashes:
        return
    parent = chain_root(identity.namespace)
    next_feature = 0
    for start in range(0, row.num_prompt_tokens // block_size * block_size, block_size):
        end = start + block_size
        extra_keys, next_feature = generate_block_hash_extra_keys(row, start, end, next_feature)
        parent = hash_block_tokens(sha256_cbor, parent, identity.token_ids[start:end], extra_keys)
        row.block_hashes.append(parent)
