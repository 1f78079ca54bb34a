# SPDX-License-Identifier: Apache-2.0
"""The safetensors sink: one private file per request, whole or not at all, whatever the id and the disk."""

import json
import os
import resource
import stat
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from omni_core.prefix_cache.config import HIDDEN_KEY
from omni_core.sinks.base import PossibleSample, RequestEnd
from omni_core.sinks.errors import InvalidRequestFileError, InvalidSinkOptionError, RowsMismatchError
from omni_core.sinks.file_names import request_file_stem
from omni_core.sinks.safetensors_files import SafetensorsSink, read_request_file, read_requests_of_client, request_files


def store(sink, make, req_id, count=4, **kwargs):
    sink.accept(make.delivery(req_id, (0, count), **kwargs))
    sink.finish(make.ended(req_id, client=kwargs.get("client")))


def only_file(sink):
    (path,) = request_files(sink.directory)
    return path


def test_what_a_plain_safetensors_reader_sees(tmp_path, make):
    sink = SafetensorsSink(tmp_path)
    store(sink, make, "0-81bdb22f", count=165, client="0", keys=(HIDDEN_KEY, "codes.audio"), dtype=torch.bfloat16)
    with safe_open(only_file(sink), framework="pt") as file:
        assert sorted(file.keys()) == ["codes.audio", "hidden_states", "token_ids"]
        assert file.get_tensor("hidden_states").dtype == torch.bfloat16
        assert torch.equal(
            file.get_tensor("hidden_states"),
            make.row_values("0-81bdb22f", HIDDEN_KEY, range(165), dtype=torch.bfloat16),
        )
        assert file.get_tensor("token_ids").dtype == torch.int64
        assert file.get_tensor("token_ids").tolist() == make.tokens("0-81bdb22f", range(165)).tolist()
        metadata = {key: json.loads(text) for key, text in file.metadata().items()}
    assert metadata == {
        "format": "omni-core.request",
        "format_version": 1,
        "req_id": "0-81bdb22f",
        "client_req_id": "0",
        "end": "finished",
        "complete": True,
        "ranges": [[0, 165]],
        "missing": [],
        "keys": {"hidden_states": HIDDEN_KEY, "codes.audio": "codes.audio"},
        "key_ranges": {},
        "leftover_keys": [],
        "sample": None,
        "use": 0,
    }


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    ],
)  # fmt: skip
def test_every_dtype_comes_back_bit_for_bit(tmp_path, make, dtype):
    sink = SafetensorsSink(tmp_path)
    sink.accept(make.delivery("r", (3, 5), dtype=dtype))
    sink.accept(make.delivery("r", (0, 3), dtype=dtype))
    sink.finish(make.ended("r"))
    rows = read_request_file(only_file(sink)).hidden_states
    expected = make.row_values("r", HIDDEN_KEY, range(5), dtype=dtype)
    assert rows.dtype == dtype
    assert torch.equal(rows.view(torch.uint8), expected.view(torch.uint8))


def test_nan_and_signed_zero_keep_their_bits(tmp_path, make):
    sink = SafetensorsSink(tmp_path)
    rows = torch.tensor([[float("nan"), -0.0, float("inf")], [1e-45, float("-inf"), 0.0]])
    sink.accept(replace(make.delivery("r", (0, 2)), rows={HIDDEN_KEY: rows}))
    sink.finish(make.ended("r"))
    back = read_request_file(only_file(sink)).hidden_states
    assert torch.equal(back.view(torch.int32), rows.view(torch.int32))


def test_a_dtype_the_format_lacks_is_named(tmp_path, make):
    sink = SafetensorsSink(tmp_path)
    sink.accept(make.delivery("r", (0, 2), dtype=torch.complex128))
    with pytest.raises(RowsMismatchError, match=r"torch\.complex128"):
        sink.finish(make.ended("r"))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("key", ["hidden_states", "token_ids", "__metadata__", "key:x", "ключ", "a\nb", ""])
def test_a_key_with_a_taken_or_odd_name_is_kept_apart(tmp_path, make, key):
    sink = SafetensorsSink(tmp_path)
    store(sink, make, "r", keys=(HIDDEN_KEY, key))
    make.assert_rows_of(read_request_file(only_file(sink)), "r", range(4), keys=(HIDDEN_KEY, key))


def test_files_and_new_directories_are_their_owners_alone(tmp_path, make):
    before = os.umask(0)
    try:
        sink = SafetensorsSink(tmp_path / "new")
        store(sink, make, "r")
        sink.accept(make.delivery("f", (0, 1)))
        sink.finish(make.ended("f", end=RequestEnd.FAILED, error="no"))
    finally:
        os.umask(before)
    assert stat.S_IMODE(sink.directory.stat().st_mode) == 0o700
    files = list(sink.directory.iterdir())
    assert len(files) == 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_a_directory_that_was_there_keeps_its_mode(tmp_path):
    tmp_path.chmod(0o750)
    SafetensorsSink(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o750


def test_a_directory_that_is_a_file_or_unnamed_is_refused_at_once(tmp_path):
    (tmp_path / "taken").write_text("x")
    with pytest.raises(FileExistsError):
        SafetensorsSink(tmp_path / "taken")
    with pytest.raises(InvalidSinkOptionError, match="directory=''"):
        SafetensorsSink("")


HOSTILE = [
    "", ".", "..", "../../etc/passwd", "/etc/passwd", "a/b", "a\\b", "a\0b", "x" * 5000, "é" * 300, "\ud800", "日本",
    "A", "a", ".hidden", ".partial-1", "-rf", "con", "a b", "a\nb", "r.safetensors", "é", "e\u0301", "%2e%2e", "~", "*",
]  # fmt: skip


def test_hostile_ids_stay_in_the_directory_and_keep_apart(tmp_path, make):
    sink = SafetensorsSink(tmp_path / "rows")
    for req_id in HOSTILE:
        store(sink, make, req_id)
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]
    stored = {kept.req_id: kept for kept in map(read_request_file, request_files(sink.directory))}
    assert set(stored) == set(HOSTILE)
    for req_id, kept in stored.items():
        make.assert_rows_of(kept, req_id, range(4))


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.text(st.characters(codec=None), max_size=200), min_size=2, max_size=6, unique=True))
def test_two_ids_never_share_a_file_even_where_case_is_ignored(ids):
    stems = [request_file_stem(req_id) for req_id in ids]
    assert len({stem.lower() for stem in stems}) == len(ids)
    for stem in stems:
        assert len(stem) <= 120
        assert set(stem) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
        assert stem.startswith("req-")


def test_a_file_that_is_there_is_not_replaced_without_being_told(tmp_path, make):
    store(SafetensorsSink(tmp_path), make, "r", count=4)
    second = SafetensorsSink(tmp_path)
    second.accept(make.delivery("r", (0, 9)))
    with pytest.raises(FileExistsError, match="overwrite=False"):
        second.finish(make.ended("r"))
    make.assert_rows_of(read_request_file(only_file(second)), "r", range(4))
    assert {path.name for path in tmp_path.iterdir()} == {only_file(second).name, "index.jsonl"}

    third = SafetensorsSink(tmp_path, overwrite=True)
    store(third, make, "r", count=9)
    make.assert_rows_of(read_request_file(only_file(third)), "r", range(9))


@pytest.mark.parametrize(("end", "left"), [(RequestEnd.FAILED, 1), (RequestEnd.ABORTED, 0)])
def test_a_later_request_of_the_same_id_that_leaves_no_rows_does_not_take_the_earlier_ones_file(
    tmp_path, make, end, left
):
    store(SafetensorsSink(tmp_path), make, "r", count=4)
    second = SafetensorsSink(tmp_path, overwrite=True)
    second.accept(make.delivery("r", (0, 9)))
    second.finish(make.ended("r", end=end, missing=[(9, 12)]))
    make.assert_rows_of(read_request_file(only_file(second)), "r", range(4))
    assert len(list(tmp_path.glob("*.error.json"))) == left


def test_a_link_that_waits_under_the_final_name_is_not_followed(tmp_path, make):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    sink = SafetensorsSink(tmp_path / "rows", overwrite=True)
    (sink.directory / (request_file_stem("r") + ".safetensors")).symlink_to(victim)
    store(sink, make, "r")
    assert victim.read_text() == "mine"
    make.assert_rows_of(read_request_file(only_file(sink)), "r", range(4))


def test_a_full_disk_is_an_os_error_of_that_request_and_leaves_nothing(tmp_path, make):
    sink = SafetensorsSink(tmp_path)
    sink.accept(make.delivery("big", (0, 20_000)))
    store(sink, make, "before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            sink.finish(make.ended("big"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    store(sink, make, "after")
    assert sorted(read_request_file(path).req_id for path in request_files(tmp_path)) == ["after", "before"]
    assert not list(tmp_path.glob(".*"))


def test_a_directory_that_went_away_is_an_os_error(tmp_path, make):
    sink = SafetensorsSink(tmp_path / "rows")
    sink.accept(make.delivery("r", (0, 4)))
    sink.directory.rmdir()
    with pytest.raises(FileNotFoundError):
        sink.finish(make.ended("r"))


def test_the_next_run_is_not_bothered_by_a_crashed_runs_leftovers(tmp_path, make):
    (tmp_path / ".partial-1-00").write_bytes(b"half")
    sink = SafetensorsSink(tmp_path)
    store(sink, make, "r")
    make.assert_rows_of(read_request_file(only_file(sink)), "r", range(4))
    with pytest.raises(InvalidRequestFileError, match="this is not one"):
        read_request_file(tmp_path / ".partial-1-00")


def test_a_failed_request_leaves_its_error_and_no_rows(tmp_path, make):
    sink = SafetensorsSink(tmp_path)
    sink.accept(make.delivery("r-1", (0, 4), client="r"))
    sink.finish(
        make.ended("r-1", end=RequestEnd.FAILED, client="r", missing=[(4, 9)], error="HitRowsAbsentError: block 5")
    )
    assert request_files(tmp_path) == ()
    (record,) = tmp_path.iterdir()
    assert record.name.endswith(".error.json")
    assert json.loads(record.read_text()) == {
        "format": "omni-core.request",
        "format_version": 1,
        "req_id": "r-1",
        "client_req_id": "r",
        "end": "failed",
        "missing": [[4, 9]],
        "error": "HitRowsAbsentError: block 5",
    }


def test_an_aborted_request_is_written_only_when_asked(tmp_path, make):
    sink = SafetensorsSink(tmp_path, keep_aborted=True)
    sink.accept(make.delivery("r", (0, 4)))
    sink.finish(make.ended("r", end=RequestEnd.ABORTED))
    stored = read_request_file(only_file(sink))
    assert (stored.end, stored.complete) == (RequestEnd.ABORTED, False)
    make.assert_rows_of(stored, "r", range(4))


def test_outputs_that_are_not_written_are_named(tmp_path, make):
    sink = SafetensorsSink(tmp_path)
    store(sink, make, "r", leftovers={"meta": object()})
    with safe_open(only_file(sink), framework="pt") as file:
        assert json.loads(file.metadata()["leftover_keys"]) == ["meta"]


def test_files_that_are_not_whole_requests_are_refused(tmp_path, make):
    sink = SafetensorsSink(tmp_path / "rows")
    store(sink, make, "r", count=64)
    whole = only_file(sink).read_bytes()
    for name, content in {
        "cut": whole[:-8],
        "empty": b"",
        "noise": b"\xff" * 64,
        "other": whole.replace(b"omni-core.request", b"omni-core.requesz"),
        "newer": whole.replace(b'"format_version":"1"', b'"format_version":"2"'),
    }.items():
        path = tmp_path / f"req-{name}.safetensors"
        path.write_bytes(content)
        with pytest.raises(InvalidRequestFileError, match=f"req-{name}"):
            read_request_file(path)
    with pytest.raises(FileNotFoundError):
        read_request_file(tmp_path / "req-none.safetensors")


@pytest.mark.parametrize("option", ["overwrite", "keep_aborted"])
@pytest.mark.parametrize("value", ["false", "true", 0, 1, None])
def test_a_text_or_number_does_not_pass_for_a_truth_value(tmp_path, option, value):
    with pytest.raises(InvalidSinkOptionError, match=f"{option}={value!r}: must be true or false"):
        SafetensorsSink(tmp_path / "rows", **{option: value})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [None, 3, b"rows", "a\0b", ["rows"]])
def test_a_directory_that_is_no_path_is_refused(value):
    with pytest.raises(InvalidSinkOptionError, match=r"directory=.*: must be the path of a directory"):
        SafetensorsSink(value)


def sample(client, group, index):
    return PossibleSample(client, f"{client}-{group}", index)


def store_named(sink, make, req_id, client, possible=None):
    sink.accept(replace(make.delivery(req_id, (0, 4), client=client), sample=possible))
    sink.finish(replace(make.ended(req_id, client=client), sample=possible))


def test_requests_of_a_client_are_found_by_its_id_all_samples_and_nobody_elses(tmp_path, make):
    sink = SafetensorsSink(tmp_path)
    store_named(sink, make, "a-00000000", "a")
    store_named(sink, make, "0_foo-81bdb22f", "0_foo", sample("foo", "81bdb22f", 0))
    store_named(sink, make, "1_foo-81bdb22f", "1_foo", sample("foo", "81bdb22f", 1))
    store_named(sink, make, "0_bar-11111111", "0_bar", sample("bar", "11111111", 0))

    def found(client):
        return [one.req_id for one in read_requests_of_client(tmp_path, client)]

    for _ in range(2):
        assert found("a") == ["a-00000000"]
        assert sorted(found("foo")) == ["0_foo-81bdb22f", "1_foo-81bdb22f"]
        assert found("0_foo") == ["0_foo-81bdb22f"]
        assert found("bar") == []
        assert found("0_bar") == ["0_bar-11111111"]
        (tmp_path / "index.jsonl").unlink(missing_ok=True)  # it is a help only
    make.assert_rows_of(read_requests_of_client(tmp_path, "a")[0], "a-00000000", range(4))


def test_what_the_index_names_without_a_file_is_no_request(tmp_path, make):
    sink = SafetensorsSink(tmp_path)
    store(sink, make, "a-00000000", client="a")
    store(sink, make, "b-00000001", client="b")
    request_files(tmp_path)[0].unlink()
    assert read_requests_of_client(tmp_path, "a") == ()
    assert [one.req_id for one in read_requests_of_client(tmp_path, "b")] == ["b-00000001"]


def test_an_index_that_cannot_be_written_costs_no_request(tmp_path, make, caplog):
    (tmp_path / "index.jsonl").mkdir()
    sink = SafetensorsSink(tmp_path)
    store(sink, make, "a-00000000", client="a")
    store(sink, make, "b-00000001", client="b")
    assert len(caplog.records) == 1
    assert "whole without it" in caplog.records[0].message
    (tmp_path / "index.jsonl").rmdir()
    assert [one.req_id for one in read_requests_of_client(tmp_path, "b")] == ["b-00000001"]
