"""Tests of event selections, compared with a reference implementation, and of windows of steps and times."""

from __future__ import annotations

import json
import pickle
import tempfile
from collections import defaultdict
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from profdeck_traces.analysis.step_names import StepNames
from profdeck_traces.base.errors import TraceError
from profdeck_traces.reading.events import read_events
from profdeck_traces.writing.selection import Selection, TimeWindow
from profdeck_traces.writing.windows import iteration_window, read_extent, step_window, time_window

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
def events(draw: st.DrawFn) -> str:
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
    pairs = draw(st.permutations(list(members.items())))
    text = ", ".join(f'"{key}": {value}' for key, value in pairs)
    return f"{{{text}}}"


SELECTIONS = st.builds(
    Selection,
    st.sampled_from([None, BEGIN_NS, -(10**30)]),
    st.sampled_from([None, END_NS, 10**400]),
    st.sampled_from([None, frozenset({"kernel"}), frozenset({"", "7"})]),
)


def time_of(value: Any) -> int | None:
    """Convert a number or numeric string to nanoseconds if it is a valid time. Numbers are passed as strings."""
    try:
        number = Decimal(value if isinstance(value, str) else "NaN")
    except ArithmeticError:
        return None
    if not number.is_finite() or number.adjusted() > 20:
        return None
    time_ns = round(Fraction(number) * 1000) if number.adjusted() > -20 else 0
    return time_ns if abs(time_ns) < 2**52 * 1000 else None


def pairs_in(decoded: list[dict[str, Any]]) -> dict[int, tuple[int, int]]:
    """Map each half of a pair to the indices of its begin and end events, which are matched in time order."""
    pairs: dict[int, tuple[int, int]] = {}
    opened: dict[Any, list[int]] = defaultdict(list)
    times = {index: time_of(event_fields.get("ts")) for index, event_fields in enumerate(decoded)}
    for index, _ in sorted(
        ((index, time) for index, time in times.items() if time is not None), key=lambda pair: pair[1]
    ):
        thread = opened[repr(decoded[index].get("tid"))]
        if decoded[index].get("ph") == "B":
            thread.append(index)
        elif decoded[index].get("ph") == "E" and thread:
            begin = thread.pop()
            pairs[begin] = pairs[index] = begin, index
    return pairs


def overlaps(start: int, stop: int, selection: Selection) -> bool:
    begin_ns = start if selection.begin_ns is None else selection.begin_ns
    end_ns = start + 1 if selection.end_ns is None else selection.end_ns
    return start < end_ns and (stop > begin_ns or start >= begin_ns)


def expected(decoded: list[dict[str, Any]], selection: Selection) -> list[bool]:
    """Return, for each event, whether the selection should keep it."""
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


def selected(selection: Selection, texts: list[str]) -> list[bool]:
    """Return, for each event of a trace, whether `Selection.rows` selects it."""
    with tempfile.NamedTemporaryFile() as file:
        path = Path(file.name)
        path.write_bytes(f"[{', '.join(texts)}]".encode("utf-8", "surrogatepass"))
        rows: list[bool] = selection.rows(read_events(path)).tolist()
        return rows


@given(st.lists(events(), min_size=1, max_size=12), SELECTIONS)
def test_selected_rows_equal_the_reference(texts: list[str], selection: Selection) -> None:
    decoded = [json.loads(text, parse_float=str, parse_int=str) for text in texts]
    with_phase = [event_fields for event_fields in decoded if "ph" in event_fields]

    assert selected(selection, texts) == expected(with_phase, selection)


def event(ph: str = "X", ts: Any = 0, **members: Any) -> dict[str, Any]:
    return {"ph": ph, "ts": ts, "pid": 1, "tid": 1, **members}


def kept_names(selection: Selection, given_events: list[dict[str, Any]]) -> list[str]:
    rows = selected(selection, [json.dumps(event_fields) for event_fields in given_events])
    return [event_fields["name"] for event_fields, is_kept in zip(given_events, rows, strict=True) if is_kept]


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
    times = ["1704161511420306.4904", "1704161511420306.491", "1704161511420306.4911", "1704161511420306.492"]
    texts = [f'{{"ph": "i", "ts": {time}}}' for time in times]
    selection = Selection(1704161511420306_491, 1704161511420306_492)

    assert selected(selection, texts) == [False, True, True, False]


def test_one_matching_category_selects_an_event() -> None:
    categories = ["kernel", "cpu_op", "cpu_op, kernel", "kernels", None, "", 3]
    given_events = [event(name=str(cat), cat=cat) for cat in categories]

    assert kept_names(Selection(categories=frozenset({"kernel"})), given_events) == ["kernel", "cpu_op, kernel"]
    assert kept_names(Selection(categories=frozenset({""})), given_events) == ["None", "", "3"]


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

    assert extent(step_window(path, range(1))) == (1704161511420306_492, 1704161511420306_493)
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
    origin_ns = 1704161511420306_492

    assert time_window(path, 5, 7) == Selection(origin_ns + 5, origin_ns + 7)
    assert time_window(path, None, 7) == Selection(None, origin_ns + 7)
    assert time_window(path, 5, None) == Selection(origin_ns + 5, None)
    with pytest.raises(TraceError, match="has no complete event"):
        time_window(write(path, [event("i")]), 0, 1)


@given(st.lists(events(), max_size=8))
def test_earliest_start_equals_the_reference(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    path = tmp_path_factory.mktemp("extent") / "trace.json"
    path.write_text(f"[{', '.join(texts)}]", encoding="utf-8")

    decoded = [json.loads(text, parse_float=str, parse_int=str) for text in texts]
    complete = [
        event_fields
        for event_fields in decoded
        if event_fields.get("ph") == "X"
        and (duration := time_of(event_fields.get("dur"))) is not None
        and duration >= 0
    ]
    complete += [decoded[begin] for begin, _ in pairs_in(decoded).values()]
    starts = [start for event_fields in complete if (start := time_of(event_fields.get("ts"))) is not None]

    extent = read_extent(path)

    assert extent.begin_ns == min(starts, default=None)
    assert extent.check.events == sum("ph" in event_fields for event_fields in decoded)


def test_extent_has_a_duration_and_categories(stepped: Path) -> None:
    extent = read_extent(stepped)

    assert extent.begin_ns == 20_000
    assert extent.duration_s == pytest.approx(63.5e-6)
    assert extent.categories == ("cpu_op", "gpu_user_annotation", "user_annotation")


def test_events_without_category_are_not_host_events(tmp_path: Path) -> None:
    """Ascend traces have no categories. The device runs a step's work after the step's window on the host."""
    process = {"ph": "M", "name": "process_name", "pid": 2, "args": {"name": "Ascend Hardware"}}
    operator = {"ph": "X", "name": "aten::mm", "cat": "cpu_op", "pid": 1, "tid": 1, "ts": 60, "dur": 1}
    kernel = {"ph": "X", "name": "MatMul", "pid": 2, "tid": 1, "ts": 60, "dur": 1}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps([process, operator, kernel]))
    selection = Selection(begin_ns=0, end_ns=100_000, host=TimeWindow(0, 50_000))
    assert selection.rows(read_events(path, args={"name": 0})).tolist() == [True, False, True]
