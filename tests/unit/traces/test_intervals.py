"""Tests of interval arithmetic, compared with references that evaluate each instant."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from profdeck_traces.reading import intervals
from profdeck_traces.reading.intervals import (
    Spans,
    complement,
    groups,
    intersection,
    joined,
    segments,
    self_times,
    time_before,
    total,
    union,
)

INTERVALS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 12), st.integers(0, 8)).map(lambda t: (t[0], t[1], t[1] + t[2])),
    max_size=14,
)


@st.composite
def nested(draw: st.DrawFn, start: int = 0, end: int = 40, depth: int = 4) -> list[tuple[int, int, int]]:
    """Draw nested intervals of track 0."""
    intervals_drawn = []
    while depth and start < end and draw(st.booleans()):
        begin = draw(st.integers(start, end))
        stop = draw(st.integers(begin, end))
        intervals_drawn += [(0, begin, stop), *draw(nested(begin, stop, depth - 1))]
        start = stop
    return intervals_drawn


def reference_self_times(given_intervals: list[tuple[int, int, int]]) -> list[int]:
    """Assign each instant to the open interval with the latest start, then the shortest length, then the last index."""
    self_times_ns = [0] * len(given_intervals)
    for track in {track for track, _, _ in given_intervals}:
        for instant in range(60):
            is_open = [i for i, (t, begin, end) in enumerate(given_intervals) if t == track and begin <= instant < end]
            if is_open:
                self_times_ns[max(is_open, key=lambda i: (given_intervals[i][1], -given_intervals[i][2], i))] += 1
    return self_times_ns


def columns(given_intervals: list[tuple[int, int, int]]) -> list[intervals.Int]:
    return [np.array([interval[column] for interval in given_intervals], dtype=np.int64) for column in range(3)]


@given(st.one_of(INTERVALS, nested(), st.builds(lambda a, b: a + [(1, s, e) for _, s, e in b], nested(), nested())))
def test_self_times_equal_the_reference(given_intervals: list[tuple[int, int, int]]) -> None:
    assert self_times(*columns(given_intervals)).tolist() == reference_self_times(given_intervals)


@given(INTERVALS)
def test_segments_equal_the_reference(given_intervals: list[tuple[int, int, int]]) -> None:
    """Both implementations assign each instant to the open interval that started last."""
    spans = sorted(((0, begin, end) for _, begin, end in given_intervals), key=lambda t: (t[1], -t[2]))
    _, starts, ends = columns(spans)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intervals.compiled, "load_library", lambda: None)
        in_python = segments(starts, ends)
    for begins, rows in (in_python, segments(starts, ends)):
        assert (np.diff(begins) > 0).all()
        for instant in range(60):
            is_open = [i for i, (_, begin, end) in enumerate(spans) if begin <= instant < end]
            place = int(np.searchsorted(begins, instant, side="right")) - 1
            assert (rows[place] if place >= 0 else -1) == max(is_open, default=-1)
        assert not len(rows) or rows[-1] == -1


@given(nested())
def test_nested_intervals_need_no_stack(given_intervals: list[tuple[int, int, int]]) -> None:
    used = sorted((interval for interval in given_intervals if interval[2] > interval[1]), key=lambda t: (t[1], -t[2]))
    _, starts, ends = columns(used)

    assert intervals.nesting(starts, ends) is not None


def test_deep_nesting_is_not_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "_MAX_LEVELS", 5)

    assert intervals.nesting(np.arange(10), 40 - np.arange(10)) is None


def test_self_times_of_many_crossing_intervals_take_linear_time() -> None:
    count = 20_000
    start = np.arange(count)
    stairs, spike = start + count, np.array([2 * count])
    nested_ends = 3 * count - start

    assert self_times(np.zeros(count), start, stairs).tolist() == [*[1] * (count - 1), count]
    times = self_times(np.zeros(count + 1), np.append(start, count), np.append(nested_ends, 4 * count))
    assert times.tolist() == [*[1] * count, 3 * count]
    assert self_times(np.zeros(2), np.array([0, 1]), np.append(spike, spike)).tolist() == [1, 2 * count - 1]


INSTANTS = range(-2, 40)


def spans_of(given_intervals: list[tuple[int, int, int]]) -> Spans:
    _, starts, ends = columns(given_intervals)
    return union(starts, ends)


def instants(spans: Spans) -> set[int]:
    """Return the instants in the spans. The spans must be sorted, nonempty and disjoint."""
    starts, ends = (side.tolist() for side in spans)
    edges = [edge for span in zip(starts, ends, strict=True) for edge in span]
    assert edges == sorted(set(edges))
    return {instant for instant in INSTANTS if any(s <= instant < e for s, e in zip(starts, ends, strict=True))}


@given(INTERVALS)
def test_union_contains_the_instants_of_all_intervals(given_intervals: list[tuple[int, int, int]]) -> None:
    covered = {instant for instant in INSTANTS if any(begin <= instant < end for _, begin, end in given_intervals)}

    assert instants(spans_of(given_intervals)) == covered
    assert total(spans_of(given_intervals)) == len(covered)


@given(INTERVALS, INTERVALS)
def test_intersections_and_complements_equal_the_reference(
    first_intervals: list[tuple[int, int, int]], second_intervals: list[tuple[int, int, int]]
) -> None:
    first, second = spans_of(first_intervals), spans_of(second_intervals)

    assert instants(intersection(first, second)) == instants(first) & instants(second)
    assert instants(complement(first, -1, 30)) == set(range(-1, 30)) - instants(first)


@given(INTERVALS, st.lists(st.integers(-2, 39), max_size=8))
def test_time_before_an_instant_is_summed(given_intervals: list[tuple[int, int, int]], limits: list[int]) -> None:
    spans = spans_of(given_intervals)
    covered = instants(spans)

    before = time_before(spans, np.array(limits, dtype=np.int64))

    assert before.tolist() == [sum(instant < limit for instant in covered) for limit in limits]


def test_spans_at_the_limits_of_64_bits_are_exact() -> None:
    spans = np.array([-(2**62), 2**62]), np.array([-(2**62) + 1, 2**62 + 3])

    assert time_before(spans, np.array([0, 2**62 + 2])).tolist() == [1, 3]


def test_groups_keep_the_order_within_a_key() -> None:
    assert [group.tolist() for group in groups(np.array([2, 1, 2, 1, 5]))] == [[1, 3], [0, 2], [4]]
    assert groups(np.array([], dtype=np.int64)) == []


def test_joined_spans_are_concatenated() -> None:
    starts, ends = joined([(np.array([5]), np.array([6])), (np.array([1]), np.array([9]))])

    assert (starts.tolist(), ends.tolist()) == ([5, 1], [6, 9])
