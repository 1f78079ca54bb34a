# SPDX-License-Identifier: Apache-2.0
"""Rows, flushes and errors cross from workers to their client whole; no call of a worker raises or holds it up long."""

import asyncio
import json
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import fake_runner as fake
import pytest
import torch
from fake_stage import FakeStage

from omni_core.integrations.vllm.errors import (
    FlushTimeoutError,
    IntegrationError,
    RowsNotKeptError,
    RpcArgumentError,
    StageNotFoundError,
)
from omni_core.integrations.vllm.rpc.async_stage_client import (
    flush_stage_async,
    stage_reports_async,
    take_rows_async,
    take_rows_through,
)
from omni_core.integrations.vllm.rpc.rows_over_rpc import (
    MAX_PIECE_BYTES,
    RowsEncoding,
    reports_from_flush,
    reports_from_replies,
    taking,
)
from omni_core.integrations.vllm.rpc.stage_client import flush_stage, stage_reports, take_rows
from omni_core.integrations.vllm.rpc.worker_calls import WorkerCalls, answer
from omni_core.integrations.vllm.session import StageSession
from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.gate import GateDecision, GateStatus
from omni_core.runtime import ThreadingRuntime
from omni_core.settings.stage_settings import OnError, StageSettings
from omni_core.sinks.errors import InvalidRequestFileError, RequestNotEndedError, UnknownRequestError

BOUND_S = 20.0
PROMPT = [11, 12, 13, 14, 15, 16]
BASE64, BYTES = RowsEncoding.BASE64, RowsEncoding.BYTES
REQ_ID, CLIENT_ID = "a-00000001", "a"


class Worker(FakeStage):
    """A rank with a cache: what vLLM's executor calls over RPC, on a fake runner."""

    def __init__(self, runtime=None, **settings):
        super().__init__(runtime=runtime, on_error=OnError.ISOLATE, **settings)
        self.calls = WorkerCalls(self.session)

    def run(self, req_id=REQ_ID, *, ended=True):
        self.step(fake.scheduled(new=[(req_id, PROMPT, [1, 2], 0, len(PROMPT))]))
        if ended:
            self.step(fake.scheduled(finished=[req_id]))

    def omni_core_flush(self, /, *args, **kwargs):
        return answer(self.calls.flush, args, kwargs)

    def omni_core_find(self, /, *args, **kwargs):
        return answer(self.calls.find, args, kwargs)

    def omni_core_read(self, /, *args, **kwargs):
        return answer(self.calls.read, args, kwargs)

    def omni_core_forget(self, /, *args, **kwargs):
        return answer(self.calls.forget, args, kwargs)

    def omni_core_report(self, /, *args, **kwargs):
        return answer(self.calls.report, args, kwargs)


class WorkerWithoutCache(Worker):
    """A rank that the gate ignores."""

    def __init__(self):
        decision = GateDecision(GateStatus.IGNORED, "not_output_rank", "a test")
        self.session = StageSession(StageSettings(enabled=True), decision, parts=None, tap=None)
        self.calls = WorkerCalls(self.session)


class WorkerOfSmallPieces(Worker):
    """Its answers hold a few bytes each."""

    def omni_core_read(self, req_id, use, offset, max_bytes, encoding):
        return super().omni_core_read(req_id, use, offset, min(max_bytes, 100), encoding)


class WaitsOfThisThread(ThreadingRuntime):
    """Adds up how long the thread that made it was ready to wait."""

    def __init__(self):
        self.total_s = 0.0
        self._thread = threading.current_thread()

    def condition(self, lock, name):
        inner, outer = super().condition(lock, name), self

        class Counted:
            def wait_for(self, predicate, timeout_s):
                if threading.current_thread() is outer._thread:
                    outer.total_s += timeout_s
                return inner.wait_for(predicate, timeout_s)

            def notify_all(self):
                inner.notify_all()

        return Counted()


class Engine:
    """As much of vLLM's `LLM` and `AsyncLLM` as the client's functions use."""

    def __init__(self, *engines_workers, unfinished=()):
        self._engines = engines_workers
        self.llm_engine = SimpleNamespace(output_processor=SimpleNamespace(request_states=dict.fromkeys(unfinished)))
        self.engine_core = self

    def collective_rpc(self, method, timeout=None, args=()):
        return self._answers(self._engines[0], method, args)

    async def call_utility_all_async(self, call, method, timeout, args, kwargs):
        assert call == "collective_rpc"
        return [self._answers(workers, method, args) for workers in self._engines]

    def _answers(self, workers, method, args):
        return [getattr(worker, method)(*args) for worker in workers]


@pytest.fixture
def worker():
    made = Worker()
    yield made
    made.session.close(BOUND_S)


@pytest.fixture
def other_worker():
    made = Worker()
    yield made
    made.session.close(BOUND_S)


def flushed(worker):
    worker.session.flush(BOUND_S)
    return worker


def take(asked, *workers, encoding=BASE64):
    """What a client that calls these workers gets."""
    steps = taking(asked, encoding)
    call = next(steps)
    while True:
        replies = [getattr(worker, call.method)(*call.args) for worker in workers]
        try:
            call = steps.send(replies)
        except StopIteration as end:
            return end.value


@contextmanager
def slow_sink(worker):
    """Its sink takes one delivery per permit; gives the semaphore of the permits."""
    permits, accept = threading.Semaphore(0), worker.session.sink.accept
    worker.session.sink.accept = lambda delivery: permits.acquire(timeout=BOUND_S) and accept(delivery)
    yield permits
    permits.release(1000)


def flush_answer_once_done(worker, flush_id):
    clock = ThreadingRuntime()
    deadline_s = clock.monotonic_s() + BOUND_S
    while not (reply := worker.omni_core_flush(flush_id))["done"]:
        assert clock.monotonic_s() < deadline_s
    return reply


def rows_of(prompt):
    return torch.tensor([fake.row_of(prompt, position) for position in range(len(prompt))])


def plain(value):
    if isinstance(value, dict):
        return all(isinstance(key, str) and plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(plain, value))
    return value is None or type(value) in (str, bytes, int, float, bool)


# -- taking rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [REQ_ID, CLIENT_ID])
@pytest.mark.parametrize("encoding", [BASE64, BYTES])
def test_rows_come_back_bit_for_bit_by_either_id(worker, asked, encoding):
    worker.run()
    [stored] = take(asked, flushed(worker), encoding=encoding)
    assert torch.equal(stored.hidden_states, rows_of(PROMPT))
    assert stored.rows["codes"].dtype == worker.runner.model.codes.dtype
    assert stored.token_ids.tolist() == PROMPT
    assert (stored.req_id, stored.client_req_id) == (REQ_ID, CLIENT_ID)
    assert stored.complete
    assert stored.ranges == ((0, len(PROMPT)),)


def test_an_answer_says_where_a_request_is(worker):
    worker.run()
    worker.run("b-00000002", ended=False)
    told = [flushed(worker).omni_core_find(asked)["requests"][0] for asked in ("a", "b")]
    assert [(one["req_id"], one["client_req_id"], one["state"]) for one in told] == [
        (REQ_ID, CLIENT_ID, "ended"),
        ("b-00000002", "b", "running"),
    ]


def test_answers_are_plain_values_and_as_base64_they_are_json(worker):
    worker.run()
    worker.run("0_b-00000002")
    flushed(worker)
    assert all(map(plain, (worker.omni_core_find("b"), worker.omni_core_read(REQ_ID, encoding="bytes"))))
    assert all(map(plain, (worker.omni_core_flush(), worker.omni_core_report())))

    async def over_http(call):
        args = json.loads(json.dumps(call.args))
        return json.loads(json.dumps([getattr(worker, call.method)(*args)]))

    [stored] = asyncio.run(take_rows_through(over_http, CLIENT_ID))
    assert torch.equal(stored.hidden_states, rows_of(PROMPT))


def test_rows_in_bfloat16_and_of_odd_keys_survive():
    from omni_core.sinks.base import RequestEnd
    from omni_core.sinks.request_content import read_request_bytes, request_file_bytes, request_file_piece
    from omni_core.sinks.rows import StoredRequest

    rows = {
        HIDDEN_KEY: torch.arange(8, dtype=torch.float32).view(2, 4).to(torch.bfloat16) / 3,
        "token_ids": torch.ones(2, 3, dtype=torch.int8),
        "schlüssel": torch.ones(1, 3, 2, dtype=torch.float64),
    }
    sent = StoredRequest(
        "a-1",
        None,
        RequestEnd.FLUSHED,
        ranges=((0, 1), (4, 5)),
        missing=((1, 4),),
        rows=rows,
        token_ids=torch.tensor([7, 8]).numpy(),
        key_ranges={"schlüssel": ((4, 5),)},
    )
    content = request_file_bytes(sent)
    got = read_request_bytes(content)
    assert {key: (tensor.dtype, tensor.tolist()) for key, tensor in got.rows.items()} == {
        key: (tensor.dtype, tensor.tolist()) for key, tensor in rows.items()
    }
    assert (got.ranges, got.missing, got.end, got.key_ranges) == (
        sent.ranges,
        sent.missing,
        sent.end,
        sent.key_ranges,
    )
    assert got.token_ids.tolist() == [7, 8]
    for piece_bytes in (1, 7, len(content), len(content) + 1):
        pieces = [request_file_piece(sent, start, piece_bytes) for start in range(0, len(content), piece_bytes)]
        assert b"".join(piece for piece, _ in pieces) == content
        assert {nbytes for _, nbytes in pieces} == {len(content)}


def test_rows_come_in_pieces_and_no_answer_holds_more_than_it_may():
    worker = WorkerOfSmallPieces()
    worker.run()
    [stored] = take(REQ_ID, WorkerWithoutCache(), flushed(worker))
    assert torch.equal(stored.hidden_states, rows_of(PROMPT))
    worker.run("b-00000002")
    reply = flushed(worker).omni_core_read("b-00000002", 0, 0, 10**6, "bytes")
    assert len(reply["piece"]) == 100 < reply["nbytes"]
    worker.session.close(BOUND_S)


def test_rows_that_are_dropped_while_they_are_read_are_an_error_and_no_half_request():
    worker = WorkerOfSmallPieces()
    worker.run()
    flushed(worker)
    steps = taking(REQ_ID, BYTES)
    call = next(steps)
    for _ in range(2):
        call = steps.send([getattr(worker, call.method)(*call.args)])
    assert worker.omni_core_forget(REQ_ID) == {"error": None, "forgotten": True}
    with pytest.raises(UnknownRequestError, match="taken or dropped while they were read"):
        steps.send([getattr(worker, call.method)(*call.args)])
    worker.session.close(BOUND_S)


def test_a_client_that_goes_away_while_it_reads_takes_nothing(worker):
    worker.run()
    flushed(worker)
    steps = taking(REQ_ID, BYTES)
    call = next(steps)
    steps.send([getattr(worker, call.method)(*call.args)])
    steps.close()
    assert len(take(REQ_ID, worker)) == 1


def test_the_sink_forgets_what_was_taken(worker):
    worker.run()
    take(REQ_ID, flushed(worker))
    with pytest.raises(UnknownRequestError, match="ids kept: none"):
        take(REQ_ID, worker)


def test_a_request_that_goes_on_is_refused_and_keeps_its_rows(worker):
    worker.run(ended=False)
    with pytest.raises(RequestNotEndedError, match="has not ended"):
        take(CLIENT_ID, flushed(worker))
    worker.step(fake.scheduled(finished=[REQ_ID]))
    assert len(take(CLIENT_ID, flushed(worker))) == 1


def test_a_request_without_rows_says_why():
    worker = Worker(sink_options={"max_requests": 1})
    worker.run()
    worker.run("b-00000002")
    with pytest.raises(UnknownRequestError, match="'a-00000001' has no rows: it was dropped for newer ones"):
        take(CLIENT_ID, flushed(worker))
    worker.session.close(BOUND_S)


def test_a_sink_that_keeps_no_rows_says_so(tmp_path):
    worker = Worker(sink="safetensors", sink_options={"directory": str(tmp_path)})
    worker.run()
    with pytest.raises(RowsNotKeptError, match="'safetensors' keeps no rows"):
        take(REQ_ID, flushed(worker))
    worker.session.close(BOUND_S)


def test_ranks_without_a_cache_answer_with_nothing(worker):
    worker.run()
    assert [one.req_id for one in take(REQ_ID, WorkerWithoutCache(), flushed(worker))] == [REQ_ID]


def test_an_engine_without_any_cache_is_told_from_one_without_the_request():
    with pytest.raises(StageNotFoundError, match="none of the 2 workers has a cache"):
        take(REQ_ID, WorkerWithoutCache(), WorkerWithoutCache())


def test_before_the_kv_cache_is_made_there_is_nothing_to_take():
    calls = WorkerCalls(None)
    assert answer(calls.find, [REQ_ID], {})["has_cache"] is False
    assert answer(calls.read, [REQ_ID], {})["piece"] is None
    assert answer(calls.forget, [REQ_ID], {}) == {"error": None, "forgotten": False}
    assert answer(calls.flush, [], {}) == {"error": None, "done": True, "waits_for": None, "report": {}}
    assert answer(calls.report, [], {}) == {}


# -- samples and engines -----------------------------------------------------------------------------------------------


def test_every_sample_of_one_request_is_taken_by_the_clients_id(worker):
    for sample in ("1_a-00000001", "0_a-00000001"):
        worker.run(sample)
    assert [one.req_id for one in take("a", flushed(worker))] == ["0_a-00000001", "1_a-00000001"]


def test_nothing_is_taken_while_one_sample_goes_on(worker):
    worker.run("0_a-00000001")
    worker.run("1_a-00000001", ended=False)
    for _ in range(2):
        with pytest.raises(RequestNotEndedError):
            take("a", flushed(worker))
    worker.step(fake.scheduled(finished=["1_a-00000001"]))
    assert len(take("a", flushed(worker))) == 2


def test_samples_that_ran_in_an_engine_each_are_one_request(worker, other_worker):
    worker.run("1_a-00000001")
    other_worker.run("0_a-00000001")
    engine = Engine([worker], [other_worker])
    taken = asyncio.run(take_rows_async(engine, "a", BOUND_S))
    assert [one.req_id for one in taken] == ["0_a-00000001", "1_a-00000001"]
    with pytest.raises(UnknownRequestError):
        take("a", worker, other_worker)


def test_one_sample_that_goes_on_in_another_engine_leaves_all_where_they_are(worker, other_worker):
    for sample in ("0_a-00000001", "2_a-00000001"):
        worker.run(sample)
    other_worker.run("1_a-00000001")
    other_worker.run("3_a-00000001", ended=False)
    for order in ((worker, other_worker), (other_worker, worker)):
        with pytest.raises(RequestNotEndedError, match="'3_a-00000001' has not ended"):
            take("a", *map(flushed, order))
    other_worker.step(fake.scheduled(finished=["3_a-00000001"]))
    taken = take("a", *map(flushed, (worker, other_worker)))
    assert [one.sample.index for one in taken] == [0, 1, 2, 3]


def test_an_id_that_only_looks_like_a_samples_stays_the_clients_own_with_several_engines(worker, other_worker):
    worker.run("0_a-00000001")
    other_worker.run("1_a-00000002")
    for one in (worker, other_worker):
        flushed(one)
    with pytest.raises(UnknownRequestError, match="no request 'a'"):
        take("a", worker, other_worker)
    assert [one.req_id for one in take("0_a", worker, other_worker)] == ["0_a-00000001"]


def test_a_request_is_found_in_the_one_engine_that_has_it(worker, other_worker):
    other_worker.run()
    engine = Engine([worker], [WorkerWithoutCache(), other_worker])
    [stored] = asyncio.run(take_rows_async(engine, CLIENT_ID, BOUND_S))
    assert stored.req_id == REQ_ID
    assert len(asyncio.run(stage_reports_async(engine))) == 3


def test_one_id_in_two_engines_is_two_requests_and_their_pieces_do_not_mix():
    first, second = WorkerOfSmallPieces(), WorkerOfSmallPieces()
    first.run()
    second.step(fake.scheduled(new=[(REQ_ID, [31, 32], [1], 0, 2)]))
    second.step(fake.scheduled(finished=[REQ_ID]))
    taken = take(REQ_ID, flushed(first), flushed(second))
    assert [one.token_ids.tolist() for one in taken] == [PROMPT, [31, 32]]
    for worker in (first, second):
        worker.session.close(BOUND_S)


# -- errors are answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "args", "kwargs", "named"),
    [
        ("flush", ["f", 0.1, None, "more"], {}, "too many positional"),
        ("flush", [], {"timeout_s": "5"}, "unexpected keyword argument 'timeout_s'"),
        ("flush", ["f"], {"flush_id": "g"}, "multiple values"),
        ("flush", [], {"self": "me"}, "unexpected keyword argument 'self'"),
        ("find", [], {}, "omni_core_find: missing a required argument: 'request_id'"),
        ("find", ["a", "b"], {}, "too many positional"),
        ("read", [], {}, "missing a required argument"),
        ("forget", [], {}, "missing a required argument"),
        ("report", ["all"], {}, "it takes no arguments"),
    ],
)
def test_arguments_that_a_method_does_not_take_are_an_answer_of_every_rank(worker, method, args, kwargs, named):
    for rank in (worker, WorkerWithoutCache()):
        error = getattr(rank, f"omni_core_{method}")(*args, **kwargs)["error"]
        assert error["type"] == "RpcArgumentError"
        assert named in error["message"]


@pytest.mark.parametrize(
    ("method", "arguments", "named"),
    [
        ("find", {"request_id": 7}, "request_id=7"),
        ("forget", {"req_id": None}, "req_id=None"),
        ("forget", {"req_id": REQ_ID, "use": "second"}, "use='second'"),
        ("read", {"req_id": REQ_ID, "encoding": "pickle"}, "'base64' or 'bytes'"),
        ("read", {"req_id": REQ_ID, "encoding": None}, "'base64' or 'bytes'"),
        ("read", {"req_id": REQ_ID, "offset": -1}, "offset=-1"),
        ("read", {"req_id": REQ_ID, "offset": True}, "offset=True"),
        ("read", {"req_id": REQ_ID, "max_bytes": 0}, "max_bytes=0"),
        ("read", {"req_id": REQ_ID, "max_bytes": MAX_PIECE_BYTES + 1}, f"from 1 to {MAX_PIECE_BYTES}"),
    ],
)
def test_a_wrong_argument_takes_nothing(worker, method, arguments, named):
    worker.run()
    flushed(worker)
    error = getattr(worker, f"omni_core_{method}")(**arguments)["error"]
    assert error["type"] == "RpcArgumentError"
    assert named in error["message"]
    assert len(take(REQ_ID, worker)) == 1


def test_numbers_may_come_as_text(worker):
    worker.run()
    flushed(worker)
    whole = worker.omni_core_read(REQ_ID, encoding="bytes")
    part = worker.omni_core_read(REQ_ID, "0", "8", "16", "bytes")
    assert part == {"error": None, "nbytes": whole["nbytes"], "piece": whole["piece"][8:24]}
    assert worker.omni_core_flush("f", "0.25")["error"] is None


@pytest.mark.parametrize("still_running", ["a-00000001", [1], {"a": 1}, 5])
def test_a_flush_refuses_what_is_no_list_of_ids_and_ends_nothing(worker, still_running):
    worker.run(ended=False)
    reply = worker.omni_core_flush(still_running=still_running)
    assert reply["error"]["type"] == "RpcArgumentError"
    assert flushed(worker).omni_core_report()["delivery"]["requests_open"] == 1


@pytest.mark.parametrize("wait_s", ["soon", "nan", -1, None, True, 0.6, "inf"])
def test_a_flush_refuses_what_is_no_time_or_would_hold_the_engine_up(worker, wait_s):
    with pytest.raises(RpcArgumentError, match=r"wait_s=.* from 0 to 0\.5"):
        reports_from_flush([worker.omni_core_flush("f", wait_s)])


def test_an_error_nobody_foresaw_is_an_answer_too(worker):
    def fail(*_):
        raise ZeroDivisionError("of a third party's part")

    worker.session.memory_sink = worker.session.begin_flush = worker.session.report = fail
    told = "ZeroDivisionError: of a third party's part"
    with pytest.raises(IntegrationError, match=told):
        take(REQ_ID, worker)
    with pytest.raises(IntegrationError, match=told):
        reports_from_flush([worker.omni_core_flush()])
    with pytest.raises(IntegrationError, match=told):
        reports_from_replies([worker.omni_core_report()])


def test_an_error_of_one_rank_is_raised_though_the_others_answered(worker):
    wrong = {"error": {"type": "RpcArgumentError", "message": "told"}}
    with pytest.raises(RpcArgumentError, match="told"):
        reports_from_flush([worker.omni_core_flush(), wrong])


@pytest.mark.parametrize("reply", [None, "OK", {"error": None}, {"piece": b""}])
def test_an_answer_of_something_else_is_named(reply):
    steps = taking(REQ_ID, BYTES)
    next(steps)
    with pytest.raises(InvalidRequestFileError, match="not the answer of a worker of Omni Core"):
        steps.send([reply])


# -- flushing ----------------------------------------------------------------------------------------------------------


def test_a_plain_flush_says_whether_it_is_done_and_ends_no_request(worker):
    worker.run(ended=False)
    flushed(worker)
    reply = worker.omni_core_flush()
    assert (reply["error"], reply["done"], reply["waits_for"]) == (None, True, None)
    assert reply["report"]["delivery"]["requests_open"] == 1
    assert reply["report"]["delivery"]["rows_delivered"] == len(PROMPT)


def test_a_flush_with_a_list_ends_what_is_not_in_it(worker):
    both = [("a-00000001", PROMPT, [1, 2], 0, len(PROMPT)), ("b-00000002", PROMPT, [3, 4], 0, len(PROMPT))]
    worker.step(fake.scheduled(new=both))
    assert worker.omni_core_flush(still_running=["b-00000002"])["error"] is None
    [ended] = take("a", flushed(worker))
    assert (ended.end.value, ended.complete) == ("flushed", True)
    with pytest.raises(RequestNotEndedError):
        take("b", worker)


def test_a_flush_that_is_not_done_says_what_it_waits_for_and_may_be_asked_about_again(worker):
    with slow_sink(worker) as permits:
        worker.run(ended=False)
        assert not worker.omni_core_flush("f")["done"]
        with pytest.raises(FlushTimeoutError, match=r"sink's accept\(\) for request 'a-00000001'"):
            reports_from_flush([worker.omni_core_flush("f")])
        permits.release()
        flush_answer_once_done(worker, "f")


def test_a_flush_waits_for_what_was_computed_before_it_and_for_nothing_later(worker):
    with slow_sink(worker) as permits:
        worker.run()
        assert not worker.omni_core_flush("f", 0)["done"]
        worker.run("b-00000002")
        permits.release()
        reply = flush_answer_once_done(worker, "f")
        assert reply["report"]["delivery"]["rows_delivered"] == len(PROMPT), "the second request's rows are held back"
        assert not worker.omni_core_flush("g", 0)["done"]
        assert worker.omni_core_flush("f", 0)["done"]


def test_asking_about_a_flush_again_ends_no_further_request(worker):
    worker.run(ended=False)
    worker.omni_core_flush("f", 0, [REQ_ID])
    worker.omni_core_flush("f", 0, [])
    assert flushed(worker).omni_core_report()["delivery"]["requests_open"] == 1


def test_flushes_that_a_stuck_sink_keeps_waiting_do_not_fill_its_queue(worker):
    with slow_sink(worker):
        worker.run(ended=False)
        worker.omni_core_flush()
        before = worker.omni_core_report()["delivery"]
        for number in range(50):
            assert not worker.omni_core_flush(f"f{number}", 0)["done"]
        after = worker.omni_core_report()["delivery"]
        assert after["sink_queue_entries"] <= before["sink_queue_entries"] + 1
        assert after["entries_waiting"] == 0


def test_a_flush_after_the_end_is_done(worker):
    worker.run()
    worker.session.close(BOUND_S)
    assert worker.omni_core_flush()["done"]


# -- the client's functions --------------------------------------------------------------------------------------------


def test_a_client_takes_a_finished_request_whose_end_the_engine_has_not_told(worker):
    worker.run(ended=False)
    llm = Engine([WorkerWithoutCache(), worker])
    [stored] = take_rows(llm, CLIENT_ID)
    assert torch.equal(stored.hidden_states, rows_of(PROMPT))


def test_a_client_does_not_end_what_its_engine_has_not_finished(worker):
    worker.run(ended=False)
    llm = Engine([worker], unfinished=[REQ_ID])
    flush_stage(llm)
    with pytest.raises(RequestNotEndedError):
        take_rows(llm, CLIENT_ID)
    assert stage_reports(llm)[0]["delivery"]["requests_open"] == 1


def test_a_client_whose_sink_is_stuck_is_told_so_in_bounded_time(worker):
    with slow_sink(worker):
        worker.run()
        with pytest.raises(FlushTimeoutError):
            flush_stage(Engine([worker]), 0.05)
    flush_stage(Engine([worker]))


def test_a_client_waits_for_the_end_of_its_request(worker):
    worker.run(ended=False)

    async def scenario():
        taking_rows = asyncio.create_task(take_rows_async(Engine([worker]), CLIENT_ID, BOUND_S))
        await asyncio.sleep(0.05)
        assert not taking_rows.done()
        worker.step(fake.scheduled(finished=[REQ_ID]))
        return await taking_rows

    assert [one.end.value for one in asyncio.run(scenario())] == ["finished"]


def test_a_client_waits_no_longer_than_it_was_told(worker):
    worker.run(ended=False)
    flushed(worker)
    with pytest.raises(RequestNotEndedError):
        asyncio.run(take_rows_async(Engine([worker]), CLIENT_ID, 0.05))


def test_a_client_gets_its_rows_though_the_sink_never_catches_up_with_the_server(worker):
    async def scenario(permits):
        worker.run()
        taking_rows = asyncio.create_task(take_rows_async(Engine([worker]), CLIENT_ID, BOUND_S))
        await asyncio.sleep(0.05)
        for number in range(1, 6):
            worker.run(f"b-{number:08x}")
        permits.release()
        return await taking_rows

    with slow_sink(worker) as permits:
        assert [one.req_id for one in asyncio.run(scenario(permits))] == [REQ_ID]
        assert worker.omni_core_report()["delivery"]["sink_queue_entries"] > 0


def test_a_flush_of_a_live_engine_ends_nothing_and_never_waits_in_the_engine():
    waits = WaitsOfThisThread()
    worker = Worker(runtime=waits)
    with slow_sink(worker):
        worker.run(ended=False)
        waits.total_s = 0.0
        with pytest.raises(FlushTimeoutError):
            asyncio.run(flush_stage_async(Engine([worker]), 0.2))
        assert waits.total_s == 0.0
    asyncio.run(flush_stage_async(Engine([worker])))
    assert worker.omni_core_report()["delivery"]["requests_open"] == 1
    worker.session.close(BOUND_S)
