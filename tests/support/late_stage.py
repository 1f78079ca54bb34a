# SPDX-License-Identifier: Apache-2.0
"""A stage whose engine goes on before sampled tokens are known, driven as vLLM's executors drive one."""

import fake_runner as fake
from async_runner import AsyncFakeRunner
from fake_runner_v2 import FakeRunnerV2
from fake_stage import FakeStage
from npu_runner import NpuFakeRunner

from omni_core.integrations.vllm.runners.v1 import V1View
from omni_core.integrations.vllm.runners.v2 import V2View


def v1_view():
    return V1View(0, tokens_come_later=True)


def v2_view():
    return V2View(0, max_num_reqs=2, max_model_len=3 * fake.BLOCK_SIZE, block_size=fake.BLOCK_SIZE)


KINDS = {"V1": (AsyncFakeRunner, v1_view), "V2": (FakeRunnerV2, v2_view), "NPU V1": (NpuFakeRunner, v1_view)}


class LateStage(FakeStage):
    """A `FakeStage` on one of `KINDS`. `step` leaves its output waiting; `read` completes the oldest."""

    def __init__(self, kind, *, model=None, **options):
        runner, view = KINDS[kind]
        super().__init__(runner=runner(model), view=view(), **options)

    def read(self, times=1):
        """The engine asks for the oldest outputs; what it is told of the last."""
        outputs = [self.runner.waiting.pop(0).get_output() for _ in range(times)]
        return outputs[-1] if outputs else None

    def finish(self):
        """Ask for every output, and hand on all that was computed."""
        self.read(len(self.runner.waiting))
        self.session.flush(20.0, still_running=())
