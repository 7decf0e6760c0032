"""Tests of merging several traces into one file."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from decimal import Decimal
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from numpy.typing import NDArray

from profdeck_traces.base.errors import TraceError
from profdeck_traces.merge import MergeSource, merge_traces, segment
from profdeck_traces.reading import compiled
from profdeck_traces.reading.events import Events
from profdeck_traces.reading.integrity import TraceCheck, check_trace
from profdeck_traces.writing.selection import Selection
from profdeck_traces.writing.trim import trim_trace


def event(ph: str = "X", **members: Any) -> dict[str, Any]:
    return {"ph": ph, "name": "n", "pid": 10, "tid": 1, "ts": 1, **members}


def name_event(pid: Any, name: Any) -> dict[str, Any]:
    return event("M", name="process_name", pid=pid, args={"name": name})


def sort_event(pid: Any, sort_index: Any) -> dict[str, Any]:
    return event("M", name="process_sort_index", pid=pid, args={"sort_index": sort_index})


def _integer(text: str) -> int | str:
    return int(text) if len(text) < 4300 else text


class Merged:
    """Writes traces, merges them and reads the result."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.sources: list[MergeSource] = []
        self.destination = directory / "merged"
        self.document: dict[str, Any] = {}
        self.events: list[dict[str, Any]] = []

    def add(self, trace: Any, label: str = "", sort_index: int = 0) -> Path:
        """Add a source: JSON text, or an object to encode as JSON."""
        number = len(self.sources)
        path = self.directory / f"source{number}"
        data = trace if isinstance(trace, bytes) else json.dumps(trace).encode()
        path.write_bytes(gzip.compress(data) if number % 2 else data)
        self.sources.append(MergeSource(path, label or f"source {number}", sort_index))
        return path

    def __call__(self, *traces: Any, as_gzip: bool = True) -> TraceCheck:
        for trace in traces:
            self.add(trace)
        self.destination.unlink(missing_ok=True)
        check = merge_traces(self.sources, self.destination, gzip=as_gzip)
        data = self.destination.read_bytes()
        self.document = json.loads(gzip.decompress(data) if as_gzip else data, parse_float=Decimal, parse_int=_integer)
        self.events = self.document["traceEvents"]
        return check

    def of_names(self, *names: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["name"] in names]

    def process_names(self) -> dict[int, str]:
        name_events = [event for event in self.of_names("process_name") if "args" in event]
        assert len({event["pid"] for event in name_events}) == len(name_events)
        return {event["pid"]: event["args"]["name"] for event in name_events}

    def order(self) -> list[str]:
        """Return the process names, sorted like in a viewer."""
        names, sort_events = self.process_names(), self.of_names("process_sort_index")
        indices = {event["pid"]: event["args"]["sort_index"] for event in sort_events}
        assert len(indices) == len(sort_events) == len(names)
        return [names[pid] for pid in sorted(names, key=lambda pid: indices[pid])]


@pytest.fixture
def merged(tmp_path: Path) -> Merged:
    return Merged(tmp_path)


@pytest.fixture(params=[True, False], ids=["compiled", "python"])
def both_parsers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test once with the compiled parser and once with the Python parser."""
    if not request.param:
        monkeypatch.setattr(compiled, "load_library", lambda: None)


def test_merged_file_is_one_gzip_member(merged: Merged) -> None:
    merged([event(name="n" * 100)] * 20_000)

    inflater = zlib.decompressobj(31)
    assert len(inflater.decompress(merged.destination.read_bytes())) > 2_000_000
    assert inflater.eof
    assert not inflater.unused_data


@pytest.mark.usefixtures("both_parsers")
def test_process_names_start_with_the_label(merged: Merged) -> None:
    merged.add([name_event(1, "python3"), event(pid=1), name_event("Spans", 'q"é'), event(pid="Spans")], "rank 0 (tp1)")
    merged.add([event(pid=1), event(pid="Spans"), event(pid=""), name_event(5, 3), event("M", name="process_name")])
    merged()

    assert sorted(merged.process_names().values()) == [
        "rank 0 (tp1): python3",
        'rank 0 (tp1): q"é',
        "source 1",
        "source 1: 1",
        "source 1: 10",
        "source 1: 3",
        "source 1: Spans",
    ]


def test_processes_are_sorted_by_source_and_then_by_sort_index(merged: Merged) -> None:
    first_source = [event(pid=1), event(pid=2), event(pid=3), event(pid=4), sort_event(2, 2**40), sort_event(1, 5)]
    two = [sort_event(1, -1.5), event(pid=2), event(pid=3), event(pid=1), sort_event(3, "x"), sort_event(2, 7)]
    merged.add(first_source, "b", 2)
    merged.add(two, "a", 1)
    merged.add([event()], "c", 2)
    merged()

    assert merged.order() == ["a: 1", "a: 3", "a: 2", "b: 3", "b: 4", "b: 1", "b: 2", "c: 10"]


FLOWS = [0, 1, 123456789012, 10**12, 1704161511434171181, "0x1f", "ff", 5.0]
ASYNC = [0, 5, "0x1f", "ff", "a/b", "", -5, 2**70, [1]]


@pytest.mark.usefixtures("both_parsers")
@pytest.mark.parametrize(("phases", "ids"), [("stf", FLOWS), ("bneSTpF", ASYNC)])
def test_ids_of_two_sources_are_distinct(merged: Merged, phases: str, ids: list[Any]) -> None:
    trace = [event(ph, name="flow", id=flow_id) for flow_id in ids for ph in phases] * 5

    merged(trace, trace, trace)

    new = [event["id"] for event in merged.of_names("flow")]
    size = len(trace)
    groups = [new[:size], new[size : 2 * size], new[2 * size :]]
    for group in groups:
        of_old = {json.dumps(event["id"]): flow_id for event, flow_id in zip(trace, group, strict=True)}
        assert group == [of_old[json.dumps(event["id"])] for event in trace]
        assert len(set(map(as_perfetto, group))) == len(ids)
        assert len(set(group)) == len(ids)
    assert len({as_perfetto(flow_id) for group in groups for flow_id in group}) == 3 * len(ids)
    assert all(isinstance(flow_id, int) for flow_id in new)


@pytest.mark.usefixtures("both_parsers")
def test_equal_ids_remain_equal(merged: Merged) -> None:
    ids = [31, "0x1f", "1F", 31.0, 2**63, "0x8000000000000000", "x", "x"]
    trace = [event("s", name="flow", id=flow_id) for flow_id in ids] + [
        event(name="flow", bind_id=31),
        event("s", name="flow"),
    ]

    merged([event("s", id=3)], trace)

    new = [event.get("id", event.get("bind_id")) for event in merged.of_names("flow")]
    assert new == [4, 4, 4, 4, 3, 3, 2, 2, 4, None]


def as_perfetto(value: Any) -> Any:
    try:
        number = int(value, 16) if isinstance(value, str) else value
    except ValueError:
        return value
    return number if 0 <= number < 2**64 else None


@pytest.mark.parametrize("times", [1, 40])
def test_bind_ids_and_global_ids_are_distinct_per_source(merged: Merged, times: int) -> None:
    bound = [event(bind_id="0x5", flow_out=True), event(bind_id=5)] * times
    scoped = [event("b", id2={"global": "g", "local": "l"})] * times

    merged(bound, bound, scoped, scoped)

    new = [event["bind_id"] for event in merged.events if "bind_id" in event]
    assert new == [1, 1] * times + [2, 2] * times
    new = [event["id2"] for event in merged.events if "id2" in event]
    assert new == [{"global": "0x3", "local": "l"}] * times + [{"global": "0x4", "local": "l"}] * times


@pytest.mark.usefixtures("both_parsers")
@pytest.mark.parametrize("shift_ns", [137_250, -137_250, 1, -1, 2_000, -3_000])
def test_source_is_shifted_exactly(merged: Merged, shift_ns: int) -> None:
    times = [
        "4203669603018.756",
        "100000000000000",
        "500.5",
        "1e3",
        '"1704161511420306.491"',
        '"12345.25"',
        "0.001",
        "2",
    ]
    text = ",".join(f'{{"ph": "X", "name": "n", "pid": 1, "ts": {ts}}}' for ts in times * 9)
    merged.add([event(ts=5)])
    path = merged.add(b"[" + text.encode() + b"]")
    merged.sources[1] = MergeSource(path, "shifted", 0, shift_ns=shift_ns)

    assert merged().whole

    moved = [Decimal(ts.strip('"')) + Decimal(shift_ns) / 1000 for ts in times * 9]
    merged_times = [event["ts"] for event in merged.of_names("n")]
    assert [Decimal(ts) for ts in merged_times] == [5, *moved]
    assert [str for ts in merged_times if isinstance(ts, str)] == [str] * 18
    assert merged.document["profdeck"]["sources"][1]["shiftNanoseconds"] == shift_ns


@attrs.frozen
class OfCategory:
    """Selects the events of a category."""

    category: str

    def rows(self, events: Events) -> NDArray[np.bool_]:
        categories = np.array([category == self.category for category in events.categories])
        kept: NDArray[np.bool_] = events.in_file_order(categories[events.all["category"]])
        return kept


@pytest.mark.usefixtures("both_parsers")
@pytest.mark.parametrize("processes", [1, 2])
def test_unselected_events_are_omitted(merged: Merged, processes: int) -> None:
    trace = [event(name=f"{n}", cat="kernel" if n % 3 else "cpu_op", pid=n % 3) for n in range(100)]
    path = merged.add({"traceEvents": trace, "baseTimeNanoseconds": 5})
    merged.sources[0] = MergeSource(path, "kernels", 0, select=OfCategory("kernel"))
    merged.add([event(name="all")])

    check = merge_traces(merged.sources, merged.destination, processes=processes)

    assert check == check_trace(merged.destination)
    written = json.loads(gzip.decompress(merged.destination.read_bytes()))["traceEvents"]
    names = [event["name"] for event in written if event["ph"] == "X"]
    assert names == [f"{n}" for n in range(100) if n % 3] + ["all"]
    assert sum(event["name"] == "process_name" for event in written) == 3


@pytest.mark.usefixtures("both_parsers")
@pytest.mark.parametrize("ts", ["soon", "12 apples", "1.2.3", "", None, [5], True, "NaN", "1e999999999", "9" * 500])
def test_invalid_times_are_unchanged(merged: Merged, ts: Any) -> None:
    trace = {"traceEvents": [event(ts=ts)] * 20, "baseTimeNanoseconds": 10**9}

    merged([event()], trace)

    assert [event["ts"] for event in merged.events if event["name"] == "n"] == [1] + [ts] * 20


def test_times_in_other_notations_are_shifted_exactly(merged: Merged) -> None:
    text = b'{"traceEvents": [{"ph": "X", "pid": 1, "name": "n", "ts": %b}], "baseTimeNanoseconds": 1500}'
    times = [b"1.5e3", b"-2.0005", b'"1E-3"', b"0.000", b'"007"']

    merged([event()], *(text % time for time in times))

    assert [str(event["ts"]) for event in merged.events if event["name"] == "n"][1:] == [
        "1501.500",
        "-0.500",
        "1.501",
        "1.500",
        "8.500",
    ]


@pytest.mark.parametrize("base", ["5", None, 1.5, [5], {}, 10**30, True])
def test_invalid_base_time_is_ignored(merged: Merged, base: Any) -> None:
    merged({"traceEvents": [event()], "baseTimeNanoseconds": base}, [event()])

    assert merged.document["baseTimeNanoseconds"] == 0


def test_file_lists_its_sources(merged: Merged) -> None:
    info = {"rank": 1, "nested": {"x": 1.50}}
    head = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "GPU"}], "distributedInfo": info}
    merged.add({**head, "traceEvents": [event()], "baseTimeNanoseconds": 7}, "one", 1)
    merged.add({"traceEvents": [event(), event(pid=0), event(pid="S")], "displayTimeUnit": "ms"}, "two", 0)
    merged()

    properties = {"deviceProperties": head["deviceProperties"], "distributedInfo": {"rank": 1, "nested": {"x": 1.5}}}
    del merged.document["traceEvents"]
    assert {key: value for key, value in merged.document.items() if key != "profdeck"} == {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
    }
    second_source, first_source = merged.document["profdeck"]["sources"]
    assert first_source == {"label": "one", "baseTimeNanoseconds": 7, **properties, "pids": {"1001000000": 10}}
    assert second_source == {
        "label": "two",
        "baseTimeNanoseconds": 0,
        "pids": {"1000000000": 10, "1000000001": 0, "1000000002": "S"},
    }


@pytest.mark.usefixtures("both_parsers")
@pytest.mark.parametrize(
    "tricky",
    [
        '{"ph": "X", "pid": 10, "args": {"pid": 10}}',
        '{"ph": "X", "p\\u0069d": 10, "args": {"pid": 11}}',
        '{"ph": "X", "pid": 11, "name": "twice", "pid": 10}',
        '{"ph": "X", "pid": 10, "name": "pid"}',
        '{"ph": "X", "pid": 10, "name": "\\"pid\\": 10"}',
        '{"ph": "X", "pid": "pid"}',
        '{"ph": "X", "pid": "\\n"}',
        '{"ph": "X", "pid": "\\n"}, {"ph": "X", "pid": 10, "args": {"pid": 11}}',
        '{"ph": "X", "pid": "id"}',
        '{"ph": "s", "pid": 10, "\\u0069d": 5, "args": {"id": 6}}',
        '{"ph": "s", "pid": 10, "id": 4, "id": 5}',
        '{"ph": "X", "pid": 10, "name": "id"}',
        '{"ph": "X", "pid": 10, "args": {"process_name": 1}}',
        '{"ph": "M", "pid": 10, "name": "process\\u005fname", "args": {"name": "p"}}',
        '{"ph": "X", "pid": 10, "args": NaN}',
        '{"ph": "X", "pid": 10, "args": {"a\\ud800": "\\udfff", "b": -Infinity}}',
        '{"ph": "?", "pid": 10}',
        '{"ph": 5, "pid": 10}',
        '{"ph" : "X" ,\n"pid"\t:\r10 }',
        '{"ph": "s", "pid": 10, "id": 5.0}',
        '{"ph": "X", "pid": 10, "n": %s}' % ("9" * 5000),
        '{"pid": 10}',
        "{}",
        "5",
        '["ph"]',
        "null",
    ],
)
def test_unusual_texts_are_merged(merged: Merged, tricky: str) -> None:
    usual = json.dumps(event(pid=10))
    text = f"[{', '.join([usual] * 9 + [tricky] + [usual] * 9)}]"

    check = merged(b'[{"ph": "s", "pid": 10, "id": 5}]', text.encode())

    def loads(data: str) -> Any:
        return json.loads(data, parse_float=str, parse_int=str, parse_constant=lambda _: None)

    assert check.whole
    written = loads(gzip.decompress(merged.destination.read_bytes()).decode())["traceEvents"]
    names = [e for e in written if e.get("name") in {"process_name", "process_sort_index"}]
    merged_events = [e for e in written if e not in names][1:]
    original = [e for e in loads(text) if isinstance(e, dict) and "ph" in e and e.get("name") != "process_name"]
    pids: dict[Any, str] = {}
    for new, old in zip(merged_events, original, strict=True):
        assert pids.setdefault(old.get("pid"), new["pid"]) == new["pid"] >= "1000000000"
        if old.get("ph") == "s":
            assert new.pop("id") == "2"
            del old["id"]
        assert new | {"pid": 0} == old | {"pid": 0}
    assert len(set(pids.values())) == len(pids)


@pytest.mark.parametrize("keep", [0.3, 0.9])
def test_readable_part_of_a_truncated_trace_is_merged(merged: Merged, keep: float) -> None:
    trace = {"schemaVersion": 1, "traceEvents": [event(name=f"e{n}") for n in range(100)], "baseTimeNanoseconds": 1}
    data = json.dumps(trace).encode()
    path = merged.add(data[: int(len(data) * keep)], "cut")
    merged.add(trace, "good", 1)

    check = merged()

    assert not check.whole
    assert check.problem is not None
    assert check.problem.startswith(f"cut ({path}): The JSON is not closed")
    assert check.problem.endswith(
        "Its baseTimeNanoseconds is missing: the smallest base of the other traces is assumed."
    )
    names = [event["name"] for event in merged.events if event["name"].startswith("e")]
    count = len(names) - 100
    assert 100 * keep - 5 < count < 100 * keep + 5
    assert names == [f"e{n}" for n in range(count)] + [f"e{n}" for n in range(100)]
    assert check_trace(merged.destination).whole
    assert merged.document["baseTimeNanoseconds"] == 1


def test_missing_base_time_is_taken_from_the_other_traces(merged: Merged) -> None:
    cut = json.dumps({"traceEvents": [event(ts=5)] * 20})[:-20].encode()

    merged(cut, [event(ts="3")], {"traceEvents": [event(ts=7)], "baseTimeNanoseconds": 10**9})

    times = [event["ts"] for event in merged.events if event["name"] == "n"]
    assert times == [1000005] * 19 + ["3", 1000007]


def test_base_time_missing_in_all_traces_is_omitted(merged: Merged) -> None:
    merged(json.dumps({"traceEvents": [event()] * 20})[:-20].encode())

    assert "baseTimeNanoseconds" not in merged.document
    assert merged.document["profdeck"]["sources"][0]["baseTimeNanoseconds"] is None


def test_truncated_array_has_the_base_time_zero(merged: Merged) -> None:
    merged(json.dumps([event(ts=5)] * 20)[:-20].encode(), {"traceEvents": [event()], "baseTimeNanoseconds": 1000})

    assert merged.document["baseTimeNanoseconds"] == 0
    assert merged.of_names("n")[-1]["ts"] == 2


def test_corrupt_sources_are_reported(merged: Merged) -> None:
    merged.add(b"[]", "empty")
    merged.add([event()], "cut")
    merged.sources[1].path.write_bytes(merged.sources[1].path.read_bytes()[:-1])
    merged.sources.append(MergeSource(merged.directory / "nowhere", "gone", 0))
    merged.add([event()], "good")

    check = merged()

    assert not check.whole
    assert check.problem is not None
    for problem in ("empty (", "): There are no events", "cut (", "gzip stream ends", "gone: Cannot read "):
        assert problem in check.problem
    assert "good" not in check.problem
    assert sorted(merged.process_names().values()) == ["cut: 10", "good: 10"]


@pytest.mark.usefixtures("both_parsers")
def test_malformed_events_are_omitted_and_reported(merged: Merged) -> None:
    deep = '{"ph": "X", "name": "deep", "args": ' + "[" * 600 + "]" * 600 + "}"

    check = merged(f"[{json.dumps(event())}, {deep}, {json.dumps(event())}]".encode())

    assert not check.whole
    assert check.problem is not None
    assert "Malformed JSON at offset" in check.problem
    assert [e["name"] for e in merged.events if e["ph"] == "X"] == ["n", "n"]


@pytest.mark.parametrize("traces", [[], [b"[]"], [b"nonsense", b""]])
def test_nothing_to_merge_is_an_error(merged: Merged, traces: list[bytes]) -> None:
    with pytest.raises(TraceError, match="There is no event to merge"):
        merged(*traces)

    assert not merged.destination.exists()
    assert len(list(merged.directory.iterdir())) == len(traces)


def test_missing_sources_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"no event to merge. a: Cannot read .*nowhere: No such file"):
        merge_traces([MergeSource(tmp_path / "nowhere", "a", 0)], tmp_path / "merged")


def test_existing_file_is_not_overwritten(merged: Merged, monkeypatch: pytest.MonkeyPatch) -> None:
    merged.add([event()])
    merged.destination.write_bytes(b"precious")

    with pytest.raises(FileExistsError):
        merge_traces(merged.sources, merged.destination)
    monkeypatch.setattr(os.path, "lexists", lambda _: False)  # simulates a concurrent write by another process
    with pytest.raises(FileExistsError):
        merge_traces(merged.sources, merged.destination)

    assert merged.destination.read_bytes() == b"precious"
    assert sorted(path.name for path in merged.directory.iterdir()) == ["merged", "source0"]


def test_failed_write_leaves_no_files(merged: Merged, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(segment, "write_all", full)
    with pytest.raises(OSError, match="No space left"):
        merged([event()])

    assert [path.name for path in merged.directory.iterdir()] == ["source0"]


def test_labels_can_contain_any_text(merged: Merged) -> None:
    merged.add([event()], 'a"\\\n\udcff')

    assert merged().whole

    assert list(merged.process_names().values()) == ['a"\\\n\udcff: 10']
    assert merged.document["profdeck"]["sources"][0]["label"] == 'a"\\\n\udcff'


def test_threads_of_profdeck_are_omitted(tmp_path: Path) -> None:
    """Recorded stacks include profdeck's own threads, such as the thread that checks limits."""
    entries = ["threading.py(1002): _bootstrap", "threading.py(1045): _bootstrap_inner", "threading.py(982): run"]
    frames = [(7, name) for name in (*entries, "profdeck/backends/recording.py(147): check", "threading.py(629): wait")]
    frames += [(8, name) for name in (*entries, "train.py(3): work", "profdeck/profiler.py(284): stop")]
    events: list[dict[str, Any]] = [
        {"ph": "X", "cat": "python_function", "name": name, "pid": 1, "tid": tid, "ts": number, "dur": 100 - number}
        for number, (tid, name) in enumerate(frames)
    ]
    events += [{"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": str(tid)}} for tid in (7, 8)]
    source = tmp_path / "trace.json"
    source.write_text(json.dumps({"traceEvents": events}))
    merge_traces([MergeSource(source, "a", 0)], tmp_path / "merged.json", gzip=False)
    trim_trace(source, tmp_path / "trimmed.json", Selection())
    for name in ("merged.json", "trimmed.json"):
        written = json.loads((tmp_path / name).read_text())["traceEvents"]
        assert {event["tid"] for event in written if event["ph"] == "X" or event["name"] == "thread_name"} == {8}
        assert [event["name"] for event in written if event["ph"] == "X"] == [name for tid, name in frames if tid == 8]
