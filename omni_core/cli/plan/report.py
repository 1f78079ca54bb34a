# SPDX-License-Identifier: Apache-2.0
"""Shows a plan: what costs how much, whether it fits, and what to change; for people or as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from omni_core.cli.tables import render_table
from omni_core.prefix_cache.host_limit import HostLimit, HostMemory
from omni_core.prefix_cache.remedies import Remedy
from omni_core.prefix_cache.sizing import HostPlan, StageSizes

_GIB = 1 << 30
_HEADERS = ("what", "where", "when", "bytes", "GiB")
_AT_START = "at start"
_AS_USED = "as blocks are written"
_AT_MOST = "at most"


@dataclass(frozen=True, slots=True)
class FirstSave:
    """What must be done before and at the first save of a key, at a rate measured on this machine just now."""

    commit_bytes_per_s: float
    """At which one thread gets fresh memory. Page-locking comes on top, and depends on the driver."""
    start_s: float
    """To commit what is committed before the first step."""
    step_s: float
    """To commit the rows of one largest step, in blocks that were never written; by the committer, not the engine."""
    pretouch_s: float
    """To commit every row of every key beforehand, on one thread; `pretouch` uses several."""


@dataclass(frozen=True, slots=True)
class WaysOut:
    """What to change about a stage that the host's memory does not hold."""

    remedies: tuple[Remedy, ...] = ()
    """Each alone makes it fit."""
    pair: tuple[Remedy, ...] = ()
    """These two together do."""
    start_remedies: tuple[Remedy, ...] = ()
    """Each alone lets it start."""
    advice: str | None = None
    """What to do where no setting alone makes it fit."""


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Everything that is shown."""

    sizes: StageSizes | None
    """`None`: the figures are a running stage's own."""
    plan: HostPlan
    live: bool
    """Whether the figures were counted by a running stage."""
    sources: tuple[str, ...]
    host: HostMemory
    first_save: FirstSave
    problems: tuple[str, ...]
    ways: WaysOut
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether there is no problem."""
        return not self.problems


def as_json(report: PlanReport) -> dict[str, Any]:
    """The report as plain values. Every number of bytes is of one cache, unless its name says host."""
    plan = report.plan
    return {
        "fits": report.fits,
        "live": report.live,
        "sources": list(report.sources),
        "stage": None if report.sizes is None else _stage_as_json(report.sizes),
        "cache": asdict(plan.cache),
        "sink_queue_bytes": plan.sink_queue_bytes,
        "sink_bytes": plan.sink_bytes,
        "beside_bytes": plan.beside_bytes,
        "device_is_host": plan.device_is_host,
        "pretouched_keys": list(plan.pretouched_keys),
        "start_bytes": plan.start_bytes,
        "most_bytes": plan.most_bytes,
        "device_bytes": plan.cache.device_bytes,
        "caches_per_host": plan.caches_per_host,
        "start_on_host_bytes": plan.start_on_host_bytes,
        "most_on_host_bytes": plan.most_on_host_bytes,
        "host": {name: None if limit is None else asdict(limit) for name, limit in _limits(report.host)},
        "first_save": {"measured": True} | asdict(report.first_save),
        "problems": list(report.problems),
        "remedies": [asdict(remedy) for remedy in report.ways.remedies],
        "remedy_pair": [asdict(remedy) for remedy in report.ways.pair],
        "start_remedies": [asdict(remedy) for remedy in report.ways.start_remedies],
        "advice": report.ways.advice,
        "notes": list(report.notes),
    }


def as_text(report: PlanReport) -> Iterator[str]:
    """The report as lines."""
    if report.sizes is not None:
        config = report.sizes.config
        yield (
            f"{config.num_blocks:,} blocks of {config.block_size} tokens; a hidden row is {config.hidden_size:,} "
            f"{str(config.hidden_dtype).removeprefix('torch.')}, {config.hidden_row_bytes:,} bytes; a step has at most "
            f"{config.max_num_tokens:,} tokens"
        )
    for source in report.sources:
        yield f"from {source}"
    yield ""
    yield f"One cache{', as it runs now' if report.live else ''}:"
    yield render_table(_HEADERS, list(_cost_rows(report.plan)), right_aligned=("bytes", "GiB"))
    yield ""
    yield from _totals(report)
    yield ""
    first = report.first_save
    yield (
        f"First save of a key: nothing to wait for, its memory is reserved and comes with the rows "
        f"({first.step_s:.2f} s for a largest step, beside the engine)."
    )
    yield (
        f"At start: {first.start_s:.2f} s to commit {report.plan.start_bytes:,} bytes, page-locking not included. "
        f"Every row beforehand (pretouch): {first.pretouch_s:.1f} s on one thread. Measured on this machine just now: "
        f"{first.commit_bytes_per_s / _GIB:.1f} GiB/s."
    )
    for note in report.notes:
        yield f"Note: {note}."
    yield ""
    if report.fits:
        yield "It fits."
        return
    for problem in report.problems:
        yield f"It does not fit: {problem}."
    ways = report.ways
    yield from _listed("Each of these alone makes it fit:", ways.remedies)
    if ways.advice is not None:
        yield f"{ways.advice}."
    yield from _listed("These two together make it fit:", ways.pair)
    yield from _listed("Each of these alone lets it start, with a warning:", ways.start_remedies)


def _listed(heading: str, remedies: Sequence[Remedy]) -> Iterator[str]:
    if remedies:
        yield heading
    for remedy in remedies:
        yield f"  {remedy.setting}: {remedy.value:,} instead of {remedy.present:,} ({remedy.how})"


def _stage_as_json(sizes: StageSizes) -> dict[str, Any]:
    config = sizes.cache_config
    return {
        "num_blocks": config.num_blocks,
        "block_size": config.block_size,
        "hidden_size": config.hidden_size,
        "hidden_dtype": str(config.hidden_dtype).removeprefix("torch."),
        "max_num_tokens": config.max_num_tokens,
        "staging_depth": config.staging_depth,
        "extra_row_bytes": config.extra_row_bytes,
        "row_bytes": sizes.stored_row_bytes,
        "deferred_keys": list(sizes.deferred_keys),
    }


def _cost_rows(plan: HostPlan) -> Iterator[tuple[str, ...]]:
    cache = plan.cache
    device = "host (CPU)" if plan.device_is_host else "device"
    rows = [
        ("staging pages", "host, pinned", _AT_START, cache.staging_bytes),
        ("snapshot ring", device, _AT_START, cache.snapshot_ring_bytes),
        ("bounce buffers", "host, pinned", _AT_START, cache.bounce_bytes),
        ("deferred ring", device, _AT_START, cache.deferred_ring_bytes),
        *(
            (f"rows of {key}", "host", _AT_START if key in plan.pretouched_keys else _AS_USED, nbytes)
            for key, nbytes in cache.pool_bytes.items()
        ),
        *((f"tables of {key}", "host", _AS_USED, nbytes) for key, nbytes in cache.key_table_bytes.items()),
        ("tables of all keys", "host", _AS_USED, cache.shared_table_bytes),
        ("recycled buffers", "host", _AT_MOST, cache.max_recycled_bytes),
        ("rows that wait for the sink", "host", _AT_MOST, plan.sink_queue_bytes),
        ("rows in the sink", "host", _AT_MOST, plan.sink_bytes),
    ]
    for what, where, when, nbytes in rows:
        if nbytes:
            yield what, where, when, f"{nbytes:,}", _gib(nbytes)


def _totals(report: PlanReport) -> Iterator[str]:
    plan = report.plan
    rows = [
        ("at start, each cache", plan.start_bytes, ""),
        ("at most, each cache", plan.most_bytes, ""),
        *([("other stages of this host", plan.beside_bytes, "--beside")] if plan.beside_bytes else []),
        (f"at start, {plan.caches_per_host} on this host", plan.start_on_host_bytes, ""),
        (f"at most, {plan.caches_per_host} on this host", plan.most_on_host_bytes, ""),
    ]
    names = {"limit": "allowed", "available": "free now"}
    rows += [(names[name], limit.nbytes, limit.source) for name, limit in _limits(report.host) if limit is not None]
    if not plan.device_is_host:
        rows.append(("device memory, each cache", plan.cache.device_bytes, ""))
    cells: Sequence[Sequence[str]] = [(what, f"{nbytes:,}", _gib(nbytes), who) for what, nbytes, who in rows]
    yield render_table(("host memory", "bytes", "GiB", "says"), cells, right_aligned=("bytes", "GiB"))


def _limits(host: HostMemory) -> tuple[tuple[str, HostLimit | None], ...]:
    return (("limit", host.limit), ("available", host.available))


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.2f}"
