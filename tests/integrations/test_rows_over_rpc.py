# SPDX-License-Identifier: Apache-2.0
"""Rows, flushes and errors cross from a worker to its client whole, and no call of a worker raises."""

import asyncio
import json
import threading
from types import SimpleNamespace

import fake_runner as fake
import pytest
import torch

from omni_core.integrations.vllm.async_stage_client import flush_stage_async, stage_reports_async, take_rows_async
from omni_core.integrations.vllm.errors import (
    FlushTimeoutError,
    IntegrationError,
    RowsNotKeptError,
    RpcArgumentError,
    StageNotFoundError,
)
from omni_core.integrations.vllm.rows_over_rpc import (
    RowsEncoding,
    flush_reply,
    reports_from_flush,
    rows_from_replies,
    take_rows_reply,
)
from omni_core.integrations.vllm.runner_hooks import adopt_hooks
from omni_core.integrations.vllm.session import StageParts, StageSession
from omni_core.integrations.vllm.settings import OmniSettings
from omni_core.integrations.vllm.stage_client import flush_stage, stage_reports, take_rows
from omni_core.prefix_cache.config import HIDDEN_KEY, PrefixCacheConfig
from omni_core.prefix_cache.gate import GateDecision, GateStatus
from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.runtime import ThreadingRuntime
from omni_core.sinks.errors import InvalidRequestFileError, RequestNotEndedError, UnknownRequestError

BOUND_S = 20.0
PROMPT = [11, 12, 13, 14, 15, 16]
BASE64, BYTES = RowsEncoding.BASE64.value, RowsEncoding.BYTES.value
REQ_ID, CLIENT_ID = "a-00000001", "a"


class Worker:
    """A rank with a cache: what vLLM's executor calls over RPC, on a fake runner."""

    def __init__(self, **settings):
        self.settings = OmniSettings(enabled=True, **settings)
        self.runner = fake.FakeRunner()
        config = PrefixCacheConfig(
            num_blocks=16,
            block_size=fake.BLOCK_SIZE,
            hidden_size=fake.HIDDEN_SIZE,
            hidden_dtype=torch.float32,
            max_num_tokens=64,
        )
        parts = StageParts(
            self.settings,
            config,
            ModelCachePolicy(),
            model=self.runner.model,
            device=self.runner.device,
            group_index=0,
            request_ids_randomised=True,
            stop_rule=fake.ends,
            runtime=ThreadingRuntime(),
        )
        adopt_hooks(self.runner, parts.hooks)
        decision = GateDecision(GateStatus.SUPPORTED, "supported", "a test")
        self.session = StageSession(self.settings, decision, parts=parts, tap=None)

    def run(self, req_id=REQ_ID, *, ended=True):
        self.step(fake.scheduled(new=[(req_id, PROMPT, [1, 2], 0, len(PROMPT))]))
        if ended:
            self.step(fake.scheduled(finished=[req_id]))

    def step(self, output):
        with torch.inference_mode():
            if self.runner.execute_model(output) is None:
                self.runner.sample_tokens({})

    def omni_core_flush(self, still_running=None, timeout_s=BOUND_S):
        return flush_reply(self.session, still_running, timeout_s)

    def omni_core_take_rows(self, request_id, encoding=BASE64):
        return take_rows_reply(self.session, request_id, encoding)

    def omni_core_report(self):
        return self.session.report()


class WorkerWithoutCache(Worker):
    """A rank that the gate ignores."""

    def __init__(self):
        decision = GateDecision(GateStatus.IGNORED, "not_output_rank", "a test")
        self.session = StageSession(OmniSettings(enabled=True), decision, parts=None, tap=None)


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
    assert worker.omni_core_flush()["error"] is None
    return worker


def rows_of(prompt):
    return torch.tensor([fake.row_of(prompt, position) for position in range(len(prompt))])


def plain(value):
    if isinstance(value, dict):
        return all(isinstance(key, str) and plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(plain, value))
    return value is None or type(value) in (str, bytes, int, float, bool)


# -- taking rows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [REQ_ID, CLIENT_ID])
@pytest.mark.parametrize("encoding", [BASE64, BYTES])
def test_rows_come_back_bit_for_bit_by_either_id(worker, asked, encoding):
    worker.run()
    [stored] = rows_from_replies([flushed(worker).omni_core_take_rows(asked, encoding)])
    assert torch.equal(stored.hidden_states, rows_of(PROMPT))
    assert stored.rows["codes"].dtype == worker.runner.model.codes.dtype
    assert stored.token_ids.tolist() == PROMPT
    assert (stored.req_id, stored.client_req_id) == (REQ_ID, CLIENT_ID)
    assert stored.complete
    assert stored.ranges == ((0, len(PROMPT)),)


def test_an_answer_says_without_decoding_what_it_holds(worker):
    worker.run()
    [told] = flushed(worker).omni_core_take_rows(REQ_ID)["requests"]
    del told["safetensors"]
    assert told == {
        "req_id": REQ_ID,
        "client_req_id": CLIENT_ID,
        "end": "finished",
        "complete": True,
        "ranges": [[0, len(PROMPT)]],
        "missing": [],
    }


def test_an_answer_is_plain_values_and_as_base64_it_is_json(worker):
    worker.run()
    worker.run("b-00000002")
    flushed(worker)
    assert plain(worker.omni_core_take_rows("b", BYTES))
    over_http = json.loads(json.dumps({"results": [worker.omni_core_take_rows("a")]}))
    assert torch.equal(rows_from_replies(over_http["results"])[0].hidden_states, rows_of(PROMPT))


def test_rows_in_bfloat16_and_of_odd_keys_survive():
    from omni_core.sinks.base import RequestEnd
    from omni_core.sinks.request_content import read_request_bytes, request_file_bytes
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
    got = read_request_bytes(request_file_bytes(sent))
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


def test_the_sink_forgets_what_was_taken(worker):
    worker.run()
    flushed(worker).omni_core_take_rows(REQ_ID)
    with pytest.raises(UnknownRequestError, match="ids kept: none"):
        rows_from_replies([worker.omni_core_take_rows(REQ_ID)])


def test_a_request_that_goes_on_is_refused_and_keeps_its_rows(worker):
    worker.run(ended=False)
    with pytest.raises(RequestNotEndedError, match="has not ended"):
        rows_from_replies([flushed(worker).omni_core_take_rows(CLIENT_ID)])
    worker.step(fake.scheduled(finished=[REQ_ID]))
    assert len(rows_from_replies([flushed(worker).omni_core_take_rows(CLIENT_ID)])) == 1


def test_every_sample_of_one_request_is_taken_by_the_clients_id(worker):
    for sample in ("0_a-00000001", "1_a-00000001"):
        worker.run(sample)
    taken = rows_from_replies([flushed(worker).omni_core_take_rows("a")])
    assert [one.req_id for one in taken] == ["0_a-00000001", "1_a-00000001"]


def test_nothing_is_taken_while_one_sample_goes_on(worker):
    worker.run("0_a-00000001")
    worker.run("1_a-00000001", ended=False)
    for _ in range(2):
        with pytest.raises(RequestNotEndedError):
            rows_from_replies([flushed(worker).omni_core_take_rows("a")])
    worker.step(fake.scheduled(finished=["1_a-00000001"]))
    assert len(rows_from_replies([flushed(worker).omni_core_take_rows("a")])) == 2


def test_a_sink_that_keeps_no_rows_says_so(tmp_path):
    worker = Worker(sink="safetensors", sink_options={"directory": str(tmp_path)})
    worker.run()
    with pytest.raises(RowsNotKeptError, match="'safetensors' keeps no rows"):
        rows_from_replies([flushed(worker).omni_core_take_rows(REQ_ID)])
    worker.session.close(BOUND_S)


def test_ranks_without_a_cache_answer_with_nothing(worker):
    worker.run()
    replies = [WorkerWithoutCache().omni_core_take_rows(REQ_ID), flushed(worker).omni_core_take_rows(REQ_ID)]
    assert replies[0] == {"error": None, "requests": []}
    assert [one.req_id for one in rows_from_replies(replies)] == [REQ_ID]


def test_an_engine_without_any_cache_is_told_from_one_without_the_request():
    with pytest.raises(StageNotFoundError, match="none of the 2 workers has a cache"):
        rows_from_replies([WorkerWithoutCache().omni_core_take_rows(REQ_ID) for _ in range(2)])


def test_before_the_kv_cache_is_made_there_is_nothing_to_take():
    assert take_rows_reply(None, REQ_ID, BYTES) == {"error": None, "requests": []}
    assert flush_reply(None, None, 1.0) == {"error": None, "report": {}}


def test_with_several_engines_the_one_with_the_rows_is_found(worker, other_worker):
    other_worker.run()
    replies = [flushed(one).omni_core_take_rows(REQ_ID) for one in (worker, other_worker)]
    assert [one.req_id for one in rows_from_replies(replies)] == [REQ_ID]


def test_with_several_engines_a_request_that_goes_on_in_one_is_not_called_unknown(worker, other_worker):
    other_worker.run(ended=False)
    replies = [flushed(one).omni_core_take_rows(REQ_ID) for one in (worker, other_worker)]
    with pytest.raises(RequestNotEndedError, match=r"has not ended.*; no request"):
        rows_from_replies(replies)


# -- errors are answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_id", "encoding", "named"),
    [(REQ_ID, "pickle", "'base64' or 'bytes'"), (REQ_ID, None, "'base64' or 'bytes'"), (7, BASE64, "request_id=7")],
)
def test_a_wrong_argument_takes_nothing(worker, request_id, encoding, named):
    worker.run()
    flushed(worker)
    with pytest.raises(RpcArgumentError, match=named):
        rows_from_replies([worker.omni_core_take_rows(request_id, encoding)])
    assert len(rows_from_replies([worker.omni_core_take_rows(REQ_ID)])) == 1


@pytest.mark.parametrize("still_running", ["a-00000001", [1], {"a": 1}, 5])
def test_a_flush_refuses_what_is_no_list_of_ids_and_ends_nothing(worker, still_running):
    worker.run(ended=False)
    reply = worker.omni_core_flush(still_running)
    assert reply["error"]["type"] == "RpcArgumentError"
    assert flushed(worker).omni_core_report()["delivery"]["requests_open"] == 1


@pytest.mark.parametrize("timeout_s", ["soon", "nan", 0, -1, None, True])
def test_a_flush_refuses_what_is_no_time(worker, timeout_s):
    with pytest.raises(RpcArgumentError, match="timeout_s"):
        reports_from_flush([worker.omni_core_flush(None, timeout_s)])


def test_an_error_nobody_foresaw_is_an_answer_too():
    class Broken(WorkerWithoutCache):
        def __init__(self):
            super().__init__()
            self.session.take = self.session.flush = self._fail

        def _fail(self, *_):
            raise ZeroDivisionError("of a third party's sink")

    with pytest.raises(IntegrationError, match="ZeroDivisionError: of a third party's sink"):
        rows_from_replies([Broken().omni_core_take_rows(REQ_ID)])
    with pytest.raises(IntegrationError, match="ZeroDivisionError: of a third party's sink"):
        reports_from_flush([Broken().omni_core_flush()])


@pytest.mark.parametrize("reply", [None, "OK", {"error": None}, {"requests": []}])
def test_an_answer_of_something_else_is_named(reply):
    with pytest.raises(InvalidRequestFileError, match="not the answer of a worker of Omni Core"):
        rows_from_replies([reply])


# -- flushing ----------------------------------------------------------------------------------------------------------


def test_a_flush_without_arguments_ends_no_request(worker):
    worker.run(ended=False)
    [report] = reports_from_flush([worker.omni_core_flush()])
    assert report["delivery"]["requests_open"] == 1
    assert report["delivery"]["rows_delivered"] == len(PROMPT)


def test_a_flush_with_a_list_ends_what_is_not_in_it(worker):
    both = [("a-00000001", PROMPT, [1, 2], 0, len(PROMPT)), ("b-00000002", PROMPT, [3, 4], 0, len(PROMPT))]
    worker.step(fake.scheduled(new=both))
    assert worker.omni_core_flush(["b-00000002"])["error"] is None
    [ended] = rows_from_replies([worker.omni_core_take_rows("a")])
    assert (ended.end.value, ended.complete) == ("flushed", True)
    with pytest.raises(RequestNotEndedError):
        rows_from_replies([worker.omni_core_take_rows("b")])


def test_a_time_may_come_as_text(worker):
    assert worker.omni_core_flush(None, "2.5")["error"] is None


def test_a_flush_that_is_not_done_in_time_says_so_and_may_be_repeated(worker, monkeypatch):
    gate, accept = threading.Event(), worker.session.sink.accept
    monkeypatch.setattr(worker.session.sink, "accept", lambda delivery: gate.wait(BOUND_S) and accept(delivery))
    worker.run()
    with pytest.raises(FlushTimeoutError):
        reports_from_flush([worker.omni_core_flush(None, 0.01)])
    gate.set()
    reports_from_flush([worker.omni_core_flush()])
    assert len(rows_from_replies([worker.omni_core_take_rows(REQ_ID)])) == 1


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


def test_a_client_of_several_engines_asks_them_all(worker, other_worker):
    other_worker.run()
    engine = Engine([worker], [WorkerWithoutCache(), other_worker])
    [stored] = asyncio.run(take_rows_async(engine, CLIENT_ID))
    assert stored.req_id == REQ_ID
    assert len(asyncio.run(stage_reports_async(engine))) == 3


def test_a_client_waits_for_the_end_of_its_request(worker):
    worker.run(ended=False)

    async def scenario():
        taking = asyncio.create_task(take_rows_async(Engine([worker]), CLIENT_ID, BOUND_S))
        await asyncio.sleep(0.05)
        assert not taking.done()
        worker.step(fake.scheduled(finished=[REQ_ID]))
        return await taking

    assert [one.end.value for one in asyncio.run(scenario())] == ["finished"]


def test_a_client_waits_no_longer_than_it_was_told(worker):
    worker.run(ended=False)
    with pytest.raises(RequestNotEndedError):
        asyncio.run(take_rows_async(Engine([worker]), CLIENT_ID, 0.05))


def test_a_flush_of_a_live_engine_ends_nothing_and_is_bounded(worker, monkeypatch):
    gate, accept = threading.Event(), worker.session.sink.accept
    monkeypatch.setattr(worker.session.sink, "accept", lambda delivery: gate.wait(BOUND_S) and accept(delivery))
    worker.run(ended=False)
    with pytest.raises(FlushTimeoutError):
        asyncio.run(flush_stage_async(Engine([worker]), 0.05))
    gate.set()
    asyncio.run(flush_stage_async(Engine([worker])))
    assert worker.omni_core_report()["delivery"]["requests_open"] == 1
