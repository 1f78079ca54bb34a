# SPDX-License-Identifier: Apache-2.0
"""Every way the diffusion KV says no.

Three families: a configuration that cannot run (before any worker starts), a request that is refused (the others go
on), and a broken promise between scheduler, worker and model (a bug; the forward fails, and the engine with it when
cleaning up is uncertain).
"""

from __future__ import annotations


class DiffusionKVError(RuntimeError):
    """Root of every error of the diffusion KV."""


class DiffusionKVConfigError(DiffusionKVError, ValueError):
    """A setting, or two of them together, that this stage cannot run with."""


class DiffusionKVConfigTypeError(DiffusionKVConfigError, TypeError):
    """A setting of the wrong type, such as `enable_prefix_caching: 1`."""


class RowError(DiffusionKVError, ValueError):
    """A row whose lengths, spans, token ids or image features do not fit together. Refuses its request."""


class IdentityValueError(RowError):
    """A value that has no canonical hash, such as an object or a quantised tensor."""


class RequestRefusedError(DiffusionKVError, ValueError):
    """One request cannot be served and never will be; nothing was changed, and the others go on."""

    def __init__(self, request_id: str, reason: str) -> None:
        """Refuse `request_id`; the message names it."""
        super().__init__(f"request {request_id!r}: {reason}")
        self.request_id = request_id


class KVWorkerError(DiffusionKVError):
    """A snapshot that contradicts what the worker holds. The forward fails; nothing was changed."""


class PagedAttentionError(DiffusionKVError):
    """A forward that the paged attention cannot express, or a paged layer that was reached without one."""
