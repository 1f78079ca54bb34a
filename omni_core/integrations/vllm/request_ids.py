# SPDX-License-Identifier: Apache-2.0
"""From the request id a worker sees back to the id the client gave, and from an HTTP request to that id.

vLLM 0.32 appends a dash and eight hexadecimal digits to the client's id (`InputProcessor.assign_request_id`). For
`n > 1` it then makes one request per sample and puts the sample's index and an underscore in front of that
(`ParentRequest.get_child_info`): client `a` becomes `a-81bdb22f`, and with two samples `0_a-81bdb22f` and
`1_a-81bdb22f`. A client may also call its request `0_a` itself; then no other request has the same digits. The client's
id may be empty.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from omni_core.sinks.base import PossibleSample

_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}\Z")
_SAMPLE_PREFIX = re.compile(r"(0|[1-9][0-9]{0,8})_(.*)\Z", re.DOTALL)
"""A sample's index has a few digits; a client's own id may have any number of them."""


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """What the client calls a request."""

    client_req_id: str
    """The internal id without the engine's digits: `0_a` both for a client's `0_a` and for the first sample of `a`."""
    sample: PossibleSample | None
    """Set if the id has a sample's form; whether it is one shows when another sample comes."""


def client_request(req_id: str, *, randomised: bool = True) -> ClientRequest | None:
    """The client's name of an internal request id. Pure; any thread.

    Args:
        req_id: the id as the worker sees it.
        randomised: whether this engine appends random digits (`VLLM_DISABLE_REQUEST_ID_RANDOMIZATION` turns that off).

    Returns:
        `None` if the id does not have the engine's form (an out-of-tree front end made it).
    """
    name = req_id
    if randomised:
        suffix = _RANDOM_SUFFIX.search(req_id)
        if suffix is None:
            return None
        name = req_id[: suffix.start()]
    sample = _SAMPLE_PREFIX.match(name)
    if sample is None:
        return ClientRequest(name, None)
    group = req_id[sample.start(2) :]
    return ClientRequest(name, PossibleSample(sample.group(2), group, int(sample.group(1))))


def chat_client_req_id(http_request_id: str) -> str:
    """The client's id of a chat completion sent to `vllm serve` with this `X-Request-Id` header.

    From `OpenAIServingChat` in vLLM 0.32. Without the header the server makes an id; the answer's `id` has the result.
    """
    return f"chatcmpl-{http_request_id}"


def completion_client_req_id(http_request_id: str, prompt_index: int = 0) -> str:
    """The client's id of one prompt of a completion sent to `vllm serve` with this `X-Request-Id` header.

    From `OpenAIServingCompletion` in vLLM 0.32: one request per prompt of the body, numbered from 0.
    """
    return f"cmpl-{http_request_id}-{prompt_index}"
