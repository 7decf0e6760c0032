"""Tests of merged traces with overlapping events in one lane. All events must remain visible."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any, Self

import pytest
from hypothesis import given, strategies as st

from profdeck_traces.merge import MergeSource, merge_traces
from profdeck_traces.reading.integrity import check_trace

# Kineto's layout with two lines per event; one line; one key per line.
LAYOUTS: list[dict[str, Any]] = [{}, {"indent": 2}, {"separators": (",", ":")}, {"indent": "\t"}]
Span = tuple[int, int]


def kernel(start_ns: int, end_ns: int, **members: Any) -> dict[str, Any]:
    head = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7}
    times = {"ts": Time(start_ns), "dur": Time(end_ns - start_ns)}
    return head | {key: value for key, value in members.items() if key in head} | times | {"args": {"stream": 7}}


class Time(float):
    """Microseconds that are written with three decimals, like in Kineto."""

    def __new__(cls, time_ns: int) -> Self:
        time = super().__new__(cls, time_ns / 1000)
        time.text = f"{time_ns // 1000}.{time_ns % 1000:03d}"
        return time

    text: str

    def __repr__(self) -> str:
        return self.text


def dumps(trace: list[Any], **layout: Any) -> bytes:
    """Encode JSON. Insert time digits afterwards, because the encoder formats floats with ``float.__repr__``."""
    times: dict[str, str] = {}

    def marked(value: Any) -> Any:
        if isinstance(value, Time):
            placeholder = f"@{len(times)}@"
            times[f'"{placeholder}"'] = value.text
            return placeholder
        if isinstance(value, dict):
            return {key: marked(inner) for key, inner in value.items()}
        return value

    text = json.dumps([marked(event) for event in trace], **layout)
    for placeholder, digits in times.items():
        text = text.replace(placeholder, digits)
    return text.encode()


def merged(*texts: bytes) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        sources = []
        for rank, text in enumerate(texts):
            sources.append(MergeSource(Path(folder) / str(rank), f"rank {rank}", rank))
            sources[-1].path.write_bytes(text)
        destination = Path(folder) / "merged"
        assert merge_traces(sources, destination) == check_trace(destination)
        events: list[dict[str, Any]] = json.loads(gzip.decompress(destination.read_bytes()), parse_float=Decimal)[
            "traceEvents"
        ]
        return events


def lanes_of(events: list[dict[str, Any]]) -> dict[tuple[Any, Any], list[Span]]:
    lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start_ns = round(Decimal(event["ts"]) * 1000)
            lanes[event["pid"], event["tid"]].append((start_ns, start_ns + round(Decimal(event["dur"]) * 1000)))
    return lanes


def kept_by_perfetto(spans: list[Span]) -> list[Span]:
    kept_spans: list[Span] = []
    open_ends: list[int] = []
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        if not open_ends or end <= open_ends[-1]:
            open_ends.append(end)
            kept_spans.append((start, end))
    return kept_spans


def names_of(events: list[dict[str, Any]]) -> dict[Any, str]:
    return {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_overlapping_event_moves_to_the_next_lane(layout: dict[str, Any]) -> None:
    trace = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "args": {"name": "stream 7"}},
        {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": 7, "args": {"sort_index": 70}},
        *[kernel(start, start + 150) for start in range(0, 4000, 100)],
        kernel(0, 9999, tid=8),
    ]

    events = merged(dumps(trace, **layout))

    lanes = lanes_of(events)
    by_name = {name: next(lane for lane in lanes if lane[1] == tid) for tid, name in names_of(events).items()}
    assert list(by_name) == ["stream 7", "stream 7 (overlapping)"]
    assert lanes[by_name["stream 7"]] == [(start, start + 150) for start in range(0, 4000, 200)]
    assert lanes[by_name["stream 7 (overlapping)"]] == [(start, start + 150) for start in range(100, 4000, 200)]
    indices = {event["tid"]: event["args"] for event in events if event["name"] == "thread_sort_index"}
    assert list(indices.values()) == [{"sort_index": 70}] * 2


def test_flows_move_with_the_event_of_their_end() -> None:
    flows = [{"ph": "f", "id": n, "pid": 0, "tid": 7, "ts": Time(100 * n), "cat": "ac2g", "bp": "e"} for n in range(30)]
    trace = [element for n, flow in enumerate(flows) for element in (kernel(100 * n, 100 * n + 150), flow)]

    events = [event for event in merged(dumps(trace)) if event["ph"] in "Xf"]

    assert [event["tid"] for event in events[::2]] == [event["tid"] for event in events[1::2]]
    assert len({event["tid"] for event in events}) == 2


def test_flow_stays_if_an_event_at_its_time_stays() -> None:
    # The second event overlaps the first without nesting, and the third is nested in the first.
    flow = {"ph": "s", "id": 1, "pid": 0, "tid": 7, "ts": Time(50)}
    trace = [kernel(0, 100), kernel(50, 150), kernel(50, 80), flow, {**flow, "ts": Time(51)}, {**flow, "tid": 8}]

    events = [event for event in merged(dumps(trace)) if event["ph"] in "Xs"]

    assert [event["tid"] == 7 for event in events] == [True, False, True, True, True, False]


def test_pairs_of_begin_and_end_move_together() -> None:
    pairs = [
        {"ph": phase, "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": Time(time)}
        for phase, time in (("B", 50), ("E", 150))
    ]

    events = [event for event in merged(dumps([kernel(0, 100), *pairs])) if event["ph"] in "XBE"]

    assert [event["tid"] for event in events] == [7, 900_000_000, 900_000_000]


def test_too_many_overlaps_are_reported(tmp_path: Path) -> None:
    (tmp_path / "trace").write_bytes(dumps([kernel(n, 1000 + n) for n in range(300)]))

    check = merge_traces([MergeSource(tmp_path / "trace", "rank 0", 0)], tmp_path / "merged")

    assert check.problem is not None
    assert "Process 0, thread 7: more than 256 events overlap" in check.problem
    assert check_trace(tmp_path / "merged").whole


def test_additional_lanes_are_numbered() -> None:
    events = merged(dumps([kernel(n, 100 + n) for n in range(3)] * 9))

    assert list(names_of(events).values()) == ["7 (overlapping)", "7 (overlapping 2)"]


def test_nested_and_consecutive_events_stay() -> None:
    trace = [kernel(0, 100), kernel(0, 50), kernel(50, 100), kernel(50, 50), kernel(100, 200), kernel(100, 100)] * 9

    assert not names_of(merged(dumps(trace)))


def test_lanes_without_categories_are_checked() -> None:
    ascend = [{"ph": "X", "name": "MatMul", "pid": 5, "tid": 3, "ts": f"{n}.0", "dur": 1.5} for n in range(40)]

    events = merged(json.dumps(ascend).encode())

    assert sorted(len(spans) for spans in lanes_of(events).values()) == [20, 20]


def test_host_lanes_are_unchanged() -> None:
    trace = [kernel(n, n + 15, cat="cpu_op") for n in range(0, 400, 10)]

    assert not names_of(merged(dumps(trace)))


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), max_size=25)


@given(SPANS, st.sampled_from(LAYOUTS), st.none() | st.integers(0, 12))
def test_perfetto_shows_all_events(spans: list[Span], layout: dict[str, Any], odd_at: int | None) -> None:
    trace = [kernel(start, start + duration) for start, duration in spans] + [kernel(1000, 1001, tid=9)] * 12
    if odd_at is not None:  # add an event whose times use a different notation
        trace.insert(odd_at, {**kernel(15, 25), "ts": 0.0150, "dur": "0.01"})

    lanes = lanes_of(merged(dumps(trace, **layout)))

    before, after = lanes_of(trace), sorted(span for spans in lanes.values() for span in spans)
    assert after == sorted(span for spans in before.values() for span in spans)
    assert all(sorted(kept_by_perfetto(spans)) == sorted(spans) for spans in lanes.values())
    of_stream = next((spans for (_, tid), spans in lanes.items() if tid == 7), [])
    assert sorted(of_stream) == sorted(kept_by_perfetto(before.get((0, 7), [])))


@pytest.mark.parametrize(
    "category", [b'"\xed\xa0\x80"', b'["kernel"]', b'{"a": "kernel"}', b"null", b"7", b'"\\ud800"']
)
def test_categories_of_any_kind_are_merged(tmp_path: Path, category: bytes) -> None:
    """A category that is not valid UTF-8, or not text, once crashed the command."""
    text = json.dumps([kernel(start, start + 5) for start in range(0, 400, 3)]).encode()
    odd = text.replace(b'"cat": "kernel"', b'"cat": ' + category)
    (tmp_path / "a").write_bytes(odd)
    (tmp_path / "b").write_bytes(text[:-1] + b", " + odd[1:])
    sources = [MergeSource(tmp_path / name, f"rank {rank}", rank) for rank, name in enumerate("ab")]
    check = merge_traces(sources, tmp_path / "merged")
    assert check.events >= 3 * len(range(0, 400, 3))
    assert check_trace(tmp_path / "merged").whole
