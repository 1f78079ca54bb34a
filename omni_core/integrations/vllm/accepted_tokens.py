# SPDX-License-Identifier: Apache-2.0
"""Which rows of a step with draft tokens count: those of tokens the engine accepts and keeps.

The sampler gives each request the accepted drafts and one token more, and the scheduler then cuts them behind the first
that ends the request (`Scheduler._update_request_with_output` and `check_stop` in vLLM 0.32). The worker never hears
of that cut, so it is made here by the same rules; without it a request would get rows past the end of its output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from omni_core.integrations.vllm.versions import StepArrays


class SampledTokens(Protocol):
    """What is read of vLLM's `ModelRunnerOutput`."""

    @property
    def sampled_token_ids(self) -> Sequence[Sequence[int]]: ...

    @property
    def req_id_to_index(self) -> Mapping[str, int]: ...


def kept_samples(runner: Any, output: SampledTokens, step: StepArrays) -> dict[str, int]:
    """For each request with drafts, how many of its sampled tokens the engine keeps. Engine thread, after sampling.

    Args:
        runner: vLLM's model runner; its `requests` have been told the sampled tokens already.
        output: what its `sample_tokens` returned.
        step: the batch, with its draft counts.

    Returns:
        A number between 1 and drafts + 1 each. If nothing was sampled for a request the scheduler takes none of its
        tokens back, so all count.
    """
    kept = {}
    for req_id, drafts in _drafts(step).items():
        sampled = output.sampled_token_ids[output.req_id_to_index[req_id]]
        if not sampled:
            kept[req_id] = drafts + 1
            continue
        request = runner.requests[req_id]
        num_output_tokens = len(request.output_token_ids) - len(sampled)
        room = min(
            request.sampling_params.max_tokens - num_output_tokens,
            runner.max_model_len - request.num_prompt_tokens - num_output_tokens,
        )
        kept[req_id] = _first_end(sampled[: max(room, 1)], request.sampling_params)
    return kept


def fewest_sampled(step: StepArrays) -> dict[str, int]:
    """As `kept_samples` for a step whose sampling failed: one token each, as if every draft had been rejected."""
    return dict.fromkeys(_drafts(step), 1)


def num_valid_rows(step: StepArrays, sampled_counts: Mapping[str, int]) -> npt.NDArray[np.int64]:
    """`(num_reqs,)`: rows of each run whose token the engine keeps."""
    counts = np.diff(step.starts)
    drafts = _drafts(step)
    for index, req_id in enumerate(step.req_ids):
        if req_id in drafts:
            counts[index] += sampled_counts[req_id] - 1 - drafts[req_id]
    return counts


def _drafts(step: StepArrays) -> dict[str, int]:
    if step.num_draft_tokens is None:
        return {}
    return {step.req_ids[index]: int(step.num_draft_tokens[index]) for index in step.num_draft_tokens.nonzero()[0]}


def _first_end(token_ids: Sequence[int], sampling_params: Any) -> int:
    ends = {sampling_params.eos_token_id, *(sampling_params.stop_token_ids or ())}
    return next((count for count, token_id in enumerate(token_ids, 1) if token_id in ends), len(token_ids))
