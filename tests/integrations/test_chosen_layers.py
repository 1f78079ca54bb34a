# SPDX-License-Identifier: Apache-2.0
"""Outputs of chosen layers are stored, joined on a hit and delivered; what cannot be given is refused at start."""

from types import SimpleNamespace

import fake_runner as fake
import pytest
import torch
from fake_stage import FakeStage

from omni_core.integrations.vllm.chosen_layers import ChosenLayers, capture_layers, check_layers, layer_key
from omni_core.integrations.vllm.errors import LayersNotCapturedError
from omni_core.integrations.vllm.stage_facts import cache_config
from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.settings.errors import SettingsError
from omni_core.settings.stage_settings import OnError, StageSettings

BOUND_S = 20.0
PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
OTHER = [*PROMPT[:8], 40, 41, 42]


class LayeredModel:
    """Hands out the layers asked for, as vLLM's models with the EAGLE-3 interface do."""

    supports_eagle3 = True

    def __init__(self):
        self.layers = ()

    def set_aux_hidden_state_layers(self, layers):
        self.layers = layers


class LayeredRunner(fake.FakeRunner):
    """The fake runner with auxiliary hidden states; layer `l` of a row is ten times the row, plus `l`."""

    def __init__(self, model):
        super().__init__(model)
        self.parallel_config = SimpleNamespace(pipeline_parallel_size=1)
        self.use_aux_hidden_state_outputs = False
        self.broken = lambda rows: rows

    def execute_model(self, scheduler_output, intermediate_tensors=None):
        result = super().execute_model(scheduler_output, intermediate_tensors)
        if self.execute_model_state is not None:
            hidden = self.execute_model_state.hidden_states
            captured = [self.broken(hidden * 10 + layer) for layer in self.model.layers]
            self.execute_model_state.aux_hidden_states = captured if self.use_aux_hidden_state_outputs else None
        return result


class LayeredStage(FakeStage):
    """A stage whose fake model hands out layers."""

    def __init__(self, layers, *, model=None, on_error=OnError.RAISE, tap=True):
        super().__init__(runner=LayeredRunner(model or LayeredModel()), layers=layers, on_error=on_error, tap=tap)

    def stored(self, req_id):
        self.session.flush(BOUND_S, still_running=())
        return super().stored(req_id)


@pytest.fixture
def stages():
    made = []

    def make(*args, **options):
        made.append(LayeredStage(*args, **options))
        return made[-1]

    yield make
    for stage in made:
        stage.session.close(BOUND_S)


def layer_rows(tokens, layer):
    return [[10 * value + layer for value in fake.row_of(tokens, position)] for position in range(len(tokens))]


def drive_a_hit(stage):
    """`a` alone; then `b`, which hits `a`'s first two blocks, beside a decode of `a`."""
    stage.step(fake.scheduled(new=[("a-00000001", PROMPT, [1, 2, 3], 0, 10)]), a_00000001=21)
    stage.step(
        fake.scheduled(new=[("b-00000002", OTHER, [1, 2, 5], 8, 3)], running=[("a-00000001", 10, 1, None)]),
        a_00000001=22,
        b_00000002=50,
    )
    return {"a-00000001": [*PROMPT, 21], "b-00000002": OTHER}


# -- rows --------------------------------------------------------------------------------------------------------------


def test_every_layer_comes_whole_with_its_tokens_and_positions_also_behind_a_hit(stages):
    stage = stages((0, 2, 5))
    for req_id, tokens in drive_a_hit(stage).items():
        stored = stage.stored(req_id)
        assert set(stored.rows) == {HIDDEN_KEY, *map(layer_key, (0, 2, 5))}
        for layer in (0, 2, 5):
            assert stored.rows[layer_key(layer)].tolist() == layer_rows(tokens, layer)
        assert stored.token_ids.tolist() == tokens
        assert stored.positions.tolist() == list(range(len(tokens)))
    assert stage.session.cache.stats().rows_from_hits == 8


def test_the_tap_sees_the_layers_by_itself(stages):
    stage = stages((0, 2))
    fed = drive_a_hit(stage)
    assert stage.session.tap.keys == {HIDDEN_KEY, layer_key(0), layer_key(2)}
    for req_id, tokens in fed.items():
        rows = stage.stored(req_id).rows
        for key in stage.session.tap.keys:
            assert stage.session.tap.equal_rows(tokens, rows[key], key).all()


def test_a_first_step_of_one_token_is_stored_because_the_keys_are_declared(stages):
    stage = stages((1,))
    stage.step(fake.scheduled(new=[("a-00000001", PROMPT[:4], [1], 0, 1)]))
    for computed in (1, 2, 3):
        stage.step(fake.scheduled(running=[("a-00000001", computed, 1, None)]), a_00000001=21)
    stage.step(fake.scheduled(new=[("b-00000002", PROMPT[:6], [1, 5], 4, 2)], finished=["a-00000001"]))
    assert stage.stored("b-00000002").rows[layer_key(1)].tolist() == layer_rows(PROMPT[:6], 1)


def test_staging_grows_with_the_layers_by_itself():
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size_local=1),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=256),
        model_config=SimpleNamespace(dtype=torch.bfloat16, get_hidden_size=lambda: 64),
    )

    def extra(**settings):
        made = cache_config(StageSettings(extra_row_bytes=8, **settings), config, num_blocks=10, block_size=32)
        return made.extra_row_bytes

    assert extra(enabled=True) == 8
    assert extra(enabled=True, layers=(0, 3, 7)) == 8 + 3 * 64 * 2


def test_without_layers_model_and_runner_are_left_alone(stages):
    stage = stages(())
    drive_a_hit(stage)
    assert stage.runner.model.layers == ()
    assert not stage.runner.use_aux_hidden_state_outputs
    assert set(stage.stored("a-00000001").rows) == {HIDDEN_KEY}


def test_layers_of_a_stage_that_is_not_enabled_or_pools_are_not_captured():
    runner = LayeredRunner(LayeredModel())
    capture_layers(StageSettings(enabled=False, layers=(1,)), runner)
    runner.is_pooling_model = True
    capture_layers(StageSettings(enabled=True, layers=(1,)), runner)
    assert runner.model.layers == ()
    assert not runner.use_aux_hidden_state_outputs


@pytest.mark.parametrize("returned", [None, [torch.zeros(1, 4)]])
def test_a_forward_that_returns_other_layers_is_an_error(returned):
    forward = SimpleNamespace(hidden_states=torch.zeros(1, 4), aux_hidden_states=returned)
    count = len(returned or ())
    with pytest.raises(LayersNotCapturedError, match=rf"layers=\[1, 2\]: the forward returned {count} auxiliary"):
        ChosenLayers((1, 2)).added_to({}, forward)


def test_layers_changed_under_a_running_engine_cost_its_requests_and_generation_goes_on(stages):
    stage = stages((1, 2), on_error=OnError.ISOLATE, tap=False)
    stage.step(fake.scheduled(new=[("a-00000001", PROMPT, [1, 2, 3], 0, 10)]), a_00000001=21)
    stage.runner.model.set_aux_hidden_state_layers((1,))
    stage.step(fake.scheduled(running=[("a-00000001", 10, 1, None)]), a_00000001=22)
    assert stage.runner.forwards == 2
    stage.session.flush(BOUND_S, still_running=())
    [failure] = stage.session.report()["delivery"]["failures"].values()
    assert "returned 1 auxiliary hidden states" in failure


@pytest.mark.parametrize("broken", [lambda rows: rows[:-1], lambda rows: rows.repeat(2, 1), lambda rows: rows.tolist()])
def test_a_layer_without_a_row_per_token_costs_the_steps_requests(stages, broken):
    stage = stages((1, 2), on_error=OnError.ISOLATE, tap=False)
    stage.runner.broken = broken
    stage.step(fake.scheduled(new=[("a-00000001", PROMPT, [1, 2, 3], 0, 10)]))
    stage.session.flush(BOUND_S, still_running=())
    [failure] = stage.session.report()["delivery"]["failures"].values()
    assert "'hidden_states.layer_1' is" in failure


# -- refusals ----------------------------------------------------------------------------------------------------------


def vllm_config(**changed):
    """An engine of a model with four decoder layers."""
    parts = {
        "model_config": SimpleNamespace(get_total_num_hidden_layers=lambda: 4, runner_type="generate"),
        "speculative_config": None,
        "parallel_config": SimpleNamespace(pipeline_parallel_size=1),
        "kernel_config": SimpleNamespace(ir_op_priority=SimpleNamespace(fused_add_rms_norm=["native"])),
    }
    return SimpleNamespace(**(parts | changed))


@pytest.mark.parametrize("layers", [(), (0,), (4,), (0, 1, 2, 3, 4)])
def test_layers_the_model_has_are_let_through(layers):
    check_layers(StageSettings(enabled=True, layers=layers), vllm_config())


@pytest.mark.parametrize(
    ("layers", "changed", "named"),
    [
        ((1, 5), {}, ["layers=[1, 5]", "4 decoder layers", "from 0 (the embeddings) to 4"]),
        (
            (1,),
            {"speculative_config": SimpleNamespace(method="eagle3")},
            ["layers=[1]", "'eagle3' chooses the model's auxiliary layers itself", "leave layers out"],
        ),
        (
            (1,),
            {"speculative_config": SimpleNamespace(method="extract_hidden_states")},
            ["'extract_hidden_states'"],
        ),
        ((1,), {"parallel_config": SimpleNamespace(pipeline_parallel_size=3)}, ["pipeline_parallel_size=3", "most 2"]),
        (
            (0, 1),
            {"kernel_config": SimpleNamespace(ir_op_priority=SimpleNamespace(fused_add_rms_norm=["vllm_c", "native"]))},
            ["layer 0 would be overwritten", "'vllm_c'", "ir_op_priority"],
        ),
    ],
)
def test_layers_the_engine_cannot_give_are_refused_by_name(layers, changed, named):
    with pytest.raises(SettingsError) as refusal:
        check_layers(StageSettings(enabled=True, layers=layers), vllm_config(**changed))
    for text in named:
        assert text in str(refusal.value)


def test_other_speculation_and_in_place_kernels_without_layer_0_are_let_through():
    kernels = SimpleNamespace(ir_op_priority=SimpleNamespace(fused_add_rms_norm=["vllm_c"]))
    config = vllm_config(speculative_config=SimpleNamespace(method="ngram"), kernel_config=kernels)
    check_layers(StageSettings(enabled=True, layers=(1, 2)), config)


def test_nothing_is_asked_of_a_stage_without_a_use_for_layers():
    check_layers(StageSettings(enabled=False, layers=(99,)), vllm_config())
    pooling = SimpleNamespace(get_total_num_hidden_layers=lambda: 4, runner_type="pooling")
    check_layers(StageSettings(enabled=True, layers=(99,)), vllm_config(model_config=pooling))


def test_a_model_that_cannot_hand_out_layers_is_refused():
    with pytest.raises(SettingsError, match=r"layers=\[1\]: FakeModel cannot hand out its layers"):
        capture_layers(StageSettings(enabled=True, layers=(1,)), LayeredRunner(fake.FakeModel()))


def test_an_engine_that_captures_layers_already_is_refused_and_left_as_it_was():
    runner = LayeredRunner(LayeredModel())
    runner.use_aux_hidden_state_outputs = True
    with pytest.raises(SettingsError, match="captures layers already"):
        capture_layers(StageSettings(enabled=True, layers=(1,)), runner)
    assert runner.model.layers == ()


@pytest.mark.parametrize("kind", ["token_keys", "request_keys", "deferred_keys"])
def test_a_key_the_model_declares_itself_is_refused(kind):
    policy = ModelCachePolicy(**{kind: frozenset({layer_key(2)})})
    with pytest.raises(SettingsError, match=r"declares 'hidden_states\.layer_2' itself"):
        ChosenLayers((1, 2)).declared_in(policy)


def test_a_key_the_model_hands_out_undeclared_is_an_error():
    forward = SimpleNamespace(hidden_states=torch.zeros(1, 4), aux_hidden_states=[torch.zeros(1, 4)])
    with pytest.raises(LayersNotCapturedError, match=r"hands out 'hidden_states\.layer_2' itself"):
        ChosenLayers((2,)).added_to({layer_key(2): torch.zeros(1)}, forward)


def test_what_the_model_declares_stays_declared():
    policy = ModelCachePolicy(token_keys=frozenset({"codes"}), needs_full_hidden_states=False)
    declared = ChosenLayers((3,)).declared_in(policy)
    assert declared.token_keys == {"codes", layer_key(3)}
    assert not declared.needs_full_hidden_states
