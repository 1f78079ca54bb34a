# SPDX-License-Identifier: Apache-2.0
"""Every mutant, and the list of bugs of the issue that each of its entries must have one for."""

from mutants.backend import BACKEND
from mutants.deferred import DEFERRED_ROWS
from mutants.landing import LANDING
from mutants.lifecycle import LIFECYCLE
from mutants.model import Mutant
from mutants.tenancies_and_reads import TENANCIES_AND_READS
from mutants.values import VALUES
from mutants.weight_versions import WEIGHT_VERSIONS

MUTANTS: tuple[Mutant, ...] = (
    *TENANCIES_AND_READS,
    *WEIGHT_VERSIONS,
    *LANDING,
    *DEFERRED_ROWS,
    *LIFECYCLE,
    *VALUES,
    *BACKEND,
)

LISTED_BUGS = (
    "version not bumped",
    "other keys not dropped on new tenancy",
    "read planned at materialise",
    "re-plan at save missing",
    "gather of an old plan fills a re-planned entry",
    "rescue flagged by slot instead of by the id stamped there",
    "reader not waiting for landing",
    "event order instead of tenancy first",
    "pin not released on discard",
    "pin not released on abort",
    "rescue before landing",
    "skip of pinned slots",
    "staging slot freed at the step's release",
    "ticket returned twice",
    "ticket never returned",
    "claim outside the pop",
    "wake before the failure record",
    "depth off by one",
    "clip off by one",
    "rejection taken as resume",
    "missing set not filled on discard",
    "block copy ignored",
    "unaligned tail dropped",
    "padded rows stored",
    "-1 slot written",
    "batch order taken for schedule order",
    "width change accepted",
    "leftover read late",
    "event waited unrecorded",
    "copy stream not waiting for the producer",
    "dtype cast",
    "`write_n + 1` dropped",
    "reset keeps versions",
)
"""The bugs that must be injected and caught, in the words they were asked for."""
