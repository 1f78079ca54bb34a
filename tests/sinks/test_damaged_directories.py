# SPDX-License-Identifier: Apache-2.0
"""Whatever else lies in a sink's directory, and whatever became of its index, each client's rows are found."""

import json
import os
import random

import pytest
import torch
from safetensors.torch import save_file

from omni_core.sinks.errors import InvalidRequestFileError
from omni_core.sinks.safetensors_files import SafetensorsSink, read_request_file, read_requests_of_client, request_files

REQUEST, CLIENT = "a-00000001", "a"


def store(directory, make, req_id, client):
    sink = SafetensorsSink(directory)
    sink.accept(make.delivery(req_id, (0, 4), client=client))
    sink.finish(make.ended(req_id, client=client))


@pytest.fixture
def directory(tmp_path, make):
    """Two clients' requests, `a` and `b`."""
    store(tmp_path / "rows", make, REQUEST, CLIENT)
    store(tmp_path / "rows", make, "b-00000002", "b")
    return tmp_path / "rows"


def file_of(directory, req_id):
    (path,) = [path for path in request_files(directory) if path.name.startswith(f"req-{req_id}-")]
    return path


def found(directory, client):
    return [stored.req_id for stored in read_requests_of_client(directory, client)]


def line(name, **changed):
    fields = {"file": name, "req_id": REQUEST, "client_req_id": CLIENT, "sample": None}
    return json.dumps(fields | changed).encode() + b"\n"


SAMPLE = {"client_req_id": "a", "group": "a-00000001", "index": 0}
LINES = {
    "no JSON": b"\0" * 4096,
    "noise": random.Random(5).randbytes(5000),
    "deep list": b"[" * 200_000,
    "deep object": b'{"a":' * 100_000,
    "number of any size": b'{"file":' + b"9" * 5000 + b"}",
    "no object": b"[1, 2]",
    "cut": line("FILE")[:30],
    "file is a list": line(["FILE"]),
    "file is none": line(None),
    "id is a list": line("FILE", req_id=[REQUEST]),
    "client is a list": line("FILE", client_req_id=["a"]),
    "client is a number": line("FILE", client_req_id=5),
    "sample is a list": line("FILE", sample=[1]),
    "sample lacks its index": line("FILE", sample={"client_req_id": "a", "group": "g"}),
    "index is a list": line("FILE", sample=SAMPLE | {"index": [0]}),
    "index is a truth value": line("FILE", sample=SAMPLE | {"index": True}),
    "other internal id": line("FILE", req_id="z-00000009", client_req_id="z"),
    "other client": line("FILE", client_req_id="z"),
}


@pytest.mark.parametrize("damage", LINES)
@pytest.mark.parametrize("first", [True, False])
def test_a_line_that_is_none_or_lies_hides_nobodys_rows(directory, damage, first):
    index = directory / "index.jsonl"
    added = LINES[damage].replace(b"FILE", file_of(directory, REQUEST).name.encode())
    whole = index.read_bytes()
    index.write_bytes(added + b"\n" + whole if first else whole + added)
    assert (found(directory, "a"), found(directory, "b")) == ([REQUEST], ["b-00000002"])
    assert found(directory, "z") == []


def test_a_file_is_not_handed_to_a_client_of_whom_only_the_index_speaks(directory):
    name = file_of(directory, REQUEST).name
    (directory / "index.jsonl").write_bytes(line(name, client_req_id="z"))
    assert found(directory, "z") == []


def test_a_line_that_names_a_file_under_another_internal_id_is_not_believed(directory):
    name = file_of(directory, REQUEST).name
    (directory / "index.jsonl").write_bytes(line(name, req_id="z-00000009", client_req_id="z"))
    assert (found(directory, "a"), found(directory, "z")) == ([REQUEST], [])


def not_regular_directory(path):
    path.mkdir()


def not_regular_link(path):
    path.symlink_to(path.with_name("elsewhere"))


def not_regular_pipe(path):
    os.mkfifo(path)


@pytest.mark.parametrize("put", [not_regular_directory, not_regular_link, not_regular_pipe])
def test_an_index_that_is_not_a_regular_file_is_neither_read_nor_written_nor_waited_for(directory, make, put):
    (directory / "index.jsonl").unlink()
    put(directory / "index.jsonl")
    store(directory, make, "c-00000003", "c")
    assert [found(directory, client) for client in "abc"] == [[REQUEST], ["b-00000002"], ["c-00000003"]]
    assert not (directory / "elsewhere").exists()


def test_files_that_the_index_does_not_name_and_are_no_requests_are_passed_over_and_told(directory, caplog):
    whole = file_of(directory, REQUEST).read_bytes()
    (directory / "req-foreign.safetensors").write_bytes(b"garbage")
    (directory / "req-cut.safetensors").write_bytes(whole[:-8])
    save_file({"x": torch.zeros(2)}, directory / "req-other.safetensors", metadata={"format": "pt"})
    os.mkfifo(directory / "req-pipe.safetensors")
    assert (found(directory, "a"), found(directory, "b")) == ([REQUEST], ["b-00000002"])
    assert "3 files passed over" in caplog.text


def test_a_damaged_file_costs_the_client_whose_it_is_by_the_index_and_nobody_else(directory):
    path = file_of(directory, REQUEST)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(InvalidRequestFileError, match=REQUEST):
        found(directory, "a")
    assert found(directory, "b") == ["b-00000002"]


GOOD = {
    "format": "omni-core.request", "format_version": 1, "req_id": "r", "client_req_id": "r", "end": "finished",
    "ranges": [[0, 2]], "missing": [], "keys": {"hidden_states": "h"}, "key_ranges": {}, "sample": None, "use": 0,
}  # fmt: skip


def write_with_metadata(directory, **texts):
    metadata = {name: json.dumps(value) for name, value in GOOD.items()} | texts
    tensors = {"hidden_states": torch.zeros(2, 3), "token_ids": torch.zeros(2, dtype=torch.int64)}
    path = directory / "req-made.safetensors"
    save_file(tensors, path, metadata=metadata)
    return path


def test_the_metadata_that_the_next_test_damages_is_read(tmp_path):
    assert read_request_file(write_with_metadata(tmp_path)).ranges == ((0, 2),)


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("req_id", "[1]"), ("client_req_id", "5"), ("client_req_id", '{"a": 1}'), ("sample", "[1]"), ("use", "[]"),
        ("keys", "[1]"), ("keys", '{"hidden_states": ["h"]}'), ("keys", '{"absent": "h"}'), ("key_ranges", "5"),
        ("ranges", "[[0, 1e999]]"), ("ranges", f"[[0, {10**30}]]"), ("ranges", "[[2, 0], [0, 4]]"), ("ranges", "[0]"),
        ("end", "[]"), ("missing", "null"), ("req_id", "[" * 100_000), ("use", "9" * 5000),
    ],
    ids=lambda text: text[:24],
)  # fmt: skip
def test_metadata_of_other_types_is_no_request_file(tmp_path, field, text):
    path = write_with_metadata(tmp_path, **{field: text})
    with pytest.raises(InvalidRequestFileError, match="req-made"):
        read_request_file(path)
    assert found(tmp_path, "another") == []
