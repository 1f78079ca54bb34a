# SPDX-License-Identifier: Apache-2.0
"""Anything that clients and an operator can do to a paged engine, in any order."""

from dataclasses import dataclass, field

import pytest
from diffusion_kv.fuzz.small_model import ADAPTER_FILES
from diffusion_kv.fuzz.stage import Stage, asks, stage_sizes
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omni_core.diffusion_kv.errors import RequestRefusedError
from omni_core.integrations.diffusion.engine import DiffusionEngine
from omni_core.integrations.diffusion.errors import EngineBusyError
from omni_core.integrations.diffusion.results import Outcome

request_ids = st.sampled_from("abcdef")


@dataclass
class OrderedWorker:
    """The stage's worker; checks that who is installed came before all others that wait."""

    inner: object
    leaving: tuple
    """Sets of ids that are aborted or refused, and still in `waiting`."""
    waiting: list = field(default_factory=list)

    @property
    def owner(self):
        return self.inner.owner

    def install(self, snapshot):
        earlier = self.waiting[: self.waiting.index(snapshot.request_id)]
        assert set(earlier) <= set().union(*self.leaving), f"{snapshot.request_id!r} overtook {earlier}"
        self.waiting.remove(snapshot.request_id)
        self.inner.install(snapshot)

    def remove(self, request_id, generation):
        self.inner.remove(request_id, generation)

    def close(self):
        self.inner.close()


class EngineMachine(RuleBasedStateMachine):
    """One thread; what several threads may do at once is the engine's own tests'."""

    make_pages = None
    """A stage's sizes -> who hands out its pages."""
    adapters = None
    """Name -> file."""
    backend = None
    """Owns the pages' memory."""
    span_safe = st.just(False)

    stage = None

    @initialize(data=st.data())
    def open(self, data):
        self.stage = Stage(data.draw(stage_sizes(span_safe=self.span_safe)), type(self).make_pages, type(self).backend)
        self.pages, self.model = self.stage.pages, self.stage.model
        self.aborted = set()
        self.worker = OrderedWorker(self.stage.step_worker, (self.aborted, self.pages.never_fit))
        self.engine = DiffusionEngine(
            self.model,
            self.worker,
            self.stage.envelope,
            reservations=self.pages,
            identifier=self.stage.identifier,
            max_wave_requests=self.stage.sizes.max_wave,
            max_running_requests=self.stage.sizes.max_running,
            block_size=self.stage.sizes.block_size if self.stage.sizes.twins_wait else None,
        )
        self.live = {}
        """Request id -> the request as it was laid out."""
        self.asked = []
        self.just_arrived = set()
        """Those that came since the last step."""
        self.num_loads = 0
        self.load_adapter(ADAPTER_FILES[0])

    def teardown(self):
        if self.stage is None:
            return
        try:
            self.take(self.engine.run())
            assert not self.live, "a request never ended"
            self.always()
            stats = self.engine.stats().kv
            assert stats.free_pages == stats.total_pages
            assert self.engine.reset_prefix_cache()
            self.pages.check()
        finally:
            self.engine.close()
            self.stage.close()

    # -- clients

    @rule(arrivals=st.lists(st.tuples(request_ids, asks), min_size=1, max_size=3), times=st.integers(0, 2))
    def serve(self, arrivals, times):
        for request_id, ask in arrivals:
            self.add(request_id, ask)
        self.step(times)

    @rule(ask=asks, names=st.lists(request_ids, min_size=2, max_size=4, unique=True), times=st.integers(1, 2))
    def serve_alike(self, ask, names, times):
        self.serve([(name, ask) for name in names], times)

    @precondition(lambda self: self.stage is not None and self.asked)
    @rule(data=st.data(), names=st.lists(request_ids, min_size=1, max_size=2), times=st.integers(0, 3))
    def serve_again(self, data, names, times):
        """Asks that came before, while their pages are everywhere between fresh and evicted."""
        self.serve([(name, data.draw(st.sampled_from(self.asked))) for name in names], times)

    @rule(times=st.integers(1, 3))
    def step(self, times):
        for _ in range(times):
            self.just_arrived.clear()
            self.take(self.engine.step())
            self.always()

    @precondition(lambda self: self.stage is not None and self.live)
    @rule(data=st.data(), times=st.integers(0, 1))
    def abort(self, data, times):
        request_id = data.draw(request_ids | st.sampled_from(sorted(self.live)))
        assert self.engine.abort(request_id) == (request_id in self.live)
        if request_id in self.live:
            self.aborted.add(request_id)
        self.step(times)

    def add(self, request_id, ask):
        request = ask.request(request_id, self.engine.loras)
        if request_id in self.live:
            with pytest.raises(RequestRefusedError, match="live"):
                self.engine.add_request(request)
            return
        self.engine.add_request(request)
        self.asked.append(ask)
        self.live[request_id] = self.model.prepared[request_id]
        self.worker.waiting.append(request_id)
        self.just_arrived.add(request_id)

    # -- what goes wrong

    @precondition(lambda self: self.stage is not None and self.live)
    @rule(data=st.data(), call=st.sampled_from(("start", "layer", "layer", "forward", "decode")))
    def break_call(self, data, call):
        self.model.breaks[data.draw(st.sampled_from(sorted(self.live)))] = call

    @precondition(lambda self: self.stage is not None and self.pages.ended)
    @rule(data=st.data())
    def hear_late_messages(self, data):
        late = self.pages.ended
        of_live_ids = [message for message in late if message[0] in self.pages.holders]
        self.pages.check_late_messages(*data.draw(st.sampled_from(of_live_ids or late)))

    # -- the operator

    @rule(what=st.sampled_from(("load adapter", "load adapter", "update weights", "update weights", "reset")))
    def operate(self, what):
        if what == "load adapter":
            self.num_loads += 1
            self.load_adapter(ADAPTER_FILES[self.num_loads % len(ADAPTER_FILES)])
        elif what == "update weights":
            self.update_weights()
        else:
            held = bool(self.pages.holders)
            assert self.engine.reset_prefix_cache() is not held

    def update_weights(self):
        if set(self.live) - self.just_arrived:
            before = self.pages.states()
            with pytest.raises(EngineBusyError):
                self.engine.update_weights(self.stage.change_weights)
            assert self.pages.states() == before
            return
        self.pages.epoch += 1
        self.engine.update_weights(self.stage.change_weights)
        assert self.engine.stats().weight_epoch == self.pages.epoch

    def load_adapter(self, name):
        self.engine.loras.load("ink", str(type(self).adapters[name]))

    # -- always

    @invariant()
    def always(self):
        if self.stage is not None:
            self.pages.check()
            self.pages.check_tables()

    def take(self, ended):
        for one in ended:
            prepared = self.live.pop(one.request_id)
            assert one.outcome is self.expected_outcome(one.request_id), f"{one.request_id!r}: {one.error}"
            if one.outcome is Outcome.COMPLETED:
                self.stage.check_result(prepared, self.model.weight_seed, one.latents)
            self.forget(one.request_id)

    def expected_outcome(self, request_id):
        if request_id in self.aborted:
            return Outcome.ABORTED
        if request_id in self.pages.never_fit:
            return Outcome.REFUSED
        return Outcome.FAILED if request_id in self.model.broken else Outcome.COMPLETED

    def forget(self, request_id):
        for ids in (self.aborted, self.model.broken, self.pages.never_fit):
            ids.discard(request_id)
        self.model.breaks.pop(request_id, None)
        if request_id in self.worker.waiting:
            self.worker.waiting.remove(request_id)
