# SPDX-License-Identifier: Apache-2.0
"""Starts a real vLLM whose Omni Core settings come from flag, environment and file, and writes what it says of them.

python settings_from_everywhere.py SCENARIO RESULT.json
"""

import json
import logging
import sys
import tempfile
from pathlib import Path

import exact_rows  # first: sets the environment vllm reads when it is imported
from engine_workload import WORKER
from tiny_model import save_tiny_model
from vllm import LLM

from omni_core.settings.errors import SettingsError


class Records(logging.Handler):
    """Keeps the text of every record of Omni Core."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.texts: list[str] = []
        logger = logging.getLogger("omni_core")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record):
        self.texts.append(record.getMessage())


def start(section: dict) -> dict:
    """What a stage with this section reports of its settings, or the mistakes it was refused for."""
    records = Records()
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_model(Path(folder))
        try:
            llm = LLM(
                model=str(model),
                dtype="float32",
                enforce_eager=True,
                skip_tokenizer_init=True,
                max_model_len=256,
                block_size=32,
                num_gpu_blocks_override=32,
                worker_cls=WORKER,
                additional_config={"omni_core": section},
            )
        except SettingsError as error:
            return {"problems": list(error.problems)}
        [report] = llm.collective_rpc("omni_core_report")
        staging_bytes = report["cache"]["memory"]["staging_bytes"]
        return {"settings": report["settings"], "log": records.texts, "staging_bytes": staging_bytes}


SCENARIOS = {
    "right": {"enabled": True, "shutdown_timeout_s": 7},
    "wrong": {"enabled": True, "stagin_depth": 8},
}

if __name__ == "__main__":
    exact_rows.make_rows_exact()
    name, result = sys.argv[1:]
    Path(result).write_text(json.dumps(start(SCENARIOS[name])))
