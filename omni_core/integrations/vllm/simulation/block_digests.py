# SPDX-License-Identifier: Apache-2.0
"""Adds to a step's events the block digests that vLLM's scheduler knows and its output does not tell.

They come from `Request.block_hashes`, which are chained over the token prefix, salt and images, so the hash at a
block's end stands for all of it. An engine whose cache shall be told them needs a scheduler that sends them along.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from omni_core.integrations.vllm.simulation.followed_request import FollowedRequest
from omni_core.prefix_cache.events import FilledBlock, RequestEvent, RequestEventKind, StepEvents

_ENDS = (RequestEventKind.FINISHED, RequestEventKind.ABORTED)


def with_digests(events: StepEvents, live: Mapping[str, FollowedRequest], hashes_per_block: int) -> StepEvents:
    """The events with the digest of every block whose tokens are known.

    Args:
        events: of a step, told to no cache yet.
        live: every request of the step, its table as the step leaves it.
        hashes_per_block: entries of `Request.block_hashes` per block.
    """
    brings: dict[str, RequestEvent] = {event.req_id: event for event in events.requests if event.kind not in _ENDS}
    filled: list[FilledBlock] = []
    told: dict[str, RequestEvent] = {}
    for req_id, followed in live.items():
        event = brings.get(req_id)
        num_blocks = len(followed.block_ids)
        num_full = min(num_blocks, len(followed.request.block_hashes) // hashes_per_block)
        first_new = num_blocks - len(event.block_ids) if event is not None else num_blocks
        if event is not None:
            digests = (
                _digest(followed, index, hashes_per_block) if index < num_full else 0
                for index in range(first_new, num_blocks)
            )
            told[req_id] = replace(event, block_digests=tuple(digests))
        filled.extend(
            FilledBlock(followed.block_ids[index], _digest(followed, index, hashes_per_block))
            for index in range(min(followed.digests_told, first_new), min(first_new, num_full))
        )
        followed.digests_told = num_full
    requests = tuple(event if event.kind in _ENDS else told.get(event.req_id, event) for event in events.requests)
    return StepEvents(requests, events.block_copies, tuple(filled))


def _digest(followed: FollowedRequest, index: int, hashes_per_block: int) -> int:
    block_hash: bytes = followed.request.block_hashes[(index + 1) * hashes_per_block - 1]
    return int.from_bytes(block_hash[:8], "little") or 1
