# SPDX-License-Identifier: Apache-2.0
"""Runs chosen layers on an engine of two ranks, and writes what was seen.

    python layers_on_two_ranks.py KIND RESULT.json

KIND is `tensor_parallel` or `pipeline_parallel`. `ways_to_run` must be on PYTHONPATH for the workers. Run by the tests
in a process of its own: importing vllm changes torch for the whole process.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from layer_scenarios import KEYS, LAYERS, Reference, relative_error, save_llama, two_waves

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # after exact_rows, which the scenarios import
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"

from vllm import LLM, SamplingParams

from omni_core.integrations.vllm.rpc.stage_client import flush_stage, take_rows

WORKERS = {
    "tensor_parallel": "checking_worker.OmniCheckingCpuWorker",
    "pipeline_parallel": "pipeline_worker.OmniCheckingPipelineCpuWorker",
}


def two_ranks(model: str, kind: str) -> dict:
    """Two waves; rows against the tap of the output rank and, at the client, against transformers."""
    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=512,
        block_size=32,
        num_gpu_blocks_override=60,
        gpu_memory_utilization=0.2,  # by default vLLM wants nearly all of the machine's memory to be free
        worker_cls=WORKERS[kind],
        additional_config={"omni_core": {"enabled": True, "layers": LAYERS, "tap": True}},
        **{f"{kind}_size": 2},
    )
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, detokenize=False)
    answers = []
    for wave in two_waves():
        answers += llm.generate([{"prompt_token_ids": prompt} for prompt in wave.values()], params)
    flush_stage(llm)
    checked = llm.collective_rpc("check_rows")
    reference, off = Reference(model), {}
    for answer in answers:
        [taken] = take_rows(llm, answer.request_id)
        by_layer, _ = reference.layers(taken.token_ids.tolist())
        off[taken.req_id] = {KEYS[n]: relative_error(taken.rows[KEYS[n]], by_layer[n]) for n in LAYERS}
    return {"checked": checked, "off_reference": off}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        outcome = two_ranks(save_llama(Path(directory)), sys.argv[1])
    Path(sys.argv[2]).write_text(json.dumps(outcome, indent=1))
