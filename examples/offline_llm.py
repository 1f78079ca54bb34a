# SPDX-License-Identifier: Apache-2.0
"""Whole-prompt hidden states from `LLM(...)` with prefix caching on, kept in this process.

    python examples/offline_llm.py --model PATH

Any text model that vLLM runs on the CPU will do; `make demo` leaves one in the folder that it names.
"""

import argparse
import os

# Both before vLLM is imported: the engine runs in this process, where its memory sink can be read.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from vllm import LLM, SamplingParams

from omni_core.integrations.vllm.rpc.stage_client import flush_stage
from omni_core.integrations.vllm.session import stage_session

SHARED = (
    "The lighthouse keeper wrote down the weather every evening: the wind, the height of the waves, the ships that "
    "passed and the colour of the sky. On the first page of the new book he wrote in large letters that whoever came "
    "after him should do the same, and leave out nothing, however small. "
)
PROMPTS = [SHARED + end for end in ("That night", "In the morning", "His daughter")]


def main() -> None:
    """Run the prompts and print, per request, what vLLM alone would have given and what was delivered."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="directory of a model, or its name on the hub")
    parser.add_argument("--max-tokens", type=int, default=8, help="tokens to generate at most (%(default)s)")
    args = parser.parse_args()

    llm = LLM(
        model=args.model,
        enable_prefix_caching=True,
        block_size=32,
        max_model_len=512,
        enforce_eager=True,
        worker_cls="omni_core.integrations.vllm.cpu_worker.OmniCpuWorker",
        additional_config={"omni_core": {"enabled": True, "sink": "memory", "on_slow_sink": "wait"}},
    )
    answers = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=args.max_tokens))

    # The engine's news of an end comes with its next step; after the last request there is none.
    flush_stage(llm)
    sink = stage_session(llm).sink
    for answer in answers:
        request = sink.request(answer.request_id)
        fed = len(answer.prompt_token_ids) + len(answer.outputs[0].token_ids) - 1  # the last token was never fed
        print(
            f"request {answer.request_id}: vLLM skipped {answer.num_cached_tokens} tokens and computed "
            f"{fed - answer.num_cached_tokens} rows; delivered {tuple(request.hidden_states.shape)}, "
            f"positions {list(request.ranges)}"
        )


if __name__ == "__main__":
    main()
