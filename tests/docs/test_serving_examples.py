# SPDX-License-Identifier: Apache-2.0
"""The examples of the serving page run on a tiny model and deliver every row."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
MODEL = "path/to/a/model"
READY_TIMEOUT_S = 300
DELIVERED = re.compile(
    r"request (\S+)(?: as \S+)?: \((\d+), 128\) torch\.\w+, positions \[\(0, (\d+)\)\], complete True"
)


def environment(**variables):
    settings = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join((str(REPOSITORY), os.environ.get("PYTHONPATH", ""))),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    return os.environ | settings | variables


@pytest.fixture
def model(tmp_path):
    """A tiny model that reads text, in the working directory of the example."""
    nothing = tmp_path / "nothing.py"
    nothing.touch()
    saver = Path(__file__).with_name("engine_example.py")
    subprocess.run([sys.executable, str(saver), str(nothing)], cwd=tmp_path, env=environment(), check=True, timeout=200)
    return str(tmp_path / MODEL)


def run(command, directory):
    ran = subprocess.run(
        command, cwd=directory, env=environment(), capture_output=True, text=True, timeout=400, check=False
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-6000:]
    return ran.stdout.splitlines()


def delivered(told):
    lines = [DELIVERED.fullmatch(line) for line in told if line.startswith("request ")]
    assert all(lines), told
    for _, rows, stop in (line.groups() for line in lines):
        assert rows == stop
        assert int(rows) > 160
    return [line[1] for line in lines]


def test_offline_rows_come_out_of_an_engine_in_its_own_process_once_per_sample(model, tmp_path):
    told = run([sys.executable, str(EXAMPLES / "offline_rows" / "offline_rows.py"), "--model", model], tmp_path)
    assert delivered(told) == ["0", "0", "1", "1", "2", "2"]
    assert sum(bool(re.fullmatch(r"rank 0: supported, \d{3,} rows", line)) for line in told) == 1


def wait_until_ready(server, url, log):
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        assert server.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.3)


def test_a_client_takes_the_rows_of_its_requests_from_the_server(model, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path / "server.log"
    script = str(EXAMPLES / "server_and_client" / "serve.sh")
    with log.open("w") as out:
        server = subprocess.Popen(
            [script, model, "--port", str(port)],
            cwd=tmp_path,
            env=environment(),
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(server, url, log)
        client = str(EXAMPLES / "server_and_client" / "client.py")
        assert len(set(delivered(run([sys.executable, client, "--url", url], tmp_path)))) == 3
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
