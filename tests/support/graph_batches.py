# SPDX-License-Identifier: Apache-2.0
"""Steps of every token count, and steps of several ranks, for comparing padding rules."""

import random
from collections.abc import Iterator

from omni_core.backend.graph_padding import EAGER_ONLY, BatchShape, Prefills

MAX_TOKENS = 8192


def steps_of(num_tokens: int, query_len: int) -> Iterator[BatchShape]:
    """Every kind of step with so many tokens: a prefill, single tokens, decodes with and without all drafts."""
    yield BatchShape(
        num_tokens=num_tokens, num_reqs=1, max_query_len=num_tokens, num_first_chunks=1, prefills=Prefills.SOME
    )
    yield BatchShape(num_tokens=num_tokens, num_reqs=num_tokens, max_query_len=1)
    num_reqs = -(-num_tokens // query_len)
    most = min(num_tokens, query_len)
    yield BatchShape(num_tokens=num_tokens, num_reqs=num_reqs, max_query_len=most)
    yield BatchShape(
        num_tokens=num_tokens,
        num_reqs=num_reqs,
        max_query_len=most,
        num_first_chunks=1,
        prefills=Prefills.LIKE_DECODES,
    )


def every_step(query_len: int, *, all_kinds_up_to: int) -> Iterator[BatchShape]:
    """`steps_of` every count up to that one, beyond it, where no graph reaches, a prefill of every count."""
    for num_tokens in range(1, MAX_TOKENS + 1):
        steps = steps_of(num_tokens, query_len)
        yield from steps if num_tokens <= all_kinds_up_to else (next(steps),)


def num_steps(*, all_kinds_up_to: int) -> int:
    """How many `every_step` yields."""
    return MAX_TOKENS + 3 * all_kinds_up_to


def drawn_step(source: random.Random, query_len: int, *, idle: bool = False) -> BatchShape:
    """A step of another rank: mostly decodes, so that ranks often agree on a graph."""
    kind = source.random()
    if idle and kind < 0.05:
        return BatchShape(num_tokens=0, num_reqs=0, max_query_len=0)
    if kind < 0.6:
        num_reqs = source.randint(1, 300)
        return BatchShape(
            num_tokens=num_reqs * query_len,
            num_reqs=num_reqs,
            max_query_len=query_len,
            may_split=source.random() < 0.9,
            prefills=source.choice((Prefills.NONE, Prefills.NONE, Prefills.LIKE_DECODES)),
        )
    num_tokens = source.randint(1, 700)
    num_reqs = source.randint(1, min(num_tokens, 200))
    return BatchShape(
        num_tokens=num_tokens,
        num_reqs=num_reqs,
        max_query_len=num_tokens - num_reqs + 1,
        num_first_chunks=source.randint(0, num_reqs),
        prefills=source.choice(tuple(Prefills)),
        may_split=source.random() < 0.9,
    )


def ranks_of(num_tokens: int, query_len: int, num_ranks: int, *, idle: bool = False) -> list[BatchShape]:
    """A step with so many tokens beside steps of other ranks, the same ones for the same count."""
    source = random.Random(num_tokens)
    own = source.choice(list(steps_of(num_tokens, query_len)))
    return [own, *(drawn_step(source, query_len, idle=idle) for _ in range(num_ranks - 1))]


def is_eager(batch: BatchShape) -> bool:
    """Whether the step's runner forces it to be eager."""
    return batch.allowed == EAGER_ONLY
