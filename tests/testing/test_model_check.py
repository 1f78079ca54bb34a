# SPDX-License-Identifier: Apache-2.0
"""A model's outputs are judged without hardware: what is wrong with them is said by key, with what to do about it."""

import random

import pytest
import torch
from torch import nn

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.errors import InvalidConfigError
from omni_core.prefix_cache.manager import OmniPrefixCacheManager
from omni_core.prefix_cache.outputs import RequestRows, StageCacheOutputs
from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.testing import (
    ModelStage,
    OracleViolationError,
    RowKind,
    SequenceRun,
    SimRequest,
    check_model_outputs,
)
from omni_core.testing.model_check import ModelCallError, ModelCheckFailedError, ModelOutputError, Problem, Severity

PROMPTS = [(5, 1, 4, 2, 8, 3, 9, 7, 6, 11, 10), (5, 1, 4, 2, 8, 3, 9, 7, 12, 13, 14, 15, 3)]


def prefix_rows(run, factor=1):
    """`(num_tokens, 3)` float64: exact, and different for every prefix, position and factor."""
    weights = torch.arange(1, len(run.token_ids) + 1)
    sums = (run.token_ids * weights * factor).cumsum(0).double()
    return torch.stack([sums, sums + weights, weights.double() * factor], 1)[run.start :]


def rows_of(runs, factor=1):
    return torch.cat([prefix_rows(run, factor) for run in runs])


class GoodModel(nn.Module):
    """Every kind of output, each declared."""

    omni_cache_policy = {  # noqa: RUF012 - as a model may declare it
        "token_keys": {"codes.audio"},
        "deferred_keys": {"layers.3"},
        "request_keys": {"speaker"},
    }

    def forward(self, runs):
        rows = rows_of(runs)
        return (
            rows,
            {
                "codes": {"audio": rows.long().unsqueeze(-1).expand(-1, -1, 2)},  # not contiguous
                "layers": {"3": rows_of(runs, 7).to(torch.float16)},
                "speaker": torch.stack([run.token_ids[:1] for run in runs]),
                "words": [{"text": str(run.token_ids.tolist()), "last": run.token_ids[-1:]} for run in runs],
                "step": torch.tensor(float(len(runs))),
            },
        )


@pytest.fixture(scope="module")
def good_report():
    return check_model_outputs(GoodModel(), PROMPTS)


def test_right_outputs_are_found_right_and_every_path_is_taken(good_report):
    report = good_report
    assert report.ok, str(report)
    report.raise_if_wrong()
    rows = {key.name: (key.rows_checked, key.rows_from_hits) for key in report.keys}
    assert rows[HIDDEN_KEY] == rows["codes.audio"] == rows["layers.3"]
    assert min(rows[HIDDEN_KEY]) > 500
    assert report.key("codes.audio").largest_difference == 0.0
    for name in ("speaker", "words", "step"):
        assert report.key(name).shares_checked > 500
        assert report.key(name).rows_checked == 0
    taken = {kind for scenario in report.scenarios for kind in scenario.kinds if scenario.counts.get(kind)}
    assert taken >= {
        RowKind.STORED_HIT,
        RowKind.SAME_STEP_HIT,
        RowKind.PARTIAL_CHUNK,
        RowKind.RESUMED,
        RowKind.RECOMPUTED,
        RowKind.LATE_MATERIALISE,
        RowKind.REDELIVERED,
        RowKind.CLIPPED,
        RowKind.HASHED_NEVER_COMPUTED,
        RowKind.DEFERRED,
    }
    assert report.advice == ()
    assert "outputs of GoodModel: right" in str(report)


def test_a_check_can_be_repeated(good_report):
    assert check_model_outputs(GoodModel(), PROMPTS).scenarios == good_report.scenarios


def test_rows_without_hidden_states():
    def model(runs):
        return None, {"codes": rows_of(runs)}

    policy = ModelCachePolicy(token_keys=frozenset({"codes"}), needs_full_hidden_states=False)
    report = check_model_outputs(model, PROMPTS, policy=policy)
    report.raise_if_wrong()
    assert report.key("codes").rows_from_hits > 200


# -- what is wrong with the form of an output -------------------------------------------------------------------------


def finding_of(key, value, *, token_keys=(), request_keys=(), deferred_keys=()):
    """The one finding about a model that returns `value(runs, rows)` under `key`."""

    def model(runs):
        return rows_of(runs), {key: value(runs, rows_of(runs))}

    policy = ModelCachePolicy(frozenset(token_keys), frozenset(request_keys), frozenset(deferred_keys))
    report = check_model_outputs(model, PROMPTS, policy=policy)
    (finding,) = report.findings
    assert report.ok is (finding.severity is Severity.ADVICE)
    assert (report.scenarios == ()) is not report.ok, "a wrong model is not run under the cache, a right one is"
    if not report.ok:
        with pytest.raises(ModelCheckFailedError, match=finding.problem.value):
            report.raise_if_wrong()
    return finding


@pytest.mark.parametrize("declared", [True, False])
def test_tokens_on_the_second_dimension(declared):
    finding = finding_of("codes", lambda runs, rows: rows.T, token_keys=["codes"] if declared else [])
    assert (finding.severity, finding.problem) == (Severity.WRONG, Problem.TOKENS_ON_OTHER_DIMENSION)
    assert finding.key == "codes"
    assert "tokens are on dimension 1" in finding.what
    assert "codes.movedim(1, 0)" in finding.remedy
    assert ("not declared" in finding.what) is not declared


def test_declared_rows_that_are_entries_of_requests():
    finding = finding_of("voice", lambda runs, rows: rows.new_zeros(len(runs), 4), deferred_keys=["voice"])
    assert finding.problem is Problem.NOT_ONE_ROW_PER_TOKEN
    assert "request_keys" in finding.remedy


def test_declared_rows_in_a_list():
    finding = finding_of("codes", lambda runs, rows: [prefix_rows(run) for run in runs], token_keys=["codes"])
    assert finding.problem is Problem.NOT_ONE_ROW_PER_TOKEN
    assert "Concatenate" in finding.remedy


def test_undeclared_rows_in_a_list_are_advice():
    finding = finding_of("codes", lambda runs, rows: [prefix_rows(run) for run in runs])
    assert (finding.severity, finding.problem) == (Severity.ADVICE, Problem.ROWS_IN_A_LIST)
    assert "never stored" in finding.remedy


def test_declared_entries_that_are_rows_of_tokens():
    finding = finding_of("codes", lambda runs, rows: rows, request_keys=["codes"])
    assert finding.problem is Problem.NOT_ONE_ENTRY_PER_REQUEST
    assert "token_keys" in finding.remedy


def test_declared_entries_of_which_there_are_too_few():
    finding = finding_of("voice", lambda runs, rows: rows.new_zeros((len(runs) + 1) // 2), request_keys=["voice"])
    assert (finding.severity, finding.problem) == (Severity.WRONG, Problem.NOT_ONE_ENTRY_PER_REQUEST)


def test_undeclared_rows_are_advice_and_work():
    finding = finding_of("codes", lambda runs, rows: rows)
    assert (finding.severity, finding.problem) == (Severity.ADVICE, Problem.UNDECLARED)
    assert "token_keys" in finding.remedy


def test_undeclared_entries_of_requests_are_ambiguous():
    finding = finding_of("voice", lambda runs, rows: rows.new_zeros(len(runs), 4))
    assert (finding.severity, finding.problem) == (Severity.WRONG, Problem.UNDECLARED_AND_AMBIGUOUS)
    assert "request_keys" in finding.remedy


def test_an_undeclared_key_that_has_rows_sometimes_is_ambiguous():
    finding = finding_of("mixed", lambda runs, rows: rows if len(rows) % 2 else rows[:1])
    assert (finding.severity, finding.problem) == (Severity.WRONG, Problem.UNDECLARED_AND_AMBIGUOUS)
    assert "once not" in finding.remedy


def test_an_undeclared_value_of_the_whole_step_is_advice():
    finding = finding_of("table", lambda runs, rows: torch.arange(77.0))
    assert (finding.severity, finding.problem) == (Severity.ADVICE, Problem.UNDECLARED)
    assert "given the whole of it" in finding.what


@pytest.mark.parametrize(
    "value",
    [
        lambda runs, rows: rows.float() if len(rows) > 3 else rows,
        lambda runs, rows: rows[:, : 3 if len(rows) > 3 else 2],
        lambda runs, rows: rows[:, None] if len(rows) > 3 else rows,
    ],
    ids=["dtype", "width", "rank"],
)
def test_rows_that_change_their_form(value):
    finding = finding_of("codes", value, token_keys=["codes"])
    assert finding.problem is Problem.ROWS_CHANGE_FORM


def test_hidden_rows_that_change_their_dtype():
    def model(runs):
        rows = rows_of(runs)
        return rows.float() if len(rows) > 3 else rows, {}

    (finding,) = check_model_outputs(model, PROMPTS).findings
    assert (finding.problem, finding.key) == (Problem.ROWS_CHANGE_FORM, HIDDEN_KEY)


def test_rows_without_an_element():
    finding = finding_of("codes", lambda runs, rows: rows[:, :0], token_keys=["codes"])
    assert finding.problem is Problem.NO_ROWS_TO_SPEAK_OF


def test_a_declared_key_that_never_comes_names_the_one_that_does():
    def model(runs):
        return rows_of(runs), {"codes.audio": rows_of(runs)}

    policy = ModelCachePolicy(token_keys=frozenset({"code.audio"}))
    report = check_model_outputs(model, PROMPTS, policy=policy)
    (finding,) = report.wrong
    assert (finding.problem, finding.key) == (Problem.DECLARED_NEVER_SEEN, "code.audio")
    assert "'codes.audio'" in finding.remedy


def test_a_key_that_comes_sometimes_is_advice_and_its_zeros_are_told():
    def model(runs):
        rows = rows_of(runs)
        return rows, {"codes": rows} if len(rows) % 2 else {}

    report = check_model_outputs(model, PROMPTS, policy=ModelCachePolicy(token_keys=frozenset({"codes"})))
    (finding,) = report.findings
    assert (finding.severity, finding.problem) == (Severity.ADVICE, Problem.COMES_SOMETIMES)
    assert report.rows(RowKind.ABSENT_KEY_ZEROS) > 0


# -- what prefix caching cannot be right for --------------------------------------------------------------------------


def rows_in_pieces(runs):
    """Sums over the tokens of this forward alone."""
    return torch.cat([run.input_ids.double().cumsum(0)[:, None] for run in runs])


def rows_in_a_batch(runs):
    return rows_of(runs) + len(runs)


def rows_by_request(runs):
    return torch.cat([prefix_rows(run) + ord(run.req_id[0]) for run in runs])


def rows_with_the_future(runs):
    return torch.cat([prefix_rows(run) + run.token_ids[-1] for run in runs])


class Random:
    def __init__(self):
        self._rng = random.Random(3)

    def __call__(self, runs):
        return rows_of(runs) + self._rng.random()


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (rows_in_pieces, "computed in pieces"),
        (rows_in_a_batch, "the other requests of the forward"),
        (rows_by_request, "the request's id"),
        (rows_with_the_future, "tokens that come after them"),
        (Random(), "the model is random, or keeps state"),
    ],
    ids=["pieces", "batch", "request", "future", "random"],
)
def test_rows_that_are_no_function_of_the_prefix(rows, says):
    report = check_model_outputs(lambda runs: (rows_of(runs), {"codes": rows(runs)}), PROMPTS)
    (finding,) = report.wrong
    assert (finding.problem, finding.key) == (Problem.NOT_A_FUNCTION_OF_THE_PREFIX, "codes")
    assert says in finding.what
    assert "position" in finding.what
    assert report.scenarios == ()


def test_small_differences_of_float_rows_are_told_and_may_be_allowed():
    def model(runs):
        return rows_of(runs) * (1 + 1e-6 * (len(runs) > 1)), {}

    (finding,) = check_model_outputs(model, PROMPTS).wrong
    assert finding.problem is Problem.NOT_A_FUNCTION_OF_THE_PREFIX
    report = check_model_outputs(model, PROMPTS, tolerance=1e-5)
    report.raise_if_wrong()
    assert 1e-7 < report.key(HIDDEN_KEY).largest_difference < 1e-5


# -- what a model must not do -----------------------------------------------------------------------------------------


def test_a_model_that_raises_is_named_with_the_forward():
    def broken(runs):
        raise KeyError("speaker 7")

    with pytest.raises(ModelCallError, match=r"call 1 of .*broken, for 'a' \[0, 11\): raised KeyError") as raised:
        check_model_outputs(broken, PROMPTS)
    assert isinstance(raised.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (lambda rows: rows, "a tensor (11, 3) of torch.float64; return a tuple"),
        (lambda rows: (rows, [rows]), "further outputs are a list"),
        (lambda rows: (rows[1:], {}), r"hidden states are a tensor (10, 3)"),
        (lambda rows: (None, {}), "needs_full_hidden_states=False"),
        (lambda rows: (rows, {"a": {"b": rows}, "a.b": rows}), "two outputs come to the name 'a.b'"),
        (lambda rows: (rows, {"far": rows.to("meta")}), "output 'far' lies on meta"),
    ],
    ids=["no tuple", "no mapping", "too few rows", "no hidden rows", "one name twice", "other device"],
)
def test_what_no_stage_can_take_is_named(returned, says):
    with pytest.raises(ModelOutputError) as raised:
        check_model_outputs(lambda runs: returned(rows_of(runs)), PROMPTS)
    assert says in str(raised.value)


def test_a_policy_that_is_none_is_named():
    class Model(GoodModel):
        omni_cache_policy = {"tokens": {"codes"}}  # noqa: RUF012 - as a model may declare it

    with pytest.raises(InvalidConfigError, match=r"Model.omni_cache_policy has unknown field 'tokens'"):
        check_model_outputs(Model(), PROMPTS)


@pytest.mark.parametrize("prompts", [[], [(1,)], [(1, 2, 3, 4)]], ids=["none", "one token", "no block"])
def test_prompts_that_can_hit_nothing_are_refused(prompts):
    with pytest.raises(ValueError, match="prompt"):
        check_model_outputs(GoodModel(), prompts)


# -- the judge can fail -----------------------------------------------------------------------------------------------


def swapped(rows):
    order = [1, 0, *range(2, rows.num_rows)]
    return {**rows.rows, HIDDEN_KEY: rows.hidden_states[order]}


TAMPERINGS = {
    "two rows change places": (lambda rows: {"rows": swapped(rows)}, "the row of position"),
    "a row is zeros": (lambda rows: {"rows": {**rows.rows, HIDDEN_KEY: rows.hidden_states * 0}}, "other rows"),
    "another dtype": (lambda rows: {"rows": {**rows.rows, HIDDEN_KEY: rows.hidden_states.float()}}, "other rows"),
    "a key is missing": (lambda rows: {"rows": {HIDDEN_KEY: rows.hidden_states}}, "exist, delivered only"),
    "positions are missing": (lambda rows: {"ranges": ((1, rows.num_rows),)}, "first missing position 0"),
    "a share is another's": (lambda rows: {"leftovers": {**rows.leftovers, "words": []}}, "leftover 'words'"),
    "a share is missing": (lambda rows: {"leftovers": {}}, "leftovers []"),
}


@pytest.mark.parametrize("tampering", TAMPERINGS)
def test_a_wrong_delivery_is_found(monkeypatch, tampering):
    change, says = TAMPERINGS[tampering]
    right = OmniPrefixCacheManager.materialize

    def tampered(self, *arguments):
        outputs = right(self, *arguments)
        served = {req_id: changed(rows, **change(rows)) for req_id, rows in outputs.items()}
        return StageCacheOutputs(outputs.step_id, served, outputs.failed, outputs.release)

    monkeypatch.setattr(OmniPrefixCacheManager, "materialize", tampered)
    with ModelStage(GoodModel()) as stage:
        stage.submit(SimRequest("a", PROMPTS[0]))
        with pytest.raises(OracleViolationError) as raised:
            stage.run_to_end()
    assert says in str(raised.value)


def changed(delivered, **changes):
    fields = ("ranges", "rows", "key_ranges", "zero_ranges", "leftovers")
    return RequestRows(delivered.req_id, **({name: getattr(delivered, name) for name in fields} | changes))


def test_a_wrong_delivery_is_a_finding_of_the_check(monkeypatch):
    monkeypatch.setattr(OmniPrefixCacheManager, "take_partial_requests", lambda self: ())
    report = check_model_outputs(GoodModel(), PROMPTS)
    assert {finding.problem for finding in report.wrong} == {Problem.DELIVERY_FAILED}
    assert "neither delivered nor reported" in report.wrong[0].what


def test_a_model_may_use_its_buffers_again():
    buffers = {}

    def model(runs):
        rows = rows_of(runs)
        buffer = buffers.setdefault("hidden", torch.empty(512, 3, dtype=rows.dtype))
        buffer[: len(rows)] = rows
        return buffer[: len(rows)], {"codes": buffer[: len(rows)]}

    report = check_model_outputs(model, PROMPTS, policy=ModelCachePolicy(token_keys=frozenset({"codes"})))
    report.raise_if_wrong()


def test_a_stage_refuses_what_its_model_would_not_see():
    with ModelStage(GoodModel()) as stage, pytest.raises(ValueError, match="token ids only"):
        stage.submit(SimRequest("a", PROMPTS[0], salt="voice"))


def test_a_run_knows_its_tokens_and_positions():
    run = SequenceRun("a", torch.tensor([4, 5, 6, 7]), 1)
    assert (run.num_tokens, run.input_ids.tolist(), run.positions.tolist()) == (3, [5, 6, 7], [1, 2, 3])


def test_wide_rows_and_long_prompts_need_no_setting():
    def model(runs):
        rows = rows_of(runs)
        return rows, {"layers": rows.repeat(1, 3_000).to(torch.bfloat16)}

    policy = ModelCachePolicy(deferred_keys=frozenset({"layers"}))
    report = check_model_outputs(model, [tuple(range(1, 30))], policy=policy, block_size=8)
    report.raise_if_wrong()
    assert report.key("layers").rows_from_hits > 0
