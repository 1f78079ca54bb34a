# SPDX-License-Identifier: Apache-2.0
"""Whether a stage fits the memory this process may use: refused, or warned of, before anything is allocated."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from omni_core.prefix_cache.errors import HostMemoryError
from omni_core.prefix_cache.host_limit import HostLimit, HostMemory
from omni_core.prefix_cache.remedies import Remedy, remedies
from omni_core.prefix_cache.sizing import HostPlan, StageSizes

logger = logging.getLogger(__name__)


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

    @property
    def fits(self) -> bool:
        """Whether everything fits, also when every block is filled."""
        return self.refusal is None and self.warning is None


def judge_fit(sizes: StageSizes, host: HostMemory) -> Fit:
    """Hold the plan of a stage against a host. Pure."""
    plan = sizes.plan()
    refusal, warning = start_problem(plan, host), growth_problem(plan, host)
    ways: tuple[Remedy, ...] = ()
    if refusal or warning:
        ways = remedies(sizes, lambda changed: not (start_problem(changed, host) or growth_problem(changed, host)))
    return Fit(plan, host, refusal, warning, ways)


def start_problem(plan: HostPlan, host: HostMemory) -> str | None:
    """Why what is committed before the first step cannot be had, or `None`."""
    if host.limit is not None and plan.start_on_host_bytes > host.limit.nbytes:
        return (
            f"{plan.start_on_host_bytes} bytes are needed before the first step ({plan.start_bytes} for each of "
            f"{plan.caches_per_host} caches on this host), but {_allows(host.limit)}"
        )
    if host.available is not None and plan.start_bytes > host.available.nbytes:
        return (
            f"{plan.start_bytes} bytes are needed before the first step of this cache, but {host.available.nbytes} "
            f"are free now ({host.available.source})"
        )
    return None


def growth_problem(plan: HostPlan, host: HostMemory) -> str | None:
    """Why the caches may not fit once every block is filled, or `None`."""
    if host.limit is not None and plan.most_on_host_bytes > host.limit.nbytes:
        return (
            f"caches on this host can come to {plan.most_on_host_bytes} bytes ({plan.most_bytes} for each of "
            f"{plan.caches_per_host}), but {_allows(host.limit)}"
        )
    if host.available is not None and plan.most_bytes > host.available.nbytes:
        return (
            f"this cache can come to {plan.most_bytes} bytes, but {host.available.nbytes} are free now "
            f"({host.available.source})"
        )
    return None


def check_host_memory(sizes: StageSizes, host: HostMemory) -> HostPlan:
    """Refuse a cache that cannot start; warn of one that may outgrow the limit or what is free. At start; logs once.

    Keys whose rows are not known yet come on top.

    Raises:
        HostMemoryError: names sizes, limit and settings; nothing was allocated.
    """
    fit = judge_fit(sizes, host)
    config = sizes.config
    if fit.refusal is not None:
        raise HostMemoryError(
            f"{fit.refusal}; staging_depth={config.staging_depth}, max_num_tokens={config.max_num_tokens}, "
            f"pretouch={config.pretouch}. {_advice(fit)}"
        )
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


def check_deferred_memory(sizes: StageSizes, host: HostMemory) -> None:
    """Refuse deferred keys whose buffers cannot be had beside what the cache has allocated already. At start.

    Raises:
        HostMemoryError: names sizes, limit and settings; nothing was allocated.
    """
    plan = sizes.plan()
    further_bytes = plan.cache.bounce_bytes + (plan.cache.deferred_ring_bytes if plan.device_is_host else 0)
    if host.limit is not None and plan.start_on_host_bytes > host.limit.nbytes:
        problem = start_problem(plan, HostMemory(host.limit, None))
    elif host.available is not None and further_bytes > host.available.nbytes:
        problem = f"{host.available.nbytes} are free now ({host.available.source})"
    else:
        return
    raise HostMemoryError(
        f"deferred keys {', '.join(sorted(sizes.deferred_keys))} need {further_bytes} bytes more: {problem}; lower "
        f"device_staging_bytes={sizes.config.device_staging_bytes}, or declare the keys as token_keys"
    )


def _allows(limit: HostLimit) -> str:
    return f"{limit.source} allows {limit.nbytes}"


def _pool_in_words(sizes: StageSizes) -> str:
    row_bytes = sum(sizes.stored_row_bytes.values())
    return (
        f"num_blocks={sizes.config.num_blocks} x block_size={sizes.config.block_size} x {row_bytes} bytes of rows per "
        f"token, and {sizes.plan().start_bytes} bytes at start; further keys come on top"
    )


def _advice(fit: Fit) -> str:
    if fit.remedies:
        return f"Any of these makes it fit: {'; '.join(map(str, fit.remedies))}"
    return "No single setting makes it fit: give the container more memory, and the engine fewer blocks"
