# SPDX-License-Identifier: Apache-2.0
"""The adapters an engine knows by name. Loading another file under a name makes keys of the first one unfindable."""

from __future__ import annotations

from dataclasses import dataclass

from omni_core.diffusion_kv.pipeline import LoRARequest
from omni_core.runtime import Runtime


@dataclass(frozen=True, slots=True)
class _Loaded:
    lora_id: int
    path: str
    load_epoch: int


class LoRARegistry:
    """Names to adapter files. Any thread may call; nothing blocks."""

    def __init__(self, runtime: Runtime) -> None:
        self._lock = runtime.lock("diffusion adapters")
        self._loaded: dict[str, _Loaded] = {}
        self._epochs = 0

    def load(self, name: str, path: str) -> None:
        """Make `name` stand for the weights in `path` as they are now, also if it stood for these before.

        Requests already made with the earlier ones keep them in their identity.
        """
        with self._lock:
            self._epochs += 1
            held = self._loaded.get(name)
            lora_id = len(self._loaded) + 1 if held is None else held.lora_id
            self._loaded[name] = _Loaded(lora_id, path, self._epochs)

    def request(self, name: str, scale: float = 1.0) -> LoRARequest:
        """What a `DiffusionRequest` carries to use the adapter.

        Raises:
            LookupError: nothing was loaded under that name.
        """
        with self._lock:
            held = self._loaded.get(name)
            if held is None:
                known = ", ".join(map(repr, self._loaded)) or "none"
                raise LookupError(f"no adapter {name!r} was loaded; there is {known}")
        return LoRARequest(name, held.lora_id, held.path, held.load_epoch, scale)
