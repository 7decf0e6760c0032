"""Tests of memory over time, compared with values from the standard library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

import profdeck_traces as traces
from profdeck_traces.analysis.memory import memory_of
from profdeck_traces.reading.reader import read_trace

Mark = tuple[int, int, int, int, int]
"""Time in nanoseconds, type and id of the device, allocated, reserved."""


def event(values: Mark, name: str = "[memory]") -> dict[str, object]:
    time_ns, kind, number, allocated, reserved = values
    args = {
        "Total Reserved": reserved, "Total Allocated": allocated, "Bytes": -8, "Device Id": number,
        "Device Type": kind, "Addr": 1, "Ev Idx": 3,
    }  # fmt: skip
    return {
        "ph": "i", "cat": "cpu_instant_event", "s": "t", "name": name, "pid": 1, "tid": 1, "ts": time_ns / 1000,
        "args": args,
    }  # fmt: skip


WORK = {
    "ph": "X",
    "cat": "cpu_op",
    "name": "[memory]",
    "pid": 1,
    "tid": 1,
    "ts": 0,
    "dur": 1,
    "args": {"a": "[memory]"},
}
MARKS = st.lists(
    st.tuples(
        st.integers(0, 10**7),
        st.sampled_from([0, 1]),
        st.sampled_from([-1, 0]),
        st.integers(0, 2**40),
        st.integers(0, 9),
    ),
    min_size=1,
    max_size=40,
    unique_by=lambda mark: mark[0],
)


@given(MARKS)
def test_peaks_equal_the_standard_library(tmp_path_factory: pytest.TempPathFactory, drawn_events: list[Mark]) -> None:
    path = tmp_path_factory.getbasetemp() / "memory.json"
    path.write_text(json.dumps({"traceEvents": [WORK, *map(event, drawn_events)]}, indent=1))
    devices = memory_of(read_trace(path), 0)
    expected: dict[tuple[int, int], list[Mark]] = {}
    for values in sorted(drawn_events):
        expected.setdefault((values[1], values[2]), []).append(values)
    assert len(devices) == len(expected)
    for device_memory, (_, of_device) in zip(devices, sorted(expected.items()), strict=True):
        peak = max(of_device, key=lambda values: (values[3], -values[0]))
        assert (device_memory.events, device_memory.peak_allocated_bytes) == (len(of_device), peak[3])
        assert device_memory.peak_us == pytest.approx(peak[0] / 1000)
        assert device_memory.peak_reserved_bytes == max(values[4] for values in of_device)
        assert max(point.allocated_bytes for point in device_memory.points) == peak[3]
        assert [point.start_us for point in device_memory.points] == sorted(
            point.start_us for point in device_memory.points
        )
        assert len(device_memory.points) <= min(200, len(of_device))


def test_devices_have_names(tmp_path: Path) -> None:
    events = [(1000, 0, -1, 5, 0), (2000, 1, 3, 7_000_000, 9_000_000), (3000, 20, 0, 1, 1), (4000, 99, 0, 1, 1)]
    (tmp_path / "a.json").write_text(json.dumps({"traceEvents": [WORK, *map(event, events)]}))
    run = traces.load(tmp_path / "a.json")
    assert [memory.device for memory in run.summary.ranks[0].memory] == ["CPU", "GPU 3", "NPU 0", "device type 99 0"]
    page = run.report()
    assert "Peak: 7 MB allocated at 0.002 ms, 9 MB reserved." in page
    points = run.table("memory_points").to_arrow().to_pylist()
    assert [point["allocated_bytes"] for point in points] == [5, 7_000_000, 1, 1]


@pytest.mark.parametrize(
    "broken",
    [
        '{"ph": "i", "name": "[memory]", "ts": 1, "args": {"Total Allocated": -1, "Device Id": 0, "Device Type": 1}}',
        '{"ph": "i", "name": "[memory]", "ts": 1, "args": {"Total Allocated": 1e30, "Device Id": 0, "Device Type": 1}}',
        '{"ph": "i", "name": "[memory]", "ts": 1, "args": {"Total Allocated": 1, "Device Id": 0}}',
        '{"ph": "i", "name": "[memory]", "ts": 1, "args": {"Total Allocated": 1, "Device Type": 0}}',
        (
            '{"ph": "i", "name": "[memory]", "ts": 1, "args": {"Total Allocated": 1, "Total Reserved": -1,'
            ' "Device Id": 0, "Device Type": 1}}'
        ),
        '{"ph": "i", "name": "[memory]", "ts": "x", "args": {"Total Allocated": 1, "Device Id": 0, "Device Type": 1}}',
        '{"ph": "i", "name": "[memory]", "ts": 1, "args": {}}',
        '{"ph": "i", "name": "[memory]", "ts": 1}',
        '"[memory]"',
    ],
)
def test_events_without_memory_values_are_ignored(tmp_path: Path, broken: str) -> None:
    (tmp_path / "a.json").write_text(f'{{"traceEvents": [{json.dumps(WORK)}, {broken}]}}')
    assert memory_of(read_trace(tmp_path / "a.json"), 0) == ()
