# SPDX-License-Identifier: Apache-2.0
"""Where tests leave what they showed, for the feature matrix: one JSON file per feature.

Nothing is written unless `FEATURE_RESULTS_FOLDER` names a folder; `make matrix` does.
"""

import json
import os
from pathlib import Path

RESULTS_VARIABLE = "FEATURE_RESULTS_FOLDER"


def record(feature: str, *, status: str, rows: int = 0, rows_from_hits: int = 0, detail: str = "", shown=None) -> None:
    """Leave one feature's outcome: what a test has just asserted.

    Args:
        feature: its name in the catalogue.
        status: `right` or `refused`.
        rows: rows judged, every key counted by itself.
        rows_from_hits: how many of them came out of the cache.
        detail: a refusal's sentence.
        shown: what else happened, name to count.
    """
    folder = os.environ.get(RESULTS_VARIABLE)
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        told = {"status": status, "rows": rows, "rows_from_hits": rows_from_hits, "detail": detail}
        told["shown"] = dict(shown or {})
        (Path(folder) / f"{feature}.json").write_text(json.dumps(told, indent=1) + "\n")


def record_checked(feature: str, checked) -> None:
    """As `record` for requests that `checking_worker` has held against the tap, all of them right."""
    record(
        feature,
        status="right",
        rows=sum(sum(request["rows"].values()) for request in checked.values()),
        rows_from_hits=sum(request["skipped"] * len(request["rows"]) for request in checked.values()),
    )
