# SPDX-License-Identifier: Apache-2.0
"""A runner that adopted the hooks delivers every row, and computes as before, whatever the cache does."""

import logging
import threading

import fake_runner as fake
import pytest
import torch
from fake_stage import FakeStage

from omni_core.integrations.vllm.errors import StageNotFoundError
from omni_core.integrations.vllm.runner_hooks import adopt_hooks
from omni_core.integrations.vllm.session import StageSession, stage_session
from omni_core.integrations.vllm.step_hooks import MAX_FAILED_STEPS_IN_A_ROW
from omni_core.integrations.vllm.tap import install_tap
from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.errors import OmniPrefixCacheStagingTimeoutError
from omni_core.prefix_cache.gate import GateDecision, GateStatus
from omni_core.settings.stage_settings import OnError, StageSettings
from omni_core.sinks.base import RequestEnd
from omni_core.sinks.errors import UnknownRequestError, UnknownSinkError

BOUND_S = 20.0
PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
OTHER = [*PROMPT[:8], 40, 41, 42]


@pytest.fixture
def stages():
    made = []

    def make(**options):
        made.append(FakeStage(**options))
        return made[-1]

    yield make
    for stage in made:
        stage.session.close(BOUND_S)


def drive_two_requests(stage):
    """`a` alone, in two chunks; then `b`, which hits `a`'s first two blocks, beside a decode of `a`."""
    stage.step(fake.scheduled(new=[("a-00000001", PROMPT, [1, 2, 3], 0, 6)]))
    stage.step(fake.scheduled(running=[("a-00000001", 6, 4, None)]), a_00000001=21)
    stage.step(
        fake.scheduled(new=[("b-00000002", OTHER, [1, 2, 5], 8, 3)], running=[("a-00000001", 10, 1, None)]),
        a_00000001=22,
        b_00000002=50,
    )
    stage.step(fake.scheduled(running=[("b-00000002", 11, 1, None)], finished=["a-00000001"]), b_00000002=51)
    return {"a-00000001": [*PROMPT, 21], "b-00000002": [*OTHER, 50]}


def expected(tokens):
    return [fake.row_of(tokens, position) for position in range(len(tokens))]


def test_chunks_decodes_and_hits_come_whole_with_both_keys_and_their_tokens(stages):
    stage = stages()
    fed = drive_two_requests(stage)
    stage.session.flush(BOUND_S, still_running=())
    for req_id, tokens in fed.items():
        stored = stage.stored(req_id)
        assert stored.hidden_states.tolist() == expected(tokens)
        assert stored.rows["codes"].tolist() == [[7 * int(value) for value in row[:2]] for row in expected(tokens)]
        assert stored.token_ids.tolist() == tokens
        assert stored.client_req_id == req_id[0]
    assert stage.stored("a-00000001").end is RequestEnd.FINISHED
    assert stage.stored("b-00000002").end is RequestEnd.FLUSHED
    assert stage.session.cache.stats().rows_from_hits == 8


def test_the_runner_keeps_its_own_class_and_methods(stages):
    runner = stages().runner
    assert isinstance(runner, fake.FakeRunner)
    assert type(runner).__name__ == "OmniCoreFakeRunner"
    assert runner.get_model() is runner.model


def test_what_the_runner_returns_passes_through(stages):
    stage = stages()
    assert stage.step(fake.scheduled()) == "nothing to do"
    assert stage.step(fake.scheduled(new=[("a-00000001", PROMPT, [1, 2, 3], 0, 6)])) is None


def test_a_step_without_tokens_reports_ends_and_saves_nothing(stages):
    stage = stages()
    stage.step(fake.scheduled(new=[("a-00000001", PROMPT, [1, 2, 3], 0, 10)]), a_00000001=21)
    stage.step(fake.scheduled(finished=["a-00000001"]))
    stage.session.flush(BOUND_S, still_running=())
    assert stage.stored("a-00000001").end is RequestEnd.FINISHED
    stats = stage.session.cache.stats()
    assert (stats.steps_saved, stats.live_requests) == (1, 0)


def test_a_dummy_run_never_reaches_the_cache_and_nothing_is_taken_after_it(stages):
    stage = stages()
    stage.runner.dummy_run()
    assert stage.session.cache.stats().steps_saved == 0
    assert stage.runner.model.taken == 0
    stage.step(fake.scheduled(new=[("a-00000001", PROMPT, [1, 2, 3], 0, 10)]))
    assert stage.runner.model.taken == 1


def test_a_model_without_further_outputs_delivers_hidden_rows(stages):
    stage = stages(model=object())
    stage.step(fake.scheduled(new=[("a-00000001", PROMPT, [1, 2, 3], 0, 10)]))
    stage.session.flush(BOUND_S, still_running=())
    assert set(stage.stored("a-00000001").rows) == {HIDDEN_KEY}


def run_with_drafts(stage, sampled, *, drafts, max_tokens=40):
    """Request a: its prompt, then a step with drafts. Returns the tokens whose rows it must have by then."""
    stage.step(fake.scheduled(new=[("a-00000001", PROMPT, [1, 2, 3, 4], 0, 10)], max_tokens=max_tokens), a_00000001=21)
    stage.step(
        fake.scheduled(running=[("a-00000001", 10, 1 + len(drafts), None)], drafts={"a-00000001": drafts}),
        a_00000001=sampled,
    )
    return [*PROMPT, 21, *sampled[:-1]]


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_rows_of_accepted_drafts_are_delivered_and_those_of_rejected_ones_never(stages, accepted):
    stage = stages(tap=True)
    drafts = [30, 31]
    fed = run_with_drafts(stage, [*drafts[:accepted], 35], drafts=drafts)
    next_position = len(fed)
    stage.step(fake.scheduled(running=[("a-00000001", next_position, 1, None)]), a_00000001=36)
    stage.session.flush(BOUND_S, still_running=())
    stored = stage.stored("a-00000001")
    assert stored.token_ids.tolist() == [*fed, 35]
    assert stored.hidden_states.tolist() == expected([*fed, 35])
    assert stored.complete
    assert stage.session.tap.requests["a-00000001"].token_ids == [*fed, 35]


def test_a_request_beside_one_with_drafts_keeps_every_row(stages):
    stage = stages()
    stage.step(fake.scheduled(new=[("a-00000001", PROMPT, [1, 2, 3], 0, 10)]), a_00000001=21)
    stage.step(
        fake.scheduled(
            new=[("b-00000002", OTHER, [1, 2, 5], 8, 3)],
            running=[("a-00000001", 10, 2, None)],
            drafts={"a-00000001": [30]},
        ),
        a_00000001=[22],
        b_00000002=50,
    )
    stage.session.flush(BOUND_S, still_running=())
    assert stage.stored("b-00000002").hidden_states.tolist() == expected(OTHER)
    assert stage.stored("a-00000001").hidden_states.tolist() == expected([*PROMPT, 21])


@pytest.mark.parametrize(
    ("sampled", "max_tokens", "kept"),
    [
        ([30, 31, 35], 2, 0),
        ([30, 31, 35], 3, 1),
        ([fake.EOS_TOKEN_ID, 31, 35], 40, 0),
        ([30, fake.STOP_TOKEN_ID, 35], 40, 1),
        ([30, 31, fake.EOS_TOKEN_ID], 40, 2),
    ],
)
def test_accepted_drafts_behind_the_token_that_ends_the_request_are_left_out(stages, sampled, max_tokens, kept):
    stage = stages()
    run_with_drafts(stage, sampled, drafts=sampled[:2], max_tokens=max_tokens)
    stage.step(fake.scheduled(finished=["a-00000001"]))
    stage.session.flush(BOUND_S, still_running=())
    stored = stage.stored("a-00000001")
    assert stored.token_ids.tolist() == [*PROMPT, 21, *sampled[:kept]]
    assert stored.hidden_states.tolist() == expected([*PROMPT, 21, *sampled[:kept]])
    assert stored.complete


def test_a_step_whose_sampling_failed_keeps_the_rows_before_its_drafts(stages):
    stage = stages()
    stage.step(fake.scheduled(new=[("a-00000001", PROMPT, [1, 2, 3, 4], 0, 10)]), a_00000001=21)
    with torch.inference_mode():
        stage.runner.execute_model(
            fake.scheduled(running=[("a-00000001", 10, 3, None)], drafts={"a-00000001": [30, 31]})
        )
    stage.runner.execute_model_state = None  # which vLLM does before it samples
    stage.step(fake.scheduled(finished=["a-00000001"]))
    stage.session.flush(BOUND_S, still_running=())
    assert stage.stored("a-00000001").token_ids.tolist() == [*PROMPT, 21]
    assert stage.session.report()["cache"]["open_steps"] == 0


def test_a_prompt_given_as_embeddings_is_delivered_with_unknown_tokens(stages):
    stage = stages()
    stage.runner.input_batch.is_token_ids[:] = False
    stage.step(fake.scheduled(new=[("a-00000001", PROMPT, [1, 2, 3], 0, 10)]))
    stage.session.flush(BOUND_S, still_running=())
    assert stage.stored("a-00000001").token_ids.tolist() == [-1] * 10


@pytest.mark.parametrize("call", ["new_step_starts", "save_outputs"])
def test_an_error_of_the_cache_turns_it_off_and_the_engine_goes_on(stages, caplog, monkeypatch, call):
    stage = stages(on_error=OnError.ISOLATE)
    stage.step(fake.scheduled(new=[("a-00000001", PROMPT, [1, 2, 3], 0, 6)]))
    calls = []

    def broken(*args, **kwargs):
        calls.append(call)
        raise ValueError("the tables are gone")

    monkeypatch.setattr(stage.session.cache, call, broken)
    with caplog.at_level(logging.ERROR, logger="omni_core"):
        stage.step(fake.scheduled(running=[("a-00000001", 6, 4, None)]), a_00000001=21)
        stage.step(fake.scheduled(running=[("a-00000001", 10, 1, None)]), a_00000001=22)
    assert stage.runner.forwards == 3
    assert calls == [call]
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    stage.session.flush(BOUND_S, still_running=())
    report = stage.session.report()
    assert report["off_reason"] == f"{call}: ValueError: the tables are gone"
    assert "the tables are gone" in report["delivery"]["failures"]["a-00000001"]
    assert "a-00000001" not in stage.session.sink.request_ids()


def test_requests_after_the_cache_was_turned_off_are_told_why_they_have_no_rows(stages, monkeypatch):
    stage = stages(on_error=OnError.ISOLATE)

    def broken(*args, **kwargs):
        raise ValueError("the tables are gone")

    monkeypatch.setattr(stage.session.cache, "save_outputs", broken)
    stage.step(fake.scheduled(new=[("a-00000001", PROMPT, [1, 2, 3], 0, 10)]))
    stage.step(fake.scheduled(new=[("b-00000002", OTHER, [4, 5, 6], 0, 11)], finished=["a-00000001"]))
    stage.session.flush(BOUND_S, still_running=())
    for req_id in ("a-00000001", "b-00000002"):
        with pytest.raises(UnknownRequestError, match="the cache was turned off: save_outputs: ValueError"):
            stage.stored(req_id)


def test_a_step_whose_outputs_cannot_be_taken_costs_its_requests_only(stages):
    stage = stages(on_error=OnError.ISOLATE)
    stage.step(fake.scheduled(new=[("a-00000001", PROMPT, [1, 2, 3], 0, 10)]))
    stage.runner.model.broken = True
    stage.step(fake.scheduled(new=[("b-00000002", OTHER, [4, 5, 6], 0, 11)], finished=["a-00000001"]))
    stage.runner.model.broken = False
    stage.step(fake.scheduled(running=[("b-00000002", 11, 1, None)]), b_00000002=9)
    stage.step(fake.scheduled(new=[("c-00000003", [*PROMPT[:8], 9], [1, 2, 7], 8, 1)], finished=["b-00000002"]))
    stage.session.flush(BOUND_S, still_running=())
    report = stage.session.report()
    assert (report["off_reason"], report["steps_failed"]) == (None, 1)
    assert stage.stored("a-00000001").hidden_states.tolist() == expected(PROMPT)
    assert stage.stored("c-00000003").hidden_states.tolist() == expected([*PROMPT[:8], 9])
    with pytest.raises(UnknownRequestError, match="no codes today"):
        stage.stored("b-00000002")


def test_a_step_too_large_for_staging_costs_its_requests_only(stages):
    stage = stages(on_error=OnError.ISOLATE, extra_row_bytes=0)
    stage.runner.model.wide = True
    stage.step(fake.scheduled(new=[("a-00000001", PROMPT, [1, 2, 3], 0, 10)]))
    stage.runner.model.wide = False
    stage.step(fake.scheduled(new=[("b-00000002", OTHER, [4, 5, 6], 0, 11)], finished=["a-00000001"]))
    stage.session.flush(BOUND_S, still_running=())
    assert stage.session.report()["off_reason"] is None
    assert "StepTooLargeError" in stage.session.report()["delivery"]["failures"]["a-00000001"]
    assert stage.stored("b-00000002").hidden_states.tolist() == expected(OTHER)


@pytest.mark.parametrize("outputs", [None, ["codes"], "codes"])
def test_outputs_that_are_no_mapping_cost_the_steps_requests(stages, monkeypatch, outputs):
    stage = stages(on_error=OnError.ISOLATE)
    monkeypatch.setattr(stage.runner.model, "take_stage_outputs", lambda: outputs)
    stage.step(fake.scheduled(new=[("a-00000001", PROMPT, [1, 2, 3], 0, 10)]))
    stage.session.flush(BOUND_S, still_running=())
    assert "not a mapping of outputs" in stage.session.report()["delivery"]["failures"]["a-00000001"]
    assert stage.session.report()["off_reason"] is None


def test_an_error_without_a_text_costs_no_more_than_another(stages, monkeypatch):
    class SpeechlessError(RuntimeError):
        def __str__(self):
            raise ValueError("no text")

    def broken():
        raise SpeechlessError

    stage = stages(on_error=OnError.ISOLATE)
    monkeypatch.setattr(stage.runner.model, "take_stage_outputs", broken)
    stage.step(fake.scheduled(new=[("a-00000001", PROMPT, [1, 2, 3], 0, 10)]))
    stage.session.flush(BOUND_S, still_running=())
    assert "SpeechlessError, whose text cannot be had" in stage.session.report()["delivery"]["failures"]["a-00000001"]


def test_a_step_that_finds_no_staging_slot_in_time_is_waited_for_once(stages, monkeypatch):
    stage, waits = stages(on_error=OnError.ISOLATE), []

    def stuck(*args, **kwargs):
        waits.append(1)
        raise OmniPrefixCacheStagingTimeoutError("no slot came free")

    monkeypatch.setattr(stage.session.cache, "save_outputs", stuck)
    stage.step(fake.scheduled(new=[("a-00000001", PROMPT, [1, 2, 3], 0, 6)]))
    stage.step(fake.scheduled(running=[("a-00000001", 6, 4, None)]), a_00000001=21)
    assert len(waits) == 1
    assert "no slot came free" in stage.session.report()["off_reason"]


def test_requests_that_start_in_the_step_that_turns_the_cache_off_are_told_why(stages, monkeypatch):
    stage = stages(on_error=OnError.ISOLATE)

    def broken(*args):
        raise ValueError("the tables are gone")

    monkeypatch.setattr(stage.session.cache, "new_step_starts", broken)
    stage.step(fake.scheduled(new=[("a-00000001", PROMPT, [1, 2, 3], 0, 6)]))
    stage.session.flush(BOUND_S, still_running=())
    with pytest.raises(UnknownRequestError, match="the cache was turned off: new_step_starts: ValueError"):
        stage.stored("a-00000001")


def test_steps_that_keep_failing_turn_the_cache_off(stages):
    stage = stages(on_error=OnError.ISOLATE)
    stage.runner.model.broken = True
    stage.step(fake.scheduled(new=[("a-00000001", PROMPT[:3], [1, 2, 3, 4, 5, 6], 0, 3)]))
    for position in range(3, 4 + MAX_FAILED_STEPS_IN_A_ROW):
        stage.step(fake.scheduled(running=[("a-00000001", position, 1, None)]), a_00000001=20)
    assert "no codes today" in stage.session.report()["off_reason"]
    assert stage.runner.forwards == 2 + MAX_FAILED_STEPS_IN_A_ROW


def test_a_runner_whose_kv_cache_is_made_again_gets_the_new_hooks(stages):
    first, second = stages(), stages()
    adopt_hooks(first.runner, second.parts.hooks)
    assert type(first.runner).__name__ == "OmniCoreFakeRunner"
    first.step(fake.scheduled(new=[("a-00000001", PROMPT, [1, 2, 3], 0, 10)]))
    assert first.session.report()["cache"]["steps_saved"] == 0
    assert second.session.report()["cache"]["steps_saved"] == 1


@pytest.mark.parametrize("call", ["new_step_starts", "save_outputs"])
def test_an_error_of_the_cache_stops_the_step_where_that_is_wanted(stages, monkeypatch, call):
    stage = stages(on_error=OnError.RAISE)

    def broken(*args, **kwargs):
        raise ValueError("the tables are gone")

    monkeypatch.setattr(stage.session.cache, call, broken)
    with pytest.raises(ValueError, match="the tables are gone"):
        stage.step(fake.scheduled(new=[("a-00000001", PROMPT, [1, 2, 3], 0, 6)]))


def stage_with_a_stalled_sink(stages, monkeypatch):
    """A stage whose sink hangs in the first step of request a, and the event that lets it go on."""
    stage = stages(staging_depth=2, staging_claim_timeout_s=0.05, sink_queue_bytes=1)
    gate, entered = threading.Event(), threading.Event()
    accept = stage.session.sink.accept

    def slow(delivery):
        entered.set()
        assert gate.wait(BOUND_S)
        accept(delivery)

    monkeypatch.setattr(stage.session.sink, "accept", slow)
    stage.step(fake.scheduled(new=[("a-00000001", PROMPT, [1, 2, 3], 0, 6)]))
    assert entered.wait(BOUND_S)
    return stage, gate


def test_rows_put_off_while_the_sink_stalls_come_when_it_moves_again(stages, monkeypatch):
    stage, gate = stage_with_a_stalled_sink(stages, monkeypatch)
    stage.step(fake.scheduled(running=[("a-00000001", 6, 4, None)]), a_00000001=21)
    stage.step(fake.scheduled(running=[("a-00000001", 10, 1, None)]), a_00000001=22)
    gate.set()
    stage.session.flush(BOUND_S, still_running=["a-00000001"])
    stage.step(fake.scheduled(running=[("a-00000001", 11, 1, None)]), a_00000001=23)
    stage.session.flush(BOUND_S, still_running=())
    report = stage.session.report()["delivery"]
    assert (report["steps_given_up"], report["stalls"]) == (2, 1)
    assert stage.stored("a-00000001").hidden_states.tolist() == expected([*PROMPT, 21, 22])
    assert stage.stored("a-00000001").complete


def test_a_request_of_which_no_row_was_delivered_is_reported_and_not_forgotten(stages, monkeypatch):
    stage, gate = stage_with_a_stalled_sink(stages, monkeypatch)
    stage.step(fake.scheduled(new=[("b-00000002", PROMPT[:3], [4], 0, 3)], finished=["a-00000001"]))
    gate.set()
    stage.session.flush(BOUND_S, still_running=())
    report = stage.session.report()["delivery"]
    assert report["requests_failed"] == 1
    assert "given up" in report["failures"]["b-00000002"]


def test_the_tap_sees_what_was_computed_with_and_without_the_cache(stages):
    stage = stages(tap=True)
    fed = drive_two_requests(stage)
    stage.session.flush(BOUND_S, still_running=())
    plain = fake.FakeRunner()
    plain_tap = install_tap(plain)
    plain.execute_model(fake.scheduled(new=[("a-0", fed["a-00000001"], [1, 2, 3], 0, 11)]))
    plain.sample_tokens({})
    plain.execute_model(fake.scheduled(new=[("b-0", fed["b-00000002"], [4, 5, 6], 0, 12)], finished=["a-0"]))
    for req_id, tokens in fed.items():
        for key, rows in stage.stored(req_id).rows.items():
            assert stage.session.tap.equal_rows(tokens, rows, key).all()
            assert plain_tap.equal_rows(tokens, rows, key).all()
            assert len(rows) == len(tokens)


def test_the_tap_takes_a_models_outputs_once_per_forward(stages):
    stage = stages(tap=True)
    drive_two_requests(stage)
    assert stage.runner.model.taken == stage.runner.forwards == stage.session.tap.num_forwards == 4
    assert stage.session.tap.keys == {HIDDEN_KEY, "codes"}


def test_an_error_of_the_tap_ends_the_tap_and_not_the_engine(stages, monkeypatch, caplog):
    stage = stages(tap=True)

    def broken(*args):
        raise ValueError("no such tensor")

    monkeypatch.setattr(stage.session.tap, "forward_done", broken)
    with caplog.at_level(logging.ERROR, logger="omni_core"):
        fed = drive_two_requests(stage)
    stage.session.flush(BOUND_S, still_running=())
    assert stage.session.tap.failure == "ValueError: no such tensor"
    assert len(caplog.records) == 1
    for req_id, tokens in fed.items():
        assert stage.stored(req_id).hidden_states.tolist() == expected(tokens)


def test_the_report_tells_of_every_part(stages):
    stage = stages()
    drive_two_requests(stage)
    stage.session.flush(BOUND_S, still_running=())
    report = stage.session.report()
    assert report["gate"]["status"] == "supported"
    assert (report["sink"], report["backend"]) == ("memory", "cpu_sim")
    assert report["delivery"]["rows_delivered"] == report["cache"]["rows_delivered"] == 23
    assert report["cache"]["steps_saved"] == 4
    assert not report["closed"]


def test_a_session_closes_once_and_still_reports(stages):
    stage = stages()
    drive_two_requests(stage)
    stage.session.close(BOUND_S)
    stage.session.close(BOUND_S)
    assert stage.session.report()["closed"]
    assert stage.session.report()["delivery"]["rows_delivered"] == 23


def test_a_session_without_a_cache_says_why_and_has_nothing_to_flush():
    decision = GateDecision(GateStatus.IGNORED, "not_enabled", "the cache is off", "turn it on")
    session = StageSession(StageSettings(), decision, parts=None, tap=None)
    session.flush(BOUND_S, still_running=())
    session.close(BOUND_S)
    assert session.cache is session.sink is session.backend is None
    told = {"status": "ignored", "rule": "not_enabled", "reason": "the cache is off", "remedy": "turn it on"}
    assert session.report()["gate"] == told


def test_an_unknown_sink_is_refused_before_anything_is_kept(stages):
    with pytest.raises(UnknownSinkError, match="no-such-sink"):
        stages(sink="no-such-sink")


def test_an_engine_in_another_process_has_no_session_here():
    llm = type("LLM", (), {"llm_engine": type("Engine", (), {"engine_core": object()})})
    with pytest.raises(StageNotFoundError, match="VLLM_ENABLE_V1_MULTIPROCESSING=0"):
        stage_session(llm)
