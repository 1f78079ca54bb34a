# SPDX-License-Identifier: Apache-2.0
"""How much of a waiting request another one, whose pages are not published yet, is about to compute."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from omni_core.diffusion_kv.reservations import RowDemand
from omni_core.diffusion_kv.rows import RowIdentity


def hit_after(computing: Sequence[RowDemand], waiting: Sequence[RowDemand], block_size: int) -> int:
    """Leading tokens `waiting` would hit once `computing` is published, by its rows alone.

    Each row of the one is held against every row of the other, as the KV manager does: CFG rows share their head.

    Args:
        computing: rows that are about to be computed.
        waiting: rows that could be computed now, or after them.
        block_size: tokens per page.

    Returns:
        Whole pages, the same for all rows of `waiting`; 0 without identities.
    """
    return min(
        (max((_hit_of_row(done, row, block_size) for done in computing), default=0) for row in waiting), default=0
    )


def _hit_of_row(computing: RowDemand, waiting: RowDemand, block_size: int) -> int:
    if computing.identity is None or waiting.identity is None:
        return 0
    prefix = min(computing.geometry.prefix_tokens, waiting.geometry.prefix_tokens)
    shared = min(prefix, shared_tokens(computing.identity, waiting.identity))
    return shared // block_size * block_size


def shared_tokens(first: RowIdentity, second: RowIdentity) -> int:
    """Leading tokens whose identity is the same in both: ids, and every image that touches them as a whole."""
    if first.namespace != second.namespace:
        return 0
    count = min(len(first.token_ids), len(second.token_ids))
    differs = np.nonzero(np.asarray(first.token_ids[:count]) != np.asarray(second.token_ids[:count]))[0]
    shared = count if differs.size == 0 else int(differs[0])
    odd_features = set(first.features) ^ set(second.features)
    return min(shared, min((feature.start for feature in odd_features), default=shared))
