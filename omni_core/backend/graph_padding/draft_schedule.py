# SPDX-License-Identifier: Apache-2.0
"""Decode lengths where the number of draft tokens follows the number of requests in a step.

Source: vLLM 0.32, `v1/spec_decode/dynamic/utils.py` `build_dynamic_sd_schedule_lookup`, and what `config/vllm.py`
`_set_cudagraph_sizes` makes of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class DraftRange(NamedTuple):
    """An entry of `num_speculative_tokens_per_batch_size`."""

    first_num_reqs: int
    last_num_reqs: int
    """Included; the number of drafts goes on until the next range begins."""
    num_drafts: int


def decode_tiers(schedule: Sequence[DraftRange], *, max_num_seqs: int, max_drafts: int) -> dict[int, int]:
    """The most requests a step can have at each query length, by query length.

    Args:
        schedule: in any order.
        max_num_seqs: requests of the largest step.
        max_drafts: `num_speculative_tokens`, which no range exceeds.

    Raises:
        ValueError: the ranges overlap, are empty or do not begin at 1, or a range has less than 0 drafts.
    """
    ranges = sorted(schedule)
    starts_at_one = bool(ranges) and ranges[0].first_num_reqs == 1
    if (
        not starts_at_one
        or any(each.first_num_reqs > each.last_num_reqs or each.num_drafts < 0 for each in ranges)
        or any(low.last_num_reqs >= high.first_num_reqs for low, high in pairwise(ranges))
    ):
        raise ValueError(f"draft schedule {ranges}: the ranges must begin at 1 request and may not overlap")
    tiers: dict[int, int] = {}
    for index, each in enumerate(ranges):
        if each.first_num_reqs <= max_num_seqs:
            next_first = ranges[index + 1].first_num_reqs if index + 1 < len(ranges) else max_num_seqs + 1
            tiers[min(each.num_drafts, max_drafts) + 1] = min(next_first - 1, max_num_seqs)
    return tiers
