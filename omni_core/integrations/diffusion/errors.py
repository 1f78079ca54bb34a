# SPDX-License-Identifier: Apache-2.0
"""How the engine loop says no; what it says of one request is `omni_core.diffusion_kv.errors.RequestRefusedError`."""

from __future__ import annotations

from omni_core.diffusion_kv.errors import DiffusionKVError
from omni_core.integrations.diffusion.results import FinishedRequest


class EngineBusyError(DiffusionKVError):
    """What was asked for needs an engine without requests, and there are some; nothing was changed."""


class WorkerCleanupError(DiffusionKVError):
    """The worker could not drop a request, so its pages cannot be given to anyone else. The engine stops."""

    def __init__(self, request_id: str, generation: int | None, cause: Exception) -> None:
        """Name the request, the generation of its pages (`None` on a dense stage), and what the worker said."""
        pages = "" if generation is None else f" (generation {generation})"
        super().__init__(
            f"the worker could not drop request {request_id!r}{pages} and may still write to its pages: "
            f"{type(cause).__name__}: {cause}"
        )


class EngineDeadError(DiffusionKVError):
    """The engine stopped serving, because pages may be free and written to at once. Open another one."""

    def __init__(self, reason: str, finished: tuple[FinishedRequest, ...] = ()) -> None:
        """Say why.

        Args:
            reason: what happened.
            finished: requests that ended in the step that stopped the engine, those it stopped included.
        """
        super().__init__(f"the diffusion engine has stopped: {reason}")
        self.reason = reason
        self.finished = finished


class EngineClosedError(DiffusionKVError):
    """The engine was closed."""
