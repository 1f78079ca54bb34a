# SPDX-License-Identifier: Apache-2.0
"""One phase of the demo in a process of its own: build the engine, drive two waves step by step, check the rows.

Run as `python -m omni_core.integrations.vllm.demo.run JOB RESULT DESCRIPTOR`. A process per phase gives both engines
the same start: nothing of the first one's memory, threads or kernel caches is left when the second is timed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from omni_core.integrations.vllm.demo.compare import cache_off_rows, check_against_tap, compare_with_cache_off
from omni_core.integrations.vllm.demo.job import (
    ComparedRequest,
    DeliveredRequest,
    DemoJob,
    DemoPrompt,
    Phase,
    PhaseResult,
    ServedRequest,
    WaveTime,
)
from omni_core.integrations.vllm.request_ids import client_request
from omni_core.integrations.vllm.session import stage_session
from omni_core.integrations.vllm.tap import ForwardTap
from omni_core.sinks.rows import StoredRequest
from omni_core.sinks.safetensors_files import read_request_file, request_files

WORKER_CLASS = "omni_core.integrations.vllm.cpu_worker.OmniCpuWorker"
BLOCK_SIZE_TOKENS = 32
WAVE_NAMES = ("cold", "warm")

CONTROL_EVERY = 8
"""Every how many prompts one is run a second time without prefix caching, alone in its batch."""

_WARM_UP_NAME = "warm-up"
_WARM_UP_TOKENS = 64
_MODEL_LEN_STEP_TOKENS = 256


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt as the engine gets it."""

    name: str
    token_ids: list[int]


@dataclass(slots=True)
class Answer:
    """What the engine said about one request so far."""

    prompt: TokenPrompt
    wave: str
    token_ids: list[int]
    text: str = ""
    skipped_tokens: int = 0


class ProgressPipe:
    """Tells the parent process what is going on, one JSON object per line."""

    def __init__(self, pipe: TextIO) -> None:
        self._pipe = pipe

    def say(self, text: str, done: int = 0, total: int = 0) -> None:
        """`done` of `total` steps of what `text` says; a total of 0 has no measure."""
        self._pipe.write(json.dumps({"text": text, "done": done, "total": total}) + "\n")
        self._pipe.flush()


def run_phase(job: DemoJob, progress: ProgressPipe) -> PhaseResult:
    """Run one phase in this process. Needs vLLM; blocks for its whole length."""
    label = f"prefix caching {job.phase.value}"
    progress.say(f"{label}: loading the tokenizer")
    prompts = tokenized(job.model, job.prompts)
    progress.say(f"{label}: starting vLLM")
    llm = _engine(job, prompts)
    session = stage_session(llm)
    tap = session.tap
    if tap is None:
        raise RuntimeError("the engine has no tap although the demo asked for one")
    # Backwards: no block of it is the start of any prompt.
    warm_up = TokenPrompt(_WARM_UP_NAME, prompts[0].token_ids[: -_WARM_UP_TOKENS - 1 : -1])
    _drive(llm, [warm_up], _WARM_UP_NAME, 2, lambda done: None)
    answers: list[Answer] = []
    times: list[WaveTime] = []
    for wave, members in zip(WAVE_NAMES, waves_of(prompts), strict=True):
        tell = partial(progress.say, f"{label}: {wave} wave", total=len(members))
        tell(0)
        wave_answers, prefill_s = _drive(llm, members, wave, job.max_tokens, tell)
        answers.extend(wave_answers)
        times.append(WaveTime(wave, len(members), prefill_s))
    served = _served(answers, tap)
    if job.phase is Phase.CACHE_ON:
        progress.say(f"{label}: holding the files against the tap")
        session.flush(still_running=())
        delivered = _checked_files(Path(job.rows_directory), answers, tap)
        return PhaseResult(tuple(times), served, delivered=delivered, stage_report=session.report())
    compared = _compared(llm, job, prompts, tap, progress)
    return PhaseResult(tuple(times), served, compared=compared, stage_report=session.report())


def waves_of(prompts: Sequence[TokenPrompt]) -> tuple[Sequence[TokenPrompt], Sequence[TokenPrompt]]:
    """The first half (and the odd one) makes the cold wave, the rest the warm one."""
    middle = (len(prompts) + 1) // 2
    return prompts[:middle], prompts[middle:]


def tokenized(model: str, prompts: Sequence[DemoPrompt]) -> list[TokenPrompt]:
    """Token ids by the model's own chat template, or of plain text where it has none."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens: list[TokenPrompt] = []
    for prompt in prompts:
        if prompt.text is not None:
            encoded = tokenizer(prompt.text)
        elif tokenizer.chat_template:
            turns = [{"role": message.role, "content": message.content} for message in prompt.messages]
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            encoded = tokenizer(text, add_special_tokens=False)
        else:
            encoded = tokenizer("\n\n".join(f"{message.role}: {message.content}" for message in prompt.messages))
        tokens.append(TokenPrompt(prompt.name, [int(token) for token in encoded["input_ids"]]))
    return tokens


def _engine(job: DemoJob, prompts: Sequence[TokenPrompt]) -> Any:
    from vllm import LLM

    needed_tokens = max(len(prompt.token_ids) for prompt in prompts) + job.max_tokens
    on = job.phase is Phase.CACHE_ON
    stage: dict[str, Any] = {"enabled": on, "tap": True}
    if on:
        stage |= {"sink": "safetensors", "sink_options": {"directory": job.rows_directory}, "on_slow_sink": "wait"}
    return LLM(
        model=job.model,
        dtype=job.dtype,
        enable_prefix_caching=on,
        worker_cls=WORKER_CLASS,
        additional_config={"omni_core": stage},
        block_size=BLOCK_SIZE_TOKENS,
        max_model_len=-(-needed_tokens // _MODEL_LEN_STEP_TOKENS) * _MODEL_LEN_STEP_TOKENS,
        enforce_eager=True,
        seed=0,
    )


def _drive(
    llm: Any, prompts: Sequence[TokenPrompt], wave: str, max_tokens: int, tell: Callable[[int], None]
) -> tuple[list[Answer], float]:
    """Add all prompts, then step until all have ended.

    Returns:
        The answers in the order of `prompts`, and the seconds until the last of them had its first token.
    """
    from vllm import SamplingParams

    engine = llm.llm_engine
    answers = {prompt.name: Answer(prompt, wave, []) for prompt in prompts}
    first_token_missing = set(answers)
    prefill_s = 0.0
    began = time.perf_counter()
    for prompt in prompts:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        engine.add_request(prompt.name, {"prompt_token_ids": prompt.token_ids}, params)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        for output in outputs:
            answer = answers[output.request_id]
            answer.token_ids = list(output.outputs[0].token_ids)
            answer.text = output.outputs[0].text
            answer.skipped_tokens = output.num_cached_tokens or 0
        if first_token_missing:
            first_token_missing -= {name for name, answer in answers.items() if answer.token_ids}
            prefill_s = time.perf_counter() - began
            tell(len(answers) - len(first_token_missing))
    return list(answers.values()), prefill_s


def _served(answers: Sequence[Answer], tap: ForwardTap) -> tuple[ServedRequest, ...]:
    computed = {_client_name(req_id): tap.computed_tokens(req_id) for req_id in tap.requests}
    return tuple(
        ServedRequest(
            name=answer.prompt.name,
            wave=answer.wave,
            prompt_tokens=len(answer.prompt.token_ids),
            generated_tokens=len(answer.token_ids),
            skipped_tokens=answer.skipped_tokens,
            computed_rows=computed[answer.prompt.name],
            text=answer.text,
        )
        for answer in answers
    )


def _checked_files(directory: Path, answers: Sequence[Answer], tap: ForwardTap) -> tuple[DeliveredRequest, ...]:
    files = _files_by_name(directory)
    warm_up = files.pop(_WARM_UP_NAME, None)
    if warm_up is not None:
        warm_up[0].unlink()
    checked: list[DeliveredRequest] = []
    for answer in answers:
        name = answer.prompt.name
        if name in files:
            path, stored = files[name]
            checked.append(check_against_tap(name, path, stored, tap, answer.prompt.token_ids, answer.token_ids))
        else:
            checked.append(DeliveredRequest(name, problem="no file was written for this request"))
    return tuple(checked)


def _compared(
    llm: Any, job: DemoJob, prompts: Sequence[TokenPrompt], tap: ForwardTap, progress: ProgressPipe
) -> tuple[ComparedRequest, ...]:
    reference = {prompt.name: cache_off_rows(tap, prompt.token_ids) for prompt in prompts}
    controls = prompts[::CONTROL_EVERY]
    text = "prefix caching off again, one prompt at a time"
    for done, prompt in enumerate(controls):
        progress.say(text, done, len(controls))
        _drive(llm, [prompt], "control", 1, lambda done: None)
    control_names = {prompt.name for prompt in controls}
    progress.say("comparing the files with the cache-off rows")
    files = _files_by_name(Path(job.rows_directory))
    compared: list[ComparedRequest] = []
    for prompt in prompts:
        if prompt.name not in files:
            compared.append(ComparedRequest(prompt.name, problem="no file to compare"))
            continue
        rows = files[prompt.name][1].hidden_states
        again = cache_off_rows(tap, prompt.token_ids) if prompt.name in control_names else None
        compared.append(compare_with_cache_off(prompt.name, rows, reference[prompt.name], again))
    return tuple(compared)


def _files_by_name(directory: Path) -> dict[str, tuple[Path, StoredRequest]]:
    stored = ((path, read_request_file(path)) for path in request_files(directory))
    return {request.client_req_id or request.req_id: (path, request) for path, request in stored}


def _client_name(req_id: str) -> str:
    found = client_request(req_id)
    return found.client_req_id if found is not None else req_id


def main(arguments: Sequence[str]) -> int:
    """Run the job of one file, write its result to another, its progress to an open file descriptor."""
    job, result, descriptor = arguments
    with os.fdopen(int(descriptor), "w", encoding="utf-8") as pipe:
        run_phase(DemoJob.load(Path(job)), ProgressPipe(pipe)).save(Path(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
