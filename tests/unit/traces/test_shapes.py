"""Tests for operators by shape, compared with a reference that uses only the standard library."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

import profdeck_traces as traces
from profdeck_traces.analysis.summary import summarise_trace

SIZES = st.lists(st.integers(1, 5), max_size=3)
DIMS = st.lists(SIZES | st.lists(SIZES, max_size=2), max_size=3)
OTHERS = st.lists(
    st.sampled_from(
        [
            {"ph": "M", "name": 7, "args": {"Input Dims": 3}, "cat": []},
            {"ph": "X", "cat": "user_annotation", "name": "a", "pid": 1, "tid": 1, "ts": 2, "dur": 1,
             "args": {"Input Dims": [[2]]}},
            {"ph": "X", "cat": "cpu_op", "name": "says so", "pid": 1, "tid": 1, "ts": 2, "dur": 1,
             "args": {"Concrete Inputs": ["Input Dims"]}},
            {"ph": "X", "cat": "cpu_op", "name": "bare", "pid": 1, "tid": 1, "ts": 2, "dur": 1, "args": [1]},
            {"ph": "i", "cat": "cpu_op", "name": "aside", "pid": 1, "tid": 1, "ts": 2, "args": {"Input Dims": [[3]]}},
        ]
    ),
    max_size=3,
)  # fmt: skip
"""Events that are not counted, whatever they say."""
OPERATORS = st.lists(
    st.tuples(st.sampled_from(["aten::mm", "aten::bmm", "aten::cat"]), DIMS, st.integers(-9, 9000)), max_size=30
)


def event(name: str, dims: Any, duration_ns: int, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": 5, "dur": duration_ns / 1000,
        "args": {"External id": 3, "Input Dims": dims, **args},
    }  # fmt: skip


@given(OPERATORS, OTHERS, st.sampled_from([5, 5.5, 1704161511420306.491]))
def test_sums_equal_the_standard_library(
    tmp_path_factory: pytest.TempPathFactory,
    operators: list[tuple[str, Any, int]],
    other_events: list[dict[str, Any]],
    begin_us: float,
) -> None:
    path = tmp_path_factory.getbasetemp() / "shapes.json"
    first = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1, "dur": 1, "args": {}}
    events = [first, *(event(*row) | {"ts": begin_us} for row in operators), *other_events]
    path.write_text(json.dumps({"traceEvents": events}))
    expected: dict[tuple[str, str], list[int]] = defaultdict(list)
    for name, dims, duration_ns in operators:
        if duration_ns >= 0:
            expected[name, json.dumps(dims)].append(duration_ns)
    calls = summarise_trace(path).shapes
    assert {
        (row.name, json.dumps(json.loads(row.shapes))): (
            row.count,
            round(row.total_us * 1000),
            round(row.max_us * 1000),
        )
        for row in calls
    } == {key: (len(times), sum(times), max(times)) for key, times in expected.items()}
    assert [row.total_us for row in calls] == sorted((row.total_us for row in calls), reverse=True)


def test_page_and_tables_have_shapes(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"traceEvents": [event("aten::mm", [[20, 30], [30, 50]], 3_000)]}))
    run = traces.load(tmp_path / "a.json")
    assert "[[20, 30], [30, 50]]" in run.report()
    assert "Counted operators: 6e-05 GFLOP, 20 GFLOP/s averaged over the recording." in run.report()
    assert run.table("shapes").to_arrow()["flops"].to_pylist() == [60_000]


def test_data_types_are_shown_with_shapes(tmp_path: Path) -> None:
    """Calls with the same shapes but different data types are in different rows."""
    types = (["float", "float"], ["c10::BFloat16", "c10::BFloat16"])
    events = [event("aten::mm", [[2, 3], [3, 5]], 3, **{"Input type": names}) for names in types]
    (tmp_path / "a.json").write_text(json.dumps({"traceEvents": events}))
    assert {row.dtypes for row in summarise_trace(tmp_path / "a.json").shapes} == {"float32", "bfloat16"}
    assert "bfloat16" in traces.load(tmp_path / "a.json").report()


def test_flops_require_shapes(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"traceEvents": [event("aten::mm", None, 3) | {"args": {}}]}))
    summary = summarise_trace(tmp_path / "a.json")
    assert (summary.shapes, summary.product_flops) == ((), None)
