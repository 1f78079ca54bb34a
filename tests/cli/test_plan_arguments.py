# SPDX-License-Identifier: Apache-2.0
"""`omni-core plan`: no number is too large to be refused, and no argument is dropped without a word."""

import io
import sys

import pytest

from omni_core.cli.main import main

STAGE = ["--num-blocks", "10", "--hidden-size", "8", "--dtype", "float32", "--host-bytes", "64 GiB"]
HUGE = [str(1 << 63), str(10**400), "9" * 5000]


def refused(capsys, *arguments):
    """What stands on stderr; argparse leaves by SystemExit."""
    try:
        status = main(["plan", *arguments])
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr()
    assert (status, said.out) == (2, "")
    return said.err


@pytest.mark.parametrize(
    "flag",
    [
        *("--num-blocks", "--kv-cache-bytes", "--block-size", "--hidden-size", "--max-num-tokens"),
        *("--tensor-parallel-size", "--pipeline-parallel-size", "--caches-per-host", "--sink-bytes", "--host-bytes"),
        *("--staging-depth", "--extra-row-bytes", "--extra-step-bytes", "--device-staging-bytes"),
        *("--max-recycled-bytes", "--sink-queue-bytes"),
    ],
)
@pytest.mark.parametrize("number", HUGE, ids=["2**63", "10**400", "5000 digits"])
def test_a_number_that_nothing_can_have_is_refused(capsys, flag, number):
    error = refused(capsys, *STAGE, flag, number)
    assert flag in error
    assert ": must be " in error


@pytest.mark.parametrize("text", ["1,0,0", "\u0663", "\u00b2", "", "-1", "0", "1.5", "1__0", "nan"])
def test_a_count_is_written_in_digits(capsys, text):
    assert "must be a whole number of at least 1, below 2**63" in refused(capsys, *STAGE, f"--num-blocks={text}")


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e20", "soon"])
def test_a_time_that_cannot_be_waited_for_is_refused(capsys, text):
    error = refused(capsys, *STAGE, "--server", "http://127.0.0.1:9", f"--server-timeout-s={text}")
    assert "must be a number of seconds above 0" in error


@pytest.mark.parametrize(
    "key",
    ["a:\u00b2:int64", "a:0:int64", f"a:{1 << 62}:int64", "a:" + "9" * 5000 + ":int64", " :1:int64", "a:1:int4"],
)
def test_a_key_that_is_none_is_refused(capsys, key):
    assert "must be " in refused(capsys, *STAGE, "--key", key)


@pytest.mark.parametrize("dtype", ["int8", "bool", "complex64", "quint4x2", "bits1x8", "uint1", "__name__", ""])
def test_hidden_rows_are_of_a_dtype_that_models_run_in(capsys, dtype):
    assert "such as bfloat16" in refused(capsys, *STAGE, "--dtype", dtype)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--stage-config", "x"], "--stage-config means nothing without --model"),
        (["--kv-cache-bytes", "1 GiB"], "--kv-cache-bytes means nothing without --model"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size means nothing without --kv-cache-bytes"),
        (["--pipeline-parallel-size", "2"], "--pipeline-parallel-size means nothing without --kv-cache-bytes"),
        (["--kv-cache-dtype", "fp8"], "--kv-cache-dtype means nothing without --kv-cache-bytes"),
        (["--server-timeout-s", "3"], "--server-timeout-s means nothing without --server"),
        (
            ["--model", "/nowhere", "--kv-cache-bytes", "1 GiB"],
            "--kv-cache-bytes and --num-blocks both say how many blocks there are: give one",
        ),
        (["--key", "hidden_states.layer_3:8:float32", "--layers", "3"], "hidden_states.layer_3 is a key of --layers"),
        (["--deferred-key", "hidden_states.layer_3:8:int64", "--layers", "3"], "is a key of --layers; leave one out"),
        (["--model", ""], "must be a model's folder, or its config.json"),
    ],
)
def test_an_argument_that_would_do_nothing_is_refused(capsys, arguments, said):
    assert said in refused(capsys, *STAGE, *arguments)


def test_two_ways_to_tell_the_blocks_are_refused_beside_a_server_too(capsys):
    arguments = ["--model", "/nowhere", "--kv-cache-bytes", "1 GiB", "--server", "http://127.0.0.1:9"]
    assert "--kv-cache-bytes and --server both say" in refused(capsys, *arguments)


@pytest.mark.parametrize("value", ["null", '"abc"', "1e400", "[1]", "-5", "0", "true", str(10**400)])
def test_a_bound_of_the_sink_that_is_no_number_of_bytes_is_refused(capsys, value):
    assert "sink_options" in refused(capsys, *STAGE, "--set", f'sink_options={{"max_bytes": {value}}}')


@pytest.mark.parametrize("how", ["text", "json"])
def test_a_terminal_without_a_character_shows_its_number(monkeypatch, how):
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", shown)
    assert main(["plan", *STAGE, "--key", "t\u00f6ne:1:int64", "--format", how]) == 0
    shown.seek(0)
    assert rb"t\xf6ne" in shown.buffer.read() if how == "text" else rb"t\u00f6ne" in shown.buffer.read()
