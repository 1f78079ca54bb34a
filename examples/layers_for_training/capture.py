# SPDX-License-Identifier: Apache-2.0
"""Captures layers of a model for the training of a drafter, with prefix caching on.

    python examples/layers_for_training/capture.py --model PATH --layers 0 1 2 --rows DIRECTORY

Every prompt begins with the same text. vLLM computes it once; the training data has its rows for every prompt.
"""

import argparse
import os
import sys

# Both before vLLM is imported.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from training_rows import training_examples
from vllm import LLM, SamplingParams

from omni_core.integrations.vllm.rpc.stage_client import flush_stage

SHARED = (
    "You are a patient teacher. Answer in one sentence, in plain words, and say so when you do not know. "
    "Never make up a name, a number or a date. "
)
QUESTIONS = ["Why is the sky blue?", "How deep is the sea?", "Who wrote this?", "What is a prefix cache for?"]


def capture(model: str, layers: list[int], directory: str, max_tokens: int) -> int:
    """Run the prompts; returns how many prompt tokens vLLM did not have to compute."""
    llm = LLM(
        model=model,
        enable_prefix_caching=True,
        block_size=32,
        max_model_len=512,
        worker_cls="omni_core.integrations.vllm.cpu_worker.OmniCpuWorker",
        enforce_eager=True,
        additional_config={
            "omni_core": {
                "enabled": True,
                "layers": layers,
                "sink": "safetensors",
                "sink_options": {"directory": directory},
                "on_slow_sink": "wait",
            }
        },
    )
    prompts = [SHARED + question for question in QUESTIONS]
    answers = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens))
    flush_stage(llm)  # the engine tells of a request's end with its next step; after the last one there is none
    return sum(answer.num_cached_tokens or 0 for answer in answers)


def main() -> None:
    """Capture, then read back what a training loop would read."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="directory of a model, or its name on the hub")
    parser.add_argument("--layers", required=True, type=int, nargs="+", help="0 is the embeddings")
    parser.add_argument("--rows", required=True, help="directory the training data is written to")
    parser.add_argument("--max-tokens", type=int, default=8, help="tokens to generate at most (%(default)s)")
    args = parser.parse_args()

    skipped = capture(args.model, args.layers, args.rows, args.max_tokens)
    print(f"vLLM skipped {skipped} tokens")
    whole, incomplete = 0, []
    for example in training_examples(args.rows, args.layers, incomplete):
        whole += 1
        shapes = {layer: tuple(rows.shape) for layer, rows in example.layers.items()}
        print(f"request {example.req_id}: {len(example.token_ids)} tokens, layers {shapes}")
    print(f"{whole} of {len(QUESTIONS)} requests are whole; those that miss rows: {', '.join(incomplete) or 'none'}")
    if whole < len(QUESTIONS):
        sys.exit("Not every prompt gave its rows; vLLM's log and the sink's .error.json files say why.")


if __name__ == "__main__":
    main()
