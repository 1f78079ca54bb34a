# SPDX-License-Identifier: Apache-2.0
"""What random workloads did, and what of it was judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from omni_core.testing.row_kinds import RowKind
from omni_core.testing.workload_config import WorkloadConfig


@dataclass(frozen=True, slots=True)
class WorkloadReport:
    """What one workload did and what of it was judged. A report exists only if every delivery was right."""

    seed: int
    config: WorkloadConfig
    num_steps: int
    num_requests: int
    rows: Mapping[RowKind, int]
    """Rows by kind (kept back rather than delivered, where the kind says so); a row can be of several kinds."""
    rows_delivered: int
    rows_computed: int
    """Rows of all forwards, each key counted."""
    requests_failed: int
    """Requests that hit blocks whose rows were never computed, and were refused."""
    requests_partial: int
    """Requests that ended with rows reported missing, because their steps were discarded."""
    requests_aborted: int
    requests_replaced: int
    """Times the content of a request was replaced."""
    weights_changed: int
    """Times the weights, or an adapter's, changed."""
    rows_rescued: int
    """Rows the cache set aside because a read still wanted them when their slot was overwritten."""


def total_rows(reports: Iterable[WorkloadReport]) -> Counter[RowKind]:
    """Rows by kind over several workloads."""
    total: Counter[RowKind] = Counter()
    for report in reports:
        total.update(report.rows)
    return total


def describe(reports: Iterable[WorkloadReport]) -> str:
    """A table of rows by kind over several workloads, for a terminal."""
    kept = list(reports)
    total = total_rows(kept)
    lines = [
        f"{len(kept)} workloads, {sum(report.num_steps for report in kept)} steps, "
        f"{sum(report.num_requests for report in kept)} requests "
        f"({sum(report.requests_aborted for report in kept)} aborted, "
        f"{sum(report.requests_failed for report in kept)} refused, "
        f"{sum(report.requests_partial for report in kept)} partial, "
        f"{sum(report.requests_replaced for report in kept)} replaced), "
        f"{sum(report.weights_changed for report in kept)} changes of weights, "
        f"{sum(report.rows_delivered for report in kept)} rows delivered and judged, "
        f"{sum(report.rows_rescued for report in kept)} rescued"
    ]
    lines.extend(f"  {kind.value:<34}{total[kind]:>9}" for kind in RowKind)
    return "\n".join(lines)
