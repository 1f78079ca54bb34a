# SPDX-License-Identifier: Apache-2.0
"""A fake runner that adopted the hooks of a real cache, builder and sink, put together as `open_stage` does."""

import fake_runner as fake
import torch

from omni_core.integrations.vllm.adapter_files import AdapterFiles
from omni_core.integrations.vllm.chosen_layers import ChosenLayers, capture_layers
from omni_core.integrations.vllm.runner_hooks import adopt_hooks
from omni_core.integrations.vllm.runners.v1 import V1View
from omni_core.integrations.vllm.session import StageSession
from omni_core.integrations.vllm.stage_parts import StageParts
from omni_core.integrations.vllm.tap import install_tap
from omni_core.prefix_cache.config import PrefixCacheConfig
from omni_core.prefix_cache.gate import GateDecision, GateStatus
from omni_core.prefix_cache.policy import ModelCachePolicy
from omni_core.runtime import ThreadingRuntime
from omni_core.settings.stage_settings import OnError, StageSettings


class FakeStage:
    """Sixteen blocks of four tokens; `settings` as an operator gives them."""

    def __init__(
        self,
        *,
        tap=False,
        model=None,
        runner=None,
        policy=None,
        runtime=None,
        first_prompts_block=None,
        view=None,
        request_ids_randomised=True,
        **settings,
    ):
        self.settings = StageSettings(enabled=True, **({"on_error": OnError.RAISE} | settings))
        layers = ChosenLayers(self.settings.captured_layers)
        self.runner = runner or fake.FakeRunner(model)
        capture_layers(self.settings, self.runner)
        config = PrefixCacheConfig(
            num_blocks=16,
            block_size=fake.BLOCK_SIZE,
            hidden_size=fake.HIDDEN_SIZE,
            hidden_dtype=torch.float32,
            max_num_tokens=64,
            staging_depth=self.settings.staging_depth,
            extra_row_bytes=self.settings.extra_row_bytes + layers.row_bytes(fake.HIDDEN_SIZE, torch.float32),
        )
        self.adapter_files = AdapterFiles()
        self.parts = StageParts(
            self.settings,
            config,
            layers.declared_in(policy or ModelCachePolicy()),
            model=self.runner.model,
            device=self.runner.device,
            view=view or V1View(0),
            group_index=0,
            request_ids_randomised=request_ids_randomised,
            stop_rule=fake.ends,
            runtime=runtime or ThreadingRuntime(),
            first_prompts_block=first_prompts_block,
            adapter_files=self.adapter_files,
        )
        adopt_hooks(self.runner, self.parts.hooks)
        decision = GateDecision(GateStatus.SUPPORTED, "supported", "a test")
        tapped = install_tap(self.runner, layers=layers.layers) if tap else None
        self.session = StageSession(self.settings, decision, parts=self.parts, tap=tapped)

    def step(self, output, **sampled):
        with torch.inference_mode():  # as vLLM's worker does
            result = self.runner.execute_model(output)
        if result is None:
            self.sample(**sampled)
        return result

    def sample(self, **sampled):
        self.runner.sample_tokens({name.replace("_", "-"): token for name, token in sampled.items()})

    def stored(self, req_id):
        return self.session.sink.request_by_internal_id(req_id)
