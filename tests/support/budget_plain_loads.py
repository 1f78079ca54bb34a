# SPDX-License-Identifier: Apache-2.0
"""Loads of a model whose outputs are all stored at once, or passed on."""

from __future__ import annotations

import torch
from budget_loads import BLOCK_SIZE, Load, blocks_of, names
from cache_rig import more, new

from omni_core.prefix_cache.policy import ModelCachePolicy


class Decoding(Load):
    """A batch of requests that gets one token each per step."""

    def __init__(self, make_rig, num_reqs, **options):
        super().__init__(make_rig, num_reqs, **options)
        self.names = names(num_reqs)
        self.whole([new(name, blocks_of(i), run=1) for i, name in enumerate(self.names)], self.further())
        self.warm_up()

    def runs(self):
        return [more(name) for name in self.names]

    def further(self):
        """Outputs besides the stored ones."""
        return {}

    def step(self):
        return self.whole(self.runs(), self.further())


class PassingOn(Decoding):
    """The same, with a tensor that has an entry per request and is not stored."""

    def __init__(self, make_rig, num_reqs):
        policy = ModelCachePolicy(token_keys=frozenset({"codes"}), request_keys=frozenset({"score"}))
        super().__init__(make_rig, num_reqs, policy=policy)

    def further(self):
        return {"score": torch.ones(len(self.names), 3)}


class PassingOnLists(Decoding):
    """The same, with a list that has a tensor per request."""

    def further(self):
        return {"score": [torch.ones(3) for _ in self.names]}


class LeavingOut(Decoding):
    """A step of which some requests are not asked for, and one that carries their rows."""

    def __init__(self, make_rig, num_asked, num_left_out=1):
        self._num_asked = num_asked
        super().__init__(make_rig, num_asked + num_left_out)

    def step(self):
        leaving_out = self.leave_out()
        self.carry()
        return leaving_out

    def leave_out(self):
        saved = self.save(self.runs())
        self.settle()
        return self.take(saved, asked=self.names[: self._num_asked])

    def carry(self):
        return self.whole(self.runs())


class Carrying(LeavingOut):
    """The same; the step that counts is the one that carries rows of `num_owed` requests."""

    def __init__(self, make_rig, num_owed, num_others=8):
        super().__init__(make_rig, num_others, num_owed)

    def step(self):
        self.leave_out()
        return self.carry()


class Prefilling(Load):
    """Steps in which one request ends and another brings its whole prompt, `growth` tokens longer than the last."""

    def __init__(self, make_rig, num_tokens, growth=1, **options):
        super().__init__(make_rig, 1, **options)
        self._num_tokens = num_tokens
        self._growth = growth
        self._prompts = 0
        self.warm_up()

    def step(self):
        finish = [f"r{self._prompts - 1}"] if self._prompts else []
        blocks = range(1, 2 + self._num_tokens // BLOCK_SIZE)
        step = self.whole([new(f"r{self._prompts}", blocks, run=self._num_tokens)], finish=finish)
        self._num_tokens += self._growth
        self._prompts += 1
        return step


class Hitting(Load):
    """Steps in which requests end, and as many others hit the same `hit` stored tokens and compute one each."""

    def __init__(self, make_rig, hit, num_reqs=1):
        super().__init__(make_rig, num_reqs)
        self._hit = hit
        self._num_reqs = num_reqs
        self._live = ["first"]
        self._steps = 0
        self._stored = tuple(range(1, 1 + hit // BLOCK_SIZE))
        self.whole([new("first", self._stored, run=hit)])
        self.warm_up()

    def step(self):
        self._steps += 1
        finish, self._live = self._live, [f"r{i}-{self._steps}" for i in range(self._num_reqs)]
        behind = self._stored[-1] + 1
        runs = [new(name, (*self._stored, behind + i), hit=self._hit, run=1) for i, name in enumerate(self._live)]
        return self.whole(runs, finish=finish)


class Drafting(Load):
    """Requests that bring a token and `num_drafts` drafts each per step, of which the last is rejected."""

    def __init__(self, make_rig, num_reqs, num_drafts=2):
        super().__init__(make_rig, num_reqs)
        self._names = names(num_reqs)
        self._num_drafts = num_drafts
        self._at = 1
        self.whole([new(name, blocks_of(i), run=1) for i, name in enumerate(self._names)])
        self.warm_up()

    def step(self):
        runs = [more(name, 1 + self._num_drafts, at=self._at, drafts=self._num_drafts) for name in self._names]
        self._at += self._num_drafts
        return self.whole(runs, counts=dict.fromkeys(self._names, self._num_drafts))


class Finishing(Load):
    """A batch that one more request joins in one step and leaves in the next, the one that counts."""

    def __init__(self, make_rig, num_reqs, num_tokens=1):
        """`num_tokens`: how many the request brings that leaves."""
        super().__init__(make_rig, num_reqs + 1)
        self._names = names(num_reqs)
        self._num_tokens = num_tokens
        self._joined = 0
        self.whole([new(name, blocks_of(i), run=1) for i, name in enumerate(self._names)])
        self.warm_up()

    def step(self):
        self._joined += 1
        stay = [more(name) for name in self._names]
        joining = new(f"joined{self._joined}", blocks_of(len(stay)), run=self._num_tokens)
        self.whole([*stay, joining])
        return self.whole(stay, finish=[joining.req_id])


class Extending(Load):
    """A decoding batch of which one request in 16 gets further blocks in each step."""

    SHARE = 16

    def __init__(self, make_rig, num_extended, num_new_blocks=1):
        num_reqs = num_extended * self.SHARE
        super().__init__(make_rig, num_reqs)
        self._names = names(num_reqs)
        self._num_new_blocks = num_new_blocks
        self._turn = 0
        self.whole([new(name, blocks_of(i, 1), run=1) for i, name in enumerate(self._names)])
        self.warm_up()

    def step(self):
        self._turn += 1
        further = {
            i: blocks_of(i)[1 : 1 + self._num_new_blocks] for i in range(self._turn, len(self._names), self.SHARE)
        }
        return self.whole([more(name, blocks=further.get(i, ())) for i, name in enumerate(self._names)])
