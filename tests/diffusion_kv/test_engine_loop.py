# SPDX-License-Identifier: Apache-2.0
"""The engine loop on parts that write down what they are asked: who runs when, who ends how, and in which order."""

import threading

import numpy as np
import pytest
from diffusion_kv.recorded_parts import Recorder, recorded_engine, request

from omni_core.diffusion_kv.errors import RequestRefusedError
from omni_core.diffusion_kv.pipeline import LoRARequest
from omni_core.diffusion_kv.tiny_hunyuan import make_adapter
from omni_core.diffusion_kv.tiny_hunyuan.options import TinyHunyuanOptions
from omni_core.integrations.diffusion.errors import EngineBusyError, EngineClosedError, EngineDeadError
from omni_core.integrations.diffusion.results import Outcome


@pytest.fixture
def recorder():
    return Recorder()


def ids(finished):
    return [one.request_id for one in finished]


def pictures_alone(*requests):
    """Each request's picture, with nothing else in its engine."""
    pictures = {}
    for asked in requests:
        with recorded_engine(Recorder(), paged=False) as engine:
            (finished,) = engine.generate([asked])
            pictures[asked.request_id] = finished.picture()
    return pictures


# -- one request ------------------------------------------------------------------------------------------------------


def test_a_request_goes_through_scheduler_worker_and_model_in_one_order(recorder):
    with recorded_engine(recorder, caching=True) as engine:
        (finished,) = engine.generate([request("a")])
    assert recorder.calls == [
        ("preprocess", "a"),
        ("identify", "a", 0),
        ("reserve", "a"),
        ("install", "a"),
        ("start", "a"),
        ("denoise", "a", 0),
        ("publish", "a"),
        ("denoise", "a", 1),
        ("denoise", "a", 2),
        ("decode", "a"),
        ("remove", "a"),  # the worker first: a free page is nobody's to write
        ("publish", "a"),
        ("free", "a"),
        ("close",),
    ]
    assert finished.outcome is Outcome.COMPLETED
    assert finished.picture().shape == (64, 64, 3)
    assert finished.latents.shape[1:] == (4, 4)
    total_tokens = 110 - 2 * 26 - 7  # of the debug layout, without its two references
    assert (finished.rows, finished.first_step_tokens) == (2, 2 * total_tokens)
    assert finished.kv.queried_tokens == 2 * total_tokens
    assert finished.kv.cached_prefix_tokens == 0


def test_the_times_of_a_request_are_parts_of_its_whole(recorder):
    with recorded_engine(recorder, caching=True) as engine:
        (finished,) = engine.generate([request(references=(np.zeros((8, 8, 3), np.uint8),))])
    times = finished.timings
    parts = (
        times.preprocess_s,
        times.hash_s,
        times.queue_s,
        times.schedule_s,
        times.start_s,
        times.first_step_s,
        times.publish_s,
        times.later_steps_s,
        times.decode_s,
    )
    assert min(parts) > 0.0
    assert sum(parts) <= times.end_to_end_s
    assert 0.0 < times.encoder_s < times.start_s


def test_without_guidance_one_row_runs(recorder):
    with recorded_engine(recorder) as engine:
        one, two = engine.generate([request("one", guidance_scale=1.0), request("two")])
    assert (one.rows, two.rows) == (1, 2)
    assert one.first_step_tokens * 2 == two.first_step_tokens
    assert one.picture().tolist() == pictures_alone(request("one", guidance_scale=1.0))["one"].tolist()
    assert one.picture().tolist() != two.picture().tolist()


def test_one_step_is_first_and_last(recorder):
    with recorded_engine(recorder) as engine:
        engine.add_request(request(num_inference_steps=1))
        (finished,) = engine.step()
    assert finished.outcome is Outcome.COMPLETED
    assert recorder.of("denoise") == [("denoise", "a", 0)]


# -- several at once --------------------------------------------------------------------------------------------------


def test_each_step_moves_every_wave_by_one_and_a_forward_is_one_wave(recorder):
    with recorded_engine(recorder) as engine:
        engine.add_request(request("a"))
        engine.step()
        engine.add_request(request("b", prompt="a hen"))
        engine.add_request(request("c", prompt="an owl"))
        assert engine.step() == []
        assert ids(engine.step()) == ["a"]
        assert ids(engine.step()) == ["b", "c"]
        assert not engine.has_unfinished_requests
    assert recorder.of("denoise") == [
        ("denoise", "a", 0),
        ("denoise", "a", 1),
        ("denoise", "b+c", 0),
        ("denoise", "a", 2),
        ("denoise", "b+c", 1),
        ("denoise", "b+c", 2),
    ]


@pytest.mark.parametrize("paged", [False, True])
def test_requests_at_different_steps_give_the_pictures_they_give_alone(recorder, paged):
    asked = [request(f"r{index}", prompt=f"{index}", seed=index, num_inference_steps=2 + index) for index in range(4)]
    with recorded_engine(recorder, paged=paged, max_wave_requests=1, max_running_requests=3) as engine:
        finished = []
        for one in asked:
            engine.add_request(one)
            finished.extend(engine.step())
        finished.extend(engine.run())
    alone = pictures_alone(*asked)
    assert sorted(ids(finished)) == sorted(alone)
    for one in finished:
        assert one.picture().tolist() == alone[one.request_id].tolist()


def test_no_more_requests_run_than_may(recorder):
    with recorded_engine(recorder, max_wave_requests=1, max_running_requests=2) as engine:
        for name in "abc":
            engine.add_request(request(name))
        engine.step()
        stats = engine.stats()
        assert (stats.running_requests, stats.running_waves, stats.waiting_requests) == (2, 2, 1)
        assert ids(engine.run()) == ["a", "b", "c"]


def test_a_request_without_pages_waits_and_nobody_overtakes_it(recorder):
    with recorded_engine(recorder, total_pages=10) as engine:  # a pair of rows takes 8, a single row 4
        for asked in (request("a"), request("b"), request("c", guidance_scale=1.0)):
            engine.add_request(asked)
        assert ids(engine.run()) == ["a", "b", "c"]
    assert recorder.of("reserve", "free") == [
        ("reserve", "a"),
        ("free", "a"),
        ("reserve", "b"),
        ("free", "b"),
        ("reserve", "c"),
        ("free", "c"),
    ]


def test_adapters_share_no_forward(recorder, tmp_path):
    path = tmp_path / "adapter.safetensors"
    make_adapter(path, TinyHunyuanOptions(layout="debug", num_layers=1).transformer, rank=2, seed=1)
    with recorded_engine(recorder) as engine:
        engine.loras.load("ink", str(path))
        half, whole = engine.loras.request("ink", 0.5), engine.loras.request("ink")
        asked = [request("p"), request("h", lora=half), request("w1", lora=whole), request("w2", lora=whole)]
        finished = engine.generate(asked)
    assert {call[1] for call in recorder.of("denoise")} == {"p", "h", "w1+w2"}
    plain, halved, *twice = (one.picture().tolist() for one in finished)
    assert plain != halved != twice[0] == twice[1]


def test_an_adapter_loaded_again_is_another_one(recorder):
    with recorded_engine(recorder) as engine:
        engine.loras.load("ink", "first")
        first = engine.loras.request("ink")
        engine.loras.load("ink", "first")
        engine.loras.load("oil", "second")
        again, other = engine.loras.request("ink"), engine.loras.request("oil")
        with pytest.raises(LookupError, match="no adapter 'chalk' was loaded; there is 'ink', 'oil'"):
            engine.loras.request("chalk")
    assert again.lora_id == first.lora_id != other.lora_id
    assert again.load_epoch > first.load_epoch


def test_any_thread_may_add(recorder):
    names = [f"r{index}" for index in range(8)]
    with recorded_engine(recorder) as engine:
        threads = [threading.Thread(target=engine.add_request, args=(request(name),)) for name in names]
        for thread in threads:
            thread.start()
        finished = []
        while len(finished) < len(names):
            finished.extend(engine.step())
        for thread in threads:
            thread.join()
    assert sorted(ids(finished)) == names


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_a_refused_request_leaves_the_others_alone(recorder):
    with recorded_engine(recorder) as engine:
        engine.add_request(request("a"))
        with pytest.raises(RequestRefusedError, match="'b': num_inference_steps=0"):
            engine.add_request(request("b", num_inference_steps=0))
        with pytest.raises(RequestRefusedError, match="'a': a request of this id is live"):
            engine.add_request(request("a"))
        assert ids(engine.run()) == ["a"]
        engine.add_request(request("b"))  # the refused id was never taken
        engine.add_request(request("a"))
        assert ids(engine.run()) == ["b", "a"]


def test_a_request_that_never_fits_is_refused_by_name_and_the_next_ones_run(recorder):
    with recorded_engine(recorder, total_pages=4) as engine:
        large, small = engine.generate([request("large"), request("small", guidance_scale=1.0)])
    assert large.outcome is Outcome.REFUSED
    with pytest.raises(RequestRefusedError, match="'large': 8 pages are needed and there are 4"):
        large.picture()
    assert small.outcome is Outcome.COMPLETED


def test_generate_tells_the_refused_among_the_others_in_order(recorder):
    with recorded_engine(recorder) as engine:
        engine.add_request(request("earlier", num_inference_steps=1))
        twice = engine.generate([request("a"), request("a"), request("b", guidance_scale=float("nan"))])
        assert [one.outcome for one in twice] == [Outcome.COMPLETED, Outcome.REFUSED, Outcome.REFUSED]
        assert "no finite number" in str(twice[2].error)
        assert ids(engine.step()) == ["earlier"]


# -- aborts -----------------------------------------------------------------------------------------------------------


def test_an_abort_before_the_first_step_computes_nothing(recorder):
    with recorded_engine(recorder, max_running_requests=1) as engine:
        engine.add_request(request("a"))
        engine.step()
        engine.add_request(request("b"))
        engine.step()
        engine.add_request(request("c"))
        assert engine.abort("b")  # in the queue
        assert engine.abort("c")  # not even there
        assert not engine.abort("nobody")
        finished = engine.run()
    assert [(one.request_id, one.outcome) for one in finished] == [
        ("b", Outcome.ABORTED),
        ("c", Outcome.ABORTED),
        ("a", Outcome.COMPLETED),
    ]
    assert {call[1] for call in recorder.of("start", "install", "denoise", "remove", "free")} == {"a"}


def test_an_abort_after_step_0_keeps_what_was_published_and_the_rest_of_the_wave_goes_on(recorder):
    with recorded_engine(recorder) as engine:
        engine.add_request(request("a"))
        engine.add_request(request("b", prompt="a hen"))
        engine.step()
        assert engine.abort("a")
        (aborted,) = engine.step()
        assert aborted.outcome is Outcome.ABORTED
        assert aborted.error is None
        with pytest.raises(LookupError, match="'a' was aborted"):
            aborted.picture()
        (finished,) = engine.run()
    of_a = [call[0] for call in recorder.calls if call[1:] == ("a",)]
    assert of_a == ["preprocess", "reserve", "install", "start", "publish", "remove", "free"]
    assert recorder.of("denoise") == [("denoise", "a+b", 0), ("denoise", "b", 1), ("denoise", "b", 2)]
    assert finished.picture().tolist() == pictures_alone(request("b", prompt="a hen"))["b"].tolist()


def test_an_id_may_come_back_after_its_abort(recorder):
    with recorded_engine(recorder) as engine:
        engine.add_request(request("a"))
        engine.step()
        engine.abort("a")
        engine.abort("a")
        assert ids(engine.step()) == ["a"]
        engine.add_request(request("a"))
        (finished,) = engine.run()
    assert finished.outcome is Outcome.COMPLETED
    assert recorder.of("reserve", "free") == [("reserve", "a"), ("free", "a")] * 2


# -- failures ---------------------------------------------------------------------------------------------------------


def test_a_failing_forward_ends_its_wave_alone_and_publishes_nothing(recorder):
    recorder.failures["denoise", "a+b", 0] = RuntimeError("out of luck")
    with recorded_engine(recorder) as engine:
        for asked in (request("a"), request("b"), request("c", num_inference_steps=2)):
            engine.add_request(asked)
        finished = engine.run()
    assert [(one.request_id, one.outcome) for one in finished] == [
        ("a", Outcome.FAILED),
        ("b", Outcome.FAILED),
        ("c", Outcome.COMPLETED),
    ]
    with pytest.raises(RuntimeError, match="out of luck"):
        finished[0].picture()
    assert {call[1] for call in recorder.of("publish")} == {"c"}
    assert {call[1] for call in recorder.of("remove")} == {call[1] for call in recorder.of("free")} == {"a", "b", "c"}


@pytest.mark.parametrize("call", ["install", "start", "decode"])
def test_what_fails_for_one_request_of_a_wave_ends_that_one(recorder, call):
    recorder.failures[call, "a"] = RuntimeError("out of luck")
    with recorded_engine(recorder) as engine:
        a, b = engine.generate([request("a"), request("b")])
        assert engine.stats().failed_requests == 1
    assert (a.outcome, b.outcome) == (Outcome.FAILED, Outcome.COMPLETED)
    assert recorder.of("remove", "free")[:2] == [("remove", "a"), ("free", "a")]


def test_a_worker_that_cannot_drop_a_request_stops_the_engine_worker_first(recorder):
    recorder.failures["remove", "a"] = OSError("the device is gone")
    engine = recorded_engine(recorder)
    engine.add_request(request("a", num_inference_steps=1))
    engine.add_request(request("b"))
    with pytest.raises(EngineDeadError, match=r"drop request 'a' \(generation 1\).*OSError: the device") as dead:
        engine.step()
    assert {one.request_id: one.outcome for one in dead.value.finished} == {"a": Outcome.FAILED, "b": Outcome.FAILED}
    assert recorder.of("close", "free") == [("close",), ("free", "a")]
    for call in (engine.step, engine.run, engine.reset_prefix_cache, lambda: engine.add_request(request("c"))):
        with pytest.raises(EngineDeadError, match="the device is gone"):
            call()
    assert engine.close() == []
    assert engine.stats().failed_requests == 2


def test_pages_stay_taken_when_the_worker_cannot_even_be_stopped(recorder):
    recorder.failures["remove", "a"] = OSError("the device is gone")
    recorder.failures["close",] = OSError("it does not answer")
    engine = recorded_engine(recorder)
    engine.add_request(request("a", num_inference_steps=1))
    with pytest.raises(EngineDeadError) as dead:
        engine.step()
    assert recorder.of("free") == []
    assert any("it does not answer" in note for note in dead.value.__cause__.__notes__)


def test_closing_stops_the_worker_then_gives_the_pages_back_and_tells_what_was_live(recorder):
    engine = recorded_engine(recorder)
    engine.add_request(request("running"))
    engine.step()
    engine.add_request(request("arrived"))
    ended = engine.close()
    assert [(one.request_id, one.outcome) for one in ended] == [
        ("running", Outcome.ABORTED),
        ("arrived", Outcome.ABORTED),
    ]
    assert recorder.calls[-2:] == [("close",), ("free", "running")]
    assert engine.close() == []
    for call in (engine.step, lambda: engine.add_request(request("late"))):
        with pytest.raises(EngineClosedError):
            call()


# -- weights and reset ------------------------------------------------------------------------------------------------


def test_new_weights_are_another_identity_and_wait_for_running_requests(recorder):
    loaded = []
    with recorded_engine(recorder, caching=True) as engine:
        engine.add_request(request("a"))
        engine.step()
        with pytest.raises(EngineBusyError, match="1 requests are queued or running"):
            engine.update_weights(lambda: loaded.append("too early"))
        engine.run()
        engine.add_request(request("b"))  # arrived, not queued: it will run on the new weights
        engine.update_weights(lambda: loaded.append("now"))
        engine.run()
        assert engine.stats().weight_epoch == 1
    assert loaded == ["now"]
    assert recorder.of("identify") == [("identify", "a", 0), ("identify", "b", 0), ("identify", "b", 1)]
    assert recorder.of("reset") == [("reset",)]


def test_a_failed_update_counts_as_new_weights(recorder):
    def fail():
        raise OSError("half written")

    with recorded_engine(recorder, caching=True) as engine:
        with pytest.raises(OSError, match="half written"):
            engine.update_weights(fail)
        assert engine.stats().weight_epoch == 1
    assert recorder.of("reset") == [("reset",)]


def test_a_reset_is_refused_while_a_request_holds_pages(recorder):
    with recorded_engine(recorder, caching=True) as engine:
        engine.add_request(request("a"))
        engine.step()
        assert not engine.reset_prefix_cache()
        engine.run()
        assert engine.reset_prefix_cache()
    with recorded_engine(recorder, paged=False) as engine:
        assert engine.reset_prefix_cache()


def test_without_caching_nothing_is_identified(recorder):
    with recorded_engine(recorder) as engine:
        (finished,) = engine.generate([request("a")])
    assert recorder.of("identify") == []
    assert finished.timings.hash_s == 0.0


def test_an_identifier_without_pages_is_a_mistake(recorder):
    with pytest.raises(ValueError, match="an identifier finds pages"):
        recorded_engine(recorder, paged=False, caching=True)


def test_an_adapter_whose_file_went_is_refused_when_it_starts(recorder, tmp_path):
    path = tmp_path / "adapter.safetensors"
    make_adapter(path, TinyHunyuanOptions(layout="debug", num_layers=1).transformer, rank=2, seed=1)
    with recorded_engine(recorder) as engine:
        engine.add_request(request("a", lora=LoRARequest("ink", 1, str(path), 1, 1.0)))
        path.unlink()
        (finished,) = engine.run()
    assert finished.outcome is Outcome.REFUSED
    assert "there is no file" in str(finished.error)
