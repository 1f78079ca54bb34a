# SPDX-License-Identifier: Apache-2.0
"""Judges a whole run: every promised row of every content was delivered once, or is named missing, never both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from omni_core.prefix_cache.outputs import PartialRequest
from omni_core.testing.ledger_records import ContentRecord, Standing
from omni_core.testing.row_judge import OracleViolationError, positions_of, short


def check_everything_accounted(contents: Iterable[ContentRecord], partials: Sequence[PartialRequest]) -> int:
    """Compare partial reports with what each content was promised and got.

    An id may have had several lives, and a report does not say of which one it is: rows are counted per id.

    Returns:
        How many ids have reported rows.

    Raises:
        OracleViolationError: names the request and the positions.
    """
    by_id: dict[str, list[ContentRecord]] = {}
    for content in contents:
        by_id.setdefault(content.track.req_id, []).append(content)
    reported: dict[str, Counter[int]] = {}
    for partial in partials:
        where = f"partial report of request {partial.req_id!r}"
        reported.setdefault(partial.req_id, Counter()).update(positions_of(where, partial.missing))
    unknown = sorted(set(reported) - set(by_id))
    if unknown:
        raise OracleViolationError(f"partial report of unknown request {unknown[0]!r}")
    for req_id, lives in by_id.items():
        _check_id(req_id, lives, reported.get(req_id, Counter()))
    return sum(bool(positions) for positions in reported.values())


def _check_id(req_id: str, contents: Sequence[ContentRecord], reported: Counter[int]) -> None:
    required: Counter[int] = Counter()
    permitted: Counter[int] = Counter()
    for content in contents:
        if content.standing is Standing.LIVE:
            raise OracleViolationError(f"request {req_id!r} has not ended: the run is not over")
        if content.standing is Standing.REPLACED:
            continue  # What was not delivered of a replaced content is wanted by nobody.
        missing = content.undelivered()
        permitted.update(missing)
        # A request that may have been refused in steps nobody asked for was perhaps never told so.
        if content.failed_in is None and content.doubtful_from is None:
            required.update(missing)
        # A hit whose request ended before any step of it was saved may be reported; nothing was promised yet.
        permitted.update(set(range(content.hit)) - content.promised)
    lost = sorted((required - reported).elements())
    surplus = sorted((reported - permitted).elements())
    if lost or surplus:
        promised = sum(len(content.promised) for content in contents)
        raise OracleViolationError(
            f"request {req_id!r}: {promised} rows promised in {len(contents)} contents, {reported.total()} reported "
            f"missing; neither delivered nor reported: {short(lost)}; wrongly reported: {short(surplus)}"
        )
