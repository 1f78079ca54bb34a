# SPDX-License-Identifier: Apache-2.0
"""Every row of every prompt from `LLM(...)` whose engine runs in processes of its own, vLLM's default.

    python offline_rows.py --model PATH

The rows are taken by the request's id over `collective_rpc`: once per request, then the engine forgets them.
"""

import argparse

from vllm import LLM, SamplingParams

from omni_core.integrations.vllm.rpc.stage_client import stage_reports, take_rows

SHARED = (
    "The lighthouse keeper wrote down the weather every evening: the wind, the height of the waves, the ships that "
    "passed and the colour of the sky. "
)
PROMPTS = [SHARED + end for end in ("That night", "In the morning", "His daughter")]


def main() -> None:
    """Generate two samples per prompt, and print for each sample what was delivered."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="directory of a model, or its name on the hub")
    parser.add_argument("--max-tokens", type=int, default=8, help="tokens to generate at most (%(default)s)")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="ranks (%(default)s)")
    args = parser.parse_args()

    llm = LLM(
        model=args.model,
        tensor_parallel_size=args.tensor_parallel_size,
        enable_prefix_caching=True,
        block_size=32,
        max_model_len=512,
        enforce_eager=True,
        worker_cls="omni_core.integrations.vllm.cpu_worker.OmniCpuWorker",
        additional_config={"omni_core": {"enabled": True, "sink": "memory", "on_slow_sink": "wait"}},
    )
    for answer in llm.generate(PROMPTS, SamplingParams(n=2, temperature=1.0, max_tokens=args.max_tokens)):
        for request in take_rows(llm, answer.request_id):
            print(
                f"request {answer.request_id} as {request.req_id}: {tuple(request.hidden_states.shape)} "
                f"{request.hidden_states.dtype}, positions {list(request.ranges)}, complete {request.complete}"
            )
    for rank, report in enumerate(stage_reports(llm)):
        print(f"rank {rank}: {report['gate']['status']}, {report.get('delivery', {}).get('rows_delivered', 0)} rows")


if __name__ == "__main__":  # vLLM starts its processes by running this file again
    main()
