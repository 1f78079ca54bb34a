# SPDX-License-Identifier: Apache-2.0
"""The effective block, and the one warning of a stage that is on and can never hit."""

import logging
from types import SimpleNamespace

import fake_runner as fake
import pytest
from fake_stage import FakeStage

from omni_core.integrations.vllm.delivery.builder import StartedRequest
from omni_core.integrations.vllm.effective_block import (
    BlockOfGroup,
    EffectiveBlock,
    effective_block,
    warn_if_first_prompts_cannot_hit,
    warn_if_no_prompt_can_hit,
)

BOUND_S = 20.0
MAMBA_160 = EffectiveBlock(160, (BlockOfGroup("full_attention", 32), *[BlockOfGroup("mamba", 160)] * 3))
BLOCK_4 = EffectiveBlock(4, (BlockOfGroup("full_attention", 4),))


def groups(*sizes, drafts=(), **told):
    """KV-cache groups of these block sizes; `drafts`: the indices of those with the draft's layers."""
    found = [
        SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=size), is_eagle_group=index in drafts)
        for index, size in enumerate(sizes)
    ]
    return SimpleNamespace(kv_cache_groups=found, **told)


def config(prefix_match_unit=None, speculative=None):
    cache_config = SimpleNamespace(prefix_match_unit=prefix_match_unit)
    return SimpleNamespace(cache_config=cache_config, speculative_config=speculative)


def speculative(*, use_eagle, block_drop=None):
    """As vLLM before 0.30 has it, or with its answer to `use_eagle_block_drop`."""
    answers = {"use_eagle": lambda: use_eagle}
    return SimpleNamespace(**answers | ({} if block_drop is None else {"use_eagle_block_drop": lambda: block_drop}))


DROPS = speculative(use_eagle=True, block_drop=True)


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.fixture
def kinds(monkeypatch):
    """The kinds that vLLM names for a stage's groups."""
    named = []
    monkeypatch.setattr("omni_core.integrations.vllm.versions.attention_group_kinds", lambda config: tuple(named))
    return named


@pytest.mark.parametrize(
    ("of_groups", "sizes", "num_tokens"),
    [
        (("full_attention",), (16,), 16),
        (("full_attention", "sliding_window"), (16, 24), 48),
        (("full_attention", "sliding_window", "sliding_window"), (32, 4096, 4096), 4096),
    ],
)
def test_a_hit_ends_where_a_block_of_every_group_ends(kinds, of_groups, sizes, num_tokens):
    kinds.extend(of_groups)
    block = effective_block(of_groups, groups(*sizes), config())
    assert block.num_tokens == num_tokens
    assert [(group.kind, group.num_tokens) for group in block.groups] == list(zip(of_groups, sizes, strict=True))


def test_what_vllm_tells_its_workers_is_taken(kinds):
    kinds.extend(("mamba", "full_attention"))
    found = groups(160, 160, cache_hit_alignment_tokens=32)
    assert effective_block(kinds, found, config()).num_tokens == 32


@pytest.mark.parametrize(("unit", "num_tokens"), [(None, 32), (16, 16)])
def test_before_vllm_tells_it_hits_inside_a_mamba_block_are_thought_possible(kinds, unit, num_tokens):
    """A warning that says `never` must not be wrong."""
    kinds.extend(("mamba", "full_attention"))
    assert effective_block(kinds, groups(160, 32), config(unit)).num_tokens == num_tokens
    told_nothing = groups(160, 32, cache_hit_alignment_tokens=None)
    assert effective_block(kinds, told_nothing, config(unit)).num_tokens == num_tokens


@pytest.mark.parametrize(
    ("sizes", "causes"),
    [
        ((16,), "full_attention (16 tokens per block)"),
        ((16, 4096), "mamba (4096 tokens per block)"),
        ((16, 24), "full_attention (16 tokens per block), mamba (24 tokens per block)"),
        ((16, 48, 24), "mamba (48 tokens per block)"),
        ((16, 64, 64, 64), "3 x mamba (64 tokens per block)"),
    ],
)
def test_the_groups_that_make_the_block_long_are_named_and_no_other(sizes, causes):
    of_groups = [BlockOfGroup("mamba" if index else "full_attention", size) for index, size in enumerate(sizes)]
    assert EffectiveBlock(0, tuple(of_groups)).causes == causes


def test_what_makes_the_block_shorter_is_a_setting_that_does():
    """vLLM raises the block of a stage with Mamba layers again; without such a group it refuses the other setting."""
    assert BLOCK_4.remedy == "pass a smaller block_size"
    assert MAMBA_160.remedy.startswith("set prefix_match_unit")


@pytest.mark.parametrize(("num_tokens", "can_hit"), [(1, False), (159, False), (160, False), (161, True)])
def test_the_last_token_of_a_prompt_is_always_computed(num_tokens, can_hit):
    assert MAMBA_160.can_hit(num_tokens) is can_hit


@pytest.mark.parametrize(
    ("method", "fewest"),
    [
        (None, 17),
        (speculative(use_eagle=False), 17),
        (speculative(use_eagle=True), 33),
        (speculative(use_eagle=True, block_drop=True), 33),
        (speculative(use_eagle=True, block_drop=False), 17),
    ],
)
def test_a_speculative_method_that_drops_the_last_block_needs_one_more(kinds, method, fewest):
    kinds.append("full_attention")
    block = effective_block(kinds, groups(16), config(speculative=method))
    assert (block.num_tokens, block.fewest_prompt_tokens) == (16, fewest)
    assert [block.can_hit(fewest - 1), block.can_hit(fewest)] == [False, True]


@pytest.mark.parametrize(
    ("of_groups", "sizes", "drafts", "fewest"),
    [
        (("full_attention", "sliding_window"), (16, 48), (0,), 48 + 16),
        (("full_attention", "sliding_window"), (16, 48), (1,), 48 + 48),
        (("full_attention", "sliding_window"), (16, 24), (), 48 + 24),
        (("mamba", "full_attention"), (160, 32), (), 32 + 32),
        (("mamba", "full_attention"), (160, 32), (1,), 32 + 32),
        (("mamba", "full_attention"), (160, 32), (0,), 32 + 1),
    ],
)
def test_with_several_groups_the_block_of_the_drafts_group_may_end_with_the_prompt(
    kinds, of_groups, sizes, drafts, fewest
):
    kinds.extend(of_groups)
    block = effective_block(kinds, groups(*sizes, drafts=drafts), config(speculative=DROPS))
    assert block.fewest_prompt_tokens == fewest


def test_the_warnings_say_what_speculation_costs(kinds, caplog):
    kinds.append("full_attention")
    block = effective_block(kinds, groups(16), config(speculative=DROPS))
    assert warn_if_no_prompt_can_hit(block, 32)
    warn_if_first_prompts_cannot_hit(block, [StartedRequest("a-00000001", [7] * 32, 0)])
    at_start, later = warnings(caplog)
    assert "max_model_len=32 is below the 33 tokens" in at_start
    assert "computes the last 16 tokens of what it found again" in at_start
    assert "Prompts of 33 tokens or more can hit" in later


def test_a_stage_whose_longest_prompt_cannot_hit_is_warned_of_at_start(caplog):
    assert warn_if_no_prompt_can_hit(MAMBA_160, 160)
    [message] = warnings(caplog)
    assert "max_model_len=160" in message
    assert "here 160 tokens" in message
    assert "3 x mamba (160 tokens per block)" in message
    assert "Raise max_model_len to 161 or more, set prefix_match_unit to a number that divides it" in message
    assert "or turn the cache off on this stage (omni_core.enabled=false)" in message


def test_a_stage_with_one_prompt_that_could_hit_is_not_warned_of_at_start(caplog):
    assert not warn_if_no_prompt_can_hit(MAMBA_160, 161)
    assert warnings(caplog) == []


def test_the_warning_names_the_longest_of_the_first_prompts(caplog):
    started = [StartedRequest(f"r{length}-00000001", [7] * length, 0) for length in (20, 90, 3)]
    warn_if_first_prompts_cannot_hit(MAMBA_160, started)
    [message] = warnings(caplog)
    assert "'r90-00000001', has 90 tokens" in message
    assert "here 160 tokens" in message
    assert "3 x mamba (160 tokens per block)" in message
    assert "Prompts of 161 tokens or more can hit" in message


def test_a_block_shorter_than_a_groups_is_not_said_to_come_from_it(caplog):
    inside = EffectiveBlock(32, (BlockOfGroup("mamba", 640), BlockOfGroup("full_attention", 640)))
    warn_if_first_prompts_cannot_hit(inside, [StartedRequest("a-00000001", [7] * 32, 0)])
    [message] = warnings(caplog)
    assert "here 32 tokens" in message
    assert "hits may end inside the blocks of the KV-cache group mamba (640 tokens per block)" in message


@pytest.fixture
def stage():
    made = FakeStage(first_prompts_block=BLOCK_4)
    yield made
    made.session.close(BOUND_S)


def test_many_short_prompts_are_warned_of_once(stage, caplog):
    for number in range(4):
        ended = [f"a{number - 1}-0000000{number - 1}"] if number else []
        new = (f"a{number}-0000000{number}", [11, 12, 13, 14], [number + 1], 0, 4)
        stage.step(fake.scheduled(new=[new], finished=ended))
    [message] = warnings(caplog)
    assert "'a0-00000000', has 4 tokens" in message


@pytest.mark.parametrize("lengths", [[5], [2, 5, 3]])
def test_a_stage_that_begins_with_a_prompt_that_is_long_enough_is_never_warned_of(stage, caplog, lengths):
    first = [(f"a{n}-0000000{n}", [9] * n, [2 * n, 2 * n + 1], 0, n) for n in lengths]
    stage.step(fake.scheduled(new=first))
    short = ("b-00000009", [9, 8], [13], 0, 2)
    stage.step(fake.scheduled(new=[short], finished=[req_id for req_id, *_ in first]))
    assert warnings(caplog) == []


def test_a_step_without_a_new_request_decides_nothing(stage, caplog):
    stage.step(fake.scheduled())
    assert warnings(caplog) == []
    stage.step(fake.scheduled(new=[("a-00000001", [1, 2], [1], 0, 2)]))
    assert len(warnings(caplog)) == 1
