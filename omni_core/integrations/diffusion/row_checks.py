# SPDX-License-Identifier: Apache-2.0
"""What is refused of a reservation before anything changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omni_core.diffusion_kv.errors import RequestRefusedError, RowError
from omni_core.diffusion_kv.reservations import RowDemand


@dataclass(frozen=True, slots=True)
class RowLimits:
    """What the worker's block tables have room for."""

    max_rows: int
    """`diffusion_kv_max_rows_per_request`."""
    max_model_len: int
    """Longest row, in tokens."""

    def check(self, request_id: str, rows: Sequence[RowDemand]) -> None:
        """Check the rows of one request.

        Raises:
            RequestRefusedError: no id, no row, too many rows, a row that is too long, or an identity that cannot be
                that of its row.
        """
        if not request_id:
            raise RequestRefusedError(request_id, "an empty id; pages are kept under it")
        if not rows:
            raise RequestRefusedError(request_id, "it has no row to reserve pages for")
        if len(rows) > self.max_rows:
            raise RequestRefusedError(
                request_id,
                f"{len(rows)} rows, and diffusion_kv_max_rows_per_request={self.max_rows}; raise it, or send the "
                "request without guidance",
            )
        for index, row in enumerate(rows):
            total_tokens = row.geometry.total_tokens
            if total_tokens > self.max_model_len:
                raise RequestRefusedError(
                    request_id,
                    f"row {index} has {total_tokens} tokens, and max_model_len={self.max_model_len}; send a smaller "
                    "picture, fewer references or a shorter prompt, or raise max_model_len",
                )
            if row.identity is not None:
                try:
                    row.identity.check_against(row.geometry)
                except RowError as error:
                    raise RequestRefusedError(request_id, f"row {index}: {error}") from error
