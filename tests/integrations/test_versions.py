# SPDX-License-Identifier: Apache-2.0
"""Which vLLM is served: the verdict on a version, and what a start finds in the source text of the one that runs."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from omni_core.integrations.vllm.releases.engine_releases import ENGINE_RELEASES, Runs, engine_version_problem
from omni_core.integrations.vllm.versions import (
    block_copies,
    collective_rpc_of_every_engine,
    draft_groups,
    kind_by_class,
    prefix_replay_tokens,
    prompt_is_token_ids,
)
from omni_core.prefix_cache.gate_platforms import ModelRunner

ROOT = Path(__file__).parents[2]
LACKING = "v1/core/sched/output.py: SchedulerOutput has finished_req_ids"


@pytest.mark.parametrize("version", [one.tested for one in ENGINE_RELEASES])
@pytest.mark.parametrize("tail", ["", "+cpu", "rc1", ".post2"])
def test_a_release_the_engine_tests_pass_on_is_served(version, tail):
    assert engine_version_problem(version + tail) is None


def test_a_patch_of_such_a_release_is_served():
    assert engine_version_problem("0.27.9") is None


@pytest.mark.parametrize("version", ["0.26.0", "0.33.0", "1.32.0", "dev", "0.3", ""])
def test_another_version_is_refused_and_the_setting_that_lets_it_try_is_named(version):
    problem = engine_version_problem(version)
    assert "vLLM 0.27 to 0.32" in problem.reason
    assert "install one of those" in problem.remedy
    assert "omni_core.allow_untested_version=true" in problem.remedy


def test_the_operator_may_let_a_version_try_that_lacks_nothing():
    assert engine_version_problem("0.33.0", allow_untested=True) is None


@pytest.mark.parametrize("version", ["0.33.0", "0.32.0"])
@pytest.mark.parametrize("allow_untested", [True, False])
def test_a_version_that_lacks_something_is_refused_by_its_name_whatever_was_allowed(version, allow_untested):
    problem = engine_version_problem(version, lacking=[LACKING, "another"], allow_untested=allow_untested)
    assert f"{LACKING} and 1 more" in problem.reason
    assert "install an unchanged vLLM 0.27 to 0.32" in problem.remedy
    assert "allow_untested_version" not in problem.remedy


@pytest.mark.parametrize("version", ["0.27.0", "0.31.0"])
def test_the_second_model_runner_is_refused_on_releases_it_was_not_run_on_unless_it_is_let_try(version):
    problem = engine_version_problem(version, runner=ModelRunner.V2)
    assert "model runner V2 of this release was never run" in problem.reason
    assert "VLLM_USE_V2_MODEL_RUNNER=0" in problem.remedy
    assert "allow_untested_version=true" in problem.remedy
    assert engine_version_problem(version, runner=ModelRunner.V2, allow_untested=True) is None


def test_the_second_model_runner_is_served_on_the_newest_release():
    assert engine_version_problem(ENGINE_RELEASES[-1].tested, runner=ModelRunner.V2) is None


@pytest.mark.parametrize("version", ["0.18.0", "0.23.0", "0.32.0"])
def test_vllm_ascend_is_refused_on_every_version_because_it_was_never_run_unless_it_is_let_try(version):
    problem = engine_version_problem(version, device_type="npu")
    assert "never run with vLLM-Ascend; it has read vLLM-Ascend 0.18.0 and 0.23.0" in problem.reason
    assert "allow_untested_version=true" in problem.remedy
    assert engine_version_problem(version, device_type="npu", allow_untested=True) is None


@pytest.mark.parametrize("device_type", ["cuda", "npu"])
def test_what_is_lacking_is_refused_on_every_device_whatever_was_allowed(device_type):
    problem = engine_version_problem("0.32.0", lacking=[LACKING], device_type=device_type, allow_untested=True)
    assert LACKING in problem.reason


def test_the_releases_are_in_order_and_the_newest_is_the_one_every_run_uses():
    assert [one.release for one in ENGINE_RELEASES] == sorted(one.release for one in ENGINE_RELEASES)
    assert [one.runs for one in ENGINE_RELEASES].count(Runs.ALWAYS) == 1
    assert ENGINE_RELEASES[-1].runs is Runs.ALWAYS


def test_the_documented_versions_are_those_of_the_code():
    expected = [
        " | ".join((f"| {release} | {one.tested} | `{one.runs.value}`", one.differs)).strip() + " |"
        for one in ENGINE_RELEASES
        for release in [".".join(map(str, one.release))]
    ]
    page = (ROOT / "docs" / "support.md").read_text()
    section = page.split("## vLLM versions", 1)[1].split("\n\n")[1]
    assert section.splitlines()[2:] == expected


def test_make_soak_prepares_the_releases_that_are_run_nightly():
    nightly = " ".join(one.tested for one in ENGINE_RELEASES if one.runs is Runs.NIGHTLY)
    assert f"NIGHTLY_VLLM := {nightly}\n" in (ROOT / "Makefile").read_text()


class ClientBefore032:
    """A client of two engines that knows no call to all of them."""

    core_engines = ("first", "second")

    async def _call_utility_async(self, call, method, timeout, args, kwargs, *, engine):
        return [f"{call} {method}{args} on {engine}"]


def test_every_engine_is_asked_where_vllm_has_no_call_to_all_of_them():
    asked = collective_rpc_of_every_engine(SimpleNamespace(engine_core=ClientBefore032()), "report", (1,))
    answers = asyncio.run(asked)
    assert answers == ["collective_rpc report(1,) on first", "collective_rpc report(1,) on second"]


def kv_cache_config(*specs):
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


def test_groups_that_know_of_no_replay_replay_nothing():
    """Before vLLM 0.31 a group's spec has no such property."""
    assert prefix_replay_tokens(kv_cache_config(SimpleNamespace(block_size=32))) == 0


def test_the_replay_of_a_stage_is_the_longest_of_its_groups():
    assert (
        prefix_replay_tokens(kv_cache_config(*(SimpleNamespace(prefix_replay_tokens=n) for n in (0, 128, 64)))) == 128
    )


def spec_of(*class_names, **fields):
    """A KV-cache spec whose class extends others of these names, the last one first."""
    made = object
    for name in reversed(class_names):
        made = type(name, (made,), {})
    spec = made()
    vars(spec).update(fields)
    return spec


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (spec_of("FullAttentionSpec", "AttentionSpec"), "full_attention"),
        (spec_of("AscendMLAAttentionSpec", "MLAAttentionSpec", "FullAttentionSpec"), "mla_attention"),
        (spec_of("SinkFullAttentionSpec", "FullAttentionSpec"), "sink_full_attention"),
        (spec_of("SlidingWindowSpec", "AttentionSpec"), "sliding_window"),
        (spec_of("MambaSpec"), "mamba"),
        (spec_of("SomethingNewSpec", "AttentionSpec"), "unknown"),
        (
            spec_of("U", kv_cache_specs={"a": spec_of("FullAttentionSpec"), "b": spec_of("FullAttentionSpec")}),
            "full_attention",
        ),
        (spec_of("U", kv_cache_specs={"a": spec_of("FullAttentionSpec"), "b": spec_of("MambaSpec")}), "unknown"),
    ],
)
def test_a_vllm_without_words_for_its_groups_has_them_told_by_their_classes(spec, kind):
    assert kind_by_class(spec) == kind


def test_what_an_older_vllm_does_not_say_is_taken_as_it_was_then():
    assert block_copies(SimpleNamespace()) == ()
    assert draft_groups(kv_cache_config(SimpleNamespace())) == [False]
    assert prompt_is_token_ids(SimpleNamespace()) is None
