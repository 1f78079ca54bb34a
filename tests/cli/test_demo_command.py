# SPDX-License-Identifier: Apache-2.0
"""`omni-core demo` from outside: its arguments, its exit status, and what it says when it cannot run."""

import io
import json
import os
import signal
import sys

import pytest

from omni_core.cli.demo.child import DemoError, run_child
from omni_core.cli.demo.progress import PlainProgress
from omni_core.cli.main import main


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    for option in ("--format", "--model", "--prompts", "--dtype", "--out", "--max-tokens", "OMNI_CORE_HOME"):
        assert option in told


@pytest.mark.parametrize(
    "arguments",
    [["--dtype", "float16"], ["--max-tokens", "0"], ["--max-tokens", "x"], ["--format", "xml"], ["--batch", "3"]],
)
def test_wrong_arguments_are_usage_errors(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["demo", *arguments])
    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_a_prompts_file_that_cannot_be_used_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text("{}\n")
    assert main(["demo", "--prompts", "bad.jsonl"]) == 2
    assert "omni-core demo: bad.jsonl, line 1: " in capsys.readouterr().err
    assert main(["demo", "--prompts", "none.jsonl"]) == 2
    assert "none.jsonl" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]


def test_a_model_path_that_is_no_model_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--model", "nowhere", "--format", "json"]) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {
        "ok": False,
        "error": "--model nowhere: no model directory (it has no config.json)",
    }
    assert "--model nowhere" in printed.err


def test_an_output_directory_with_files_in_it_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine").write_text("x")
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "there are files in it; name a new or empty directory" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_missing_packages_are_named_with_the_way_to_get_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in ("vllm", "gguf") else object())
    assert main(["demo", "--out", str(tmp_path / "out")]) == 1
    assert "not installed: vllm, gguf. `make demo` sets up everything" in capsys.readouterr().err


@pytest.fixture
def a_module(tmp_path):
    """Writes a module for a child process and gives the environment in which it is found."""

    def write(source):
        (tmp_path / "child_under_test.py").write_text(source)
        return {**os.environ, "PYTHONPATH": str(tmp_path)}

    return write


def run_it(tmp_path, environment, screen):
    run_child(
        "child_under_test",
        lambda descriptor: (str(descriptor),),
        what="the engine",
        log=tmp_path / "engine.log",
        progress=PlainProgress(screen),
        environment=environment,
    )


SAY = """\
import json, os, sys
pipe = os.fdopen(int(sys.argv[1]), "w")
def say(text, done=0, total=0):
    pipe.write(json.dumps({"text": text, "done": done, "total": total}) + "\\n")
    pipe.flush()
"""


def test_a_childs_progress_is_shown_and_its_chatter_goes_to_the_log(tmp_path, a_module):
    environment = a_module(SAY + 'say("cold wave", 1, 8); print("chatter"); say("cold wave", 2, 8); say("warm wave")')
    screen = io.StringIO()
    run_it(tmp_path, environment, screen)
    assert [line.split("] ")[1] for line in screen.getvalue().splitlines()] == ["cold wave", "warm wave"]
    assert (tmp_path / "engine.log").read_text() == "chatter\n"


@pytest.mark.parametrize(
    ("last_act", "why"),
    [
        (
            'raise RuntimeError("no memory left")',
            r"the engine ended with status 1\. The last lines of .*no memory left",
        ),
        ("os.kill(os.getpid(), 9)", r"the engine was ended by signal 9\."),
        ("sys.exit(7)", r"the engine ended with status 7\."),
    ],
)
def test_a_child_that_fails_is_an_error_with_the_end_of_its_log(tmp_path, a_module, last_act, why):
    environment = a_module(SAY + last_act)
    with pytest.raises(DemoError, match=f"(?s){why}"):
        run_it(tmp_path, environment, io.StringIO())


@pytest.mark.parametrize(
    ("what_comes", "raised"),
    [("interrupt", KeyboardInterrupt), ("SIGTERM", SystemExit)],
)
def test_a_child_does_not_outlive_the_end_of_its_parent(tmp_path, a_module, what_comes, raised):
    environment = a_module(
        SAY + f'open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid())); say("up")\nimport time\ntime.sleep(600)'
    )

    class Interrupts(PlainProgress):
        def say(self, text, done=0, total=0):
            if what_comes == "interrupt":
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(raised):
        run_child(
            "child_under_test",
            lambda descriptor: (str(descriptor),),
            what="the engine",
            log=tmp_path / "engine.log",
            progress=Interrupts(sys.stderr),
            environment=environment,
        )
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_nothing_of_the_directory_one_is_in_is_imported(tmp_path, a_module, monkeypatch):
    environment = a_module(SAY + 'import textwrap; say(str(hasattr(textwrap, "dedent")))')
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "textwrap.py").write_text("")
    monkeypatch.chdir(elsewhere)
    screen = io.StringIO()
    run_it(tmp_path, environment, screen)
    assert screen.getvalue().endswith("] True\n")
