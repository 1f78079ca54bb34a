# SPDX-License-Identifier: Apache-2.0
"""Which rows of a step with draft tokens count: those of tokens the engine accepts and keeps.

The sampler gives each request the accepted drafts and one token more, and the scheduler then cuts them behind the first
that ends the request (`Scheduler._update_request_with_output` in vLLM 0.27 to 0.32). The worker never hears of that
cut, so the scheduler's own rule is asked here once more; else a request would get rows past the end of its output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from omni_core.integrations.vllm.runners.step_arrays import StepArrays


class SampledTokens(Protocol):
    """What is read of vLLM's `ModelRunnerOutput`."""

    @property
    def sampled_token_ids(self) -> Sequence[Sequence[int]]: ...

    @property
    def req_id_to_index(self) -> Mapping[str, int]: ...


StopRule = Callable[[Any, int], bool]
"""vLLM's `check_stop(request, max_model_len)`: whether the last output token of a request ends it."""


@dataclass(slots=True)
class _RequestSoFar:
    """A request as the scheduler would see it after some of its sampled tokens: what `check_stop` reads and sets."""

    sampling_params: Any
    num_prompt_tokens: int
    num_output_tokens: int
    output_token_ids: Sequence[int]
    pooling_params: None = None
    status: Any = None
    stop_reason: Any = None

    @property
    def max_tokens(self) -> int:
        return int(self.sampling_params.max_tokens)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


def kept_samples(runner: Any, output: SampledTokens, step: StepArrays, stop_rule: StopRule) -> dict[str, int]:
    """For each request with drafts, how many of its sampled tokens the engine keeps. Engine thread, after sampling.

    Args:
        runner: vLLM's model runner; its `requests` have been told the sampled tokens already.
        output: what its `sample_tokens` returned.
        step: the batch, with its draft counts.
        stop_rule: the scheduler's.

    Returns:
        A number between 1 and drafts + 1 each. If nothing was sampled for a request the scheduler takes none of its
        tokens back, so all count.
    """
    kept = {}
    for req_id, drafts in _drafts(step).items():
        sampled = output.sampled_token_ids[output.req_id_to_index[req_id]]
        kept[req_id] = _num_kept(runner, req_id, sampled, stop_rule) if sampled else drafts + 1
    return kept


def _num_kept(runner: Any, req_id: str, sampled: Sequence[int], stop_rule: StopRule) -> int:
    request = runner.requests[req_id]
    params = request.sampling_params
    num_before = len(request.output_token_ids) - len(sampled)
    for count in range(1, len(sampled)):
        # The rule looks at the last token only, unless it looks for repetitions.
        outputs = sampled[:count]
        if params.repetition_detection is not None:
            outputs = request.output_token_ids[: num_before + count]
        so_far = _RequestSoFar(params, request.num_prompt_tokens, num_before + count, outputs)
        if stop_rule(so_far, runner.max_model_len):
            return count
    return len(sampled)


@dataclass(frozen=True, slots=True)
class OutputEnd:
    """Tells which sampled token ends a request, where the worker goes on before the scheduler has looked. Pure."""

    sampling_params: Any
    """vLLM's `SamplingParams`."""
    stop_rule: StopRule
    max_model_len: int

    def first_end(
        self, sampled: Sequence[int], *, num_prompt_tokens: int, num_before: int, before: Callable[[], Sequence[int]]
    ) -> int | None:
        """Index of the first of the sampled tokens that ends the request; `None`: it goes on.

        Args:
            sampled: what one step sampled for it.
            num_prompt_tokens: length of its prompt.
            num_before: tokens sampled for it before.
            before: gives those; asked only where the rule looks for repetitions.
        """
        outputs: Sequence[int] = sampled
        if self.sampling_params.repetition_detection is not None:
            outputs = [*before(), *sampled]
        num_other = len(outputs) - len(sampled)
        for count in range(1, len(sampled) + 1):
            so_far = _RequestSoFar(
                self.sampling_params, num_prompt_tokens, num_before + count, outputs[: num_other + count]
            )
            if self.stop_rule(so_far, self.max_model_len):
                return count - 1
        return None


def accepted_samples(output: SampledTokens, step: StepArrays) -> dict[str, int]:
    """For each request with drafts, how many tokens were sampled: rows of so many of its run are the model's.

    Those behind the token that ends the request are among them; whoever hands rows on leaves them out. As for
    `kept_samples`, all count if nothing was sampled.
    """
    return {
        req_id: len(output.sampled_token_ids[output.req_id_to_index[req_id]]) or drafts + 1
        for req_id, drafts in _drafts(step).items()
    }


def sampled_tokens(output: SampledTokens, step: StepArrays) -> tuple[tuple[int, ...], ...]:
    """What was sampled for each request of a step, in its order. Copied: the scheduler cuts the output's own lists."""
    return tuple(tuple(output.sampled_token_ids[output.req_id_to_index[req_id]]) for req_id in step.req_ids)


def fewest_sampled(step: StepArrays) -> dict[str, int]:
    """As `kept_samples` for a step whose sampling failed: one token each, as if every draft had been rejected."""
    return dict.fromkeys(_drafts(step), 1)


def num_valid_rows(step: StepArrays, sampled_counts: Mapping[str, int]) -> npt.NDArray[np.int64]:
    """`(num_reqs,)`: rows of each run whose token the engine keeps."""
    counts = np.diff(step.starts)
    if step.num_draft_tokens is not None:
        for index in step.num_draft_tokens.nonzero()[0]:
            counts[index] += sampled_counts[step.req_ids[index]] - 1 - step.num_draft_tokens[index]
    return counts


def _drafts(step: StepArrays) -> dict[str, int]:
    if step.num_draft_tokens is None:
        return {}
    return {step.req_ids[index]: int(step.num_draft_tokens[index]) for index in step.num_draft_tokens.nonzero()[0]}
