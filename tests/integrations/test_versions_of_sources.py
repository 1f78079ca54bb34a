# SPDX-License-Identifier: Apache-2.0
"""The contract with vLLM, held against source text that is never imported: samples, the installed vLLM, a wheel."""

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest
from next_vllm import modules_of_next_vllm

from omni_core.integrations.vllm.releases.engine_contract import (
    ENGINE_CONTRACT,
    FIRST_RELEASE,
    FIRST_RELEASE_READ,
    EngineFact,
    FactKind,
    contract_of,
)
from omni_core.integrations.vllm.releases.engine_releases import NEWEST_RELEASE, release_of
from omni_core.integrations.vllm.releases.engine_sources import EngineSources
from omni_core.integrations.vllm.releases.v2_contract import V2_CONTRACT

SAMPLE = """
from .elsewhere import Worker1 as Worker2

if TYPE_CHECKING:
    SWITCH: bool = False

def kind_of(spec: Spec, *, strict=False): ...

class Worker(base.WorkerBase):
    rank: int
    first, second = 1, 2

    def __init__(self, config):
        self.config: Config = config
        self.left, self.right = config
        other.foreign = 1

    @property
    def device(self): ...

    async def run(self, method, *args, timeout=None):
        local = 1
        self.state = None
"""


@pytest.fixture
def sources(tmp_path):
    (tmp_path / "worker.py").write_text(SAMPLE)
    return EngineSources(tmp_path)


def fact(name, *detail, kind=FactKind.MEMBER, owner="Worker", module="worker.py"):
    return EngineFact(module, owner, name, kind, detail)


PRESENT = [
    fact("rank"),
    fact("second"),
    fact("config"),
    fact("right"),
    fact("device"),
    fact("run"),
    fact("state"),
    fact("SWITCH", owner=None),
    fact("kind_of", owner=None),
    fact("Worker", owner=None),
    fact("kind_of", "spec", owner=None, kind=FactKind.CALL),
    fact("run", kind=FactKind.CALL),
    fact("run", "method", kind=FactKind.CALL),
    fact("WorkerBase", kind=FactKind.BASE),
    fact("run", "self.state = None", kind=FactKind.EXPRESSION),
    fact("Worker2", owner=None, kind=FactKind.EXPORT),
]
ABSENT = [
    fact("ranks"),
    fact("local"),
    fact("foreign"),
    fact("rank", owner="Runner"),
    fact("rank", module="runner.py"),
    fact("rank", owner=None),
    fact("SWITCHES", owner=None),
    fact("kind_of", "spec", "strict", owner=None, kind=FactKind.CALL),
    fact("run", "args", kind=FactKind.CALL),
    fact("walk", kind=FactKind.CALL),
    fact("rank", kind=FactKind.CALL),
    fact("Base", kind=FactKind.BASE),
    fact("run", "self.state = 1", kind=FactKind.EXPRESSION),
    fact("walk", "self.state = None", kind=FactKind.EXPRESSION),
    fact("elsewhere", owner=None, kind=FactKind.EXPORT),
    fact("Worker", owner=None, kind=FactKind.EXPORT),
]


def test_what_the_source_text_says_is_found_and_what_it_does_not_say_is_named_in_order(sources):
    assert sources.lacking([*PRESENT, *ABSENT]) == tuple(ABSENT)


def test_a_fact_reads_as_a_sentence_with_its_place():
    assert str(fact("run", "method", kind=FactKind.CALL)) == "worker.py: Worker takes run (method)"
    assert str(fact("SWITCH", owner=None)) == "worker.py has SWITCH"


def test_no_fact_is_listed_twice():
    assert len(set(ENGINE_CONTRACT)) == len(ENGINE_CONTRACT)


def test_an_older_release_has_fewer_facts_to_hold():
    read, run = set(contract_of(FIRST_RELEASE_READ)), set(contract_of(FIRST_RELEASE))
    assert read < run < set(contract_of(NEWEST_RELEASE)) == set(ENGINE_CONTRACT)


def test_a_release_older_than_any_that_was_read_has_no_fewer_to_hold_than_the_oldest():
    assert contract_of((0, 9)) == contract_of(FIRST_RELEASE_READ)


def installed_package():
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vllm is not installed")
    return Path(spec.submodule_search_locations[0])


def test_the_installed_vllm_holds_the_contract_of_both_model_runners():
    package = installed_package()
    [distribution, *_] = importlib.metadata.packages_distributions()["vllm"]
    release = release_of(importlib.metadata.version(distribution))
    assert EngineSources(package).lacking((*contract_of(release), *V2_CONTRACT)) == ()


def copied_module(package, module, directory):
    file = directory / module
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes((package / module).read_bytes())
    return file


RENAMED = [
    ("v1/core/sched/output.py", "finished_req_ids", "done_req_ids"),
    ("v1/worker/block_table.py", "num_blocks_per_row", "row_lengths"),
    ("v1/engine/parallel_sampling.py", "{index}_{self", "{index}:{self"),
    ("v1/worker/cpu_worker.py", "class CPUWorker(Worker)", "class CPUWorker(WorkerBase)"),
]


@pytest.mark.parametrize(("module", "old", "new"), RENAMED)
def test_a_name_that_a_new_vllm_changes_is_the_one_that_is_lacking(tmp_path, module, old, new):
    file = copied_module(installed_package(), module, tmp_path)
    facts = [one for one in ENGINE_CONTRACT if one.module == module]
    assert EngineSources(tmp_path).lacking(facts) == ()
    file.write_text(file.read_text().replace(old, new))
    [lacking] = EngineSources(tmp_path).lacking(facts)
    assert lacking.name in old or (lacking.detail and old in lacking.detail[0]) or lacking.kind is FactKind.BASE


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_the_next_vllm_holds_the_contract_in_its_wheel(tmp_path):
    """It is refused all the same, because it was never run; `allow_untested_version` lets it try."""
    contracts = (*ENGINE_CONTRACT, *V2_CONTRACT)
    package = modules_of_next_vllm((one.module for one in contracts), tmp_path)
    assert EngineSources(package).lacking(contracts) == ()
