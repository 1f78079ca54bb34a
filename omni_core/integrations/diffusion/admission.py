# SPDX-License-Identifier: Apache-2.0
"""The largest request a stage was profiled for. A larger one could run out of memory in the middle of a forward."""

from __future__ import annotations

from dataclasses import dataclass

from omni_core.diffusion_kv.errors import RequestRefusedError
from omni_core.diffusion_kv.pipeline import PreparedRequest


@dataclass(frozen=True, slots=True)
class AdmissionEnvelope:
    """Limits on one request, taken from the profile request. Any thread may use it."""

    max_rows: int
    max_total_tokens: int
    max_target_tokens: int

    @classmethod
    def of(cls, profile: PreparedRequest) -> AdmissionEnvelope:
        """The envelope that `profile`, the largest request, just fits."""
        geometries = [row.layout.geometry for row in profile.rows]
        return cls(
            max_rows=len(geometries),
            max_total_tokens=max(geometry.total_tokens for geometry in geometries),
            max_target_tokens=max(geometry.target_tokens for geometry in geometries),
        )

    def check(self, prepared: PreparedRequest) -> None:
        """Check one request. Call it before its content is hashed.

        Raises:
            RequestRefusedError: it has no row, more rows, or a longer row or target than the stage was profiled for.
        """
        request_id = prepared.request.request_id
        geometries = [row.layout.geometry for row in prepared.rows]
        if not geometries:
            raise RequestRefusedError(request_id, "it has no row; preprocessing gives at least the conditional one")
        for what, value, limit in (
            ("rows", len(geometries), self.max_rows),
            ("tokens in a row", max(geometry.total_tokens for geometry in geometries), self.max_total_tokens),
            ("target tokens in a row", max(geometry.target_tokens for geometry in geometries), self.max_target_tokens),
        ):
            if value > limit:
                raise RequestRefusedError(
                    request_id,
                    f"{value} {what}, and the stage was profiled for at most {limit}; send a smaller picture, fewer "
                    "references or a shorter prompt, or start the stage with a larger profile request",
                )
