"""Tests that read traces into columns and compare them with the standard library's json."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from real_traces import each

from profdeck_traces.base.errors import TraceError
from profdeck_traces.reading import compiled, fallback, stream
from profdeck_traces.reading.columns import ANNOTATION, DEVICE_ANNOTATION, DEVICE_CATEGORIES, Columns
from profdeck_traces.reading.reader import read_trace
from profdeck_traces.reading.trace import Trace

LANES = DEVICE_CATEGORIES | {ANNOTATION, DEVICE_ANNOTATION}
LAYOUTS = ("one line", "indented", "kineto 2.13", "kineto", "compact")

Row = tuple[str, str, Any, Any, int, int]


def written(events: list[Any], layout: str, **members: Any) -> str:
    """Return a trace in one of the layouts of profilers and tools."""
    document = {"schemaVersion": 1, **members, "traceEvents": events}
    if layout == "one line":
        return json.dumps(document)
    if layout == "compact":
        return json.dumps(document, separators=(",", ":"))
    if layout == "indented":
        return json.dumps(document, indent=4)
    head = json.dumps({"schemaVersion": 1, **members})[:-1]
    if layout == "kineto":
        texts = [
            json.dumps(event).replace(', "ts"', ',\n    "ts"').replace(', "args": {', ',\n    "args": {\n      ')
            for event in events
        ]
        return head + ', "traceEvents": [\n  ' + ",\n  ".join(texts) + "\n  ]\n}"
    texts = [json.dumps(event, indent=0).replace(",\n", "\n    ,") for event in events]
    return head + ', "traceEvents": [\n' + "\n    ,".join(texts) + "\n]}"


def rows_of(text: str) -> Counter[Row]:
    """Return the complete events, read with the standard library."""
    document = json.loads(text, parse_float=Decimal)
    events = document["traceEvents"] if isinstance(document, dict) else document
    named = {
        event.get("pid"): event["args"]["name"]
        for event in events
        if isinstance(event, dict) and event.get("ph") == "M" and event.get("name") == "process_name"
    }
    return Counter(
        (
            event.get("cat") or named.get(event.get("pid"), ""),
            event.get("name", ""),
            event.get("pid"),
            event.get("tid"),
            start := round(Decimal(event["ts"]) * 1000),
            start + max(0, round(Decimal(event.get("dur", 0)) * 1000)),
        )
        for event in events
        if isinstance(event, dict) and event.get("ph") == "X" and "ts" in event
    )


def rows(columns: Columns) -> Counter[Row]:
    tables = columns.tables
    return Counter(
        zip(
            [tables.categories[tables.name_category[code]] for code in columns.name.tolist()],
            [tables.names[code] for code in columns.name.tolist()],
            [tables.tracks[code][0] for code in columns.track.tolist()],
            [tables.tracks[code][1] for code in columns.track.tolist()],
            columns.start_ns.tolist(),
            columns.end_ns.tolist(),
            strict=True,
        )
    )


times = st.one_of(
    st.integers(0, 10**6),
    st.integers(0, 10**9).map(lambda number: number / 1000),
    st.decimals(0, 10**13, places=3).map(str),
    st.integers(10**15, 10**15 + 10**6),
)
texts = st.one_of(
    st.sampled_from(
        ["aten::mm", "kernel", "void f<int>(a, b)", '"kernel"', "gpu_memcpy", "args", "}, {", '\\"', "é", "\n"]
    ),
    st.text(max_size=12),
)
ids = st.one_of(st.integers(-1, 5), st.integers(0, 2**40), st.sampled_from(["Spans", "stream 7"]))
args = st.dictionaries(
    st.sampled_from(["bytes", "kernel", "cat", "ph", "ts", "grid", "stream"]),
    st.recursive(st.one_of(st.integers(0, 99), texts), lambda inner: st.lists(inner, max_size=3), max_leaves=4),
    max_size=3,
)
complete = st.fixed_dictionaries(
    {
        "ph": st.just("X"),
        "cat": st.sampled_from([*sorted(LANES), "cpu_op", "cuda_runtime", "python_function", "new_accelerator"]),
        "name": texts,
        "pid": ids,
        "tid": ids,
        "ts": times,
    },
    optional={"dur": times, "args": args},
)
plain = st.fixed_dictionaries(
    {
        "ph": st.just("X"),
        "cat": st.sampled_from(["kernel", "gpu_memcpy", "cpu_op", "user_annotation"]),
        "name": st.sampled_from(["gemm", "copy", "ProfilerStep#1"]),
        "pid": st.integers(0, 3),
        "tid": st.integers(0, 3),
        "ts": st.integers(0, 10**9).map(lambda number: number / 1000),
        "dur": st.integers(0, 10**6).map(lambda number: number / 1000),
        "args": args,
    }
)
other_events = st.one_of(
    st.fixed_dictionaries(
        {"ph": st.sampled_from("stf"), "id": ids, "cat": st.just("ac2g"), "name": texts, "ts": times}
    ),
    st.fixed_dictionaries(
        {
            "name": st.sampled_from(["process_name", "thread_name", "process_labels"]),
            "ph": st.just("M"),
            "pid": ids,
            "args": st.fixed_dictionaries({"name": st.sampled_from(["python", "Ascend Hardware", "GPU 0"])}),
        }
    ),
    st.fixed_dictionaries({"ph": st.just("i"), "name": texts, "ts": times}),
)
shuffled = st.one_of(complete, other_events).flatmap(lambda event: st.permutations(list(event.items())).map(dict))
events = st.one_of(
    st.lists(plain, min_size=1, max_size=30),
    st.lists(st.one_of(plain, complete, other_events), max_size=30),
    st.lists(st.one_of(complete, other_events, shuffled), max_size=20),
)
quick = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@quick
@given(events=events, layout=st.sampled_from(LAYOUTS), chunk=st.sampled_from([97, 1000, 1 << 20]))
def test_events_equal_the_standard_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[Any], layout: str, chunk: int
) -> None:
    monkeypatch.setattr(stream.read_chunks, "__defaults__", (chunk,))
    text = written(events, layout, distributedInfo={"rank": 1})
    path = tmp_path / "trace.json"
    path.write_text(text, encoding="utf-8")
    expected = rows_of(text)

    trace = read_trace(path)

    assert trace.check.whole == bool(events)
    assert_all_read(trace, expected)
    assert trace.members == {"distributedInfo": {"rank": 1}}


@quick
@given(
    events=st.lists(st.one_of(plain, complete, other_events), min_size=5, max_size=20),
    layout=st.sampled_from(LAYOUTS),
    data=st.data(),
)
def test_mutated_trace_is_whole_only_if_the_standard_library_reads_the_same(
    tmp_path: Path, events: list[Any], layout: str, data: st.DataObject
) -> None:
    text = bytearray(written(events, layout).encode())
    offset = data.draw(st.integers(0, len(text) - 1))
    change = data.draw(st.sampled_from(["cut", "replace", "insert", "delete"]))
    if change == "cut":
        del text[offset:]
    elif change == "replace":
        text[offset] = data.draw(st.integers(0, 255))
    elif change == "insert":
        text[offset:offset] = data.draw(st.binary(min_size=1, max_size=4))
    else:
        del text[offset : offset + data.draw(st.integers(1, 20))]
    path = tmp_path / "trace.json"
    path.write_bytes(text)

    trace = read_trace(path)

    try:
        expected = rows_of(text.decode())
    except (ValueError, ArithmeticError, AttributeError, KeyError, TypeError):
        pass  # the standard library does not read parts of corrupt files and does not define unusual values
    else:
        if trace.check.whole:
            assert_all_read(trace, expected)


@pytest.mark.shared_data
@each("gpu/*.json.gz", "npu/trace_view.json")
def test_real_traces_equal_the_standard_library(path: Path) -> None:
    data = path.read_bytes()
    expected = rows_of((gzip.decompress(data) if path.suffix == ".gz" else data).decode())

    # Ascend durations have more digits than nanoseconds, so rounding can differ.
    assert_same(rows(read_trace(path).events), expected, tolerance_ns=1 if path.parent.name == "npu" else 0)


def assert_all_read(trace: Trace, expected: Counter[Row]) -> None:
    """Check that the trace has the expected events, or counts them as device events with implausible times."""
    read = rows(trace.events)
    omitted = expected - read
    assert not read - expected
    assert Counter(row[1] for row in omitted.elements()) == sum(
        (Counter({name: count}) for name, count in trace.implausible), Counter()
    )


def assert_same(actual: Counter[Row], expected: Counter[Row], *, tolerance_ns: int) -> None:
    for actual_row, expected_row in zip(
        sorted(actual.elements(), key=repr), sorted(expected.elements(), key=repr), strict=True
    ):
        assert actual_row[:-1] == expected_row[:-1]
        assert abs(actual_row[-1] - expected_row[-1]) <= tolerance_ns


def kernels(count: int, **more: Any) -> list[dict[str, Any]]:
    return [
        {
            "ph": "X",
            "cat": "kernel",
            "name": f"k{n % 7}",
            "pid": 0,
            "tid": 7,
            "ts": n,
            "dur": 1,
            "args": {"n": n},
            **more,
        }
        for n in range(count)
    ]


def test_times_since_1970_keep_their_nanoseconds(tmp_path: Path) -> None:
    # The nearest float is a whole number of microseconds.
    text = written(kernels(1), "kineto")
    path = tmp_path / "trace.json"
    path.write_text(re.sub(r'"ts": [0-9.]+', '"ts": 1712195495521130.028', text))

    columns = read_trace(path).events

    assert columns.start_ns[0] == 1712195495521130028
    assert columns.end_ns[0] == 1712195495521130028 + 1000


@pytest.mark.parametrize(
    "odd",
    [
        {"ph": "X", "cat": "cpu_op", "name": "kernel", "pid": 1, "tid": 1, "ts": 5, "dur": 1, "args": {}},
        {"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": 1, "ts": 5, "dur": 1, "args": {"of": "kernel"}},
        {"ph": "X", "cat": "kernel", "name": "kernel", "pid": 1, "tid": 1, "ts": 5, "dur": 1, "args": {}},
        {"ph": "X", "cat": "cpu_op", "name": "b", "args": {"in": {"ph": "X", "cat": "kernel"}}, "ts": 5, "dur": 1},
        {"ph": "B", "cat": "kernel", "name": "c", "pid": 1, "tid": 1, "ts": 5, "args": {}},
        {"ph": "X", "cat": "kernel", "name": "no args", "pid": 1, "tid": 1, "ts": 5, "dur": 1},
        {"cat": "kernel", "ph": "X", "name": "other order", "pid": 1, "tid": 1, "ts": 5, "dur": 1, "args": {}},
        {"ph": "X", "args": {"first": 1}, "cat": "kernel", "name": "args first", "pid": 1, "tid": 1, "ts": 5, "dur": 1},
        {"ph": "X", "cat": "kernel", "name": "text", "pid": 1, "tid": 1, "ts": "5.001", "dur": "1", "args": {}},
    ],
    ids=lambda odd: odd["name"],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_unusual_events_are_read(tmp_path: Path, odd: dict[str, Any], layout: str) -> None:
    text = written([*kernels(50), odd, *kernels(50)], layout)
    path = tmp_path / "trace.json"
    path.write_text(text)

    assert rows(read_trace(path).events) == rows_of(text)


def test_escaped_category_equals_the_unescaped_category(tmp_path: Path) -> None:
    text = written(kernels(20), "kineto").replace(
        '"cat": "kernel", "name": "k3"', '"cat": "k\\u0065rnel", "name": "k3"'
    )
    path = tmp_path / "trace.json"
    path.write_text(text)

    assert rows(read_trace(path).events) == rows_of(text)
    assert {row[0] for row in rows_of(text)} == {"kernel"}


def test_events_before_the_end_of_a_truncated_stream_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    compressed = gzip.compress(written(kernels(5000), "kineto").encode())
    path.write_bytes(compressed[:-100])

    trace = read_trace(path)

    assert (
        trace.check.problem
        == f"The gzip stream ends after {len(compressed) - 100:,} bytes, before its trailer: the file was cut off."
    )
    assert 4000 < len(trace.events) < 5000


def test_names_processes_and_sizes_of_copies_are_read(tmp_path: Path) -> None:
    copy = {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "pid": 0, "tid": 7, "ts": 1, "dur": 1}
    naming = {"name": "process_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": "GPU"}}
    thread = {"name": "thread_name", "ph": "M", "pid": 0, "tid": 7, "args": {"name": "stream 7"}}
    path = tmp_path / "trace.json"
    path.write_text(written([copy | {"args": {"bytes": 40}}, copy | {"args": {"bytes": 2}}, naming, thread], "kineto"))

    trace = read_trace(path)

    assert trace.arg("bytes", trace.events.row).tolist() == [40, 2]
    assert trace.process_names == {0: "GPU"}
    assert trace.thread_names == {(0, 7): "stream 7"}


@pytest.mark.parametrize("is_compiled", [True, False])
def test_names_above_the_limit_are_combined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_compiled: bool
) -> None:
    for parser in (compiled.CompiledParser, fallback.PythonParser):
        monkeypatch.setattr(parser.__init__, "__kwdefaults__", {"max_names": 10, "in_files": False})
    if not is_compiled:
        monkeypatch.setattr(compiled, "load_library", lambda: None)
    events = [
        {"ph": "X", "cat": f"c{n % 300}", "name": f"n{n}" * 3000, "pid": n, "tid": n, "ts": n, "dur": 1}
        for n in range(1000)
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(events))

    columns = read_trace(path).events

    assert len(columns) == 1000
    assert {*columns.tables.names} == {"(other)", *((f"n{n}" * 3000)[:4095] + "…" for n in range(8))}
    assert len(columns.tables.tracks) == 10
    assert len(columns.tables.categories) == 255


def test_each_operator_name_is_checked_once(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    step = {"ph": "X", "cat": "cpu_op", "name": "step 1", "pid": 1, "tid": 1, "ts": 1, "dur": 5}
    path.write_text(json.dumps([step, step | {"name": "mm"}, *kernels(9), step, step | {"ts": 9}]))
    checked_names: list[str] = []

    trace = read_trace(path, is_step=lambda name: checked_names.append(name) is None and name == "step 1")

    assert checked_names == ["step 1", "mm"]
    assert trace.annotations.start_ns.tolist() == [1000, 1000, 9000]
    assert len(read_trace(path).annotations) == 0


def test_invalid_base_time_is_none(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(written(kernels(1), "compact", baseTimeNanoseconds=10**400))

    assert read_trace(path).base_ns == 0


def test_zip_bomb_stops_at_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * 50_000_000))

    trace = read_trace(path, max_json_bytes=4_000_000)

    assert trace.check.problem == "The JSON has more than 4,000,000 bytes: the remainder was not read."


def test_events_are_converted_to_an_arrow_table(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from profdeck_traces.reading.arrow import record_batches

    path = tmp_path / "trace.json"
    path.write_text(written(kernels(3), "kineto"))

    table = record_batches(read_trace(path).events).read_all()

    assert table.column_names == ["name", "category", "pid", "tid", "start_ns", "end_ns"]
    assert table.to_pylist()[2] == {
        "name": "k2", "category": "kernel", "pid": "0", "tid": "7", "start_ns": 2000, "end_ns": 3000
    }  # fmt: skip


def test_missing_file_is_a_trace_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="Cannot read"):
        read_trace(tmp_path / "nowhere.json")
