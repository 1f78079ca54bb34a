# SPDX-License-Identifier: Apache-2.0
"""From the request id a worker sees back to the id the client gave.

vLLM 0.32 appends a dash and eight hexadecimal digits to the client's id (`InputProcessor.assign_request_id`), and puts
the sample's index and an underscore in front for `n > 1` (`ParentRequest.get_child_info`): client `a` becomes
`a-81bdb22f`, and its second sample of two `1_a-81bdb22f`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}\Z")
_SAMPLE_PREFIX = re.compile(r"(\d+)_(.+)\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """What the client calls a request."""

    client_req_id: str
    sample_index: int | None
    """Which of the `n` samples of the client's request this is; `None` for a request without samples.

    A client's own id of the form `<digits>_<text>` cannot be told from a sample's id and reads as one.
    """


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
        if suffix is None or suffix.start() == 0:
            return None
        name = req_id[: suffix.start()]
    sample = _SAMPLE_PREFIX.match(name)
    if sample is None:
        return ClientRequest(name, None)
    return ClientRequest(sample.group(2), int(sample.group(1)))
