# SPDX-License-Identifier: Apache-2.0
"""What `check_model_outputs` found, and what it ran to find it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from omni_core.testing.model_check.calls import AuthoredModelError
from omni_core.testing.model_check.findings import Finding, Severity
from omni_core.testing.row_kinds import RowKind


class ModelCheckFailedError(AuthoredModelError, AssertionError):
    """A model's outputs cannot be cached as they are declared. The message is the report."""


@dataclass(frozen=True, slots=True)
class KeyReport:
    """One output of the model."""

    name: str
    declared: str
    """The policy's word for it: a field of `ModelCachePolicy`, or `undeclared`."""
    form: str
    """Its latest shape and dtype."""
    num_forwards: int
    """Forwards that brought it."""
    rows_checked: int
    """Delivered rows that equal, bit for bit, what the model computed for that prefix in the same run."""
    rows_from_hits: int
    """Of those, rows that came from the cache."""
    largest_difference: float
    """Between a delivered row and the same row without a cache, relative to the row's largest element."""
    shares_checked: int
    """Of an output that is passed on and not stored: requests that got just what the model returned for them."""


@dataclass(frozen=True, slots=True)
class ScenarioReport:
    """One scenario as it went."""

    name: str
    num_steps: int
    num_requests: int
    rows_delivered: int
    rows_from_hits: int
    requests_refused: int
    """Requests with a hit on rows that were never computed, for which the cache rightly gave an error."""
    counts: Mapping[RowKind, int]
    """Every kind of row that occurred."""
    kinds: tuple[RowKind, ...]
    """Kinds of rows it is about."""


@dataclass(frozen=True, slots=True)
class ModelCheckReport:
    """The whole check. `str(report)` is for people."""

    model: str
    num_forwards: int
    """How often the model was called in all."""
    keys: tuple[KeyReport, ...]
    scenarios: tuple[ScenarioReport, ...]
    """Empty if what the model returns alone was wrong already."""
    findings: tuple[Finding, ...]
    """Wrong ones first."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; there may be advice."""
        return not self.wrong

    @property
    def wrong(self) -> tuple[Finding, ...]:
        """Findings that have to be put right."""
        return tuple(finding for finding in self.findings if finding.severity is Severity.WRONG)

    @property
    def advice(self) -> tuple[Finding, ...]:
        """Findings to know about."""
        return tuple(finding for finding in self.findings if finding.severity is Severity.ADVICE)

    def key(self, name: str) -> KeyReport:
        """The report on one output.

        Raises:
            KeyError: no such output.
        """
        for key in self.keys:
            if key.name == name:
                return key
        raise KeyError(name)

    def rows(self, kind: RowKind) -> int:
        """Rows of a kind in all scenarios."""
        return sum(scenario.counts.get(kind, 0) for scenario in self.scenarios)

    def raise_if_wrong(self) -> None:
        """Do nothing if the outputs are right.

        Raises:
            ModelCheckFailedError: something is wrong.
        """
        if self.wrong:
            raise ModelCheckFailedError(str(self))

    def __str__(self) -> str:
        verdict = "right" if self.ok else f"{len(self.wrong)} things wrong" if len(self.wrong) > 1 else "wrong"
        lines = [f"outputs of {self.model}: {verdict} ({self.num_forwards} forwards)"]
        lines += [f"  {finding}" for finding in self.findings]
        lines += [_key_line(key) for key in self.keys]
        if not self.scenarios:
            lines.append("  not run under the cache: what the model returns alone has to be put right first")
        lines += [_scenario_line(scenario) for scenario in self.scenarios]
        return "\n".join(lines)


def _key_line(key: KeyReport) -> str:
    told = [f"  {key.name}: {key.declared}, {key.form}"]
    if key.rows_checked:
        told.append(f"{key.rows_checked} rows checked, {key.rows_from_hits} of them from the cache")
        told.append(f"largest difference to no cache {key.largest_difference:.2g}")
    if key.shares_checked:
        told.append(f"passed on and not stored, {key.shares_checked} shares checked")
    return "; ".join(told)


def _scenario_line(scenario: ScenarioReport) -> str:
    about = ", ".join(f"{scenario.counts.get(kind, 0)} {kind.value}" for kind in scenario.kinds)
    refused = f", {scenario.requests_refused} requests refused" if scenario.requests_refused else ""
    return (
        f"  {scenario.name}: {scenario.num_steps} steps, {scenario.num_requests} requests{refused}, "
        f"{scenario.rows_delivered} rows ({scenario.rows_from_hits} from the cache); {about}"
    )
