# SPDX-License-Identifier: Apache-2.0
"""`omni-core plan --server`: whatever answers, and however slowly, the end comes in time and in one line."""

import json
import socket
import threading
import time
from contextlib import contextmanager

import pytest

from omni_core.cli.main import main

STAGE_FLAGS = ["--hidden-size", "64", "--dtype", "float32", "--host-bytes", "64 GiB"]
INFO = 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0\n'
MEMORY = {
    "staging_bytes": 1,
    "bounce_bytes": 1,
    "snapshot_ring_bytes": 1,
    "deferred_ring_bytes": 1,
    "pool_bytes": {"codes": 100},
    "key_table_bytes": {"codes": 1},
    "shared_table_bytes": 1,
    "max_recycled_bytes": 1,
}


@contextmanager
def answering(*answers):
    """A server that gives each connection the next of `answers`: bytes, or a function of the socket."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        for answer in answers:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                try:
                    read_question(connection)
                    connection.sendall(answer) if isinstance(answer, bytes) else answer(connection)
                except OSError:
                    pass

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def read_question(connection):
    """All of it: a connection that is closed with something unread is reset, and the answer may be lost."""
    with connection.makefile("rb") as asked:
        body_bytes = 0
        while (line := asked.readline().strip()) != b"":
            if line.lower().startswith(b"content-length:"):
                body_bytes = int(line.partition(b":")[2])
        asked.read(body_bytes)


def http(body, status="200 OK"):
    body = body.encode() if isinstance(body, str) else body
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def refused(capsys, url, *arguments):
    assert main(["plan", "--server", url, *STAGE_FLAGS, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"omni-core plan: --server {url}: /metrics: ")
    assert error.count("\n") == 1, "one line"
    return error


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"\x00SSH-2.0-foo\r\n\r\n", r"BadStatusLine: \x00SSH-2.0-foo\r\n"),
        (b"", "RemoteDisconnected"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\nabc", "its answer ended 497 bytes too early"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", "LineTooLong"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: a\r\n" * 500 + b"\r\n", "got more than 100 headers"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzzz\r\n", "IncompleteRead"),
        (http(b"\xff\xfe"), "can't decode byte 0xff"),
        (http("", "302 Found"), "HTTP 302; give the address that vLLM itself listens at"),
        (http(INFO.replace("1000", "\u00b2")), "num_gpu_blocks='\u00b2', not a number"),
        (http(INFO.replace("1000", "9" * 5000)), "num_gpu_blocks='999999999999...9999999999999', not a number"),
        (http(INFO.replace("1000", "0")), "num_gpu_blocks='0', not a number of at least 1"),
        (http(INFO.replace('block_size="16",', "")), "block_size='', not a number"),
        (http(INFO.replace("16", "None")), "block_size='None', not a number"),
        (http(INFO + INFO.replace('"0"', '"1"').replace("1000", "None")), "num_gpu_blocks='None', not a number"),
    ],
)
def test_an_answer_that_is_none_is_told_in_one_line(capsys, answer, said):
    with answering(answer) as url:
        assert said in refused(capsys, url)


def test_an_answer_that_comes_byte_by_byte_ends_with_the_time_for_all_of_it(capsys):
    listened_to_the_end = threading.Event()

    def drip(connection):
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n")
        for _ in range(400):
            connection.sendall(b"a")
            time.sleep(0.05)
        listened_to_the_end.set()

    with answering(drip) as url:
        assert "no whole answer within 0.4 s" in refused(capsys, url, "--server-timeout-s", "0.4")
    assert not listened_to_the_end.is_set()


def test_an_answer_without_end_is_read_only_so_far(capsys):
    sent = []

    def flood(connection):
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(1024):
            connection.sendall(b"a" * (1 << 20))
            sent.append(1)

    with answering(flood) as url:
        assert "more than 16,777,216 bytes" in refused(capsys, url, "--server-timeout-s", "60")
    assert len(sent) < 256


def test_labels_that_never_end_are_not_searched_for_ever(capsys):
    line = 'vllm:cache_config_info{block_size="' + "a" * (4 << 20) + "} 1.0\n"
    with answering(http(line)) as url:
        assert "block_size='', not a number" in refused(capsys, url)


def live(memory=MEMORY, **report):
    return {"results": [{"cache": {"memory": memory}, **report}]}


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ([], "its answer has no list of results, but []"),
        ({"results": None}, "its answer has no list of results, but {'results': None}"),
        ({"results": "abc"}, "its answer has no list of results"),
        ({"results": [{"gate": None}]}, "no worker has a cache: it does not say why"),
        ({"results": [{"gate": "off"}]}, "no worker has a cache: it does not say why"),
        ({"results": [{"gate": {"reason": "a\nb\x1b[1m"}}]}, r"no worker has a cache: a\nb\x1b[1m"),
        ({"results": [{"cache": None}]}, "no worker has a cache"),
        ({"results": [{"cache": "x"}]}, "a worker's cache is 'x'"),
        (live([1]), "a worker's cache.memory is [1]"),
        (live({}), "a worker's cache.memory has no staging_bytes"),
        (live(settings="x"), "a worker's settings is 'x'"),
        (live(MEMORY | {"staging_bytes": -5}), "a worker's staging_bytes is -5, no number of bytes"),
        (live(MEMORY | {"staging_bytes": 1.5}), "a worker's staging_bytes is 1.5"),
        (live(MEMORY | {"staging_bytes": True}), "a worker's staging_bytes is True"),
        (live(MEMORY | {"staging_bytes": 1 << 63}), "a worker's staging_bytes is 9223372036854775808"),
        (live(MEMORY | {"pool_bytes": None}), "a worker's pool_bytes is None"),
        (live(MEMORY | {"pool_bytes": {"codes": "x"}}), "a worker's pool_bytes of codes is 'x'"),
        ("[" * 100_000, "its answer is nested too deeply"),
        ("<html>", "its answer is not JSON"),
    ],
)
def test_a_report_of_another_form_is_a_note(capsys, reply, said):
    body = reply if isinstance(reply, str) else json.dumps(reply)
    with answering(http(INFO), http(body)) as url:
        assert main(["plan", "--server", url, *STAGE_FLAGS, "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["live"] is False
    assert said in document["notes"][-1]


def test_settings_that_are_null_are_not_said(capsys):
    with answering(http(INFO), http(json.dumps(live(settings=None)))) as url:
        assert main(["plan", "--server", url, "--host-bytes", "64 GiB", "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["live"], document["cache"]) == (True, MEMORY)
