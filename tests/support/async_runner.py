# SPDX-License-Identifier: Apache-2.0
"""A stand-in for vLLM's V1 runner under asynchronous scheduling, as on CUDA and NPU.

The next step runs before the one before it has been read. What was sampled is on the device only: in host memory -1
stands for it, and `get_output` brings it later, on whatever thread.
"""

from abc import ABC, abstractmethod

import fake_runner as fake


class AsyncModelRunnerOutput(ABC):
    """vLLM's base of such outputs, abstract as the real one: that decides what may become of an object's class."""

    @abstractmethod
    def get_output(self): ...


class AsyncOutput(AsyncModelRunnerOutput):
    """vLLM's output of one step, to be asked for once."""

    def __init__(self, output):
        self._output = output
        self.asked = 0

    def get_output(self):
        self.asked += 1
        if isinstance(self._output, Exception):
            raise self._output
        return self._output


class AsyncFakeRunner(fake.FakeRunner):
    """Its outputs come as `AsyncOutput`; those the engine has not asked for yet are in `waiting`."""

    def __init__(self, model=None):
        super().__init__(model)
        self._device_tokens = self.input_batch.token_ids_cpu.copy()
        self.waiting = []
        self.copy_error = None

    def _keep_sampled(self, index, first, tokens):
        self._device_tokens[index, first : first + len(tokens)] = tokens
        self.input_batch.token_ids_cpu[index, first : first + len(tokens)] = -1

    def _output(self, output):
        self.waiting.append(AsyncOutput(self.copy_error or output))
        return self.waiting[-1]
