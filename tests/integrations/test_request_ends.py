# SPDX-License-Identifier: Apache-2.0
"""How a request ended, as far as a worker can tell, and which request of an id that is used again."""

from functools import partial

import pytest
from delivery_rig import BOUND_S, deliver, running, step

from omni_core.integrations.vllm.delivery.builder import StartedRequest
from omni_core.integrations.vllm.request_ids import client_request
from omni_core.sinks.base import RequestEnd
from omni_core.sinks.errors import AmbiguousRequestError, UnknownRequestError
from omni_core.sinks.memory import MemorySink
from omni_core.sinks.safetensors_files import SafetensorsSink, read_request_file, read_requests_of_client, request_files

PROMPT = [10, 11, 12, 13]


def run(builder, *, computed, prompt=PROMPT, req_id="a", step_id=1):
    """The request's first step: `computed` tokens of its prompt."""
    builder.news([StartedRequest(req_id, prompt, 0)], [])
    deliver(builder, step(step_id, **{req_id: (0, list(range(10, 10 + computed)))}))


def test_a_request_that_ends_before_its_prompt_was_computed_was_aborted(cache, sink):
    cache.script(1, {"a": [(0, 3)]})
    with running(cache, sink) as builder:
        run(builder, computed=3)
        builder.news([], ["a"])
        builder.flush(BOUND_S)
        assert builder.report()["requests_aborted"] == 1
    assert sink.told[-1] == ("end", "a", RequestEnd.ABORTED, ((3, 4),), None)


def test_a_request_that_ends_after_its_prompt_was_computed_reads_as_finished(cache, sink):
    cache.script(1, {"a": [(0, 4)]})
    with running(cache, sink) as builder:
        run(builder, computed=4)
        builder.news([], ["a"])
        builder.flush(BOUND_S)
        assert builder.report()["requests_aborted"] == 0
    assert sink.told[-1] == ("end", "a", RequestEnd.FINISHED, (), None)


def test_a_prompt_whose_last_step_was_given_up_was_computed_and_misses_rows(cache, sink):
    cache.script(1, {"a": [(0, 3)]})
    with running(cache, sink) as builder:
        run(builder, computed=3)
        builder.give_up(step(2, a=(3, [13])))
        builder.news([], ["a"])
        builder.flush(BOUND_S)
    assert sink.told[-1] == ("end", "a", RequestEnd.FINISHED, ((3, 4),), None)


def test_a_prompt_of_unknown_length_cannot_tell_an_abort(cache, sink):
    cache.script(1, {"a": [(0, 3)]})
    with running(cache, sink) as builder:
        run(builder, computed=3, prompt=None)
        builder.news([], ["a"])
        builder.flush(BOUND_S)
    assert sink.told[-1] == ("end", "a", RequestEnd.FINISHED, (), None)


def test_a_session_whose_prompt_grows_is_whole_with_its_last_piece(cache, sink):
    cache.script(1, {"a": [(0, 4)]})
    cache.script(2, {"a": [(4, 5)]})
    with running(cache, sink) as builder:
        run(builder, computed=4)
        builder.news([StartedRequest("a", [*PROMPT, 14, 15], 4)], [])
        deliver(builder, step(2, a=(4, [14])))
        builder.news([], ["a"])
        builder.flush(BOUND_S)
    assert sink.told[-1] == ("end", "a", RequestEnd.ABORTED, ((5, 6),), None)


@pytest.mark.parametrize("last_act", ["flush", "close"])
def test_a_request_open_at_a_flush_or_close_is_complete_only_if_its_prompt_is(cache, last_act):
    sink = MemorySink()
    cache.script(1, {"half": [(0, 3)]})
    cache.script(2, {"whole": [(0, 4)]})
    with running(cache, sink) as builder:
        run(builder, computed=3, req_id="half")
        run(builder, computed=4, req_id="whole", step_id=2)
        if last_act == "flush":
            builder.flush(BOUND_S)
    half, whole = sink.request("half"), sink.request("whole")
    assert half.end is whole.end is RequestEnd.FLUSHED
    assert (half.complete, half.missing) == (False, ((3, 4),))
    assert (whole.complete, whole.missing) == (True, ())


@pytest.mark.parametrize("keep_aborted", [False, True])
def test_sinks_drop_or_keep_an_aborted_request_as_they_are_told(cache, tmp_path, keep_aborted):
    cache.script(1, {"a": [(0, 3)]})
    cache.script(2, {"a": [(0, 3)]})
    memory = MemorySink(keep_aborted=keep_aborted)
    files = SafetensorsSink(tmp_path, keep_aborted=keep_aborted)
    for sink in (memory, files):
        with running(cache, sink) as builder:
            run(builder, computed=3)
            builder.news([], ["a"])
    written = [read_request_file(path) for path in request_files(tmp_path)]
    kept = [memory.request(req_id) for req_id in memory.request_ids()]
    for found in (written, kept):
        assert [(one.end, one.complete) for one in found] == [(RequestEnd.ABORTED, False)] * keep_aborted
    if not keep_aborted:
        with pytest.raises(UnknownRequestError, match="it was aborted"):
            memory.request("a")


def use_an_id_twice(cache, sink, *, failing=()):
    for number in (1, 2):
        cache.script(number, RuntimeError("lost") if number in failing else {"a": [(0, 2 + number)]})
    client_of = partial(client_request, randomised=False)
    with running(cache, sink, client_request_of=client_of, ids_repeat=True) as builder:
        for number in (1, 2):
            run(builder, computed=2 + number, prompt=PROMPT[:3], step_id=number)
            builder.news([], ["a"])


def test_two_requests_with_one_id_one_after_the_other_are_both_kept_and_told_apart(cache, tmp_path):
    memory = MemorySink()
    use_an_id_twice(cache, memory)
    with pytest.raises(AmbiguousRequestError, match=r"stands for 2 requests: 'a', 'a' \(use 2\)"):
        memory.request("a")
    assert [(one.use, one.num_rows) for one in memory.requests_of_client("a")] == [(0, 3), (1, 4)]
    assert memory.request_by_internal_id("a").num_rows == 4
    use_an_id_twice(cache, SafetensorsSink(tmp_path))
    assert [(one.use, one.num_rows) for one in map(read_request_file, request_files(tmp_path))] == [(1, 4), (0, 3)]


def test_a_second_use_that_failed_is_not_answered_with_the_first_ones_rows(cache):
    memory = MemorySink()
    use_an_id_twice(cache, memory, failing=(2,))
    with pytest.raises(UnknownRequestError, match=r"'a' \(use 2\) has no rows: it failed: step 2 could not be read"):
        memory.request_by_internal_id("a")
    with pytest.raises(AmbiguousRequestError):
        memory.request("a")
    assert [one.use for one in memory.requests_of_client("a")] == [0]


def test_each_of_several_samples_has_rows_of_its_own_and_they_are_found_together(cache, tmp_path):
    memory = MemorySink()
    samples = ("0_foo-81bdb22f", "1_foo-81bdb22f")
    for sink in (memory, SafetensorsSink(tmp_path)):
        cache.script(1, {req_id: [(0, 4)] for req_id in samples})
        cache.script(2, {samples[1]: [(4, 5)]})
        with running(cache, sink, client_request_of=client_request) as builder:
            builder.news([StartedRequest(req_id, PROMPT, 0) for req_id in samples], [])
            deliver(builder, step(1, **dict.fromkeys(samples, (0, PROMPT))))
            deliver(builder, step(2, **{samples[1]: (4, [99])}))
            builder.news([], samples)
    for found in (memory.requests_of_client("foo"), read_requests_of_client(tmp_path, "foo")):
        assert [(one.req_id, one.token_ids.tolist()) for one in found] == [
            (samples[0], PROMPT),
            (samples[1], [*PROMPT, 99]),
        ]
    assert memory.request("1_foo").req_id == samples[1]
    assert [one.req_id for one in read_requests_of_client(tmp_path, "1_foo")] == [samples[1]]
