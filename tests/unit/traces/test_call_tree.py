"""Tests of the call tree, compared with a reference that evaluates each instant, and of its output."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, strategies as st
from typer.testing import CliRunner

import profdeck_traces as traces
from profdeck.cli import app
from profdeck_traces.analysis.call_tree import CallTree
from profdeck_traces.analysis.detail_model import StackFrame
from profdeck_traces.reading.reader import read_trace

Call = tuple[str, int, int]


def written(path: Path, calls: Sequence[Call], category: str = "python_function") -> Path:
    events = [
        {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 7, "ts": start / 1000, "dur": (end - start) / 1000}
        for name, start, end in calls
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def tree(path: Path) -> CallTree:
    trace = read_trace(path)
    return CallTree(trace.events, trace.tables.names_of_categories(frozenset({"cpu_op"})), trace.thread_names)


def paths_of(frames: Sequence[StackFrame]) -> dict[tuple[str, ...], tuple[int, int, int]]:
    paths: list[tuple[str, ...]] = []
    for frame in frames:
        paths.append((*(paths[frame.parent] if frame.parent is not None else ()), frame.name))
    return {
        path: (frame.count, round(frame.total_us * 1000), round(frame.self_us * 1000))
        for path, frame in zip(paths, frames, strict=True)
    }


def expected(calls: Sequence[Call]) -> dict[tuple[str, ...], tuple[int, int, int]]:
    """Reference implementation: at each instant, the path consists of all open calls, outermost first."""
    counts: Counter[tuple[str, ...]] = Counter()
    totals: Counter[tuple[str, ...]] = Counter()
    self_ns: Counter[tuple[str, ...]] = Counter()
    thread = "thread 7 of process 1"
    sorted_calls = sorted(calls, key=lambda call: (call[1], -call[2]))

    def open_at(instant: int, before: int) -> tuple[str, ...]:
        inside = [
            name for number, (name, start, end) in enumerate(sorted_calls) if start <= instant < end and number < before
        ]
        return (thread, *inside)

    for number, (name, start, _) in enumerate(sorted_calls):
        counts[*open_at(start, number), name] += 1
    for instant in range(max((end for _, _, end in calls), default=0)):
        path = open_at(instant, len(sorted_calls))
        if len(path) > 1:
            self_ns[path] += 1
            for depth in range(1, len(path) + 1):
                totals[path[:depth]] += 1
    return {path: (counts[path], totals[path], self_ns[path]) for path in totals}


@st.composite
def nested(draw: st.DrawFn, begin: int = 0, end: int = 60, depth: int = 0) -> list[Call]:
    calls: list[Call] = []
    position = begin
    while position < end and draw(st.booleans()):
        start = draw(st.integers(position, end - 1))
        stop = draw(st.integers(start + 1, end))
        calls.append((draw(st.sampled_from("abc")), start, stop))
        if depth < 4:
            calls += draw(nested(start, stop, depth + 1))
        position = stop
    return calls


@given(nested())
def test_call_tree_equals_the_reference(tmp_path_factory: pytest.TempPathFactory, calls: list[Call]) -> None:
    path = written(tmp_path_factory.getbasetemp() / "calls.json", calls)
    # Equal calls are also nested.
    assert paths_of(tree(path).frames()) == expected(calls)
    functions = {function.name: function for function in tree(path).functions()}
    for name in {name for name, _, _ in calls}:
        instants = {instant for called, start, end in calls if called == name for instant in range(start, end)}
        assert functions[name].total_us == pytest.approx(len(instants) / 1000)
        assert functions[name].count == sum(called == name for called, _, _ in calls)
    assert sum(function.self_us for function in functions.values()) == pytest.approx(
        len({instant for _, start, end in calls for instant in range(start, end)}) / 1000
    )


CALLS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50), st.integers(1, 20)), max_size=12)


@given(CALLS)
def test_overlapping_calls_keep_their_total_time(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[str, int, int]]
) -> None:
    calls = [(name, start, start + length) for name, start, length in drawn]
    path = written(tmp_path_factory.getbasetemp() / "overlaps.json", calls)
    frames = tree(path).frames()
    paths = paths_of(frames)
    assert {path: sums[1:] for path, sums in paths.items()} == {
        path: sums[1:] for path, sums in expected(calls).items()
    }
    assert sum(count for count, _, _ in paths.values()) == len(calls)


def test_time_of_overlapping_calls_is_linear_in_their_depth(tmp_path: Path) -> None:
    """Regression test: finding the call that ends took time proportional to the depth."""

    def cpu_s(depth: int) -> float:
        nested = [("a", at, 3 * depth - at) for at in range(depth)]
        overlapping = [("b", 3 * depth, 3 * depth + 2), ("c", 3 * depth + 1, 3 * depth + 3)]
        trace = read_trace(written(tmp_path / "trace.json", [*nested, *overlapping]))
        begin = time.process_time()
        CallTree(trace.events, trace.tables.names_of_categories(frozenset({"cpu_op"})), trace.thread_names)
        return time.process_time() - begin

    cpu_s(10)
    assert cpu_s(16_000) < 20 * cpu_s(2_000)  # 8 times for linear time


def test_trace_without_stacks_has_no_tree(tmp_path: Path) -> None:
    call_tree = tree(written(tmp_path / "a.json", [("aten::mm", 0, 50)], "cpu_op"))
    assert (call_tree.frames(), call_tree.functions()) == ((), ())


def test_short_calls_are_added_to_their_caller(tmp_path: Path) -> None:
    paths = paths_of(tree(written(tmp_path / "a.json", [("big", 0, 100_000), ("small", 10, 60)])).frames())
    assert list(paths) == [("thread 7 of process 1",), ("thread 7 of process 1", "big")]
    assert paths["thread 7 of process 1", "big"][2] == 100_000


def test_speedscope_export_has_all_stacks(tmp_path: Path) -> None:
    """Speedscope reads samples with weights. Their sum is the time of the threads."""
    calls = [("train.py(1): main", 0, 9000), ("train.py(5): load", 1000, 4000), ("<script>", 2000, 3000)]
    path = written(tmp_path / "a.json", calls)
    file = tmp_path / "a.speedscope.json"
    result = CliRunner().invoke(app, ["export", str(path), "--speedscope", str(file)])
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(file.read_text())
    jsonschema.validate(document, SPEEDSCOPE)
    (profile,) = document["profiles"]
    frames = [frame["name"] for frame in document["shared"]["frames"]]
    stacks = {tuple(frames[index] for index in stack): weight for stack, weight in
              zip(profile["samples"], profile["weights"], strict=True)}  # fmt: skip
    top = "thread 7 of process 1"
    assert stacks == {
        (top, "train.py(1): main"): 6,
        (top, "train.py(1): main", "train.py(5): load"): 2,
        (top, "train.py(1): main", "train.py(5): load", "<script>"): 1,
    }
    assert profile["endValue"] == 9


def test_export_without_stacks_explains_how_to_record_them(tmp_path: Path) -> None:
    path = written(tmp_path / "a.json", [("aten::mm", 0, 50)], "cpu_op")
    result = CliRunner().invoke(app, ["export", str(path), "--speedscope", str(tmp_path / "out.json")])
    assert result.exit_code == 4
    assert "with_stack" in result.stderr
    assert not (tmp_path / "out.json").exists()
    assert CliRunner().invoke(app, ["export", str(path)]).exit_code == 2


def test_steps_have_one_tree(tmp_path: Path) -> None:
    """The tree combines the stages of all steps."""
    events = [
        {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 7, "ts": ts, "dur": dur}
        for step in range(3)
        for category, name, ts, dur in (
            ("user_annotation", f"ProfilerStep#{step}", step * 100, 90),
            ("user_annotation", "forward", step * 100 + 10, 60),
            ("python_function", "model.py(1): forward", step * 100 + 20, 40),
        )
    ]
    (tmp_path / "a.json").write_text(json.dumps({"traceEvents": events}))
    (rank,) = traces.load(tmp_path / "a.json").summary.ranks
    assert [(frame.name, frame.count) for frame in rank.stacks] == [
        ("thread 7 of process 1", 0), ("forward", 3), ("model.py(1): forward", 3),
    ]  # fmt: skip


def test_page_has_the_flame_graph(tmp_path: Path) -> None:
    path = written(tmp_path / "a.json", [("train.py(1): <b>main", 0, 9000), ("load", 1000, 4000)])
    page = traces.load(path).report()
    assert "train.py(1): &lt;b&gt;main" in page
    assert 'class="flame"' in page


# Excerpt of https://www.speedscope.app/file-format-schema.json for files with samples.
SPEEDSCOPE = {
    "type": "object",
    "required": ["$schema", "shared", "profiles"],
    "properties": {
        "$schema": {"const": "https://www.speedscope.app/file-format-schema.json"},
        "shared": {
            "type": "object",
            "required": ["frames"],
            "properties": {
                "frames": {"type": "array", "items": {"type": "object", "required": ["name"],
                                                      "properties": {"name": {"type": "string"}}}}
            },
        },
        "profiles": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type", "name", "unit", "startValue", "endValue", "samples", "weights"],
                "properties": {
                    "type": {"const": "sampled"},
                    "unit": {"enum": ["none", "nanoseconds", "microseconds", "milliseconds", "seconds", "bytes"]},
                    "samples": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
                    "weights": {"type": "array", "items": {"type": "number"}},
                },
            },
        },
    },
}  # fmt: skip


THREAD = ["threading.py(1002): _bootstrap", "threading.py(1045): _bootstrap_inner", "threading.py(982): run"]


@pytest.mark.parametrize(
    ("functions", "is_excluded"),
    [
        ([*THREAD, "profdeck/base/shutdown.py(259): _run", "wait"], True),
        ([*THREAD, "/opt/lib/site-packages/profdeck_ray/store.py(9): <lambda>", "wait"], True),
        ([*THREAD, "train.py(3): work", "profdeck/profiler.py(260): start"], False),
        ([*THREAD, "profdecked/train.py(3): work"], False),
        (["profdeck/__main__.py(1): <module>", "train.py(3): <module>"], False),
        (THREAD, False),
    ],
)
def test_threads_of_profdeck_are_excluded(tmp_path: Path, functions: list[str], is_excluded: bool) -> None:
    calls = [(name, 10 * depth, 1000 - 10 * depth) for depth, name in enumerate(functions)]
    result = tree(written(tmp_path / "t.json", [*calls, ("threading.py(9): _delete", 1000, 1010)]))
    assert (result.functions() == ()) is is_excluded
    assert (result.frames() == ()) is is_excluded
