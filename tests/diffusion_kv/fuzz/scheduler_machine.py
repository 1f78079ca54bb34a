# SPDX-License-Identifier: Apache-2.0
"""Scheduler and worker by hand: steps, acknowledgements, preemptions, removals and ends come when they like."""

from dataclasses import dataclass

import pytest
from diffusion_kv.fuzz.stage import Stage, asks, stage_sizes
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omni_core.diffusion_kv.attention.owner import RowKey
from omni_core.diffusion_kv.errors import RequestRefusedError
from omni_core.diffusion_kv.reservations import RowDemand
from omni_core.integrations.diffusion.loras import LoRARegistry
from omni_core.integrations.diffusion.request_states import RequestStatus
from omni_core.integrations.diffusion.scheduler import DiffusionScheduler
from omni_core.runtime import ThreadingRuntime

request_ids = st.sampled_from("abcde")
one_of_them = st.integers(0, 7)


@dataclass(eq=False)
class Running:
    """A wave, its requests that are still in it, and the step that comes next."""

    wave: object
    request_ids: list
    next_step: int

    @property
    def steps_left(self):
        return self.wave.forward_key.num_inference_steps - self.next_step


class SchedulerMachine(RuleBasedStateMachine):
    """What an engine does in one order is done here in any that is allowed."""

    make_pages = None
    adapters = None
    backend = None
    """Owns the pages' memory."""
    span_safe = st.just(False)

    stage = None

    @initialize(data=st.data())
    def open(self, data):
        self.stage = Stage(data.draw(stage_sizes(span_safe=self.span_safe)), type(self).make_pages, type(self).backend)
        self.pages, sizes = self.stage.pages, self.stage.sizes
        self.pages.worker_first = False
        self.scheduler = DiffusionScheduler(
            self.pages,
            self.stage.envelope,
            max_wave_requests=sizes.max_wave,
            max_running_requests=sizes.max_running,
            block_size=sizes.block_size if sizes.twins_wait else None,
        )
        self.loras = LoRARegistry(ThreadingRuntime())
        self.loras.load("ink", str(next(iter(type(self).adapters.values()))))
        self.live = {}
        """Request id -> the request as it was laid out, in order of arrival."""
        self.asked = []
        self.states = {}
        """Request id -> the model's, once it was started."""
        self.running = []
        self.to_acknowledge = []
        """Waves whose first step was computed; they may all have ended since."""
        self.removals = []
        """What the worker was not told yet: (removal, what it holds)."""

    def teardown(self):
        if self.stage is None:
            return
        try:
            while self.live:
                self.start_wave()
                for running in tuple(self.running):
                    self.forward(running)
                self.always()
            self.deliver()
            self.always()
            assert self.stage.kv_worker.request_ids == ()
            assert all(state.num_rows == 0 for state in self.pages.inner.page_states())
            assert self.pages.reset()
            self.pages.check()
        finally:
            self.stage.close()

    # -- the queue

    @rule(arrivals=st.lists(st.tuples(request_ids, asks), min_size=1, max_size=3), start=st.booleans())
    def arrive(self, arrivals, start):
        for request_id, ask in arrivals:
            if request_id in self.live:
                with pytest.raises(RequestRefusedError, match="live"):
                    self.scheduler.check(self.live[request_id])
                continue
            prepared = self.stage.model.preprocess(ask.request(request_id, self.loras))
            identities = self.stage.identifier.identify(prepared, self.pages.epoch)
            rows = zip(prepared.rows, identities, strict=True)
            self.scheduler.add(prepared, [RowDemand(row.layout.geometry, identity) for row, identity in rows])
            self.asked.append(ask)
            self.live[request_id] = prepared
        if start:
            self.start_wave()

    @rule(ask=asks, names=st.lists(request_ids, min_size=2, max_size=4, unique=True))
    def arrive_alike(self, ask, names):
        self.arrive([(name, ask) for name in names], start=True)

    @precondition(lambda self: self.stage is not None and self.asked)
    @rule(data=st.data(), names=st.lists(request_ids, min_size=1, max_size=2), start=st.booleans())
    def arrive_again(self, data, names, start):
        """Asks that came before, while their pages are everywhere between fresh and evicted."""
        self.arrive([(name, data.draw(st.sampled_from(self.asked))) for name in names], start)

    @rule()
    def start_wave(self):
        waiting = [name for name in self.live if self.status(name) is not RequestStatus.RUNNING]
        num_running = self.scheduler.num_running
        wave = self.scheduler.schedule()
        for failed in self.scheduler.take_failed():
            assert failed.prepared.request.request_id in self.pages.never_fit
            waiting.remove(failed.prepared.request.request_id)
            self.forget(failed.prepared.request.request_id)
        if wave is None:
            assert num_running or not waiting, f"nobody runs, and {waiting} wait"
            return
        assert list(wave.request_ids) == waiting[: len(wave.request_ids)], "first come, first served"
        assert len(wave.requests) <= self.stage.sizes.max_wave
        assert self.scheduler.num_running == num_running + len(wave.requests) <= self.stage.sizes.max_running
        self.deliver()
        for scheduled in wave.requests:
            assert scheduled.snapshot == self.pages.holders[scheduled.request_id].snapshot
            self.stage.step_worker.install(scheduled.snapshot)
            if scheduled.request_id not in self.states:
                self.states[scheduled.request_id] = self.stage.model.start(scheduled.prepared)
        self.running.append(Running(wave, list(wave.request_ids), wave.forward_key.completed_steps))
        for late in self.late_acknowledgements():
            self.scheduler.acknowledge_first_step(late)

    # -- waves

    @precondition(lambda self: self.stage is not None and self.running)
    @rule(which=one_of_them, times=st.integers(1, 2), acknowledge=st.booleans())
    def compute(self, which, times, acknowledge):
        running = self.running[which % len(self.running)]
        for _ in range(times):
            if running in self.running:
                self.forward(running)
        if acknowledge and running.wave in self.to_acknowledge:
            self.scheduler.acknowledge_first_step(running.wave)

    @precondition(lambda self: self.stage is not None and self.to_acknowledge)
    @rule(which=one_of_them)
    def acknowledge(self, which):
        waves = self.late_acknowledgements() or self.to_acknowledge
        self.scheduler.acknowledge_first_step(waves[which % len(waves)])

    @precondition(lambda self: self.stage is not None and self.running)
    @rule(which=one_of_them, how=st.sampled_from(("abort", "fail", "preempt", "preempt")))
    def interrupt(self, which, how):
        running = self.running[which % len(self.running)]
        request_id = running.request_ids[which % len(running.request_ids)]
        self.leave(running, request_id)
        if how == "preempt":
            self.scheduler.preempt(request_id, running.next_step)
            assert self.status(request_id) is RequestStatus.PREEMPTED
            return
        self.end(request_id, getattr(self.scheduler, how))

    @precondition(lambda self: self.stage is not None and self.live)
    @rule(which=one_of_them)
    def abort(self, which):
        request_id = list(self.live)[which % len(self.live)]
        for running in self.running:
            if request_id in running.request_ids:
                self.leave(running, request_id)
                break
        self.end(request_id, self.scheduler.abort)
        assert self.scheduler.abort(request_id) is None

    # -- messages

    @rule()
    def deliver(self):
        for removal, _ in self.removals:
            self.stage.step_worker.remove(removal.request_id, removal.generation)
        self.removals.clear()

    @precondition(lambda self: self.stage is not None and self.pages.ended)
    @rule(data=st.data())
    def hear_late_messages(self, data):
        self.deliver()
        late = self.pages.ended
        of_live_ids = [message for message in late if message[0] in self.pages.holders]
        self.pages.check_late_messages(*data.draw(st.sampled_from(of_live_ids or late)))

    @rule()
    def reset(self):
        self.pages.reset()

    # -- always

    @invariant()
    def always(self):
        if self.stage is None:
            return
        self.pages.check()
        self.pages.check_tables([snapshot for _, snapshot in self.removals])
        assert self.scheduler.num_running == sum(len(running.request_ids) for running in self.running)
        assert self.scheduler.num_waiting == len(self.live) - self.scheduler.num_running

    # -- how it is done

    def status(self, request_id):
        return self.scheduler.status(request_id)

    def late_acknowledgements(self):
        """Waves of an id that came back and holds other pages now."""
        return [wave for wave in self.to_acknowledge if any(map(self.came_back, wave.requests))]

    def came_back(self, scheduled):
        holder = self.pages.holders.get(scheduled.request_id)
        return holder is not None and holder.snapshot is not scheduled.snapshot

    def forward(self, running):
        states = [self.states[request_id] for request_id in running.request_ids]
        keys = [
            RowKey(state.prepared.request.request_id, row)
            for state in states
            for row in range(len(state.prepared.rows))
        ]
        owner = self.stage.step_worker.owner
        begin = owner.later_step if running.next_step else owner.first_step
        self.stage.model.denoise(states, running.next_step, begin(keys, running.wave.forward_key.layouts[0]))
        if not running.next_step:
            self.to_acknowledge.append(running.wave)
        running.next_step += 1
        if running.steps_left:
            return
        for request_id in tuple(running.request_ids):
            state = self.states[request_id]
            self.stage.check_result(state.prepared, 0, state.latents)
            self.leave(running, request_id)
            self.end(request_id, self.scheduler.finish)

    def leave(self, running, request_id):
        running.request_ids.remove(request_id)
        if not running.request_ids:
            self.running.remove(running)

    def end(self, request_id, call):
        holder = self.pages.holders.get(request_id)
        removal = call(request_id)
        assert (removal is None) == (holder is None)
        if removal is not None:
            assert (removal.request_id, removal.generation) == (request_id, holder.snapshot.generation)
            self.removals.append((removal, holder.snapshot))
        self.forget(request_id)

    def forget(self, request_id):
        assert self.status(request_id) is None
        del self.live[request_id]
        self.states.pop(request_id, None)
        self.pages.never_fit.discard(request_id)
