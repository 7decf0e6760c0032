"""Tests of sorted columns, begin/end pairs, parent events, and files in other encodings and formats."""

from __future__ import annotations

import bz2
import codecs
import gzip
import json
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_fuzz import base

from profdeck_traces.base.errors import TraceError
from profdeck_traces.reading import events as reading
from profdeck_traces.reading.events import Events, read_events


def write(path: Path, events: list[dict[str, Any]], **members: Any) -> Path:
    path.write_text(json.dumps({"traceEvents": events, **members}))
    return path


def event(name: str, start: float, duration: float, **members: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": start, "dur": duration, **members}


def names_of(events: Events) -> list[str]:
    return [events.names[code] for code in events.name]


@pytest.mark.parametrize("in_python", [False, True])
def test_events_are_sorted_and_have_parents(tmp_path: Path, in_python: bool) -> None:
    rows = [
        event("inner", 2, 1, args={"correlation": 7}),
        event("outer", 1, 10),
        event("instant", 1, 0),
        event("after", 11, 1),
        event("same", 1, 5),
        event("other track", 0, 100, tid=2),
        event("no time", 0, 1) | {"ts": None},
        {"ph": "i", "name": "mark", "ts": 3},
    ]
    events = read_events(write(tmp_path / "a.json", rows), in_python=in_python)
    assert names_of(events) == ["outer", "same", "instant", "inner", "after", "other track"]
    assert events.parent.tolist() == [-1, 0, 1, 1, -1, -1]
    assert events.arg("correlation").tolist() == [-1, -1, -1, 7, -1, -1]
    assert events.arg("correlation", np.array([3, 0])).tolist() == [7, -1]
    assert len(events) == 8
    assert events.all["row"].tolist() == [1, 4, 2, 0, 3, 5, 6, 7]
    assert events.in_file_order(np.arange(8)).tolist() == [3, 0, 2, 4, 1, 5, 6, 7]
    kind = events.with_name(np.ones(events.complete, np.bool_), {"outer", "inner"}.__contains__)
    assert events.innermost(kind).tolist() == [0, 0, 0, 3, -1, -1]


def test_parents_and_order_are_equal_to_a_simple_search(tmp_path: Path) -> None:
    chance = random.Random(3)  # noqa: S311 - reproducible input
    rows = [event(f"n{k}", chance.randrange(50), chance.randrange(20), tid=chance.randrange(3)) for k in range(300)]
    events = read_events(write(tmp_path / "a.json", rows))
    key = list(zip(events.track.tolist(), events.start_ns.tolist(), (-events.duration_ns).tolist(), strict=True))
    assert key == sorted(key)
    for row, parent in enumerate(events.parent.tolist()):
        opened = [
            other
            for other in range(row)
            if events.track[other] == events.track[row] and events.end_ns[other] > events.start_ns[row]
        ]
        # The parent is the open event on the track that started last, even if the two events overlap without nesting.
        assert parent == -1 or parent in opened
        assert parent == (opened[-1] if opened else -1)
    assert events.parent.tolist() == read_events(events.path, in_python=True).parent.tolist()


def test_begin_and_end_events_are_one_event(tmp_path: Path) -> None:
    rows = [
        {"ph": phase, "name": name, "pid": 1, "tid": tid, "ts": time}
        for phase, name, tid, time in [
            ("B", "outer", 1, 1), ("B", "inner", 1, 2), ("B", "thread", 2, 2), ("E", "", 1, 3), ("E", "", 1, 9),
            ("E", "", 1, 10), ("E", "", 2, 12), ("B", "open", 2, 13), ("B", "last", 1, 14), ("E", "", 1, 15),
        ]
    ]  # fmt: skip
    events = read_events(write(tmp_path / "a.json", rows))
    assert dict(zip(names_of(events), (events.duration_ns // 1000).tolist(), strict=True)) == {
        "outer": 8, "inner": 1, "thread": 10, "last": 1,
    }  # fmt: skip
    assert sum(map(len, events.pairs)) == len(rows) - 2


def test_names_with_other_escapes_are_one_name(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"ph": "X", "ts": 1, "name": "a/b"}, {"ph": "X", "ts": 2, "name": "a\\/b", "pid": 0.0}]')
    assert names_of(read_events(path)) == ["a/b", "a/b"]


def test_the_process_is_the_category_of_events_without_one(tmp_path: Path) -> None:
    rows = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "Ascend Hardware"}},
        {"ph": "X", "name": "MatMul", "pid": 1, "tid": 1, "ts": "1.5", "dur": 1},
        {"ph": "X", "name": "other", "pid": 2, "tid": 1, "ts": "1.5", "dur": 1},
    ]
    events = read_events(write(tmp_path / "a.json", rows))
    assert events.has_category({"Ascend Hardware"}).tolist() == [True, False]
    assert events.process_names == {1: "Ascend Hardware"}


def test_large_traces_are_kept_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(base(random.Random(1)))  # noqa: S311 - reproducible input
    expected = read_events(path)
    monkeypatch.setattr(reading, "_LARGE_JSON_BYTES", 0)
    monkeypatch.setattr(reading, "_LARGE_FILE_BYTES", 0)
    events = read_events(path)
    assert isinstance(events.all["start_ns"], np.memmap)
    assert all(np.array_equal(events.all[name], expected.all[name]) for name in expected.all)
    assert all(np.array_equal(events.arg(key), expected.arg(key)) for key in expected.args)


TEXT = json.dumps({"traceEvents": [event("é", 1, 2), event("b", 3, 4)]}, ensure_ascii=False)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-32", "utf-32-le"])
def test_encodings_are_read(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes((codecs.BOM_UTF16_BE if encoding == "utf-16-be" else b"") + TEXT.encode(encoding))
    assert names_of(read_events(path)) == ["é", "b"]


def test_packed_traces_are_read(tmp_path: Path) -> None:
    data = TEXT.encode()
    for name, content in {
        "a.gz": gzip.compress(data[:30]) + gzip.compress(data[30:]),
        "a.bz2": bz2.compress(data[:30]) + bz2.compress(data[30:]),
    }.items():
        (tmp_path / name).write_bytes(content)
        events = read_events(tmp_path / name)
        assert events.check.whole, name
        (tmp_path / name).write_bytes(content[:-12])
        cut = read_events(tmp_path / name)
        assert not cut.check.whole
        assert cut.check.problem is not None
        assert "cut off" in cut.check.problem
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("trace.json", data)
    assert names_of(read_events(tmp_path / "a.zip")) == ["é", "b"]


def test_formats_that_are_not_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(20))
    with pytest.raises(TraceError, match="zstd -d"):
        read_events(tmp_path / "a.zst")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.json", "{}")
        archive.writestr("b.json", "{}")
    with pytest.raises(TraceError, match=r"2 files \(a.json, b.json"):
        read_events(tmp_path / "a.zip")
