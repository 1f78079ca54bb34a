# SPDX-License-Identifier: Apache-2.0
"""One engine in this process under a feature, driven step by step, and what it gave each client."""

import gc
from dataclasses import dataclass, field

from vllm import LLM, SamplingParams

from omni_core.integrations.vllm.delivery.ledger import UNKNOWN_TOKEN_ID
from omni_core.integrations.vllm.rpc.stage_client import flush_stage
from omni_core.integrations.vllm.session import stage_session
from omni_core.sinks.safetensors_files import SafetensorsSink, read_request_file, request_files

WORKER = "omni_core.integrations.vllm.cpu_worker.OmniCpuWorker"


@dataclass
class ClientRequest:
    """What a client asked for and got."""

    prompt_token_ids: list[int]
    num_samples: int = 1
    outputs: dict[int, list[int]] = field(default_factory=dict)
    done: bool = False
    aborted: bool = False
    num_cached_tokens: int = 0

    def fed_tokens(self, sample: int) -> list[int]:
        """Every token whose row was computed: the last one sampled is never fed."""
        return (self.prompt_token_ids + self.outputs.get(sample, []))[: self.num_rows(sample)]

    def num_rows(self, sample: int) -> int:
        return len(self.prompt_token_ids) + max(len(self.outputs.get(sample, [])) - 1, 0)


class FeatureEngine:
    """Greedy unless told otherwise. A context manager: the next engine of a process needs this one gone."""

    def __init__(self, model: str, *, cache: bool, num_blocks: int = 200, settings=None, **options):
        omni = {"enabled": cache, "sink": "memory", "on_error": "raise", "tap": True}
        omni |= {"sink_options": {"keep_aborted": True}} | (settings or {})
        chosen = {
            "dtype": "float32",
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "max_model_len": 1024,
            "block_size": 32,
            "num_gpu_blocks_override": num_blocks,
            "enable_prefix_caching": cache,
            "worker_cls": WORKER,
            "additional_config": {"omni_core": omni},
        } | options
        self._detokenize = not chosen["skip_tokenizer_init"]
        self.llm = LLM(model=model, **chosen)
        self.session = stage_session(self.llm)
        self.requests: dict[str, ClientRequest] = {}
        self.num_preemptions = 0
        self.num_drafts = self.num_drafts_accepted = self.num_sampled = 0
        self._watch(self.llm.llm_engine.model_executor.driver_worker.worker)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()

    def add(self, request_id, prompt, max_tokens=8, *, lora_request=None, num_samples=1, **sampling):
        """`prompt` is token ids, or a prompt as vLLM takes it."""
        given = {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt
        params = SamplingParams(
            max_tokens=max_tokens,
            n=num_samples,
            detokenize=self._detokenize,
            **({"temperature": 0.0, "ignore_eos": True} | sampling),
        )
        known = given.get("prompt_token_ids") or [UNKNOWN_TOKEN_ID] * len(given.get("prompt_embeds", ()))
        self.requests[request_id] = ClientRequest(list(known), num_samples)
        self.llm.llm_engine.add_request(request_id, given, params, lora_request=lora_request)

    def step(self, times=1):
        for _ in range(times):
            for output in self.llm.llm_engine.step():
                request = self.requests[output.request_id]
                if output.prompt_token_ids is not None and UNKNOWN_TOKEN_ID not in request.prompt_token_ids:
                    request.prompt_token_ids = list(output.prompt_token_ids)
                request.num_cached_tokens = output.num_cached_tokens or 0
                request.done = output.finished
                for sample in output.outputs:
                    request.outputs[sample.index] = list(sample.token_ids)

    def abort(self, request_id):
        self.requests[request_id].aborted = True
        self.llm.llm_engine.abort_request([request_id])

    def run(self):
        while self.llm.llm_engine.has_unfinished_requests():
            self.step()

    def wave(self, prompts, max_tokens=8, **options):
        for request_id, prompt in prompts.items():
            self.add(request_id, prompt, max_tokens, **options)
        self.run()

    def reset_prefix_cache(self, **options):
        return self.llm.llm_engine.reset_prefix_cache(**options)

    def flush(self):
        flush_stage(self.llm)
        if self.session.cache is not None:
            self.session.cache.flush(20.0)

    def stored(self):
        """What the sink keeps, by the engine's id: in memory, or read back from its files."""
        sink = self.session.sink
        if isinstance(sink, SafetensorsSink):
            kept = map(read_request_file, request_files(sink.directory))
            return {stored.req_id: stored for stored in kept}
        return {req_id: sink.request_by_internal_id(req_id) for req_id in sink.request_ids()}

    @property
    def num_accepted_behind_the_end(self):
        """Tokens the sampler gave, drafts among them, that the engine did not keep."""
        kept = sum(len(tokens) for request in self.requests.values() for tokens in request.outputs.values())
        return self.num_sampled - kept

    def internal_ids(self, request_id):
        """Sample index to the engine's id, told from the ids the tap saw."""
        found = {}
        for req_id in self.session.tap.requests:
            name = req_id[:-9]
            if name == request_id:
                found[0] = req_id
            elif self.requests[request_id].num_samples > 1 and name.endswith(f"_{request_id}"):
                found[int(name.split("_", 1)[0])] = req_id
        return found

    def _watch(self, worker):
        execute_model, sample_tokens = worker.execute_model, worker.sample_tokens
        drafts = {}

        def executed(scheduler_output, *args):
            self.num_preemptions += len(scheduler_output.preempted_req_ids or ())
            drafts.clear()
            drafts.update(scheduler_output.scheduled_spec_decode_tokens)
            return execute_model(scheduler_output, *args)

        def sampled(*args):
            output = sample_tokens(*args)
            self.num_sampled += sum(map(len, output.sampled_token_ids))
            for req_id, tokens in drafts.items():
                self.num_drafts += len(tokens)
                self.num_drafts_accepted += len(output.sampled_token_ids[output.req_id_to_index[req_id]]) - 1
            return output

        worker.execute_model, worker.sample_tokens = executed, sampled
