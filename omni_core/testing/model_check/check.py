# SPDX-License-Identifier: Apache-2.0
"""The whole check of a model: alone first, then under the cache in every scenario, then against no cache at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.prefix_cache.errors import OmniPrefixCacheError
from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.runtime import Runtime
from omni_core.testing.model_check.calls import ModelCaller, StageModel, name_of
from omni_core.testing.model_check.findings import Finding, Problem, Severity, wrong
from omni_core.testing.model_check.no_cache import NoCacheComparison
from omni_core.testing.model_check.probes import Tokens, probe
from omni_core.testing.model_check.report import KeyReport, ModelCheckReport, ScenarioReport
from omni_core.testing.model_check.scenarios import Scenario, ScenarioRun, scenarios_for
from omni_core.testing.model_check.shapes import OutputForms
from omni_core.testing.model_check.stage import ModelStage
from omni_core.testing.row_judge import OracleViolationError
from omni_core.testing.row_kinds import RowKind


def check_model_outputs(
    model: StageModel,
    prompts: Sequence[Sequence[int]],
    *,
    policy: ModelCachePolicy | None = None,
    block_size: int = 4,
    vocabulary: int | None = None,
    tolerance: float | None = None,
    seed: int = 0,
    runtime: Runtime | None = None,
) -> ModelCheckReport:
    """Run a model's outputs through the real cache on a simulated engine. Blocks: some hundred calls of the model.

    First the model alone: whole prompts, again, in pieces and in batches, because a prefix hit is right only for
    outputs that are a function of the tokens before them. Then the cache: stored and same-step hits, chunks, recycled
    blocks, preemption and resumption, aborts, late builders, padded graphs, rejected drafts. Each delivered row must
    equal, bit for bit, one that the model computed for its prefix in that run, and within `tolerance` the row that the
    model computes alone, without a cache.

    Args:
        model: see `StageModel`.
        prompts: token ids; at least one prompt is longer than `block_size`.
        policy: what the model says about its outputs; default: its `omni_cache_policy`.
        block_size: tokens per KV block. A small one gives many hits on short prompts.
        vocabulary: requests go on with tokens below this; default: up to the largest token of the prompts.
        tolerance: most that float rows of one prefix may differ by, relative to the row's largest element; default by
            dtype, see `DEFAULT_TOLERANCES`. Rows of other dtypes are equal or wrong.
        seed: decides every random choice.
        runtime: makes all threads and locks; default: real ones.

    Returns:
        What was found; `raise_if_wrong()` makes it an assertion.

    Raises:
        ValueError: the prompts are too few or too short.
        AuthoredModelError: the model raised, or returned what no stage can take; names the call.
    """
    check = _Check(model, _checked_prompts(prompts, block_size), policy, tolerance, runtime)
    check.probe()
    if not check.is_wrong:
        biggest = 1 + max(max(prompt) for prompt in check.prompts)
        tokens_below = biggest if vocabulary is None else vocabulary
        scenarios = scenarios_for(
            check.prompts,
            check.policy,
            block_size=block_size,
            vocabulary=tokens_below,
            row_bytes=check.row_bytes,
            seed=seed,
        )
        for scenario in scenarios:
            check.run(scenario, seed)
    return check.report()


def _checked_prompts(prompts: Sequence[Sequence[int]], block_size: int) -> tuple[Tokens, ...]:
    checked = tuple(tuple(map(int, prompt)) for prompt in prompts)
    if not checked or min(map(len, checked)) < 2:
        raise ValueError(f"{len(checked)} prompts given; give at least one, each of at least two tokens")
    longest = max(map(len, checked))
    if longest <= block_size:
        raise ValueError(
            f"the longest prompt has {longest} tokens: with block_size={block_size} nothing could be hit; "
            "give a longer prompt, or a smaller block size"
        )
    return checked


class _Check:
    """The check as it goes."""

    def __init__(
        self,
        model: StageModel,
        prompts: tuple[Tokens, ...],
        policy: ModelCachePolicy | None,
        tolerance: float | None,
        runtime: Runtime | None,
    ) -> None:
        self.policy = ModelCachePolicy.from_model(model) if policy is None else policy
        self.prompts = prompts
        self._model = model
        self._tolerance = tolerance
        self._runtime = runtime
        self._forms = OutputForms(self.policy)
        self._caller = ModelCaller(model, keeps_hidden=self.policy.needs_full_hidden_states, watch=self._forms.saw)
        self._probe_findings: list[Finding] = []
        self._cache_findings: list[Finding] = []
        self._scenarios: list[ScenarioReport] = []
        self._without_cache = NoCacheComparison(self._caller, tolerance)
        self._shares: Counter[str] = Counter()

    @property
    def is_wrong(self) -> bool:
        """Whether the model alone has shown something wrong."""
        found = (*self._forms.findings(), *self._probe_findings)
        return any(finding.severity is Severity.WRONG for finding in found)

    @property
    def row_bytes(self) -> int:
        """Bytes per row of the further outputs, as far as they were seen."""
        return self._forms.row_bytes

    def probe(self) -> None:
        """The model alone."""
        self._probe_findings = probe(self._caller, self._forms, self.prompts, self._tolerance)

    def run(self, scenario: Scenario, seed: int) -> None:
        """One scenario under the cache."""
        with ModelStage(
            self._model, scenario.stage, policy=self.policy, runtime=self._runtime, watch=self._forms.saw
        ) as stage:
            run = ScenarioRun(scenario, stage, self.prompts, seed)
            try:
                run.run()
            except (OracleViolationError, OmniPrefixCacheError) as error:
                what = f"In scenario {scenario.name!r}, step {run.num_steps}: {type(error).__name__}: {error}."
                remedy = "If the message does not name something the model does, it is a bug of Omni Core: report it."
                self._cache_findings.append(wrong(Problem.DELIVERY_FAILED, None, what, remedy))
            self._take(scenario, run, stage)

    def report(self) -> ModelCheckReport:
        """What was found."""
        compared = self._without_cache.findings()
        findings = [*self._forms.findings(), *self._probe_findings, *self._cache_findings, *compared]
        hits = sum(scenario.counts.get(RowKind.STORED_HIT, 0) for scenario in self._scenarios)
        if self._scenarios and not hits and not self._cache_findings:
            remedy = "Give prompts of several blocks, or a smaller block size."
            findings.append(wrong(Problem.NOTHING_TO_HIT, None, "No scenario had a prefix hit.", remedy))
        findings.sort(key=lambda finding: finding.severity is Severity.ADVICE)
        return ModelCheckReport(
            name_of(self._model),
            self._forms.num_forwards,
            tuple(self._key_report(name) for name in self._key_names()),
            tuple(self._scenarios),
            tuple(findings),
        )

    def _take(self, scenario: Scenario, run: ScenarioRun, stage: ModelStage) -> None:
        stats, oracle = stage.stats(), stage.oracle
        self._without_cache.take(stage.judge.delivered)
        self._shares.update(stage.judge.shares)
        self._scenarios.append(
            ScenarioReport(
                scenario.name,
                run.num_steps,
                run.num_requests,
                oracle.rows_delivered,
                stats.rows_from_hits if stats else 0,
                oracle.requests_failed,
                Counter({kind: count for kind, count in oracle.counts.items() if count}),
                scenario.kinds,
            )
        )

    def _key_names(self) -> list[str]:
        hidden = [HIDDEN_KEY] if self._forms.hidden_forms else []
        return [*hidden, *sorted(self._forms.sightings)]

    def _key_report(self, name: str) -> KeyReport:
        rows, from_hits, largest = 0, 0, 0.0
        if name in self._without_cache.counts:
            count = self._without_cache.counts[name]
            rows, from_hits, largest = count.rows, count.from_hits, count.largest_difference
        if name == HIDDEN_KEY:
            form = ", ".join(f"{width} of {dtype}" for width, dtype in sorted(self._forms.hidden_forms, key=str))
            num_forwards, declared = self._forms.num_forwards, "hidden states"
        else:
            seen = self._forms.sightings[name]
            form, num_forwards, declared = str(seen[-1]), len(seen), self._declared_as(name)
        return KeyReport(name, declared, form, num_forwards, rows, from_hits, largest, self._shares[name])

    def _declared_as(self, name: str) -> str:
        fields = {
            "token_keys": self.policy.token_keys,
            "request_keys": self.policy.request_keys,
            "deferred_keys": self.policy.deferred_keys,
        }
        return next((field_name for field_name, names in fields.items() if name in names), "undeclared")
