"""Tests of trimmed traces: exact contents, and corrupt, existing and malicious files."""

from __future__ import annotations

import errno
import gzip
import json
import os
import zipfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from real_traces import each

from profdeck_traces.analysis.summary import summarise_trace
from profdeck_traces.base.errors import TraceError
from profdeck_traces.reading import compiled
from profdeck_traces.reading.copying import strict_json
from profdeck_traces.reading.integrity import check_trace
from profdeck_traces.writing import trim
from profdeck_traces.writing.selection import Selection
from profdeck_traces.writing.trim import trim_trace
from profdeck_traces.writing.windows import read_extent, step_window

LAYOUTS: list[dict[str, Any]] = [{}, {"indent": 4}, {"separators": (",", ":")}, {"separators": ("\n    ,", ": ")}]
KINETO = """{
  "schemaVersion": 1,
  "deviceProperties": [
    {
      "id": 0, "name": "GPU"
    }
  ],
  "traceEvents": [
  {
    "ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": 1,
    "ts": 10.500, "dur": 0.625,
    "args": {"Input Dims": [[1], []]}
  },
  {
    "ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7,
    "ts": 11.000, "dur": 0.500
  },
  {
    "name": "process_name", "ph": "M", "ts": 0, "pid": 1, "tid": 0,
    "args": {
      "name": "python"
    }
  }
  ],
  "traceName": "t.json",
  "baseTimeNanoseconds": 1704153600000000000
}
"""


def event(ph: str = "X", ts: Any = 0, **members: Any) -> dict[str, Any]:
    return {"ph": ph, "ts": ts, "pid": 1, "tid": 1, **members}


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def content(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" else data


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "source.json", KINETO.encode())


def test_events_and_members_keep_their_text_and_order(source: Path, tmp_path: Path) -> None:
    check = trim_trace(source, tmp_path / "out.json", Selection(begin_ns=11_200))

    trimmed = content(tmp_path / "out.json").decode()
    positions = [
        KINETO.index('{\n    "ph": "X"'),
        KINETO.index('{\n    "ph": "X", "cat": "kernel"'),
        KINETO.index('{\n    "name"'),
    ]
    assert trimmed.split() == (KINETO[: positions[0]] + KINETO[positions[1] :]).split()
    assert KINETO[positions[1] : positions[2]].rstrip(", \n") in trimmed
    assert KINETO[positions[2] : KINETO.index('\n  ],\n  "traceName')] in trimmed
    assert list(json.loads(trimmed)) == list(json.loads(KINETO))
    assert check == check_trace(tmp_path / "out.json")
    assert (check.whole, check.events) == (True, 2)


ELEMENTS = st.lists(
    st.one_of(
        st.builds(
            event,
            st.sampled_from("XXXiMsf"),
            st.one_of(st.integers(0, 9), st.floats(0, 9), st.sampled_from(["5", "NaN", float("nan"), None])),
            dur=st.sampled_from([0, 1, 2.5, None]),
            name=st.sampled_from(['}, {"ph"', "\ud800", "é", "\\", "a" * 99]),
            args=st.sampled_from([{}, {"Input Dims": [[], [1]]}, {"list": [{"ph": "M"}, {}]}]),
        ),
        st.sampled_from([None, 1, "ph", [], {}, [event()]]),
    ),
    max_size=30,
)
MEMBERS: st.SearchStrategy[dict[str, Any]] = st.dictionaries(
    st.sampled_from(["a", 'b"', "stackFrames", "é"]), st.sampled_from([0, -1.5, "x", None, [], {"y": [1]}])
)


@given(MEMBERS, ELEMENTS, MEMBERS, st.sampled_from(LAYOUTS), st.sampled_from([0, 16, 200]), st.booleans())
def test_trimmed_trace_equals_the_filtered_trace(
    tmp_path_factory: pytest.TempPathFactory,
    before: dict[str, Any],
    elements: list[Any],
    after: dict[str, Any],
    layout: dict[str, Any],
    padding: int,
    bare: bool,
) -> None:
    directory = tmp_path_factory.mktemp("trim")
    elements = [event(name="first", ts=3), *elements]
    members = {} if bare else {**before, **after}
    document = elements if bare else {**before, "traceEvents": elements, **after}
    data = json.dumps(document, ensure_ascii=False, **layout).encode("utf-8", "surrogatepass") + b" " * padding
    selection = Selection(2_000, 7_000)

    def is_kept(element: Any) -> bool:
        if not isinstance(element, dict):
            return False
        if element.get("ph") == "M":
            return True
        try:
            start = Decimal(element["ts"])
        except (ArithmeticError, KeyError, TypeError):
            return False
        stop = start + Decimal(element["dur"] or 0) if element["ph"] == "X" and element.get("dur") else start
        return start.is_finite() and start < 7 and (stop > 2 or start >= 2)

    expected = [element for element in elements if is_kept(element)]
    check = trim_trace(write(directory / "source.json.gz", data), directory / "out.json", selection)

    def strict(value: Any) -> Any:
        return json.loads(strict_json(json.dumps(value).encode()))

    trimmed = json.loads(content(directory / "out.json").decode(), parse_constant=pytest.fail)
    assert (trimmed if bare else trimmed["traceEvents"]) == strict(expected)
    assert bare or trimmed == strict({**members, "traceEvents": expected})
    assert check.whole
    assert check.events == sum("ph" in element for element in expected)
    for element in expected:
        text = json.dumps(element, ensure_ascii=False, **{**layout, "indent": None}).encode("utf-8", "surrogatepass")
        assert layout.get("indent") or strict_json(text) in content(directory / "out.json")


@pytest.mark.parametrize("name", ["out.json", "out.json.gz"])
def test_file_name_selects_compression(source: Path, tmp_path: Path, name: str) -> None:
    check = trim_trace(source, tmp_path / name, Selection(categories=frozenset({"kernel"})))

    assert (tmp_path / name).read_bytes().startswith(b"\x1f\x8b") == name.endswith(".gz")
    assert [e["name"] for e in json.loads(content(tmp_path / name))["traceEvents"]] == ["k", "process_name"]
    assert check == check_trace(tmp_path / name)
    assert names_in(tmp_path) == [name, "source.json"]


def test_pairs_are_kept_together(tmp_path: Path) -> None:
    keys = (f'"k{n}"' for n in range(9))
    pair = [event("B", 1), event("E", 2), event("B", 5), event("E", 9), event("B", 11), event("E", 12)]
    texts = [json.dumps(event_fields).replace("{", f"{{{next(keys)}: 0, ", 1) for event_fields in pair]
    source = write(tmp_path / "source.json", f"[{', '.join(texts)}]".encode())

    trim_trace(source, tmp_path / "out.json", Selection(6_000, 7_000))

    assert content(tmp_path / "out.json").decode().split() == ["[", *",\n".join(texts[2:4]).split(), "]"]


def test_step_of_a_long_trace_is_trimmed(tmp_path: Path) -> None:
    events = [event("M", name="process_name", args={"name": "python"})]
    for number in range(10_000):
        step, within = divmod(number, 1000)
        start = step * 10_000 + within * 9
        if not within:
            events.append(event(ts=start, dur=9_500, cat="user_annotation", name=f"ProfilerStep#{step}"))
        events.append(event(ts=start + 0.125, dur=8, cat="cpu_op", name=f"op{within % 7}", args={"n": "x" * 99}))
    source = write(tmp_path / "long.json.gz", json.dumps({"traceEvents": events}, indent=4).encode())

    selection = step_window(source, range(3, 5))
    check = trim_trace(source, tmp_path / "steps.json.gz", selection)

    assert (selection.begin_ns, selection.end_ns) == (30_000_000, 49_500_000)
    assert (check.whole, check.events) == (True, 2003)
    assert json.loads(content(tmp_path / "steps.json.gz"))["traceEvents"] == [events[0], *events[3004:5006]]
    summary = summarise_trace(tmp_path / "steps.json.gz")
    assert sum(operator.count for operator in summary.operators) == 2000


def test_existing_file_is_not_overwritten(source: Path, tmp_path: Path) -> None:
    existing = write(tmp_path / "taken", b"precious")
    with pytest.raises(FileExistsError):
        trim_trace(source, existing, Selection())
    with pytest.raises(FileExistsError):
        trim_trace(source, source, Selection())

    assert existing.read_bytes() == b"precious"
    assert names_in(tmp_path) == ["source.json", "taken"]


def test_failed_write_leaves_no_files(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(trim, "write_all", full)
    with pytest.raises(OSError, match="No space left"):
        trim_trace(source, tmp_path / "out", Selection())

    assert names_in(tmp_path) == ["source.json"]


def test_selection_without_events_reports_the_existing_events(source: Path, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"It lasts 1e-06 s .*; its categories are cpu_op, kernel\."):
        trim_trace(source, tmp_path / "out", Selection(begin_ns=10**9))

    assert names_in(tmp_path) == ["source.json"]


@pytest.mark.parametrize("data", [b"", b"not a trace", b"{}", b"[]"])
def test_file_that_is_not_a_trace_is_an_error(tmp_path: Path, data: bytes) -> None:
    source = write(tmp_path / "source", data)
    with pytest.raises(TraceError, match="source: "):
        trim_trace(source, tmp_path / "out", Selection())
    with pytest.raises(TraceError, match="Cannot read"):
        trim_trace(tmp_path / "nowhere", tmp_path / "out", Selection())
    with pytest.raises(TraceError, match="Is a directory"):
        trim_trace(tmp_path, tmp_path / "out", Selection())

    assert names_in(tmp_path) == ["source"]


@pytest.mark.parametrize("name", ["cut.json", "cut.json.gz"])
def test_readable_part_of_a_corrupt_trace_is_kept_and_closed(tmp_path: Path, name: str) -> None:
    # Digits of pi are barely compressible.
    events = [event(ts=n, name=f"{(n * 314159265358979) % 10**15}") for n in range(3000)]
    source = write(tmp_path / name, json.dumps({"rank": 3, "traceEvents": events, "after": 1}).encode())
    os.truncate(source, source.stat().st_size // 2)

    check = trim_trace(source, tmp_path / "out.json", Selection(begin_ns=500_000))

    trimmed = json.loads(content(tmp_path / "out.json"))
    event_count = len(trimmed["traceEvents"])
    assert trimmed == {"rank": 3, "traceEvents": events[500 : 500 + event_count]}
    assert 500 < event_count == check.events
    assert not check.whole
    assert check.problem is not None
    assert check.problem.startswith(f"{source}: The ")
    assert check_trace(tmp_path / "out.json").whole


def test_malformed_event_is_omitted_and_reported(tmp_path: Path) -> None:
    malformed = [
        b'{"ph": "X", "ts": 99, "args": %b%b}' % (b"[" * 600, b"]" * 600),
        b'{"ph": "X", "name": "\t"}',
        b'{"ph": }',
    ]
    for text in malformed:
        source = write(tmp_path / "source.json", b'[{"ph": "X", "ts": 0}, %b, {"ph": "X", "ts": 2}]' % text)

        check = trim_trace(source, tmp_path / "out.json", Selection(1_000, 3_000))

        assert content(tmp_path / "out.json").split() == b'[ {"ph": "X", "ts": 2} ]'.split()
        assert (check.whole, check.events) == (False, 1)
        assert str(check.problem).startswith(f"{source}: Malformed JSON at offset ")
        (tmp_path / "out.json").unlink()


def test_other_encodings_and_archives_are_trimmed(source: Path, tmp_path: Path) -> None:
    (tmp_path / "utf16.json").write_bytes(source.read_bytes().decode().encode("utf-16"))
    with zipfile.ZipFile(tmp_path / "trace.zip", "w") as archive:
        archive.write(source)
    trim_trace(source, tmp_path / "expected.json", Selection(begin_ns=11_200))

    for name in ("utf16.json", "trace.zip"):
        assert trim_trace(tmp_path / name, tmp_path / f"{name}.out", Selection(begin_ns=11_200)).whole
        assert content(tmp_path / f"{name}.out") == content(tmp_path / "expected.json")


@pytest.mark.parametrize("name", ["out.json", "out.json.gz"])
def test_parser_in_python_writes_the_same_file(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    trim_trace(source, tmp_path / name, Selection(begin_ns=11_200))
    monkeypatch.setattr(compiled, "load_library", lambda: None)
    trim_trace(source, tmp_path / f"python-{name}", Selection(begin_ns=11_200))

    assert (tmp_path / f"python-{name}").read_bytes() == (tmp_path / name).read_bytes()


def test_trace_with_two_event_arrays_is_reported(tmp_path: Path) -> None:
    source = write(tmp_path / "source.json", b'{"traceEvents": [{"ph": "i"}], "a": 1, "traceEvents": [{"ph": "C"}]}')

    check = trim_trace(source, tmp_path / "out.json", Selection())

    assert json.loads(content(tmp_path / "out.json")) == {"traceEvents": [{"ph": "i"}], "a": 1}
    assert "a second array of events begins" in str(check.problem)


def test_progress_is_in_bytes_of_the_source(source: Path, tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    trim_trace(
        source, tmp_path / "out", Selection(), on_progress=lambda bytes_read, total: reports.append((bytes_read, total))
    )

    assert reports == sorted(reports)
    assert reports[-1] == (source.stat().st_size, source.stat().st_size)


@pytest.mark.shared_data
@each("gpu/*.json.gz", "npu/trace_view.json")
def test_middle_of_a_real_trace_equals_the_reference(path: Path, tmp_path: Path) -> None:
    extent = read_extent(path)
    assert extent.begin_ns is not None
    quarter_ns = int(extent.duration_s * 1e9) // 4
    begin_ns, end_ns = extent.begin_ns + quarter_ns, extent.begin_ns + 3 * quarter_ns
    destination = tmp_path / "out.trace.json.gz"

    check = trim_trace(path, destination, Selection(begin_ns, end_ns))

    def events_of(file: Path) -> list[dict[str, Any]]:
        document = json.loads(content(file), parse_float=Decimal)
        events: list[dict[str, Any]] = document["traceEvents"] if isinstance(document, dict) else document
        return events

    def is_kept(event_fields: dict[str, Any]) -> bool:
        start = Decimal(event_fields.get("ts", 0)) * 1000
        stop = start + Decimal(event_fields.get("dur", 0)) * 1000
        return event_fields["ph"] == "M" or (start < end_ns and (stop > begin_ns or start >= begin_ns))

    assert check.whole
    assert events_of(destination) == list(filter(is_kept, events_of(path)))
    assert summarise_trace(destination).events == check.events
