# SPDX-License-Identifier: Apache-2.0
"""A paged stage of the real engine with its pages in view: what is free, what is published, which bytes changed."""

from contextlib import contextmanager

import torch
from diffusion_kv.accuracy.stages import opened

from omni_core.diffusion_kv.worker.page_pool import NULL_PAGE


class WatchedPages:
    """The pages of one stage and every snapshot handed out. Look between requests only."""

    def __init__(self):
        self.kv_worker = None
        self.reservations = None
        self.snapshots = []

    @property
    def layers(self):
        return self.kv_worker.pool.layers

    def readable(self):
        """Pages a later request may hit."""
        return {page.page_id for page in self.reservations.page_states() if page.published}

    def poison(self):
        """NaN into every page that no later request may read, and into vLLM's null page."""
        assert self.kv_worker.request_ids == ()
        nobodys = sorted({NULL_PAGE, *range(self.kv_worker.pool.num_blocks)} - self.readable())
        for layer in self.layers:
            layer[nobodys] = torch.nan

    def content(self):
        """A copy of all bytes, `[layers, pages, bytes]`; NaN equals itself there."""
        return torch.stack([layer.flatten(1).view(torch.uint8) for layer in self.layers]).clone()

    def changed_since(self, content):
        """Pages of which some byte differs."""
        return set((self.content() != content).any(dim=2).any(dim=0).nonzero().flatten().tolist())

    def hit_and_own(self):
        """Of the latest request, the pages it hit and those it had to itself."""
        hit, own = set(), set()
        for row in self.snapshots[-1].rows:
            (pages,) = row.block_ids
            num_hit = row.cached_prefix_tokens // self.kv_worker.pool.block_size
            hit.update(pages[:num_hit])
            own.update(pages[num_hit:])
        return hit, own


@contextmanager
def opened_in_view(owner, monkeypatch, **settings):
    """`opened`, and the pages of that stage."""
    from omni_core.integrations.diffusion import paging

    watched = WatchedPages()
    open_worker, open_reservations = paging.open_worker, paging.open_reservations

    def open_watched_worker(*args):
        worker = open_worker(*args)
        watched.kv_worker = worker.kv_worker
        return worker

    def open_watched_reservations(*args):
        watched.reservations = open_reservations(*args)
        return _Recorded(watched)

    with monkeypatch.context() as patch:
        patch.setattr(paging, "open_worker", open_watched_worker)
        patch.setattr(paging, "open_reservations", open_watched_reservations)
        with opened(owner, **settings) as engine:
            yield engine, watched


class _Recorded:
    """Writes down every snapshot; the rest is the stage's own reservations'."""

    def __init__(self, watched):
        self._watched = watched
        inner = watched.reservations
        self.publish, self.free, self.reset, self.stats = inner.publish, inner.free, inner.reset, inner.stats

    def reserve(self, request_id, rows, **only):
        snapshot = self._watched.reservations.reserve(request_id, rows, **only)
        if snapshot is not None:
            self._watched.snapshots.append(snapshot)
        return snapshot
