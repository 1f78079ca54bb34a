# SPDX-License-Identifier: Apache-2.0
"""Asks `omni-core plan` about a real engine: of its blocks before it starts, and of a server while it runs.

python run_plan.py WAY RESULT.json
"""

import io
import json
import os
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"

import httpx
import torch
from run_server import Server
from tiny_model import save_tiny_model
from vllm import LLM
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from omni_core.cli.main import main

KV_CACHE_BYTES = 10_000_000
HOST = ["--host-bytes", "64 GiB", "--format", "json"]


def plan(*arguments):
    printed = io.StringIO()
    with redirect_stdout(printed):
        status = main(["plan", *arguments, *HOST])
    return {"status": status} | json.loads(printed.getvalue())


def blocks_of_an_engine(folder):
    """vLLM's own number of blocks, and the plan's from the same configuration and bytes."""
    model = save_tiny_model(folder / "model")
    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=512,
        block_size=32,
        gpu_memory_utilization=0.2,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
    )
    given = ["--model", model, "--dtype", "float32", "--block-size", "32", "--kv-cache-bytes", str(KV_CACHE_BYTES)]
    return {"engine": llm.llm_engine.vllm_config.cache_config.num_gpu_blocks, "plan": plan(*given)}


def bytes_of_a_block(folder):
    """Bytes of a block of 16 tokens in one layer, by vLLM's specs."""
    full = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=128, dtype=torch.bfloat16)
    latent = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    return {"full": full.page_size_bytes, "latent": latent.page_size_bytes}


def running_server(folder):
    """A server's live figures, and those of a plan from flags of the same stage."""
    with Server(folder, staging_depth=3, sink_queue_bytes=1_000_000, tap=False) as server:
        body = {"model": "tiny", "prompt": list(range(2, 80)), "max_tokens": 4}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).raise_for_status()
        live = plan("--server", server.url)
    # The server's own default of max_num_batched_tokens depends on its device; its pages tell which it took.
    row_bytes = live["cache"]["staging_bytes"] // 3 - (1 << 20)
    flags = ["--num-blocks", "100", "--block-size", "32", "--max-num-tokens", str(row_bytes // (128 * 4 + 256))]
    flags += ["--model", str(folder / "model"), "--dtype", "float32", "--key", "talker.codes:12:int32", "--on-cpu"]
    return {"live": live, "planned": plan(*flags, "--staging-depth", "3")}


WAYS = {way.__name__: way for way in (blocks_of_an_engine, bytes_of_a_block, running_server)}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        outcome = WAYS[sys.argv[1]](Path(directory))
    Path(sys.argv[2]).write_text(json.dumps(outcome, indent=1))
