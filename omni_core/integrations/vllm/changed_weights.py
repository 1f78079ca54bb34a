# SPDX-License-Identifier: Apache-2.0
"""What a worker hears of changed weights: every call of vLLM's worker that may change them also tells the cache.

In vLLM 0.27 to 0.32 (`v1/worker/gpu_worker.py`) weights change through `reload_weights`, through `update_weights` and
`finish_weight_update` of a trainer, and through sleep: level 2 throws them away, as `discard` of their tag does (since
0.31), and after `wake_up` they are whatever is loaded then. `reset_weights` (since 0.32; `POST /weight_checker` reaches
it) makes every weight zero. Level 1 brings back the same weights; the KV cache is lost, but the engine forgets its
hashes before it sleeps, so no later request can hit what was stored. Adapters change through `add_lora` and
`remove_lora`, and where a step loads one: see `adapter_files`. `reset_prefix_cache` does not reach the worker, and need
not: the blocks begin new tenancies. What a function given to `collective_rpc` or `apply_model` does to the weights, no
worker hears.
"""

from __future__ import annotations

import logging
from typing import Any, cast

from omni_core.integrations.vllm.adapter_files import AdapterFiles
from omni_core.integrations.vllm.session import StageSession
from omni_core.prefix_cache.slot_table import is_adapter_id

_LOG = logging.getLogger(__name__)

_LEVEL_WITHOUT_WEIGHTS = 2
"""Sleep at this level throws the weights away."""
_WEIGHTS_TAG = "weights"


class ChangedWeightsMixin:
    """In front of a worker class of vLLM. Its methods are called by the engine, on the worker's main thread.

    Rows are given up also when vLLM's own call raises: then some weights may have changed all the same.
    """

    # vLLM's own, of the worker class behind this one.
    model_runner: Any

    omni_core_session: StageSession | None = None
    _omni_core_draft_update = False
    _omni_core_weights_lost = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Run vLLM's own; what is known of adapters' files is the worker's, as the adapters are."""
        cast("Any", super()).__init__(*args, **kwargs)
        self.omni_core_adapter_files = AdapterFiles()

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Run vLLM's own: every weight may be another one."""
        try:
            cast("Any", super()).reload_weights(*args, **kwargs)
        finally:
            self._weights_changed("reload_weights")

    def start_weight_update(self) -> None:
        """Run vLLM's own: the updates that follow are of the model."""
        cast("Any", super()).start_weight_update()
        self._omni_core_draft_update = False

    def start_draft_weight_update(self) -> None:
        """Run vLLM's own: the updates that follow are of the draft model, whose weights no stored row depends on."""
        cast("Any", super()).start_draft_weight_update()
        self._omni_core_draft_update = True

    def update_weights(self, *args: Any, **kwargs: Any) -> None:
        """Run vLLM's own: some weights are new, and steps may run before the others are."""
        try:
            cast("Any", super()).update_weights(*args, **kwargs)
        finally:
            if not self._omni_core_draft_update:
                self._weights_changed("update_weights")

    def finish_weight_update(self) -> None:
        """Run vLLM's own: what was computed between the updates is of no weights that stay."""
        try:
            cast("Any", super()).finish_weight_update()
        finally:
            if not self._omni_core_draft_update:
                self._weights_changed("finish_weight_update")

    def reset_weights(self) -> None:
        """Run vLLM's own, which 0.32 is the first to have: every weight is zero until others are loaded."""
        try:
            cast("Any", super()).reset_weights()
        finally:
            self._weights_changed("reset_weights")

    def sleep(self, level: int = 1) -> None:
        """Run vLLM's own. Steps already computed are delivered meanwhile: their rows lie on the host."""
        try:
            cast("Any", super()).sleep(level)
        finally:
            self._omni_core_weights_lost |= level >= _LEVEL_WITHOUT_WEIGHTS

    def discard(self, tags: tuple[str, ...]) -> None:
        """Run vLLM's own, which 0.31 is the first to have: the memory of these tags loses what it holds."""
        try:
            cast("Any", super()).discard(tags)
        finally:
            self._omni_core_weights_lost |= _WEIGHTS_TAG in tags

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Run vLLM's own: after sleep that threw the weights away, others come in their place."""
        try:
            cast("Any", super()).wake_up(tags)
        finally:
            if self._omni_core_weights_lost and (tags is None or _WEIGHTS_TAG in tags):
                self._omni_core_weights_lost = False
                self._weights_changed("wake_up without the weights of before")

    def add_lora(self, lora_request: Any) -> bool:
        """Run vLLM's own: an adapter that it reads from its files may be another one."""
        reads_files = lora_request.load_inplace or lora_request.lora_int_id not in self._adapters_loaded()
        if reads_files:
            self.omni_core_adapter_files.about_to_read(lora_request)
        try:
            return bool(cast("Any", super()).add_lora(lora_request))
        finally:
            if reads_files:
                self._adapter_changed(lora_request.lora_int_id, "add_lora")

    def remove_lora(self, lora_id: int) -> bool:
        """Run vLLM's own: what comes back under this id may be another adapter."""
        try:
            removed = bool(cast("Any", super()).remove_lora(lora_id))
        finally:
            self._adapter_changed(lora_id, "remove_lora")
        if removed:
            self.omni_core_adapter_files.forget(lora_id)
        return removed

    def _adapters_loaded(self) -> set[int]:
        return set() if self.model_runner.lora_config is None else set(self.model_runner.list_loras())

    def _weights_changed(self, call: str) -> None:
        if self.omni_core_session is not None:
            _warn(call, self.omni_core_session.bump_version(None))

    def _adapter_changed(self, adapter_id: int, call: str) -> None:
        # No row is of an id that names no adapter, and what to say of such an id is vLLM's own matter.
        if self.omni_core_session is not None and is_adapter_id(adapter_id):
            _warn(call, self.omni_core_session.bump_version(adapter_id))


def _warn(call: str, report: dict[str, Any] | None) -> None:
    rows = 0 if report is None else max(report["rows_absent"].values(), default=0)
    if rows:
        _LOG.warning(
            "%s: %d stored rows are of weights that have changed and are not served any more. If vLLM still has their "
            "KV cache, call reset_prefix_cache(): until then a request that hits it gets no rows",
            call,
            rows,
        )
