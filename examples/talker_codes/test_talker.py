# SPDX-License-Identifier: Apache-2.0
"""Tests of the talker's outputs, with no hardware and no engine: `pytest examples/talker_codes`."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from talker import CODEBOOKS, Talker

from omni_core.testing import RowKind, SequenceRun, SimRequest, check_model_outputs
from omni_core.testing.fixtures import SimEngineFactory, StageJudge
from omni_core.testing.model_check import ModelCheckFailedError, Problem
from omni_core.testing.output_builder import BuiltStep

GREETING = (7, 3, 19, 4, 4, 28, 51, 6, 30, 12, 9, 44, 2)
QUESTION = (*GREETING[:8], 33, 21, 60, 17, 5)


def test_outputs_are_right_under_the_cache() -> None:
    """Hits, chunks, preemption, aborts, late builders, padded graphs, drafts: every row is the model's own."""
    report = check_model_outputs(Talker(), [GREETING, QUESTION])
    print(report)
    report.raise_if_wrong()
    assert report.key("codes.audio").rows_from_hits > 0
    assert report.key("layers.0").rows_from_hits > 0
    assert report.rows(RowKind.SAME_STEP_HIT) > 0


def test_whoever_asks_again_gets_every_code(sim_engine: SimEngineFactory, stage_oracle: StageJudge) -> None:
    """The second request skips what the first has computed, and still gets a row for each of its tokens."""
    stage = sim_engine(Talker())
    stage.submit(SimRequest("first", GREETING))
    stage.run_to_end()
    codes: dict[str, torch.Tensor] = {}

    def keep(built: BuiltStep) -> None:
        for req_id, rows in (built.outputs or {}).items():
            codes[req_id] = rows["codes.audio"].clone()  # the rows are given back after this call

    stage.submit(SimRequest("second", QUESTION))
    stage.run_to_end(keep)
    assert codes["second"].shape == (len(QUESTION), CODEBOOKS)
    assert stage_oracle(stage).rows_from_hits == 8  # two blocks of four tokens begin both prompts


class SidewaysTalker(Talker):
    """Its codes lie as `(16, num_tokens)`, as a codec likes them."""

    def forward(self, runs: Sequence[SequenceRun]) -> tuple[torch.Tensor, Mapping[str, Any]]:
        """As the talker's, with the codes turned."""
        hidden, outputs = super().forward(runs)
        return hidden, {**outputs, "codes": {"audio": outputs["codes"]["audio"].T}}


def test_codes_that_lie_sideways_are_found() -> None:
    """Each token's codes must be a row."""
    report = check_model_outputs(SidewaysTalker(), [GREETING, QUESTION])
    assert [finding.problem for finding in report.wrong] == [Problem.TOKENS_ON_OTHER_DIMENSION]
    with pytest.raises(ModelCheckFailedError, match="movedim"):
        report.raise_if_wrong()
