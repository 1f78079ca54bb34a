# SPDX-License-Identifier: Apache-2.0
"""What can go wrong in a sink: rows that do not fit together, ids without rows, options that make no sense."""

from __future__ import annotations


class SinkError(RuntimeError):
    """Root of the errors a sink raises by itself. A failing medium raises `OSError`."""


class UnknownSinkError(SinkError):
    """No installed distribution registers a sink under the asked name."""


class DuplicateSinkError(SinkError):
    """Two distributions register a sink under one name."""


class BrokenSinkError(SinkError):
    """What a distribution registers as a sink cannot be imported, or is no sink."""


class InvalidSinkOptionError(SinkError, ValueError):
    """An option of a sink has a value it cannot run with."""


class SinkClosedError(SinkError):
    """The sink was closed."""


class RowsMismatchError(SinkError):
    """A delivery disagrees with itself or with an earlier delivery of its request: row counts, widths or dtypes."""


class DuplicateRowsError(SinkError):
    """A position was delivered twice."""


class RowsGapError(SinkError):
    """A request ended with positions that were neither delivered nor declared missing."""


class SinkFullError(SinkError):
    """Requests that have not ended would hold more bytes than the sink may; the request that came last is dropped."""


class RequestEndedError(SinkError):
    """Rows came for a request that had ended."""


class UnknownRequestError(SinkError, KeyError):
    """No rows lie under this id; the message names the ids there are, or why this one has none."""

    def __str__(self) -> str:
        return RuntimeError.__str__(self)


class RequestNotEndedError(UnknownRequestError):
    """The request is known and goes on, so its rows cannot be had yet; ask again after its end."""


class AmbiguousRequestError(SinkError, KeyError):
    """A client's id stands for several requests; the message names their internal ids."""

    def __str__(self) -> str:
        return RuntimeError.__str__(self)


class InvalidRequestFileError(SinkError):
    """A file is not a whole request written by this version of the safetensors sink."""
