# SPDX-License-Identifier: Apache-2.0
"""Builds one cache in a fresh process, fills part of its pool, and prints what the process's memory did, as JSON.

Reads what to build from its input, a line each: {"num_blocks": ..., "keys": {...}, "fill_blocks": ...}. Each line is
answered by a line from a process that is forked off for it.
"""

import gc
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from omni_core_cpu_sim import CpuSimBackend

from omni_core.prefix_cache.config import PrefixCacheConfig
from omni_core.prefix_cache.events import RequestEvent, RequestEventKind, StepEvents, StepLayout
from omni_core.prefix_cache.manager import OmniPrefixCacheManager
from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.runtime import ThreadingRuntime


def anonymous_bytes():
    """Resident anonymous memory: RSS without the file pages of libraries, which come and go by themselves."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no such line")


class Outputs:
    """The largest step's outputs, made once: a model's memory is not the cache's."""

    def __init__(self, *, max_num_tokens, hidden_size, hidden_dtype, keys):
        self.hidden = torch.ones(max_num_tokens, hidden_size, dtype=getattr(torch, hidden_dtype))
        self.keys = {
            name: torch.ones(max_num_tokens, width, dtype=getattr(torch, dtype)) for name, width, dtype in keys
        }


class Filled:
    """A cache whose blocks one request after another fills, a step of whole blocks at a time; nothing is delivered."""

    def __init__(self, outputs, *, hidden_dtype, keys=(), deferred=(), keeps_hidden=True, **settings):
        self.config = PrefixCacheConfig(hidden_dtype=getattr(torch, hidden_dtype), **settings)
        self.outputs = outputs
        runtime = ThreadingRuntime()
        self.backend = CpuSimBackend(runtime)
        self.cache = OmniPrefixCacheManager(
            self.config, self.backend, lambda: self.layout, runtime=runtime, device=torch.device("cpu")
        )
        self.cache.register_policy(
            ModelCachePolicy(
                token_keys=set(outputs.keys) - set(deferred),
                deferred_keys=set(deferred),
                needs_full_hidden_states=keeps_hidden,
            )
        )
        self._step = 0

    def fill(self, first_block, num_blocks):
        size = self.config.block_size
        per_step = self.config.max_num_tokens // size
        for block in range(first_block, first_block + num_blocks, per_step):
            blocks = range(block, min(block + per_step, first_block + num_blocks))
            tokens = len(blocks) * size
            self._step += 1
            req_id = f"r{self._step}"
            events = [RequestEvent(RequestEventKind.STARTED, req_id, tuple(blocks), 0, tokens, 0)]
            if self._step > 1:
                events.insert(0, RequestEvent(RequestEventKind.FINISHED, f"r{self._step - 1}"))
            slots = np.arange(blocks[0] * size, (blocks[-1] + 1) * size, dtype=np.int64)
            self.layout = StepLayout((req_id,), np.array([0, tokens]), np.arange(tokens), slots)
            self.cache.new_step_starts(StepEvents(tuple(events)))
            step_id = self.cache.save_outputs(
                self.outputs.hidden[:tokens],
                {name: rows[:tokens] for name, rows in self.outputs.keys.items()},
                num_tokens_unpadded=tokens,
                num_tokens_padded=tokens,
                carry_owed=False,
            )
            self.cache.discard_step(step_id)
            self.cache.flush()

    def close(self):
        self.cache.close()
        self.backend.close()


def outputs_of(told):
    return Outputs(
        max_num_tokens=told["max_num_tokens"],
        hidden_size=told["hidden_size"],
        hidden_dtype=told["hidden_dtype"],
        keys=told.get("keys", ()),
    )


def warm_up():
    """What a first cache makes the process load and allocate for good is not this cache's."""
    told = {"num_blocks": 64, "block_size": 4, "hidden_size": 8, "hidden_dtype": "float32", "max_num_tokens": 16}
    small = Filled(outputs_of(told), **told)
    small.fill(1, 60)
    small.close()
    gc.collect()


def main(told):
    torch.set_num_threads(1)
    fill_blocks, far_blocks = told.pop("fill_blocks"), told.pop("far_blocks", ())
    warm_up()
    outputs = outputs_of(told)
    before = anonymous_bytes()
    filled = Filled(outputs, **told)
    built = anonymous_bytes()
    built_stats = filled.cache.stats()
    filled.fill(1, 1)
    one_block = anonymous_bytes()
    filled.fill(2, fill_blocks - 1)
    full = anonymous_bytes()
    for block in far_blocks:
        filled.fill(block, 1)
    far = anonymous_bytes()
    sys.stdout.write(
        json.dumps(
            {
                "growth_when_built": built - before,
                "growth_when_one_block_is_written": one_block - before,
                "growth_when_filled": full - before,
                "growth_when_far_blocks_are_written": far - before,
                "memory_when_built": asdict(built_stats.memory),
                "memory_when_filled": asdict(filled.cache.stats().memory),
                "resident_pool_bytes": filled.cache.resident_pool_bytes(),
            }
        )
        + "\n"
    )
    filled.close()


def answer_in_a_child(line):
    child = os.fork()
    if child == 0:
        main(json.loads(line))
        sys.exit()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != 0:
        sys.exit(status)


if __name__ == "__main__":
    gc.freeze()  # what was imported need not be collected again in each child
    for each_line in sys.stdin:
        answer_in_a_child(each_line)
