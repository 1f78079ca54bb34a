# SPDX-License-Identifier: Apache-2.0
"""What a feature's scenario is made of: prompts, a run with the cache, a run without, and what must have happened."""

import random
from dataclasses import dataclass, field

from feature_engine import FeatureEngine
from feature_models import VOCAB_SIZE
from verdict import compare, faults, judge
from vllm import EngineArgs

from omni_core.integrations.vllm.errors import GateRefusedError
from omni_core.integrations.vllm.stage import check_stage
from omni_core.settings.stage_settings import StageSettings


class Prompts:
    """Random prompts, the same in every run; those of one family share their beginning."""

    def __init__(self, seed=1):
        self._random = random.Random(seed)
        self._families = {}

    def tokens(self, count):
        return [self._random.randrange(2, VOCAB_SIZE) for _ in range(count)]

    def family(self, name, count, *, shared, own):
        begin = self._families.setdefault(name, self.tokens(shared))
        return [begin + self.tokens(own + 5 * index) for index in range(count)]

    def named(self, prefix, family, count, *, shared, own):
        prompts = self.family(family, count, shared=shared, own=own)
        return {f"{prefix}-{index}": prompt for index, prompt in enumerate(prompts)}

    def repetitive(self, count):
        """A prompt that repeats itself, so that an n-gram drafter guesses right at times."""
        phrase = self.tokens(7)
        return (phrase * (count // len(phrase) + 1))[:count]


@dataclass
class Outcome:
    """What one feature's run showed."""

    status: str
    """`right`, `wrong`, `refused` or `left alone`."""
    detail: str = ""
    verdict: dict = field(default_factory=dict)
    evidence: dict = field(default_factory=dict)


def serve(model, drive, evidence, *, exact=True, only_with_cache=None, **options):
    """Run `drive(engine)` with the cache, and without where `exact`, and judge every row.

    Args:
        model: the model's folder.
        drive: gives an engine its requests; the same in both runs.
        evidence: from the engine to what must have happened: name to (count, least count).
        exact: whether rows and tokens must also equal those of a run without prefix caching.
        only_with_cache: engine options of the run with the cache alone.
        options: engine options of both.
    """
    with FeatureEngine(model, cache=True, **options | (only_with_cache or {})) as engine:
        drive(engine)
        engine.flush()
        verdict = judge(engine)
        shown = evidence(engine) | {"requests": (verdict["requests"], 1)}
    if exact:
        with FeatureEngine(model, cache=False, **options) as without:
            drive(without)
            verdict |= compare(engine, without)
    return outcome_of(verdict, shown)


def outcome_of(verdict, shown):
    """`right` if the verdict names rows and nothing wrong with them, and everything has happened often enough."""
    wrong = [f"{name}: {count}" for name, count in faults(verdict).items()]
    wrong += [f"only {count} {name}" for name, (count, least) in shown.items() if count < least]
    counts = {name: count for name, (count, _) in shown.items()}
    return Outcome("wrong" if wrong else "right", "; ".join(wrong), verdict, counts)


def refuse(model, named, **options):
    """Start an engine with the cache; it must be refused by a sentence that names `named`."""
    try:
        FeatureEngine(model, cache=True, **options)
    except GateRefusedError as refusal:
        right = named in str(refusal)
        return Outcome("refused" if right else "wrong", str(refusal))
    return Outcome("wrong", "the engine started")


def refuse_configuration(model, named, change, **options):
    """Ask the gate about a configuration that this machine cannot run, as a worker does before it loads a model.

    Args:
        model: the model's folder.
        named: what the refusal must name.
        change: makes of a configuration for this machine the one in question.
        options: engine options.
    """
    args = EngineArgs(model=model, skip_tokenizer_init=True, enable_prefix_caching=True, **options)
    config = args.create_engine_config()
    change(config)
    try:
        check_stage(StageSettings(enabled=True), config, uses_v2_runner=False)
    except GateRefusedError as refusal:
        return Outcome("refused" if named in str(refusal) else "wrong", str(refusal))
    return Outcome("wrong", "the gate let it through")


def hits(engine, least=1):
    """The evidence that rows came from the cache."""
    return {"rows from hits": (engine.session.cache.stats().rows_from_hits, least)}
