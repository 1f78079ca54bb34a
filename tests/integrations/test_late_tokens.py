# SPDX-License-Identifier: Apache-2.0
"""An engine that goes on before sampled tokens are known delivers what one does that waits: on CUDA and NPU."""

import threading

import fake_runner as fake
import pytest
from late_stage import KINDS, LateStage

from omni_core.settings.stage_settings import OnError
from omni_core.sinks.base import RequestEnd
from omni_core.sinks.errors import UnknownRequestError

BOUND_S = 20.0
PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
OTHER = [*PROMPT[:8], 40, 41, 42]
A, B, C, D, E = "a-00000001", "b-00000002", "c-00000003", "d-00000004", "e-00000005"


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def stages():
    made = []

    def make(kind, **options):
        made.append(LateStage(kind, **options))
        return made[-1]

    yield make
    for stage in made:
        stage.session.close(BOUND_S)


def expected(tokens):
    return [fake.row_of(tokens, position) for position in range(len(tokens))]


def holds(stored, tokens):
    return stored.hidden_states.tolist() == expected(tokens) and stored.token_ids.tolist() == tokens


def start(stage, req_id=A, prompt=PROMPT, blocks=(1, 2, 3), hit=0, **sampled):
    stage.step(fake.scheduled(new=[(req_id, prompt, list(blocks), hit, len(prompt) - hit)]), **sampled)


def test_chunks_decodes_and_hits_come_whole_with_their_tokens_though_each_step_is_read_a_step_late(stages, kind):
    stage = stages(kind)
    stage.step(fake.scheduled(new=[(A, PROMPT, [1, 2, 3], 0, 6)]))
    stage.step(fake.scheduled(running=[(A, 6, 4, None)]), a_00000001=21)
    stage.read()
    stage.step(
        fake.scheduled(new=[(B, OTHER, [1, 2, 5], 8, 3)], running=[(A, 10, 1, None)]), a_00000001=22, b_00000002=50
    )
    stage.read()
    stage.step(fake.scheduled(running=[(B, 11, 1, None)], finished=[A]), b_00000002=51)
    stage.finish()
    assert holds(stage.stored(A), [*PROMPT, 21])
    assert holds(stage.stored(B), [*OTHER, 50])
    assert stage.stored(A).end is RequestEnd.FINISHED
    assert stage.session.cache.stats().rows_from_hits == 8
    assert stage.session.report()["delivery"]["failures"] == {}


def test_a_step_reaches_the_sink_when_its_output_is_complete_and_not_before(stages, kind):
    stage = stages(kind)
    start(stage, a_00000001=21)
    stage.session.flush(BOUND_S)
    assert stage.session.report()["delivery"]["rows_delivered"] == 0
    stage.read()
    stage.session.flush(BOUND_S)
    assert stage.session.report()["delivery"]["rows_delivered"] == 10


def test_an_output_may_be_completed_on_another_thread_and_is_what_vllm_made(stages, kind):
    stage = stages(kind)
    start(stage, a_00000001=21)
    own = type(stage.runner.waiting[0])
    told = []
    thread = threading.Thread(target=lambda: told.append(stage.read()))
    thread.start()
    thread.join(BOUND_S)
    assert told[0].sampled_token_ids == [[21]]
    assert own.__name__ == "OmniCoreAsyncOutput"
    stage.finish()
    assert holds(stage.stored(A), PROMPT)


@pytest.mark.parametrize("last", [fake.EOS_TOKEN_ID, fake.STOP_TOKEN_ID])
@pytest.mark.parametrize("read_before_the_news", [True, False])
def test_a_step_run_for_a_request_that_had_ended_adds_no_row(stages, kind, last, read_before_the_news):
    stage = stages(kind)
    start(stage, a_00000001=last)
    stage.step(fake.scheduled(running=[(A, 10, 1, None)]), a_00000001=99)  # the engine does not know yet
    stage.read(1 + read_before_the_news)
    stage.step(fake.scheduled(new=[(B, OTHER, [1, 2, 5], 8, 3)], finished=[A]), b_00000002=50)
    stage.finish()
    assert holds(stage.stored(A), PROMPT)
    assert stage.stored(A).complete
    assert stage.stored(A).end is RequestEnd.FINISHED
    assert holds(stage.stored(B), OTHER)
    assert stage.session.report()["delivery"]["failures"] == {}


def test_a_step_that_is_read_after_a_flush_ended_its_request_is_no_failure_if_the_last_token_was_seen(stages, kind):
    stage = stages(kind)
    start(stage, a_00000001=fake.EOS_TOKEN_ID)
    stage.step(fake.scheduled(running=[(A, 10, 1, None)]), a_00000001=99)
    stage.read()
    stage.session.flush(BOUND_S, still_running=())
    stage.finish()
    assert stage.stored(A).complete
    assert stage.session.report()["delivery"]["failures"] == {}


def test_the_length_a_client_asked_for_ends_a_request_too(stages, kind):
    stage = stages(kind)
    stage.step(fake.scheduled(new=[(A, PROMPT, [1, 2, 3, 4], 0, 10)], max_tokens=2), a_00000001=21)
    for computed, token in ((10, 22), (11, 23), (12, 24)):
        stage.step(fake.scheduled(running=[(A, computed, 1, None)]), a_00000001=token)
        stage.read()
    stage.step(fake.scheduled(finished=[A]))
    stage.finish()
    assert holds(stage.stored(A), [*PROMPT, 21])


def test_news_of_an_end_do_not_overtake_a_step_that_waits(stages, kind):
    stage = stages(kind)
    start(stage, a_00000001=21)
    stage.step(fake.scheduled(running=[(A, 10, 1, None)]), a_00000001=22)
    stage.step(fake.scheduled(finished=[A]))  # aborted while two steps wait
    stage.finish()
    assert holds(stage.stored(A), [*PROMPT, 21])
    assert stage.session.report()["delivery"]["failures"] == {}


def test_an_id_used_again_while_steps_wait_is_another_request(stages, kind):
    stage = stages(kind, request_ids_randomised=False)
    start(stage, a_00000001=21)
    stage.step(fake.scheduled(new=[(A, OTHER, [4, 5, 6], 0, 11)], finished=[A]), a_00000001=50)
    stage.finish()
    stored = stage.session.sink.requests_of_client(A)
    assert [one.token_ids.tolist() for one in stored] == [PROMPT, OTHER]


@pytest.mark.parametrize("isolate", [True, False])
def test_an_output_that_cannot_be_completed_raises_as_before_and_costs_no_row_that_is_right(stages, kind, isolate):
    stage = stages(kind, on_error=OnError.ISOLATE if isolate else OnError.RAISE)
    stage.runner.copy_error = ConnectionError("the copy failed")
    start(stage, a_00000001=21)
    with pytest.raises(ConnectionError, match="the copy failed"):
        stage.read()
    stage.finish()
    assert holds(stage.stored(A), PROMPT)
    assert stage.session.report()["cache"]["open_steps"] == 0


def test_steps_that_nobody_reads_are_given_up_at_once_when_no_slot_is_left_and_their_rows_come_later(stages, kind):
    stage = stages(kind, staging_depth=4, staging_claim_timeout_s=BOUND_S)
    start(stage, blocks=(1, 2, 3, 4), a_00000001=21)
    for computed in (10, 11, 12):
        stage.step(fake.scheduled(running=[(A, computed, 1, None)]), a_00000001=computed + 12)
    assert stage.session.report()["delivery"]["stalls"] == 0
    stage.read(4)
    stage.session.flush(BOUND_S)
    stage.step(fake.scheduled(running=[(A, 13, 1, None)]), a_00000001=25)
    stage.finish()
    assert holds(stage.stored(A), [*PROMPT, 21, 22, 23, 24])
    assert stage.session.report()["delivery"]["steps_given_up"] == 1


def test_a_cache_that_is_reset_while_a_step_waits_forgets_the_step(stages, kind):
    stage = stages(kind)
    start(stage, a_00000001=21)
    stage.session.reset()
    stage.read()
    stage.step(fake.scheduled(new=[(B, OTHER, [4, 5, 6], 0, 11)], finished=[A]), b_00000002=50)
    stage.finish()
    assert holds(stage.stored(B), OTHER)
    with pytest.raises(UnknownRequestError):
        stage.stored(A)
    assert stage.session.report()["off_reason"] is None


def test_a_cache_that_is_turned_off_while_a_step_waits_is_right_again_after_a_reset(stages, kind, monkeypatch):
    stage = stages(kind, on_error=OnError.ISOLATE)
    start(stage, a_00000001=21)

    def broken(events):
        raise RuntimeError("no more news")

    with monkeypatch.context() as patch:
        patch.setattr(stage.session.cache, "new_step_starts", broken)
        stage.step(fake.scheduled(running=[(A, 10, 1, None)]), a_00000001=22)
    assert "no more news" in stage.session.report()["off_reason"]
    stage.read(2)
    # Blocks handed out while the cache is off are blocks all the same.
    stage.step(fake.scheduled(new=[(B, OTHER, [4, 5, 6], 0, 11)], finished=[A]), b_00000002=50)
    stage.session.flush(BOUND_S)
    assert "the cache was turned off" in stage.session.report()["delivery"]["failures"][B]
    stage.session.reset()
    stage.step(fake.scheduled(running=[(B, 11, 1, None)]), b_00000002=51)
    stage.read(2)
    stage.step(fake.scheduled(new=[(C, OTHER, [4, 5, 7], 8, 3)], finished=[B]), c_00000003=60)
    stage.step(fake.scheduled(new=[(D, PROMPT, [4, 8, 9], 4, 6)], finished=[C]), d_00000004=70)
    stage.step(fake.scheduled(new=[(E, PROMPT, [10, 11, 12], 0, 10)], finished=[D]), e_00000005=80)
    stage.finish()
    report = stage.session.report()
    assert (report["off_reason"], report["steps_failed"]) == (None, 0)
    assert "tokens [(0, 8)] were not computed" in report["delivery"]["failures"][C]
    assert holds(stage.stored(E), PROMPT)


def test_a_request_is_told_of_a_cache_that_an_earlier_output_turned_off_while_a_step_was_saved(
    stages, kind, monkeypatch
):
    stage = stages(kind, on_error=OnError.ISOLATE)
    start(stage, a_00000001=21)
    save = stage.session.cache.save_outputs

    def broken(*args, **kwargs):
        raise RuntimeError("no such step")

    def save_while_the_last_output_is_read(*args, **kwargs):
        with monkeypatch.context() as patch:
            patch.setattr("omni_core.integrations.vllm.saved_steps.BuiltStep", broken)
            reading = threading.Thread(target=stage.read)
            reading.start()
            reading.join(BOUND_S)
        return save(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(stage.session.cache, "save_outputs", save_while_the_last_output_is_read)
        stage.step(fake.scheduled(running=[(A, 10, 1, None)]), a_00000001=22)
    assert "no such step" in stage.session.report()["off_reason"]
    stage.step(fake.scheduled(new=[(B, OTHER, [4, 5, 6], 0, 11)], finished=[A]), b_00000002=50)
    stage.session.flush(BOUND_S)
    assert "the cache was turned off" in stage.session.report()["delivery"]["failures"][B]


def test_requests_of_a_warm_up_are_none_of_a_clients(stages, kind):
    stage = stages(kind, tap=True)
    with stage.session.warming_up():
        stage.step(fake.scheduled(new=[("_warmup_0_", [2, 3], [1], 0, 2)]))
        stage.step(fake.scheduled(running=[("_warmup_0_", 2, 1, None)]))
        stage.step(fake.scheduled(finished=["_warmup_0_"]))
        stage.read(2)
    start(stage, a_00000001=21)
    stage.finish()
    assert stage.session.sink.request_ids() == (A,)
    assert list(stage.session.tap.requests) == [A]
    assert stage.session.cache.stats().steps_saved == 1


def test_the_tap_sees_the_tokens_that_the_device_was_fed(stages, kind):
    stage = stages(kind, tap=True)
    start(stage, a_00000001=21)
    stage.step(fake.scheduled(running=[(A, 10, 1, None)]), a_00000001=22)
    stage.finish()
    assert stage.session.tap.failure is None
    assert stage.session.tap.requests[A].token_ids == [*PROMPT, 21]
    assert stage.session.tap.equal_rows([*PROMPT, 21], stage.stored(A).hidden_states).all()
