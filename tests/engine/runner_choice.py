# SPDX-License-Identifier: Apache-2.0
"""Lets vLLM on the CPU run either model runner: `RUNNER=V1` or `V2` in the environment. Import this before vllm.

The second runner is made of Triton kernels, and this machine has nothing to compile them for. Triton's interpreter runs
them, slowly; vLLM is told of a Triton backend for the CPU, which it looks for and never calls.
"""

import os

import exact_rows  # sets the environment vllm reads, this variable among it

SECOND = os.environ["RUNNER"] == "V2"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(SECOND))

if SECOND:
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import Backend, backends
    from triton.runtime import interpreter

    class UnusedDriver:
        """What vLLM asks a Triton backend for."""

        @staticmethod
        def is_active():
            return False

    class IntegersAsMasks:
        """The interpreter's loads and stores, which take no integers as masks; compiled kernels do."""

        def __init__(self, memory):
            self._memory = memory

        def __getattr__(self, name):
            return getattr(self._memory, name)

        def load(self, pointers, mask, other, dtype):
            return self._memory.load(pointers, mask.astype(bool), other, dtype)

        def store(self, pointers, value, mask):
            return self._memory.store(pointers, value, mask.astype(bool))

    backends["cpu"] = Backend(compiler=backends["nvidia"].compiler, driver=UnusedDriver)
    interpreter._interpreter = IntegersAsMasks(interpreter._interpreter)


def make_rows_exact() -> None:
    exact_rows.make_rows_exact()
