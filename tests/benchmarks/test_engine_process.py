# SPDX-License-Identifier: Apache-2.0
"""An engine of `omni-core bench vllm` that ends or hangs ends the benchmark, and says which engine it was."""

import os

import pytest

from omni_core.cli.bench.engine_process import EngineProcess, EngineProcessError
from omni_core.integrations.vllm.bench.loads import EngineKind, Load, LoadKind

LOAD = Load(LoadKind.REUSE, 0, 1, num_requests=1, prefix_tokens=16, own_tokens=1, output_tokens=1)


@pytest.fixture
def engine(tmp_path):
    """Of a model that is not there: its process ends by itself, once it has imported what it needs."""
    with EngineProcess(EngineKind.MEMORY, tmp_path / "no-model", "float32", tmp_path, os.environ) as process:
        yield process


def test_an_engine_that_ends_is_told_with_the_end_of_its_log(engine):
    with pytest.raises(EngineProcessError, match=r"(?s)'on, Omni Core, memory sink' ended; .*no-model/config\.json"):
        engine.run(LOAD)


def test_an_engine_that_does_not_answer_is_killed(engine):
    with pytest.raises(EngineProcessError, match=r"did not answer within 0 s; --skip vllm leaves these engines out"):
        engine.run(LOAD, timeout_s=0.0)
    with pytest.raises(EngineProcessError, match="ended"):
        engine.run(LOAD)
