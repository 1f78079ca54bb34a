# SPDX-License-Identifier: Apache-2.0
"""`omni-core` and `omni-core backends`: what is printed, in which form, with which exit status."""

import json
import os
import subprocess
import sys

import pytest

import omni_core
from omni_core.cli.main import COMMANDS, main
from omni_core.cli.tables import render_table


def test_backends_as_json(capsys):
    assert main(["backends", "--format", "json"]) == 0
    listed = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)["backends"]}
    assert {"cpu_sim", "cuda", "npu"} <= set(listed)
    assert listed["cpu_sim"] == {
        "name": "cpu_sim",
        "distribution": "omni-core",
        "version": omni_core.__version__,
        "entry_point": "omni_core_cpu_sim:CpuSimBackend",
        "device_type": "cpu",
        "available": True,
        "reason": None,
        "refuses": None,
    }


def test_backends_as_text_names_distribution_availability_and_reason(capsys):
    assert main(["backends"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "distribution", "available", "reason"]
    assert any(line.split() == ["cpu_sim", "omni-core", omni_core.__version__, "yes"] for line in lines)


def test_no_usable_backend_is_the_commands_own_no(capsys, monkeypatch):
    monkeypatch.setattr("omni_core.cli.backends.explain_backends", tuple)
    assert main(["backends"]) == 1
    assert "no installed distribution registers a backend" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"omni-core {omni_core.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["no-such-command"], ["backends", "--format", "yaml"], ["backends", "x"]])
def test_wrong_usage_is_status_2_and_says_why(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: omni-core" in capsys.readouterr().err


def test_help_names_every_command_and_imports_none_of_them():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys\n"
            "from omni_core.cli.main import main\n"
            "try:\n    main(['--help'])\n"
            "finally:\n    print([name for name in sys.modules if name in ('torch', 'vllm')])",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    for command in COMMANDS:
        assert command.name in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


ACTIONS = {"config": [("show",), ("validate",), ("schema",)]}
"""Commands that do one of several things."""


@pytest.mark.parametrize(
    "words",
    [(command.name, *action) for command in COMMANDS for action in ACTIONS.get(command.name, [()])],
    ids=" ".join,
)
def test_every_command_of_the_table_exists_and_has_both_formats(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    assert "--format {text,json}" in capsys.readouterr().out


def test_a_reader_that_leaves_early_is_no_traceback():
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "omni_core.cli.main", "backends"],
            stdout=write_end,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (1, "")


def test_table_aligns_numbers_right_and_wraps_the_last_column_only():
    table = render_table(
        ("request", "rows", "note"),
        [("a", "7", "one two three four five six seven"), ("long-request-name", "1234", "")],
        right_aligned={"rows"},
        width=54,
    )
    assert table.splitlines() == [
        "request            rows  note",
        "-----------------  ----  -----------------------------",
        "a                     7  one two three four five six",
        "                         seven",
        "long-request-name  1234",
    ]


def test_table_refuses_a_row_of_another_length():
    with pytest.raises(ValueError, match=r"\['a'\] has 1 cells for 2 headers"):
        render_table(("x", "y"), [("a",)])
