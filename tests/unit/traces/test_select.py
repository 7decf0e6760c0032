"""Tests of event selections, compared with a reference implementation, and of windows of steps and times."""

from __future__ import annotations

import json
import pickle
from collections import defaultdict
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from profdeck_traces.analysis.step_names import StepNames
from profdeck_traces.base.errors import TraceError
from profdeck_traces.writing.selection import Selection, TimeWindow
from profdeck_traces.writing.windows import iteration_window, read_extent, step_window, time_window

# Separators of old Kineto, of torch 2.13, of json.dumps, and of json.dumps with an indent.
BETWEEN = [b",\n  ", b"\n    ,\n    ", b", ", b",\n    ", b","]

BEGIN_NS, END_NS = 4203669603018_756, 4203669603020_000
# Around the edges, as far from them as floats can tell, and nearer.
TIMES = [
    "4203669603018.756", "4203669603018.755", "4203669603018.7559999999999999", "4203669603018.7560000000000001",
    '"4203669603018.756"', '"4203669603018.755999999"', "4203669603020", "4203669603019.999999999", "4203669603020.0",
    '"4203669603020"', "4203669603019", "4203669603000", "4203669604000", "0", "-1.5", "4.203669603018756e12",
    "12345678901234567890.123", '"12345678901234567890.1"', "1e300", "-1e300", "1e400", "1e-400", '"1e400"',
    "1e99999999999999999999", "NaN", "-Infinity", "null", "true", "[1]", '"soon"', '"NaN"', '""', "1" * 30, "9" * 5000,
]  # fmt: skip
DURATIONS = [
    "0",
    "0.001",
    "0.0000000000000001",
    "1",
    "30",
    '"30"',
    "5e12",
    "-5",
    "1e300",
    "1e400",
    "null",
    '"x"',
    "NaN",
]
NAMES = ['"a"', '"}, {\\"ph\\": \\"M\\""', '"\\u00e9"', '"\\ud800"', '"é"']
CATEGORIES = ['"kernel"', '"cpu_op"', '"cpu_op,kernel"', '""', "null", "7"]


@st.composite
def events(draw: st.DrawFn, layout: tuple[str, str] = (", ", ": ")) -> bytes:
    members = {
        "ph": draw(st.sampled_from(['"X"', '"X"', '"X"', '"M"', '"i"', '"s"', '"C"', '"B"', '"E"', '"XX"', "3"]))
    }
    optional = {"ts": TIMES, "dur": DURATIONS, "name": NAMES, "cat": CATEGORIES, "tid": ["1", '"1"', "2"]}
    optional["args"] = ['{"Input Dims": [[], [1]]}', '[{"ph": "M"}, {"ts": 1}]', "{}"]
    for key, values in optional.items():
        if draw(st.integers(0, 7)):
            members[key] = draw(st.sampled_from(values))
    if not draw(st.integers(0, 20)):
        del members["ph"]
    comma, colon = layout
    pairs = draw(st.permutations(list(members.items())))
    return b"{%b}" % comma.join(f'"{key}"{colon}{value}' for key, value in pairs).encode()


SELECTIONS = st.builds(
    Selection,
    st.sampled_from([None, BEGIN_NS, -(10**30)]),
    st.sampled_from([None, END_NS, 10**400]),
    st.sampled_from([None, frozenset({"kernel"}), frozenset({"", "7"})]),
)


def time_of(value: Any) -> Fraction | None:
    """The exact microseconds of a number or a string, if they are a time; numbers come as strings."""
    try:
        number = Decimal(value if isinstance(value, str) else "NaN")
    except ArithmeticError:
        return None
    return Fraction(number) if number.is_finite() and number.adjusted() < 40 else None


def pairs_in(decoded: list[dict[str, Any]]) -> dict[int, tuple[int, int]]:
    """The begin and end of each half of a pair."""
    pairs: dict[int, tuple[int, int]] = {}
    opened: dict[Any, list[int]] = defaultdict(list)
    for index, event_fields in enumerate(decoded):
        if event_fields.get("ph") == "B":
            opened[event_fields.get("tid")].append(index)
        elif event_fields.get("ph") == "E" and opened[event_fields.get("tid")]:
            begin = opened[event_fields.get("tid")].pop()
            pairs[begin] = pairs[index] = begin, index
    return pairs


def overlaps(start: Fraction, stop: Fraction, selection: Selection) -> bool:
    begin_us = start if selection.begin_ns is None else Fraction(selection.begin_ns, 1000)
    end_us = start + 1 if selection.end_ns is None else Fraction(selection.end_ns, 1000)
    return start < end_us and (stop > begin_us or start >= begin_us)


def expected(array: bytes, selection: Selection) -> list[bool]:
    """Which of the objects in an array are to be kept."""
    decoded = json.loads(array, parse_float=str, parse_int=str)
    pairs = pairs_in(decoded)

    def is_kept(index: int) -> bool:
        phase = decoded[index].get("ph")
        if phase == "M" or (phase in ("B", "E") and index not in pairs):
            return True
        begin, end = (decoded[half] for half in pairs.get(index, (index, index)))
        category = begin.get("cat")
        event_categories = {category, *category.split(",")} if isinstance(category, str) else {""}
        if selection.categories is not None and not event_categories & selection.categories:
            return False
        if selection.begin_ns is None and selection.end_ns is None:
            return True
        start, stop = time_of(begin.get("ts")), time_of(end.get("ts"))
        if start is None:
            return False
        if phase == "X":
            stop = start + max(0, time_of(begin.get("dur")) or 0)
        return overlaps(start, start if stop is None else max(start, stop), selection)

    return [is_kept(index) for index in range(len(decoded))]


@given(st.data(), st.sampled_from(BETWEEN), SELECTIONS)
def test_kept_events_equal_the_reference_byte_for_byte(
    data: st.DataObject, between: bytes, selection: Selection
) -> None:
    layout = data.draw(st.sampled_from([(", ", ": "), (",", ":"), (",\n        ", ": ")]))
    texts = data.draw(st.lists(events(layout), max_size=12))
    array = b"[%b]" % between.join(texts)

    expected_texts = [text for text, is_expected in zip(texts, expected(array, selection), strict=True) if is_expected]

    assert selection.apply(array) == b"[%b]" % between.join(expected_texts)


def event(ph: str = "X", ts: Any = 0, **members: Any) -> dict[str, Any]:
    return {"ph": ph, "ts": ts, "pid": 1, "tid": 1, **members}


def kept_names(selection: Selection, given_events: list[dict[str, Any]]) -> list[str]:
    return [event_fields["name"] for event_fields in json.loads(selection.apply(json.dumps(given_events).encode()))]


def test_events_that_overlap_the_window_are_kept() -> None:
    spans = {"before": (0, 10), "touches": (0, 20), "into": (0, 21), "inside": (25, 1), "out of": (29, 50),
             "over": (0, 99), "moment": (20, 0), "end": (30, 5)}  # fmt: skip
    given_events = [event(name=name, ts=ts, dur=dur) for name, (ts, dur) in spans.items()]

    assert kept_names(Selection(20_000, 30_000), given_events) == ["into", "inside", "out of", "over", "moment"]
    assert kept_names(Selection(begin_ns=30_000), given_events) == ["out of", "over", "end"]
    assert kept_names(Selection(end_ns=20_000), given_events) == ["before", "touches", "into", "over"]


def test_metadata_is_kept_and_events_without_a_time_are_not() -> None:
    given_events = [{"ph": "M", "name": "process_name"}, {"ph": "i", "name": "timeless"}, {"ph": "X", "name": "too"}]

    assert kept_names(Selection(0, 1), given_events) == ["process_name"]
    assert kept_names(Selection(categories=frozenset({"kernel"})), given_events) == ["process_name"]
    assert kept_names(Selection(), given_events) == ["process_name", "timeless", "too"]


def test_times_are_compared_with_more_digits_than_floats() -> None:
    times = ["1704161511420306.4909", "1704161511420306.491", "1704161511420306.4911", "1704161511420306.492"]
    array = b"[%b]" % b",".join(b'{"ph": "i", "name": "%d", "ts": %b}' % (n, t.encode()) for n, t in enumerate(times))
    selection = Selection(1704161511420306_491, 1704161511420306_492)

    assert [event_fields["name"] for event_fields in json.loads(selection.apply(array))] == ["1", "2"]


def test_one_matching_category_selects_an_event() -> None:
    categories = ["kernel", "cpu_op", "cpu_op, kernel", "kernels", None, "", 3]
    given_events = [event(name=str(cat), cat=cat) for cat in categories]

    assert kept_names(Selection(categories=frozenset({"kernel"})), given_events) == ["kernel", "cpu_op, kernel"]
    assert kept_names(Selection(categories=frozenset({""})), given_events) == ["None", ""]


def test_pair_open_in_the_window_is_kept_with_both_ends() -> None:
    given_events = [
        event("B", 0, name="whole"), event("B", 1, name="past"), event("E", 2, name="past"),
        event("B", 3, name="other", tid=2), event("B", 15, name="inner"), event("E", 99, name="other", tid=2),
        event("E", 16, name="inner"), event("B", 30, name="future"), event("E", 31, name="future"),
        event("E", 100, name="whole"),
    ]  # fmt: skip

    assert kept_names(Selection(10_000, 20_000), given_events) == ["whole", "other", "inner", "other", "inner", "whole"]


def test_end_of_a_pair_has_the_category_of_its_begin() -> None:
    given_events = [event("B", 0, name="a", cat="kernel"), event("B", 1, name="b"), event("E", 2, name="b"),
                    event("E", 3, name="a")]  # fmt: skip

    assert kept_names(Selection(categories=frozenset({"kernel"})), given_events) == ["a", "a"]


@given(st.data())
def test_pairs_stay_nested_if_a_trace_is_split(data: st.DataObject) -> None:
    open_, given_events = 0, []
    for time in range(data.draw(st.integers(2, 30))):
        phase = data.draw(st.sampled_from("BE")) if open_ else "B"
        open_ += 1 if phase == "B" else -1
        given_events.append(event(phase, time, name=str(time)))
    given_events += [event("E", 50 + index, name="last") for index in range(open_)]
    begin = data.draw(st.integers(0, 30))
    selection = Selection(begin * 1000, (begin + 3) * 1000)
    cut = data.draw(st.integers(0, len(given_events)))

    names = kept_names(selection, given_events[:cut]) + kept_names(selection, given_events[cut:])
    expected_names = kept_names(selection, given_events)

    assert set(expected_names) <= set(names)
    by_name = {event_fields["name"]: event_fields for event_fields in given_events if event_fields["name"] != "last"}
    depth = 0
    for name in names:
        depth += 1 if name in by_name and by_name[name]["ph"] == "B" else -1
        assert depth >= 0
    assert depth == 0


def test_undecodable_text_is_returned_unchanged() -> None:
    deep = b'[{"ph": "X", "args": %b%b}]' % (b"[" * 100_000, b"]" * 100_000)

    assert Selection(0, 1).apply(deep) == deep
    assert Selection(0, 1).apply(b"[1, 2") == b"[1, 2"
    assert Selection(0, 1).pick(deep) is None


def test_elements_other_than_objects_are_not_kept() -> None:
    assert Selection(0, 1).apply(b'[null, {"ph": "M"}, 3]') == b'[{"ph": "M"}]'
    assert Selection(0, 1).apply(b"[]") == b"[]"
    assert Selection().apply(b' [ {"ph": "M"} ]\n') == b'[{"ph": "M"}]'


def test_picked_events_are_counted() -> None:
    array = b'[{"ph": "M"} , {"ph": "i", "ts": 0} , {"ph": "i", "ts": 5} , {"ts": 0}]'

    picked = Selection(0, 1).pick(array)

    assert picked is not None
    assert picked.text == b'{"ph": "M"} , {"ph": "i", "ts": 0} , {"ts": 0}'
    assert (picked.between, picked.events, picked.selected) == (b" , ", 3, 2)


def test_selection_can_be_pickled() -> None:
    selection = Selection(1, 2, frozenset({"kernel"}))

    assert pickle.loads(pickle.dumps(selection)) == selection  # noqa: S301


def annotation(name: str, ts: float, dur: float, **members: Any) -> dict[str, Any]:
    return event(name=name, cat="user_annotation", ts=ts, dur=dur, **members)


def on_device(name: str, ts: float, dur: float, external_id: int | None = None) -> dict[str, Any]:
    args = {} if external_id is None else {"External id": external_id}
    return event(name=name, cat="gpu_user_annotation", ts=ts, dur=dur, pid=0, tid=7, args=args)


def write(path: Path, given_events: list[Any]) -> Path:
    path.write_text(json.dumps({"traceEvents": given_events}), encoding="utf-8")
    return path


@pytest.fixture
def stepped(tmp_path: Path) -> Path:
    """Steps 2 to 4 and 7, each of which lasts 10 us on the host, and 3 us longer on the device."""
    given_events: list[dict[str, Any]] = [event("M", name="process_name")]
    for step in (7, 2, 3, 4):
        given_events += [
            annotation(f"ProfilerStep#{step}", step * 10, 10, args={"External id": step}),
            annotation("backward", step * 10 + 2, 3, tid=2, args={"External id": 100 + step}),
            event(name="op", cat="cpu_op", ts=step * 10, dur=1),
            on_device(f"ProfilerStep#{step}", step * 10 + 5, 4),
            on_device("backward", step * 10 + 9, 4.5, external_id=100 + step),
        ]
    return write(tmp_path / "stepped.json", given_events)


def extent(selection: Selection) -> tuple[int | None, int | None]:
    return selection.begin_ns, selection.end_ns


def test_device_window_of_a_step_ends_at_the_next_steps_device_window(stepped: Path) -> None:
    selection = step_window(stepped, range(3, 4))
    assert (selection.host, selection.work) == (TimeWindow(30_000, 40_000), TimeWindow(35_000, 45_000))
    assert step_window(stepped, range(7, 8)).work == TimeWindow(75_000, None)


def test_step_window_includes_all_launched_work(stepped: Path) -> None:
    assert extent(step_window(stepped, range(3, 4))) == (30_000, 43_500)
    assert extent(step_window(stepped, range(2, 5))) == (20_000, 53_500)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (range(5, 6), "does not have the step 5: it has 2..4, 7."),
        (range(3, 8), "does not have the steps 3..7: it has 2..4, 7."),
        (range(10**40), "does not have the steps 0..9{40}: it has"),
    ],
)
def test_missing_steps_are_reported_with_the_existing_steps(stepped: Path, steps: range, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        step_window(stepped, steps)


def test_trace_without_steps_is_reported(tmp_path: Path) -> None:
    path = write(tmp_path / "plain.json", [event(name="ProfilerStep#x"), event("i", name="ProfilerStep#1")])
    with pytest.raises(TraceError, match="does not have the step 1: no step is marked in it."):
        step_window(path, range(1, 2))
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(TraceError, match="no step is marked in it. It is damaged: The JSON is not closed"):
        step_window(path, range(1, 2))
    with pytest.raises(TraceError, match="Cannot read"):
        step_window(tmp_path / "none", range(1, 2))


@pytest.mark.parametrize(
    "ts", ["1704161511420306.4915", '"1704161511420306.4915"', 'NaN, "ts": "1704161511420306.4915"']
)
def test_step_bounds_are_exact(tmp_path: Path, ts: str) -> None:
    path = tmp_path / "exact.json"
    step_text = '{"ph": "X", "name": "ProfilerStep#0", "cat": "cpu_op", "ts": %s, "dur": 0.0001}'
    path.write_text(f"[{', '.join([step_text % ts, *[step_text.replace('#0', '#9') % 5] * 3])}]")

    assert extent(step_window(path, range(1))) == (1704161511420306_491, 1704161511420306_492)
    assert extent(step_window(path, range(9, 10))) == (5000, 5001)


EXECUTIONS = StepNames(["execute.*"])


def test_iterations_are_numbered_from_0_by_start_time(tmp_path: Path) -> None:
    given_events = [annotation("execute", ts, 5, args={"External id": ts}) for ts in (30, 10, 20)]
    given_events += [annotation("execute inner", 21, 2), annotation("other", 5, 1)]
    given_events += [on_device("execute", ts + 4, 3, external_id=ts) for ts in (10, 20, 30)]
    path = write(tmp_path / "engine.json", given_events)

    assert extent(iteration_window(path, range(1), EXECUTIONS)) == (10_000, 17_000)
    assert extent(iteration_window(path, range(1, 3), EXECUTIONS)) == (20_000, 37_000)
    with pytest.raises(TraceError, match="does not have the iterations 2..3: it has 0..2."):
        iteration_window(path, range(2, 4), EXECUTIONS)
    with pytest.raises(TraceError, match="does not have the iteration 0: no iteration is marked in it."):
        iteration_window(path, range(1), StepNames([]))


def test_times_are_relative_to_the_earliest_complete_event(tmp_path: Path) -> None:
    given_events = [event("M"), event("i", 1), event(ts="1704161511420306.4915", dur=8), event(ts=1704161511420307.0)]
    path = write(tmp_path / "times.json", given_events)
    origin_ns = 1704161511420306_491

    assert time_window(path, 5, 7) == Selection(origin_ns + 5, origin_ns + 7)
    assert time_window(path, None, 7) == Selection(None, origin_ns + 7)
    assert time_window(path, 5, None) == Selection(origin_ns + 5, None)
    with pytest.raises(TraceError, match="has no complete event"):
        time_window(write(path, [event("i")]), 0, 1)


@given(st.lists(events(), max_size=8), st.sampled_from(BETWEEN))
def test_earliest_start_equals_the_reference(
    tmp_path_factory: pytest.TempPathFactory, texts: list[bytes], between: bytes
) -> None:
    path = tmp_path_factory.mktemp("extent") / "trace.json"
    path.write_bytes(b"[%b]" % between.join(texts))

    decoded = [json.loads(text, parse_float=str, parse_int=str) for text in texts]
    starts = [
        start
        for event_fields in decoded
        if event_fields.get("ph") == "X" and (start := time_of(event_fields.get("ts"))) is not None
    ]

    extent = read_extent(path)

    assert extent.begin_ns == (min(starts) * 1000 // 1 if starts else None)
    assert extent.check.events == sum("ph" in event_fields for event_fields in decoded)


def test_extent_has_a_duration_and_categories(stepped: Path) -> None:
    extent = read_extent(stepped)

    assert extent.begin_ns == 20_000
    assert extent.duration_s == pytest.approx(63.5e-6)
    assert extent.categories == ("cpu_op", "gpu_user_annotation", "user_annotation")
