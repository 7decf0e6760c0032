"""Slices of a timeline, in memory and from a file, against the events that went in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from profdeck_traces.reading import time_slices
from profdeck_traces.reading.columns import Columns, Tables
from profdeck_traces.reading.time_slices import TimeSlices


def block(events: list[tuple[int, int]], first_name: int = 0) -> Columns:
    starts = np.array([start for start, _ in events], dtype=np.int64)
    durations = np.array([duration for _, duration in events], dtype=np.int64)
    names = np.arange(first_name, first_name + len(events), dtype=np.int32)
    return Columns(Tables(), names, np.zeros(len(events), dtype=np.int32), starts, starts + durations)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    events=st.lists(st.tuples(st.integers(-50, 200), st.integers(0, 60)), min_size=1, max_size=120),
    limit=st.sampled_from([8, 16, 32, 1000]),
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=10),
)
def test_slices_cover_all_events_once_and_all_of_their_time(
    events: list[tuple[int, int]], limit: int, sizes: list[int]
) -> None:
    slices = TimeSlices(Tables(), limit)
    position = 0
    while position < len(events):
        size = sizes[position % len(sizes)]
        slices.add(block(events[position : position + size], position))
        position += size
    assert len(slices) == len(events)

    assert sorted(name for time_slice in slices.blocks() for name in time_slice.name.tolist()) == list(
        range(len(events))
    )
    begun: list[int] = []
    covered = np.zeros(len(events), dtype=np.int64)
    until = None
    for time_slice in slices.slices():
        columns = time_slice.columns
        assert until in (None, time_slice.begin_ns)
        until = time_slice.end_ns
        assert (np.diff(time_slice.order_ns) >= 0).all()
        assert (columns.start_ns >= time_slice.begin_ns).all()
        assert (columns.end_ns <= time_slice.end_ns).all()
        assert (columns.start_ns <= columns.end_ns).all()
        names = columns.name.tolist()
        assert [events[name][0] for name in names] == time_slice.order_ns.tolist()
        assert [sum(events[name]) for name in names] == time_slice.whole_end_ns.tolist()
        begun += columns.name[time_slice.first].tolist()
        np.add.at(covered, columns.name, columns.end_ns - columns.start_ns)

    assert sorted(begun) == list(range(len(events)))
    assert covered.tolist() == [duration for _, duration in events]


def test_memory_is_bounded_by_a_slice() -> None:
    slices = TimeSlices(Tables(), 1000)
    for thread in range(20):  # each thread's events follow those of the one before, as in real traces
        slices.add(block([(10 * n, 5) for n in range(1000)], 1000 * thread))

    sizes = [len(time_slice.columns) for time_slice in slices.slices()]

    assert sum(sizes) == 20_000
    assert max(sizes) < 1500


def test_memory_is_bounded_whatever_is_open_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_slices, "_MAX_OPEN_EVENTS", 50)
    slices = TimeSlices(Tables(), 100)
    for number in range(10):
        slices.add(block([(100 * number + n, 10_000 - n) for n in range(100)], 100 * number))

    all_slices = list(slices.slices())

    assert max(len(time_slice.columns) for time_slice in all_slices) <= 300
    assert sum(int(time_slice.first.sum()) for time_slice in all_slices) == 1000
    assert all_slices[-1].end_ns == 100 * 9 + 10_000


def test_no_events_have_no_slices() -> None:
    assert list(TimeSlices(Tables()).slices()) == []
