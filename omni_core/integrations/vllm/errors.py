# SPDX-License-Identifier: Apache-2.0
"""How the vLLM integration says no: at start-up; in the middle of a generation only where rows would be wrong."""

from __future__ import annotations


class IntegrationError(RuntimeError):
    """Root of the integration's errors."""


class GateRefusedError(IntegrationError):
    """A cache was asked for on a stage where it cannot give right rows; the engine does not start."""


class StageNotFoundError(IntegrationError):
    """The engine's worker is not in this process, or is not one of ours."""


class RowsBeyondTableError(IntegrationError):
    """A row was computed at a position for which its request has no KV block, so it has no slot."""


class BlockTableMismatchError(IntegrationError):
    """What is known of a batch's blocks or rows is not what the model runner used; its slots would be wrong."""


class LayersNotCapturedError(IntegrationError):
    """A forward did not return the chosen layers, or the model hands out one of their keys itself."""


class RowsNotKeptError(IntegrationError):
    """Rows were asked of a stage whose sink hands them on and keeps none."""


class RpcArgumentError(IntegrationError, ValueError):
    """An argument of one of Omni Core's `collective_rpc` methods cannot be used; nothing was done."""


class FlushTimeoutError(IntegrationError, TimeoutError):
    """Rows already computed did not reach the sink in time; names what they wait for."""


class StepNotSavedError(IntegrationError):
    """One step's rows could not be saved; its requests get no more rows, and other requests are not concerned."""
