# SPDX-License-Identifier: Apache-2.0
"""Features of the engine on a plain text model."""

import threading

import torch
from feature_engine import WORKER, FeatureEngine
from feature_models import llama, lora_adapter
from scenario import Outcome, Prompts, hits, outcome_of, refuse, refuse_configuration, serve
from verdict import judge
from vllm import LLM
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RepetitionDetectionParams

NGRAM = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
}


def chunked_prefill(folder):
    prompts = Prompts(1)
    waves = [prompts.named(f"wave{turn}", "a", 3, shared=160, own=60) for turn in range(2)]

    def drive(engine):
        for wave in waves:
            engine.wave(wave)

    return serve(llama(folder), drive, lambda one: hits(one, 640), max_num_batched_tokens=64, max_num_seqs=8)


def same_step_hits(folder):
    wave = Prompts(2).named("twin", "a", 6, shared=100, own=12)
    return serve(llama(folder), lambda one: one.wave(wave), lambda one: hits(one, 5 * 96), max_num_batched_tokens=2048)


def preemption(folder, **options):
    prompts = Prompts(3)
    crowd = prompts.named("crowd", "a", 4, shared=40, own=60)
    after = prompts.named("after", "a", 2, shared=40, own=60)

    def drive(engine):
        engine.wave(crowd, max_tokens=160)
        engine.wave(after)

    def shown(engine):
        return hits(engine) | {"preemptions": (engine.num_preemptions, 1)}

    return serve(llama(folder), drive, shown, num_blocks=14, max_model_len=384, **options)


def aborts(folder):
    prompts = Prompts(4)
    before, during, after = prompts.tokens(200), prompts.family("b", 3, shared=200, own=60), prompts.tokens(90)
    followers = prompts.named("follower", "b", 2, shared=200, own=10)

    def drive(engine):
        engine.add("before", before)
        engine.abort("before")
        engine.add("during", during[0])
        engine.step(2)
        engine.abort("during")
        engine.add("after", after, max_tokens=50)
        engine.step(6)
        engine.abort("after")
        engine.wave(followers)

    return serve(llama(folder), drive, lambda one: hits(one, 2 * 64), max_num_batched_tokens=96, max_num_seqs=8)


def speculation(folder, **options):
    prompts = Prompts(5)
    wave = {f"loop-{index}": prompts.repetitive(90 + index) for index in range(4)}
    again = {f"again-{index}": [*prompt, 7, 8, 9] for index, prompt in enumerate(wave.values())}

    def drive(engine):
        engine.wave(wave, max_tokens=120)
        engine.wave(again, max_tokens=30)
        first = engine.requests["loop-0"]
        engine.wave({"continued": (first.prompt_token_ids + first.outputs[0])[:200]})

    def shown(engine):
        rejected = engine.num_drafts - engine.num_drafts_accepted
        return hits(engine, 64) | {
            "accepted drafts": (engine.num_drafts_accepted, 20),
            "rejected drafts": (rejected, 20),
        }

    return serve(llama(folder, attention_scale=0.01), drive, shown, only_with_cache=NGRAM, **options)


def speculation_and_ends(folder):
    """Requests that end inside their accepted drafts: by a stop token, by a repetition, by their length."""
    prompts = Prompts(20)
    wave = {f"loop-{index}": prompts.repetitive(60 + index) for index in range(6)}

    def drive(engine):
        engine.wave(wave, max_tokens=120)
        for index, (name, prompt) in enumerate(wave.items()):
            outputs = engine.requests[name].outputs[0]
            # It has seen its own answer, so the drafter guesses it from the first token on.
            told = [*prompt, *outputs, *prompt[-20:]]
            engine.wave({f"free-{index}": told}, max_tokens=60)
            free = engine.requests[f"free-{index}"].outputs[0]
            newest = max(free[:50], key=free.index)
            engine.add(f"stop-{index}", told, 60, ignore_eos=False, stop_token_ids=[newest])
            engine.add(f"length-{index}", told, 40 + index)
            repetition = RepetitionDetectionParams(max_pattern_size=60, min_count=2)
            engine.add(f"repeat-{index}", told, 120, repetition_detection=repetition)
        engine.run()

    def shown(engine):
        lengths = {name: len(request.outputs[0]) for name, request in engine.requests.items()}
        shorter = {
            kind: sum(lengths[f"{kind}-{index}"] < most for index in range(6))
            for kind, most in (("stop", 60), ("repeat", 120))
        }
        return hits(engine, 64) | {
            "accepted drafts": (engine.num_drafts_accepted, 100),
            "requests ended by a stop token": (shorter["stop"], 5),
            "requests ended by a repetition": (shorter["repeat"], 1),
            "tokens sampled behind an end and left out": (engine.num_accepted_behind_the_end, 3),
        }

    return serve(llama(folder, attention_scale=0.01), drive, shown, only_with_cache=NGRAM)


def speculation_and_preemption(folder):
    prompts = Prompts(6)
    crowd = {f"loop-{index}": prompts.repetitive(100 + 3 * index) for index in range(4)}

    def shown(engine):
        return {
            "preemptions": (engine.num_preemptions, 1),
            "accepted drafts": (engine.num_drafts_accepted, 20),
        }

    return serve(
        llama(folder, attention_scale=0.01),
        lambda one: one.wave(crowd, max_tokens=160),
        shown,
        num_blocks=14,
        max_model_len=384,
        only_with_cache=NGRAM,
    )


def parallel_sampling(folder):
    prompts = Prompts(7).named("many", "a", 2, shared=140, own=9)

    def drive(engine):
        engine.wave(prompts, max_tokens=20, num_samples=4, temperature=1.0, seed=7)

    def shown(engine):
        samples = sum(len(engine.internal_ids(name)) for name in engine.requests)
        return hits(engine, 3 * 128) | {"samples": (samples, 8)}

    return serve(llama(folder), drive, shown)


def lora(folder):
    model = llama(folder / "model")
    folders = {number: lora_adapter(folder / f"adapter-{number}", number) for number in (1, 2)}
    adapters = [None, *(LoRARequest(f"adapter-{number}", number, path) for number, path in folders.items())]
    prompts = Prompts(8).family("a", 2, shared=100, own=10)

    def drive(engine):
        for turn, prompt in enumerate(prompts):
            for number, adapter in enumerate(adapters):
                # One after the other: vLLM 0.32 on CPU leaves an adapter out where a prefill holds others too.
                engine.add(f"turn{turn}-adapter{number}", prompt, lora_request=adapter)
                engine.run()

    def shown(engine):
        sink = engine.session.sink
        last = [sink.request_by_internal_id(engine.internal_ids(f"turn0-adapter{n}")[0]) for n in range(3)]
        differing = len({stored.hidden_states[50].numpy().tobytes() for stored in last})
        return hits(engine, 3 * 96) | {"adapters with rows of their own": (differing, 3)}

    return serve(model, drive, shown, enable_lora=True, max_loras=2, max_lora_rank=8)


def cache_salt(folder):
    prompt = Prompts(9).tokens(110)

    def drive(engine):
        for index, salt in enumerate([None, None, "a", "a", "b"]):
            given = {"prompt_token_ids": prompt} | ({} if salt is None else {"cache_salt": salt})
            engine.add(f"salt-{index}", given)
            engine.run()

    def shown(engine):
        hit = [engine.requests[f"salt-{index}"].num_cached_tokens for index in range(5)]
        return hits(engine, 192) | {"salts that hit their own only": (int(hit == [0, 96, 0, 96, 0]), 1)}

    return serve(llama(folder), drive, shown)


def reset_prefix_cache(folder):
    prompts = Prompts(10)
    waves = [prompts.named(f"wave{turn}", "a", 2, shared=100, own=10) for turn in range(3)]
    long = prompts.tokens(80)
    told = {}

    def drive(engine):
        engine.wave(waves[0])
        told["idle"] = engine.reset_prefix_cache()
        engine.wave(waves[1])
        engine.add("running", long, max_tokens=30)
        engine.step(5)
        told["running"] = engine.reset_prefix_cache()
        told["forced"] = engine.reset_prefix_cache(reset_running_requests=True)
        engine.run()
        engine.wave(waves[2])

    def shown(engine):
        first_after = engine.requests["wave1-0"].num_cached_tokens + engine.requests["wave2-0"].num_cached_tokens
        agreed = told == {"idle": True, "running": False, "forced": True}
        return hits(engine, 3 * 96) | {
            "resets as expected": (int(agreed), 1),
            "first requests after a reset without a hit": (int(first_after == 0), 1),
        }

    return serve(llama(folder), drive, shown)


def structured_output(folder):
    from vllm.sampling_params import StructuredOutputsParams

    prompts = Prompts(11).named("json", "a", 3, shared=100, own=7)

    def drive(engine):
        engine.wave(
            prompts,
            max_tokens=24,
            ignore_eos=False,
            structured_outputs=StructuredOutputsParams(regex="(yes|no) [0-9]{4,12}"),
        )

    def shown(engine):
        tokenizer = engine.llm.get_tokenizer()
        texts = [tokenizer.decode(one.outputs[0], skip_special_tokens=True) for one in engine.requests.values()]
        fitting = sum(text.replace(" ", "").startswith(("yes", "no")) for text in texts)
        return hits(engine, 96) | {"outputs of the asked form": (fitting, 3)}

    return serve(llama(folder), drive, shown, skip_tokenizer_init=False)


def logprobs(folder):
    prompts = Prompts(12)
    plain = prompts.named("plain", "a", 2, shared=100, own=7)
    with_prompt = prompts.named("prompt", "a", 2, shared=100, own=7)

    def drive(engine):
        engine.wave(plain, logprobs=5)
        engine.wave(with_prompt, prompt_logprobs=2)

    def shown(engine):
        skipped = sum(engine.requests[name].num_cached_tokens for name in with_prompt)
        return hits(engine, 96) | {"requests with prompt logprobs hit nothing": (int(skipped == 0), 1)}

    return serve(llama(folder), drive, shown)


def long_prompt(folder):
    prompts = Prompts(13)
    base = prompts.tokens(8000)
    waves = [{f"long-{index}": base + prompts.tokens(101)} for index in range(2)]

    def drive(engine):
        for wave in waves:
            engine.wave(wave)

    # Not exact: behind 8,000 tokens the attention kernel cuts a run of 101 rows otherwise than one of 4,005.
    return serve(llama(folder), drive, lambda one: hits(one, 8000), exact=False, max_model_len=8192, num_blocks=560)


def block_size(size):
    def scenario(folder):
        prompts = Prompts(14)
        waves = [prompts.named(f"wave{turn}", "a", 3, shared=280, own=20) for turn in range(2)]

        def drive(engine):
            for wave in waves:
                engine.wave(wave, max_tokens=20)

        return serve(llama(folder), drive, lambda one: hits(one, 5 * 256), block_size=size, num_blocks=6400 // size)

    return scenario


def bfloat16(folder):
    prompts = Prompts(15)
    waves = [prompts.named(f"wave{turn}", "a", 3, shared=100, own=20) for turn in range(2)]

    def drive(engine):
        for wave in waves:
            engine.wave(wave, max_tokens=20)

    return serve(llama(folder, torch.bfloat16), drive, lambda one: hits(one, 480), dtype="bfloat16")


def skip_reading(folder):
    prompt = Prompts(16).tokens(100)

    def drive(engine):
        engine.wave({"first": prompt})
        engine.wave({"second": prompt}, skip_reading_prefix_cache=True)
        engine.wave({"third": prompt})

    def shown(engine):
        return hits(engine, 96) | {
            "a request that reads nothing": (int(not engine.requests["second"].num_cached_tokens), 1)
        }

    return serve(llama(folder), drive, shown)


def prompt_embeddings(folder):
    generator = torch.Generator().manual_seed(18)
    one, other = torch.randn(2, 110, 128, generator=generator)
    half = torch.cat((one[:64], other[64:]))

    def drive(engine):
        for index, embeds in enumerate([one, one, other, half, other]):
            engine.add(f"embedded-{index}", {"prompt_embeds": embeds})
            engine.run()

    def shown(engine):
        hit = [engine.requests[f"embedded-{index}"].num_cached_tokens for index in range(5)]
        return hits(engine, 96 + 64 + 96) | {"hits of equal embeddings only": (int(hit == [0, 96, 0, 64, 96]), 1)}

    return serve(llama(folder), drive, shown, enable_prompt_embeds=True)


def isolation(folder):
    """A sink that hangs, then a cache that breaks: clients get every token all the same."""
    prompts = Prompts(19)
    waves = [prompts.named(f"wave{turn}", "a", 3, shared=100, own=20) for turn in range(3)]
    model, let_go = llama(folder), threading.Event()

    hung_to_the_end = []

    def hang(delivery):
        if not let_go.wait(60.0):
            hung_to_the_end.append(delivery.req_id)
        accept(delivery)

    def broken(*args, **kwargs):
        raise RuntimeError("the tables are gone")

    with FeatureEngine(model, cache=True, settings={"on_error": "isolate"}) as engine:
        sink, cache = engine.session.sink, engine.session.cache
        accept = sink.accept
        engine.wave(waves[0])
        sink.accept = hang
        engine.wave(waves[1])
        while_stuck = sum(engine.requests[name].done for name in waves[1])
        let_go.set()
        engine.flush()
        verdict = judge(engine)
        cache.save_outputs = broken
        engine.wave(waves[2])
        engine.flush()
        report = engine.session.report()
    with FeatureEngine(model, cache=False) as without:
        for wave in waves:
            without.wave(wave)
    agreeing = sum(engine.requests[name].outputs == without.requests[name].outputs for name in without.requests)
    shown = {
        "requests that ended while the sink hung": (0 if hung_to_the_end else while_stuck, 3),
        "requests with the tokens of a run without the cache": (agreeing, 9),
        "requests reported as failed": (report["delivery"]["requests_failed"], 3),
        "the cache is off, and says why": (int("the tables are gone" in str(report["off_reason"])), 1),
    }
    return outcome_of(verdict, shown)


def kv_consumer(folder):
    return refuse(llama(folder), "kv_role='kv_consumer'", kv_transfer_config=_transfer("kv_consumer", folder))


def kv_both(folder):
    return refuse(llama(folder), "kv_role='kv_both'", kv_transfer_config=_transfer("kv_both", folder))


def kv_producer(folder):
    return refuse(llama(folder), "kv_connector='ExampleConnector'", kv_transfer_config=_transfer("kv_producer", folder))


def pooling(folder):
    engine = LLM(
        model=llama(folder),
        runner="pooling",
        dtype="float32",
        enforce_eager=True,
        worker_cls=WORKER,
        additional_config={"omni_core": {"enabled": True}},
    )
    [gate] = [report["gate"] for report in engine.collective_rpc("omni_core_report")]
    [embedded] = engine.embed([{"prompt_token_ids": [5, 6, 7]}])
    right = (gate["status"], gate["rule"]) == ("ignored", "pooling") and len(embedded.outputs.embedding) == 128
    return Outcome("left alone" if right else "wrong", gate["reason"])


def context_parallel(folder):
    return refuse_configuration(
        llama(folder), "decode 2", lambda config: setattr(config.parallel_config, "decode_context_parallel_size", 2)
    )


def async_speculation(folder):
    # vLLM turns asynchronous scheduling off on CPU, so it is turned on in the finished configuration.
    return refuse_configuration(
        llama(folder),
        "with async_scheduling",
        lambda config: setattr(config.scheduler_config, "async_scheduling", True),
        **NGRAM,
    )


def priority_scheduling(folder):
    return refuse(llama(folder), "scheduling_policy='priority'", scheduling_policy="priority")


def _transfer(role, folder):
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "kv")},
    }
