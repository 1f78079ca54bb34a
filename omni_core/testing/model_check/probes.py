# SPDX-License-Identifier: Apache-2.0
"""Runs the model alone, in the ways an engine may: whole, again, in pieces, in a batch; rows of a prefix must agree.

A prefix hit hands on rows that were computed for another request, in another batch, with other tokens behind them. That
is right only for outputs that are a function of the tokens up to the row, and of its position. No cache is involved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.testing.model_check.calls import ModelCaller, ModelForward, SequenceRun
from omni_core.testing.model_check.findings import Finding, Problem, wrong
from omni_core.testing.model_check.rows import row_differences, tolerance_of
from omni_core.testing.model_check.shapes import OutputForms

Tokens = tuple[int, ...]


class Circumstance(Enum):
    """What was different when a prompt was computed a second time; its value says what the rows depend on."""

    AGAIN = "the same forward gives other rows when it is run again: the model is random, or keeps state"
    OTHER_REQUEST = "they depend on the request's id"
    OTHER_TAIL = "they depend on tokens that come after them"
    IN_A_BATCH = "they depend on the other requests of the forward"
    IN_PIECES = "they depend on where the forward starts, so a prompt that is computed in pieces gives other rows"


_REMEDIES = {
    Circumstance.AGAIN: "Draw random numbers from the tokens and the position; keep nothing between forwards but KV.",
    Circumstance.OTHER_REQUEST: "What belongs to one request is an entry: declare it in request_keys.",
    Circumstance.OTHER_TAIL: "Prefix caching cannot be right for it: turn it off, or return what is causal.",
    Circumstance.IN_A_BATCH: "Compute each request's rows from its own tokens; use `runs` to tell them apart.",
    Circumstance.IN_PIECES: "Compute rows from all of `token_ids`, not from this forward's `input_ids` alone.",
}


@dataclass(frozen=True, slots=True)
class _Trial:
    """A forward that computes some rows of a prompt a second time: those of `runs[index]`."""

    circumstance: Circumstance
    runs: tuple[SequenceRun, ...]
    index: int
    num_comparable: int
    """The run's first rows, so many of which have the prompt's prefix."""


def run_of(tokens: Sequence[int], start: int = 0, req_id: str = "a") -> SequenceRun:
    """A run of `tokens` from position `start` on."""
    return SequenceRun(req_id, torch.tensor(tokens, dtype=torch.int64), start)


def probe(caller: ModelCaller, forms: OutputForms, prompts: Sequence[Tokens], tolerance: float | None) -> list[Finding]:
    """Compute each prompt alone, then in every circumstance, and compare.

    Args:
        caller: the model; every forward also goes to `forms`, which must be what it watches with.
        forms: which outputs have rows.
        prompts: at least one, each of at least two tokens.
        tolerance: see `tolerance_of`.

    Returns:
        One finding per output that is no function of prefix and position, for the first circumstance that shows it.

    Raises:
        AuthoredModelError: the model raised, or returned what no stage can take.
    """
    compared: list[tuple[Tokens, _Trial, ModelForward, ModelForward]] = []
    for index, prompt in enumerate(prompts):
        alone = caller([run_of(prompt)]).kept()
        other = prompts[index - 1] if len(prompts) > 1 else tuple(reversed(prompt))
        compared.extend((prompt, trial, alone, caller(trial.runs).kept()) for trial in _trials(prompt, other))
    _show_small_forwards(caller, prompts)
    found: dict[str, tuple[int, Finding]] = {}
    order = list(Circumstance)
    for prompt, trial, alone, again in compared:
        for name, finding in _compare(forms, prompt, trial, alone, again, tolerance):
            place = order.index(trial.circumstance)
            if name not in found or place < found[name][0]:
                found[name] = (place, finding)
    return [finding for _, finding in found.values()]


def _trials(prompt: Tokens, other: Tokens) -> Iterator[_Trial]:
    length = len(prompt)
    cut = max(1, length // 2)
    old_tail, tail = prompt[cut:], tuple(reversed(prompt[cut:]))
    yield _Trial(Circumstance.AGAIN, (run_of(prompt),), 0, length)
    yield _Trial(Circumstance.OTHER_REQUEST, (run_of(prompt, req_id="b"),), 0, length)
    same_tail = next((i for i in range(len(tail)) if tail[i] != old_tail[i]), len(tail))
    yield _Trial(Circumstance.OTHER_TAIL, (run_of(prompt[:cut] + tail),), 0, cut + same_tail)
    yield _Trial(Circumstance.OTHER_TAIL, (run_of(prompt[:cut]),), 0, cut)
    yield _Trial(Circumstance.IN_A_BATCH, (run_of(other, req_id="b"), run_of(prompt)), 1, length)
    yield _Trial(Circumstance.IN_A_BATCH, (run_of(prompt), run_of(other, len(other) - 1, "b")), 0, length)
    yield _Trial(Circumstance.IN_PIECES, (run_of(prompt, cut),), 0, length - cut)
    yield _Trial(Circumstance.IN_PIECES, (run_of(prompt, length - 1),), 0, 1)


def _show_small_forwards(caller: ModelCaller, prompts: Sequence[Tokens]) -> None:
    """Decode steps of one and of several requests: what a tensor's first dimension means can be told from them."""
    for count in (1, 2, 3):
        caller([run_of(prompts[i % len(prompts)], len(prompts[i % len(prompts)]) - 1, f"d{i}") for i in range(count)])


def _compare(
    forms: OutputForms, prompt: Tokens, trial: _Trial, alone: ModelForward, again: ModelForward, tolerance: float | None
) -> Iterator[tuple[str, Finding]]:
    start = trial.runs[trial.index].start
    for name, rows in _rows_by_name(forms, again).items():
        expected = _rows_by_name(forms, alone).get(name)
        if expected is None:
            continue
        ours = again.rows_of(trial.index, rows)[: trial.num_comparable]
        theirs = expected[start : start + trial.num_comparable]
        if ours.numel() == 0 or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            continue  # the forms say what is the matter
        apart = row_differences(ours, theirs)
        if float(apart.max()) <= tolerance_of(rows.dtype, tolerance):
            continue
        yield name, _finding(name, prompt, trial, start, apart)


def _finding(name: str, prompt: Tokens, trial: _Trial, start: int, apart: torch.Tensor) -> Finding:
    at = int(apart.argmax())
    largest = float(apart[at])
    size = "they are not equal"
    if largest < torch.inf:
        size = f"they differ by {largest:.2g} of the row's largest element"
    what = (
        f"Rows of a prompt of {len(prompt)} tokens were computed alone and then for {', '.join(map(str, trial.runs))}; "
        f"at position {start + at} {size}: {trial.circumstance.value}."
    )
    return wrong(Problem.NOT_A_FUNCTION_OF_THE_PREFIX, name, what, _REMEDIES[trial.circumstance])


def _rows_by_name(forms: OutputForms, forward: ModelForward) -> dict[str, torch.Tensor]:
    stored = forward.hidden is not None and forms.policy.needs_full_hidden_states
    rows = {HIDDEN_KEY: forward.hidden} if stored and forward.hidden is not None else {}
    for name in forward.outputs:
        if forms.has_rows(name) and forward.has_row_per_token(name):
            rows[name] = forward.outputs[name]
    return rows
