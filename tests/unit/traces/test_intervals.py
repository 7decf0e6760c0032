"""Self time and busy time against references that look at every instant."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profdeck.traces import intervals
from profdeck.traces.intervals import self_times, span_and_busy

INTERVALS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 12), st.integers(0, 8)).map(lambda t: (t[0], t[1], t[1] + t[2])),
    max_size=14,
)


@st.composite
def nested(draw: st.DrawFn, start: int = 0, end: int = 40, depth: int = 4) -> list[tuple[int, int, int]]:
    """Draw intervals of track 0 that nest."""
    found = []
    while depth and start < end and draw(st.booleans()):
        begin = draw(st.integers(start, end))
        stop = draw(st.integers(begin, end))
        found += [(0, begin, stop), *draw(nested(begin, stop, depth - 1))]
        start = stop
    return found


def reference_self_times(found: list[tuple[int, int, int]]) -> list[int]:
    """Give each instant to the open interval that started last, of these the shortest, of these the last."""
    own = [0] * len(found)
    for track in {track for track, _, _ in found}:
        for instant in range(60):
            is_open = [i for i, (t, begin, end) in enumerate(found) if t == track and begin <= instant < end]
            if is_open:
                own[max(is_open, key=lambda i: (found[i][1], -found[i][2], i))] += 1
    return own


def columns(found: list[tuple[int, int, int]]) -> list[intervals.Int]:
    return [np.array([interval[column] for interval in found], dtype=np.int64) for column in range(3)]


@settings(max_examples=150, deadline=None)
@given(st.one_of(INTERVALS, nested(), st.builds(lambda a, b: a + [(1, s, e) for _, s, e in b], nested(), nested())))
def test_self_times_equal_those_of_every_instant(found: list[tuple[int, int, int]]) -> None:
    assert self_times(*columns(found)).tolist() == reference_self_times(found)


@settings(max_examples=50, deadline=None)
@given(nested())
def test_nested_intervals_need_no_stack(found: list[tuple[int, int, int]]) -> None:
    used = sorted((interval for interval in found if interval[2] > interval[1]), key=lambda t: (t[1], -t[2]))
    _, starts, ends = columns(used)

    assert intervals._parents(starts, ends) is not None


def test_deep_nesting_goes_to_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "_MAX_LEVELS", 5)
    found = [(0, i, 40 - i) for i in range(10)]

    assert self_times(*columns(found)).tolist() == reference_self_times(found)


@settings(max_examples=100, deadline=None)
@given(INTERVALS.filter(bool))
def test_span_and_busy_equal_those_of_every_instant(found: list[tuple[int, int, int]]) -> None:
    _, starts, ends = columns(found)
    covered = sum(any(begin <= instant < end for _, begin, end in found) for instant in range(60))

    assert span_and_busy(starts, ends) == (max(ends) - min(starts), covered)
