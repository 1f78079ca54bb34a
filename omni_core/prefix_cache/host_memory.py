# SPDX-License-Identifier: Apache-2.0
"""Whether a stage fits the memory this process may use: refused, or warned of, before anything is allocated."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from omni_core.prefix_cache.errors import HostMemoryError
from omni_core.prefix_cache.host_limit import HostMemory
from omni_core.prefix_cache.remedies import Remedy, remedies, remedy_pair
from omni_core.prefix_cache.sizing import HostPlan, StageSizes

logger = logging.getLogger(__name__)


NO_SINGLE_SETTING = "No single setting makes it fit: give the container more memory, and the engine fewer blocks"


@dataclass(frozen=True, slots=True)
class Fit:
    """A plan held against a host."""

    plan: HostPlan
    host: HostMemory
    refusal: str | None
    """Why the caches cannot even start; `None` if they can."""
    warning: str | None
    """What may not fit once blocks are filled, or is not free now."""
    remedies: tuple[Remedy, ...]
    """Settings of which each alone makes it fit."""
    pair: tuple[Remedy, ...]
    """Two settings that together make it fit; empty if one alone does, or no two do."""
    start_remedies: tuple[Remedy, ...]
    """Further ones of which each alone lets it start, with a warning."""

    @property
    def fits(self) -> bool:
        """Whether everything fits, also when every block is filled."""
        return self.refusal is None and self.warning is None


def judge_fit(sizes: StageSizes, host: HostMemory, *, room_for_every_key: bool = False) -> Fit:
    """Hold the plan of a stage against a host. Pure.

    Args:
        sizes: the stage.
        host: what it may use.
        room_for_every_key: whether what is advised must also leave no `missing_row_bytes`.
    """
    plan = sizes.plan()

    def starts(changed: StageSizes) -> bool:
        return start_problem(changed.plan(), host) is None

    def fits(changed: StageSizes) -> bool:
        if room_for_every_key and changed.missing_row_bytes:
            return False
        return starts(changed) and growth_problem(changed.plan(), host) is None

    alone = remedies(sizes, fits)
    return Fit(
        plan,
        host,
        refusal=start_problem(plan, host),
        warning=growth_problem(plan, host),
        remedies=alone,
        pair=() if alone else remedy_pair(sizes, fits),
        start_remedies=tuple(remedy for remedy in remedies(sizes, starts) if remedy not in alone),
    )


def start_problem(plan: HostPlan, host: HostMemory) -> str | None:
    """Why what is committed before the first step cannot be had, or `None`."""
    return _problem(
        host,
        "{} bytes are needed before the first step ({})",
        "{} bytes are needed before the first step of this cache",
        plan.start_on_host_bytes,
        plan.start_bytes,
        plan,
    )


def growth_problem(plan: HostPlan, host: HostMemory) -> str | None:
    """Why the caches may not fit once every block is filled, or `None`."""
    return _problem(
        host,
        "caches on this host can come to {} bytes ({})",
        "this cache can come to {} bytes",
        plan.most_on_host_bytes,
        plan.most_bytes,
        plan,
    )


def check_staging_memory(sizes: StageSizes, host: HostMemory) -> None:
    """Refuse a cache whose staging cannot be had, whatever policy it gets. Before anything is allocated.

    Raises:
        HostMemoryError: names sizes, limit and settings.
    """
    staging = sizes.before_policy
    fit = judge_fit(staging, host)
    if fit.refusal is not None:
        raise _refused(staging, fit)


def check_host_memory(sizes: StageSizes, host: HostMemory, *, taken_bytes: int = 0) -> HostPlan:
    """Refuse a cache that cannot start; warn of one that may outgrow the limit or what is free. At start; logs once.

    Keys whose rows are not known yet come on top.

    Args:
        sizes: the stage, its policy known.
        host: as it is now.
        taken_bytes: what this cache has taken of it already.

    Raises:
        HostMemoryError: names sizes, limit and settings; nothing was allocated.
    """
    fit = judge_fit(sizes, host.given_back(taken_bytes))
    if fit.refusal is not None:
        raise _refused(sizes, fit)
    if fit.warning is not None:
        logger.warning("%s: %s. %s", fit.warning, _pool_in_words(sizes), _advice(fit))
    else:
        logger.info(
            "caches on this host can come to %d bytes (%d each): %s",
            fit.plan.most_on_host_bytes,
            fit.plan.most_bytes,
            _pool_in_words(sizes),
        )
    return fit.plan


def _problem(
    host: HostMemory, on_host: str, of_one: str, on_host_bytes: int, one_bytes: int, plan: HostPlan
) -> str | None:
    """Why so much cannot be had: all caches of the host against its limit, those to start against what is free now."""
    if host.limit is not None and on_host_bytes > host.limit.nbytes:
        beside = f", and {plan.beside_bytes} of other stages" if plan.beside_bytes else ""
        parts = f"{one_bytes} for each of {plan.caches_per_host} caches on this host{beside}"
        return f"{on_host.format(on_host_bytes, parts)}, but {host.limit.source} allows {host.limit.nbytes}"
    if host.available is None:
        return None
    free = f"but {host.available.nbytes} are free now ({host.available.source})"
    if one_bytes > host.available.nbytes:
        return f"{of_one.format(one_bytes)}, {free}"
    own_bytes = on_host_bytes - plan.beside_bytes
    if host.before_any_start and own_bytes > host.available.nbytes:
        parts = f"{one_bytes} for each of {plan.caches_per_host} caches on this host"
        return f"{on_host.format(own_bytes, parts)}, {free}"
    return None


def _refused(sizes: StageSizes, fit: Fit) -> HostMemoryError:
    config = sizes.config
    settings = [
        f"staging_depth={config.staging_depth}",
        f"max_num_tokens={config.max_num_tokens}",
        f"pretouch={config.pretouch}",
    ]
    if sizes.deferred_keys:
        names = ", ".join(sorted(sizes.deferred_keys))
        settings.append(f"device_staging_bytes={config.device_staging_bytes} for the deferred keys {names}")
    return HostMemoryError(f"{fit.refusal}; {', '.join(settings)}. {_advice(fit)}")


def _pool_in_words(sizes: StageSizes) -> str:
    row_bytes = sum(sizes.stored_row_bytes.values())
    return (
        f"num_blocks={sizes.config.num_blocks} x block_size={sizes.config.block_size} x {row_bytes} bytes of rows per "
        f"token, {sizes.plan().start_bytes} bytes at start, and {sizes.sink_queue_bytes + sizes.sink_bytes} of rows "
        "that the sink waits for or holds; further keys come on top"
    )


def _advice(fit: Fit) -> str:
    told = [f"Any of these makes it fit: {_listed(fit.remedies)}" if fit.remedies else NO_SINGLE_SETTING]
    if fit.pair:
        told.append(f"These two together make it fit: {_listed(fit.pair)}")
    if fit.start_remedies:
        told.append(f"Any of these lets it start: {_listed(fit.start_remedies)}")
    return ". ".join(told)


def _listed(ways: tuple[Remedy, ...]) -> str:
    return "; ".join(map(str, ways))
