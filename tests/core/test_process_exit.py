# SPDX-License-Identifier: Apache-2.0
"""A program that ends without `close()` ends cleanly: no helper thread is torn down in the middle of a write."""

import os
import subprocess
import sys

PROGRAM = """
import gc
import os
import sys

import numpy as np
import torch
from omni_core_cpu_sim import CpuSimBackend

from omni_core.prefix_cache.config import PrefixCacheConfig
from omni_core.prefix_cache.events import RequestEvent, RequestEventKind, StepEvents, StepLayout
from omni_core.prefix_cache.manager import OmniPrefixCacheManager
from omni_core.runtime import ThreadingRuntime

TOKENS, WIDTH = 2048, 2048
RUNS = {"during a write": 4, "with idle threads": 1, "by an error": 1}


def use_a_cache(how):
    layout = StepLayout(("A",), np.array([0, TOKENS]), np.arange(TOKENS), np.arange(TOKENS) + 16)
    runtime = ThreadingRuntime()
    cache = OmniPrefixCacheManager(
        PrefixCacheConfig(
            num_blocks=256,
            block_size=16,
            hidden_size=WIDTH,
            hidden_dtype=torch.float32,
            max_num_tokens=TOKENS,
            staging_depth=2,
            extra_row_bytes=0,
            extra_step_bytes=0,
        ),
        CpuSimBackend(runtime),
        lambda: layout,
        runtime=runtime,
        device=torch.device("cpu"),
    )
    start = RequestEvent(RequestEventKind.STARTED, "A", tuple(range(1, 129)), 0, TOKENS)
    cache.new_step_starts(StepEvents((start,)))
    cache.save_outputs(torch.ones(TOKENS, WIDTH), {}, num_tokens_unpadded=TOKENS, num_tokens_padded=TOKENS)
    if how == "with idle threads":
        cache.flush()
    if how == "by an error":
        raise ValueError("the program failed")


def exit_codes(how):
    for _ in range(RUNS[how]):
        child = os.fork()
        if child == 0:
            use_a_cache(how)
            sys.exit()
        yield os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


gc.freeze()  # what was imported need not be collected again at the end of each child
for how in RUNS:
    print(how, *exit_codes(how), flush=True)
"""
"""Programs are forked off after the imports, which take longer than all the rest. Each ends like any interpreter.

A thread torn down at the wrong moment aborts most runs, not each, so there are several.
"""


def test_a_program_that_ends_without_closing_its_cache_exits_with_its_own_code():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    expected = ["during a write 0 0 0 0", "with idle threads 0", "by an error 1"]
    assert ended.stdout.splitlines() == expected, ended.stderr
    assert "terminate called" not in ended.stderr
