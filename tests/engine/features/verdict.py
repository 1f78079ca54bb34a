# SPDX-License-Identifier: Apache-2.0
"""Holds what the sink got against the tap of the same run, and against a run without prefix caching."""

HELD = ("open_steps", "live_reads", "pinned_slots", "queued_writes", "staging_slots_in_use")
_NOT_FAULTS = frozenset({"requests", "rows", "keys", "rows_from_hits", "steps", "evidence"})


def judge(engine):
    """What the sink got from a flushed engine: counts of rows, and of everything that is wrong with them."""
    counts = dict.fromkeys(
        (
            "requests",
            "rows",
            "rows_not_the_taps",
            "rows_missing",
            "requests_mislabelled",
            "requests_not_delivered",
            "requests_failed",
        ),
        0,
    )
    keys = set()
    for request, sample, tapped, stored in _delivered(engine, counts):
        counts["requests"] += 1
        if request.done:
            counts["requests_mislabelled"] += stored.token_ids.tolist() != request.fed_tokens(sample)
            counts["rows_missing"] += abs(request.num_rows(sample) - stored.num_rows)
        if not request.aborted:
            counts["rows_missing"] += sum(stop - start for start, stop in stored.missing)
        for key, rows in stored.rows.items():
            keys.add(key)
            counts["rows"] += len(rows)
            counts["rows_missing"] += stored.num_rows - len(rows)
            counts["rows_not_the_taps"] += _num_unknown(engine, tapped, rows, key)
    report = engine.session.report()
    counts["requests_failed"] = report["delivery"]["requests_failed"] + len(report["delivery"]["sink_errors"])
    counts["held_at_the_end"] = sum(report["cache"][name] for name in HELD)
    return counts | {
        "keys": sorted(keys),
        "rows_from_hits": report["cache"]["rows_from_hits"],
        "steps": report["cache"]["steps_saved"],
        "off_reason": report["off_reason"],
        "tap_failure": engine.session.tap.failure,
        "reasons": {**report["delivery"]["failures"], **report["delivery"]["sink_errors"]},
    }


def compare(engine, without):
    """How the same requests differ, bit for bit, from those of an engine without prefix caching."""
    counts = {"rows_unlike_cache_off": 0, "outputs_unlike_cache_off": 0}
    for request, sample, tapped, stored in _delivered(engine, {"requests_not_delivered": 0}):
        if request.done:
            control = without.requests[_name_of(engine, request)]
            counts["outputs_unlike_cache_off"] += control.outputs[sample] != request.outputs[sample]
        for key, rows in stored.rows.items():
            counts["rows_unlike_cache_off"] += _num_unknown(without, tapped, rows, key)
    return counts


def faults(verdict):
    """What is wrong, by name; nothing at all is wrong with a run that judged rows and returns nothing here."""
    found = {name: count for name, count in verdict.items() if name not in _NOT_FAULTS and count}
    return found if verdict["rows"] else found | {"rows": 0}


def _delivered(engine, counts):
    tap, kept = engine.session.tap, engine.stored()
    for request_id, request in engine.requests.items():
        internal = engine.internal_ids(request_id)
        counts["requests_not_delivered"] += 0 if internal or request.aborted else 1
        for sample, req_id in internal.items():
            if req_id in kept:
                yield request, sample, tap.requests[req_id], kept[req_id]
            else:
                counts["requests_not_delivered"] += not request.aborted


def _num_unknown(engine, tapped, rows, key):
    return int((~engine.session.tap.equal_rows_at(tapped.digests, rows, key)).sum())


def _name_of(engine, request):
    return next(name for name, one in engine.requests.items() if one is request)
