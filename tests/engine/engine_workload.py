# SPDX-License-Identifier: Apache-2.0
"""Drives one in-process engine step by step, and remembers what the scheduler did with the blocks."""

import gc
from dataclasses import dataclass, field

from vllm import LLM, SamplingParams

from omni_core.integrations.vllm.session import stage_session

WORKER = "omni_core.integrations.vllm.cpu_worker.OmniCpuWorker"


@dataclass
class Finished:
    """What the engine gave a client for one request."""

    prompt: list[int]
    output: list[int] = field(default_factory=list)
    done: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


class BlockHistory:
    """Which prompt prefixes each KV block has held, and when it got the last, from the scheduler's own words."""

    def __init__(self, block_size: int):
        self._block_size = block_size
        self._held: dict[int, set[int]] = {}
        self._filled_in: dict[int, int] = {}
        self._tables: dict[str, list[int]] = {}
        self._prompts: dict[str, list[int]] = {}
        self._step = 0
        self.rows_hit = {"in the step that computes them": 0, "stored": 0, "stored in a recycled block": 0}
        self.preemptions = 0
        self.drafts = 0
        self.decode_runs = 0
        """Runs of one token and its drafts: without accepted drafts, as many as tokens behind the first ones."""

    def see(self, scheduler_output) -> None:
        self._step += 1
        self.preemptions += len(scheduler_output.preempted_req_ids or ())
        for new in scheduler_output.scheduled_new_reqs:
            blocks, hit = list(new.block_ids[0]), new.num_computed_tokens // self._block_size
            for block in blocks[:hit]:
                if self._filled_in[block] == self._step:
                    self.rows_hit["in the step that computes them"] += self._block_size
                else:
                    self.rows_hit["stored"] += self._block_size
                    if len(self._held[block]) > 1:
                        self.rows_hit["stored in a recycled block"] += self._block_size
            self._prompts[new.req_id], self._tables[new.req_id] = list(new.prompt_token_ids), blocks[:hit]
            self._fill(new.req_id, blocks[hit:])
        cached = scheduler_output.scheduled_cached_reqs
        drafts = scheduler_output.scheduled_spec_decode_tokens
        self.drafts += sum(map(len, drafts.values()))
        scheduled = scheduler_output.num_scheduled_tokens
        self.decode_runs += sum(scheduled[req_id] == 1 + len(drafts.get(req_id, ())) for req_id in cached.req_ids)
        for req_id, new_blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if req_id in cached.resumed_req_ids:
                self._tables[req_id] = []
            self._fill(req_id, new_blocks[0] if new_blocks else [])

    def _fill(self, req_id, blocks) -> None:
        table, prompt = self._tables[req_id], self._prompts[req_id]
        for block in blocks:
            table.append(block)
            end = len(table) * self._block_size
            own = req_id if end > len(prompt) else ""  # generated tokens belong to one request
            self._held.setdefault(block, set()).add(hash((*prompt[:end], own)))
            self._filled_in[block] = self._step


class Engine:
    """One engine with greedy sampling. Use as a context manager: the next engine of a process needs this one gone."""

    def __init__(
        self, model: str, *, cache: bool, block_size: int, num_blocks: int, settings: dict | None = None, **options
    ):
        """`settings` are further ones of Omni Core, `options` further ones of vLLM."""
        section = {"enabled": cache, "sink": "memory", "on_error": "raise", "tap": True} | (settings or {})
        self.llm = LLM(
            model=model,
            dtype="float32",
            enforce_eager=options.pop("enforce_eager", True),
            skip_tokenizer_init=True,
            max_model_len=512,
            block_size=block_size,
            num_gpu_blocks_override=num_blocks,
            enable_prefix_caching=cache,
            worker_cls=WORKER,
            additional_config={"omni_core": section},
            **options,
        )
        self.session = stage_session(self.llm)
        self.requests: dict[str, Finished] = {}
        self.history = BlockHistory(block_size)
        worker = self.llm.llm_engine.model_executor.driver_worker.worker
        execute_model = worker.execute_model

        def watched(scheduler_output):
            self.history.see(scheduler_output)
            return execute_model(scheduler_output)

        worker.execute_model = watched

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()

    @property
    def runner(self):
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner

    def add(self, request_id: str, prompt: list[int], max_tokens: int = 8, **sampling) -> None:
        self.requests[request_id] = Finished(prompt)
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False, **sampling)
        self.llm.llm_engine.add_request(request_id, {"prompt_token_ids": prompt}, params)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for output in self.llm.llm_engine.step():
                self.requests[output.request_id].output = list(output.outputs[0].token_ids)
                self.requests[output.request_id].done = output.finished

    def abort(self, request_id: str) -> None:
        self.llm.llm_engine.abort_request([request_id])

    def run(self) -> None:
        while self.llm.llm_engine.has_unfinished_requests():
            self.step()

    def wave(self, requests: dict[str, list[int]], max_tokens: int = 8, **sampling) -> None:
        for request_id, prompt in requests.items():
            self.add(request_id, prompt, max_tokens, **sampling)
        self.run()
