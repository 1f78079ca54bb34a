# SPDX-License-Identifier: Apache-2.0
"""Runs prompts shorter than the effective block on a real vLLM, and writes what Omni Core warned of.

python short_prompts.py SCENARIO RESULT.json
"""

import json
import logging
import sys
import tempfile
from pathlib import Path

import exact_rows  # first: sets the environment vllm reads when it is imported
from engine_workload import WORKER
from feature_models import qwen3_next
from tiny_model import save_tiny_model
from vllm import LLM, SamplingParams

from omni_core.integrations.vllm.rpc.stage_client import flush_stage


class Warnings(logging.Handler):
    """Keeps the text of every warning of Omni Core."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logger = logging.getLogger("omni_core")
        logger.setLevel(logging.WARNING)  # vLLM's own level is set higher here
        logger.addHandler(self)

    def emit(self, record):
        self.texts.append(record.getMessage())


def warned(model: str, lengths: list[int], **options) -> dict:
    """What was warned of at start and then with prompts of these lengths, one after the other."""
    warnings = Warnings()
    llm = LLM(
        model=model,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        worker_cls=WORKER,
        additional_config={"omni_core": {"enabled": True, "on_error": "raise"}},
        **options,
    )
    at_start = list(warnings.texts)
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, detokenize=False)
    for length in lengths:
        llm.generate([{"prompt_token_ids": [7 + at % 400 for at in range(length)]}], params, use_tqdm=False)
    flush_stage(llm)
    [report] = llm.collective_rpc("omni_core_report")
    core = llm.llm_engine.engine_core.engine_core
    return {
        "at_start": at_start,
        "later": warnings.texts[len(at_start) :],
        "scheduler_block_size": core.scheduler.block_size,
        "rows_from_hits": report["cache"]["rows_from_hits"],
    }


def short_then_long(folder: Path) -> dict:
    options = {"dtype": "float32", "block_size": 64, "num_gpu_blocks_override": 40}
    return warned(save_tiny_model(folder), [20, 64, 20, 200, 200], max_model_len=512, **options)


def longest_too_short(folder: Path) -> dict:
    options = {"dtype": "float32", "block_size": 64, "num_gpu_blocks_override": 40}
    return warned(save_tiny_model(folder), [20, 50], max_model_len=64, **options)


def hybrid(folder: Path) -> dict:
    return warned(qwen3_next(folder), [200, 200], dtype="bfloat16", max_model_len=1024, num_gpu_blocks_override=400)


def hybrid_with_a_finer_unit(folder: Path) -> dict:
    options = {"dtype": "bfloat16", "max_model_len": 1024, "num_gpu_blocks_override": 400}
    return warned(qwen3_next(folder), [200, 200], prefix_match_unit=32, **options)


SCENARIOS = (short_then_long, longest_too_short, hybrid, hybrid_with_a_finer_unit)


def main() -> None:
    name, result = sys.argv[1:]
    [scenario] = [one for one in SCENARIOS if one.__name__ == name]
    exact_rows.make_rows_exact()
    with tempfile.TemporaryDirectory() as folder:
        seen = scenario(Path(folder))
    Path(result).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
