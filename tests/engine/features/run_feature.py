# SPDX-License-Identifier: Apache-2.0
"""Runs one feature's scenario in this process and writes what it showed.

python run_feature.py FEATURE RESULT.json
"""

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

import exact_rows  # first: sets the environment vllm reads when it is imported
from catalogue import FEATURES

if __name__ == "__main__":
    exact_rows.make_rows_exact()
    feature = FEATURES[sys.argv[1]]
    with tempfile.TemporaryDirectory() as directory:
        outcome = feature.load()(Path(directory))
    Path(sys.argv[2]).write_text(json.dumps(dataclasses.asdict(outcome), indent=1))
