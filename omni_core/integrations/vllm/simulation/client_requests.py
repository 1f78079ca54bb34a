# SPDX-License-Identifier: Apache-2.0
"""Makes vLLM's `Request` objects of what simulated clients ask for.

A prompt that arrives in pieces is a streaming session of vLLM 0.32 (`Scheduler.add_request`,
`_update_request_as_session`): each piece is a resumable request of the same id that samples one token, which the
session throws away when the next piece comes; a request that is not resumable ends the session.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from omni_core.testing.sim_request import SimRequest


class RequestMaker:
    """Makes requests. Engine thread only.

    Args:
        block_hasher: hashes a request's blocks.
    """

    def __init__(self, block_hasher: Callable[[Any], list[bytes]]) -> None:
        self._block_hasher = block_hasher
        self._num_made = 0

    def first(self, request: SimRequest, *, priority: int = 0) -> Any:
        """The request as it is submitted; if its prompt arrives in pieces, its first piece."""
        in_pieces = bool(request.later_pieces)
        max_tokens = 1 if in_pieces else request.max_output_tokens
        return self._make(request, request.prompt_token_ids, max_tokens, priority=priority, resumable=in_pieces)

    def piece(self, request: SimRequest, index: int) -> Any:
        """The later piece at `index`."""
        last = index == len(request.later_pieces) - 1
        max_tokens = request.max_output_tokens if last else 1
        return self._make(request, request.later_pieces[index], max_tokens, resumable=True)

    def end(self, request: SimRequest) -> Any:
        """What a client sends after the last piece; its token is never looked at."""
        return self._make(request, (0,), 1, resumable=False)

    def _make(
        self,
        request: SimRequest,
        token_ids: Sequence[int],
        max_tokens: int,
        *,
        resumable: bool,
        priority: int = 0,
    ) -> Any:
        self._num_made += 1
        return Request(
            request_id=request.req_id,
            prompt_token_ids=list(token_ids),
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            # Counted, not timed: the priority policy breaks ties by it, and a seed must give one run.
            arrival_time=float(self._num_made),
            mm_features=[
                MultiModalFeatureSpec(
                    data=None,
                    modality="image",
                    # One identity has one length in vLLM, whose encoder cache is keyed by it.
                    identifier=f"{image.identity} {image.length}",
                    mm_position=PlaceholderRange(offset=image.offset, length=image.length),
                )
                for image in request.images
            ],
            cache_salt=request.salt or None,
            lora_request=_adapter(request),
            priority=priority,
            block_hasher=self._block_hasher,
            resumable=resumable,
        )


def _adapter(request: SimRequest) -> LoRARequest | None:
    """What a salt stands for: the cache hears of the adapter whose rows change. Nothing is read from the path."""
    return LoRARequest(request.salt, request.adapter_id, request.salt) if request.salt else None
