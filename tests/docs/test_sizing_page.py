# SPDX-License-Identifier: Apache-2.0
"""The plan on the sizing page is what the command prints for the model it names."""

import re
import shlex
from pathlib import Path

from model_configs import QWEN3_OMNI_30B_A3B, write_model

from omni_core.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "sizing.md"
MODEL = "Qwen3-Omni-30B-A3B-Instruct"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_plan_shown_is_the_plan_printed(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    (_, command), (_, shown), *_ = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    program, *arguments = shlex.split(command.replace("\\\n", " "))
    assert program == "omni-core"
    model = write_model(tmp_path / MODEL, QWEN3_OMNI_30B_A3B)
    assert main([model if argument == MODEL else argument for argument in arguments]) == 0
    printed = capsys.readouterr().out.splitlines()
    left_out = ("First save", "At start: ", f"from {model}")
    kept = [line for line in printed if not line.startswith(left_out)]
    assert "\n".join(kept).replace("\n\n\n", "\n\n") == shown.rstrip("\n")
    assert len(printed) == len(kept) + len(left_out)
