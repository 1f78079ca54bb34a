# SPDX-License-Identifier: Apache-2.0
"""A stage whose weights and adapters change: a stand-in for vLLM's worker behind the mixin that hears of changes."""

from types import SimpleNamespace

import fake_runner as fake
import pytest
import torch
from fake_stage import FakeStage

from omni_core.integrations.vllm.changed_weights import ChangedWeightsMixin
from omni_core.integrations.vllm.rpc.worker_calls import WorkerCalls, answer
from omni_core.settings.stage_settings import OnError
from omni_core.sinks.errors import UnknownRequestError

PROMPT = [11, 12, 13, 14, 15, 16]
OLD, NEW = 0.0, 100.0
"""Added to every row by the weights."""


class VllmWorker:
    """What vLLM's worker has, as far as weights go."""

    def __init__(self, runner):
        self.model_runner = runner
        self.broken = False

    def _change(self):
        self.model_runner.row_offset = NEW
        if self.broken:
            raise RuntimeError("half of the weights are loaded")

    def reload_weights(self, *args, **kwargs):
        self._change()

    def start_weight_update(self):
        """Nothing is changed yet."""

    start_draft_weight_update = start_weight_update

    def update_weights(self, update_info):
        self._change()

    def finish_weight_update(self):
        self._change()

    def reset_weights(self):
        self._change()

    def discard(self, tags):
        """The memory of these tags is given up."""

    def sleep(self, level=1):
        """The device's memory is given up."""

    def wake_up(self, tags=None):
        """It is back."""

    def add_lora(self, lora_request):
        self.model_runner.loaded_adapters.add(lora_request.lora_int_id)
        return True

    def remove_lora(self, lora_id):
        self.model_runner.loaded_adapters.discard(lora_id)
        return True


class Worker(ChangedWeightsMixin, VllmWorker):
    pass


class ChangingStage(FakeStage):
    """A worker's stage and the worker; also what `LLM.collective_rpc` reaches."""

    def __init__(self, **settings):
        super().__init__(**({"on_error": OnError.ISOLATE} | settings))
        self.worker = Worker(self.runner)
        self.worker.omni_core_session = self.session
        self.worker.omni_core_adapter_files = self.adapter_files
        self.calls = WorkerCalls(self.session)

    def serve(self, name, blocks, hit=0, adapter=None):
        """Run a whole request; returns its end and rows."""
        req_id = f"{name}-00000001"
        new = [(req_id, PROMPT, blocks, hit, len(PROMPT) - hit)]
        self.step(fake.scheduled(new=new, lora_request=adapter))
        self.step(fake.scheduled(finished=[req_id]))
        self.session.flush(still_running=())
        return self.stored(req_id)

    def refuses(self, *request, **options):
        """Whether the request gets no rows because those of its hit are of old weights, or of another adapter."""
        with pytest.raises(UnknownRequestError, match="the weights or the adapter changed"):
            self.serve(*request, **options)
        return True

    @property
    def version(self):
        return self.session.cache.stats().weight_version

    def collective_rpc(self, method, args=()):
        call = {"omni_core_reset": self.calls.reset, "omni_core_bump": self.calls.bump}[method]
        return [answer(call, args, {})]


def computed_by(stored, offset):
    return torch.equal(
        stored.hidden_states, torch.tensor([fake.row_of(PROMPT, at) for at in range(len(PROMPT))]) + offset
    )


def adapter(number, path="", *, load_inplace=False):
    return SimpleNamespace(
        lora_int_id=number, lora_name=f"adapter {number}", lora_path=str(path), load_inplace=load_inplace
    )
