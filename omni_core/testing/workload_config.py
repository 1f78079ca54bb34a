# SPDX-License-Identifier: Apache-2.0
"""Everything about a random workload but its random choices, and how a seed draws it.

Each feature of an engine is on in some workloads only, independently of the others, so that their combinations occur.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from omni_core.prefix_cache.config import Delivery
from omni_core.testing.fake_model import FakeKey, hidden_key
from omni_core.testing.scheduler_config import Mishaps, Preemption, SchedulerConfig
from omni_core.testing.stage_config import StageConfig

KEY_PALETTE: tuple[FakeKey, ...] = (
    FakeKey("mm_feature", (16,), torch.float32),
    FakeKey("codes.audio", (4, 3), torch.int64),
    FakeKey("layers.10", (2, 2, 5), torch.bfloat16),
    FakeKey("scores", (7,), torch.float16, padded=False),
)
"""Further keys of workloads: their own widths, ranks, dtypes and padding."""


@dataclass(frozen=True, slots=True)
class Likelihoods:
    """Chances, between 0 and 1."""

    key_emitted: float = 0.6
    """A further key is emitted in a step."""
    abort_between: float = 0.04
    """Before a step, some request is aborted."""
    abort_before_forward: float = 0.04
    """Some request of a step is aborted between schedule and forward."""
    forward_lost: float = 0.02
    """A step's forward never runs."""
    sent_again: float = 0.5
    """A burst repeats a request whose rows were lost, or whose content was replaced, as clients do."""
    discarded: float = 0.08
    """A step is discarded instead of materialised."""
    partly_asked: float = 0.08
    """A step is materialised for some of its requests."""
    collected: float = 0.7
    """Finished outputs are judged and released after a step, instead of being held."""
    acknowledged: float = 0.8
    """With two-phase delivery, a request's rows are acknowledged before they are released."""
    id_reused: float = 0.0
    """A request takes the id of one that has ended."""
    in_pieces: float = 0.0
    """A request's prompt arrives in pieces."""
    replaced: float = 0.0
    """Before a step, the content of some request is replaced."""
    weights_changed: float = 0.0
    """Before a step, or while it is under way, the weights or an adapter change."""
    hashes_forgotten: float = 0.0
    """The engine resets its own prefix cache when weights change, as it should."""


@dataclass(frozen=True, slots=True)
class WorkloadConfig:
    """A workload."""

    stage: StageConfig
    hidden: FakeKey
    keys: tuple[FakeKey, ...]
    num_requests: int = 40
    num_prefixes: int = 4
    """Distinct long prefixes that prompts start with."""
    max_prompt_tokens: int = 64
    max_output_tokens: int = 6
    largest_burst: int = 6
    """Most requests submitted at one time."""
    equal_burst: float = 0.4
    """Chance that the requests of a burst are one prompt repeated."""
    max_steps_late: int = 3
    likelihoods: Likelihoods = field(default_factory=Likelihoods)

    @classmethod
    def draw(cls, seed: int) -> WorkloadConfig:
        """A configuration that depends on `seed` alone."""
        rng = random.Random(f"workload config {seed}")
        max_prompt_tokens = rng.choice((24, 48, 80))
        max_output_tokens = rng.choice((1, 2, 8, 16))
        bursts = rng.random() < 0.5
        scheduler = _draw_scheduler(rng, seed, max_prompt_tokens + max_output_tokens, bursts=bursts)
        keys = tuple(sorted(rng.sample(KEY_PALETTE, rng.randint(0, 3)), key=lambda key: key.name))
        return cls(
            _draw_stage(rng, seed, scheduler, keys),
            hidden_key(rng.choice((2, 8, 24)), rng.choice((torch.float32, torch.bfloat16))),
            keys,
            num_prefixes=rng.choice((2, 4, 8)),
            max_prompt_tokens=max_prompt_tokens,
            max_output_tokens=max_output_tokens,
            max_steps_late=rng.choice((0, 2, 4)),
            equal_burst=0.9 if bursts else 0.3,
            likelihoods=_draw_likelihoods(rng),
        )

    @classmethod
    def draw_cramped(cls, seed: int) -> WorkloadConfig:
        """One whose pool holds hardly more than one request, so that hit blocks change hands in the next step.

        With a runtime that stalls reads, rows are overwritten while a read still wants them.
        """
        config = cls.draw(seed)
        scheduler = config.stage.scheduler
        cramped = replace(
            scheduler,
            num_blocks=1 + -(-25 // scheduler.block_size),
            max_chunk_tokens=None,
            max_num_requests=3,
            side_group_window=None,
        )
        return replace(
            config,
            stage=replace(config.stage, scheduler=cramped, staging_depth=4),
            num_requests=60,
            num_prefixes=2,
            max_prompt_tokens=24,
            max_output_tokens=1,
            max_steps_late=4,
        )


def _draw_scheduler(rng: random.Random, seed: int, largest_request: int, *, bursts: bool) -> SchedulerConfig:
    block_size = rng.choice((1, 2, 4, 4, 8, 16))
    preemption = rng.choice((Preemption.NEVER, Preemption.NEVER, Preemption.RECOMPUTE_V1, Preemption.RECOMPUTE_V2))
    preempts = preemption is not Preemption.NEVER
    window = rng.choice((block_size, 3 * block_size)) if rng.random() < 0.2 else None
    largest = -(-largest_request // block_size) + (0 if window is None else window // block_size)
    digests = rng.random() < 0.5
    partial_hits = block_size > 1 and rng.random() < 0.2
    takes_back = preempts and digests and not partial_hits and rng.random() < 0.6
    return SchedulerConfig(
        # Where requests may be preempted, the pool is small enough that they are.
        num_blocks=1 + largest * rng.choice((1, 2, 3) if preempts else (2, 2, 3, 6)),
        block_size=block_size,
        max_num_tokens=rng.choice((16, 32, 64, 128)),
        max_num_requests=8 if bursts else rng.choice((2, 4, 8)),
        max_chunk_tokens=rng.choice((None, None, 5, 12)),
        partial_block_hits=partial_hits,
        preemption=preemption,
        block_digests=digests,
        max_draft_tokens=rng.choice((0, 0, 0, 1, 3, 6)),
        side_group_window=window,
        mishaps=Mishaps(
            seed,
            preempted=rng.choice((0.0, 0.1, 0.3)) if preempts else 0.0,
            taken_back=0.1 if takes_back else 0.0,
        ),
    )


def _draw_stage(rng: random.Random, seed: int, scheduler: SchedulerConfig, keys: tuple[FakeKey, ...]) -> StageConfig:
    most = scheduler.max_num_tokens
    divisors = [size for size in range(1, scheduler.block_size) if scheduler.block_size % size == 0]
    options: Mapping[str, Any] = {"copy_latency_s": rng.choice((0.0, 0.0, 0.0005))}
    deferred = frozenset(key.name for key in keys if rng.random() < 0.6) if rng.random() < 0.4 else frozenset()
    return StageConfig(
        scheduler,
        staging_depth=rng.choice((2, 3, 4)),
        capture_sizes=tuple(sorted({4, 8, most // 2, most})) if rng.random() < 0.5 else (),
        declare_keys=rng.random() < 0.7,
        deferred_keys=deferred,
        device_staging_bytes=rng.choice((0, 1 << 10, 8 << 10, 1 << 20)),
        delivery=Delivery.TWO_PHASE if rng.random() < 0.25 else Delivery.ON_MATERIALIZE,
        drafts_accepted=rng.choice((0.3, 0.7, 0.95)),
        kernel_block_size=rng.choice(divisors) if divisors and rng.random() < 0.25 else None,
        threaded_builder=rng.random() < 0.4,
        shuffle_batch_seed=seed,
        leftovers=rng.random() < 0.4,
        backend_options=options,
    )


def _draw_likelihoods(rng: random.Random) -> Likelihoods:
    likelihoods = Likelihoods(
        id_reused=rng.choice((0.0, 0.0, 0.3)),
        in_pieces=rng.choice((0.0, 0.0, 0.3)),
        replaced=rng.choice((0.0, 0.0, 0.15)),
        weights_changed=rng.choice((0.0, 0.0, 0.05, 0.15)),
        hashes_forgotten=rng.choice((0.0, 0.7)),
    )
    if rng.random() < 0.25:  # forwards that often never run, and clients that send their requests again
        return replace(likelihoods, abort_before_forward=0.3, forward_lost=0.1, sent_again=0.8)
    return likelihoods
