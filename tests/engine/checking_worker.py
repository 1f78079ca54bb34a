# SPDX-License-Identifier: Apache-2.0
"""A worker that holds every delivered row against the tap of its own run: the rows need not leave its process.

Give the engine `worker_cls="checking_worker.OmniCheckingCpuWorker"`, this folder on PYTHONPATH, and the settings
`"tap": True` and the memory or the safetensors sink. Then `llm.collective_rpc("check_rows")` answers once per rank.
"""

import exact_rows  # before vllm: sets the environment it reads when it is imported
from row_digests import digests_of
from tiny_model import register_tiny_model

from omni_core.integrations.vllm.cpu_worker import OmniCpuWorker
from omni_core.sinks.safetensors_files import SafetensorsSink, read_request_file, request_files


def held_against_tap(stored, tap):
    """How many rows of a stored request are, bit for bit, rows this run computed for that prefix and position."""
    tapped = tap.requests[stored.req_id]
    equal = {}
    for key, rows in stored.rows.items():
        equal[key] = at = 0
        for start, stop in stored.ranges_of(key):
            piece = rows[at : at + stop - start]
            equal[key] += int(tap.equal_rows(tapped.token_ids, piece, key, first_position=start).sum())
            at += stop - start
    return {
        "client_req_id": stored.client_req_id,
        "end": stored.end.value,
        "complete": stored.complete,
        "ranges": [list(one) for one in stored.ranges],
        "missing": [list(one) for one in stored.missing],
        "rows": {key: len(rows) for key, rows in stored.rows.items()},
        "equal_to_tap": equal,
        "digests": digests_of(stored),
        "tokens_agree": stored.token_ids.tolist() == [tapped.token_ids[position] for position in stored.positions],
        "prompt_tokens": tapped.num_prompt_tokens,
        "computed": tapped.computed_tokens,
        "skipped": tapped.skipped_tokens,
    }


class OmniCheckingCpuWorker(OmniCpuWorker):
    """Adds one method for `collective_rpc`; answers with plain dicts, lists, numbers and strings."""

    def init_device(self):
        exact_rows.make_rows_exact()
        register_tiny_model()
        super().init_device()

    def check_rows(self):
        """Per internal request id, what the sink keeps, held against the tap; empty on a rank without a cache.

        Flush before. Requests that the tap saw and the sink does not keep are not listed.
        """
        session = self.omni_core_session
        if session.sink is None:
            return {}
        if isinstance(session.sink, SafetensorsSink):
            kept = map(read_request_file, request_files(session.sink.directory))
        else:
            kept = map(session.sink.request_by_internal_id, session.sink.request_ids())
        return {stored.req_id: held_against_tap(stored, session.tap) for stored in kept}
