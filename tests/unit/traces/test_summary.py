"""Summaries of written traces, against numbers worked out by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from profdeck_traces.analysis.model import OperatorSummary, RankSummary
from profdeck_traces.analysis.step_names import StepNames
from profdeck_traces.analysis.summary import summarise_trace

HEAD = {
    "deviceProperties": [{"id": 0, "name": "GPU A"}, {"id": 1, "name": "GPU B"}],
    "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8},
}


def event(category: str | None, name: str, start: Any, duration: Any, *, pid: Any = 10, tid: Any = 1) -> dict[str, Any]:
    written = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": duration}
    return {key: value for key, value in written.items() if value is not None}


def summarise(tmp_path: Path, trace: Any, *, cut: int | None = None, **layout: Any) -> RankSummary:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(trace, **layout).encode()[:cut]))
    return summarise_trace(path)


EVENTS = [
    event("user_annotation", "ProfilerStep#7", 1000, 100),
    event("cpu_op", "aten::linear", 1010, 50.5),
    event("cpu_op", "aten::addmm", 1020, 20.25),
    event("cuda_runtime", "cudaLaunchKernel", 1025, 5),
    event("python_function", "f.py(1): g", 1000, 99),
    event("cpu_op", "aten::addmm", 1070, 10),
    event("cpu_op", "aten::addmm", 1000, 7, tid="other"),
    event("kernel", "gemm", 1040, 30, pid=0, tid=7),
    event("kernel", "gemm", 1060, 30, pid=0, tid=8),
    event("gpu_memcpy", "Memcpy DtoH", 1200.125, 0.125, pid=0, tid=7),
    event("gpu_user_annotation", "ProfilerStep#7", 1040, 50, pid=0, tid=7),
    event("kernel", "gemm", 1000, 1, pid=1, tid=7),
    {"ph": "i", "name": "mark", "ts": 5},
]
GEMM_ETC = [("gemm", "kernel", 3, 61.0, 30.0), ("Memcpy DtoH", "gpu_memcpy", 1, 0.125, 0.125)]


def kernels(summary: RankSummary) -> list[tuple[str, str, int, float, float]]:
    return [(kernel.name, kernel.kind, kernel.count, kernel.total_us, kernel.max_us) for kernel in summary.kernels]


def times(operators: tuple[OperatorSummary, ...]) -> list[tuple[str, int, float, float, float]]:
    return [
        (operator.name, operator.count, operator.self_us, operator.total_us, operator.max_us) for operator in operators
    ]


@pytest.mark.parametrize("layout", [{}, {"indent": 2}])
@pytest.mark.parametrize("first", ["head", "events"])
def test_trace_is_summarised(tmp_path: Path, layout: dict[str, Any], first: str) -> None:
    trace = {**HEAD, "traceEvents": EVENTS} if first == "head" else {"traceEvents": EVENTS, **HEAD}

    summary = summarise(tmp_path, trace, **layout)

    assert summary.whole
    assert summary.problem is None
    assert (summary.rank, summary.world_size, summary.events) == (3, 8, 13)
    assert summary.span_us == 200.25
    assert times(summary.operators) == [
        ("aten::addmm", 3, 37.25, 37.25, 20.25),
        ("aten::linear", 1, 30.25, 50.5, 50.5),
    ]
    assert times(summary.annotations) == [("ProfilerStep#7", 1, 39.5, 100.0, 100.0)]
    assert kernels(summary) == GEMM_ETC
    assert [kernel.share for kernel in summary.kernels] == [61 / 61.125, 0.125 / 61.125]
    assert [kernel.mean_us for kernel in summary.kernels] == [61 / 3, 0.125]
    assert [(category.category, category.count, category.total_us) for category in summary.categories] == [
        ("gemm", 3, 61.0),
        ("memory copy", 1, 0.125),
    ]
    assert [
        (device.device, device.name, device.events, device.span_us, device.busy_us, device.idle_us)
        for device in summary.devices
    ] == [(0, "GPU A", 3, 160.25, 50.125, 110.125), (1, "GPU B", 1, 1.0, 1.0, 0.0)]
    assert (summary.busy_us, summary.idle_us) == (51.125, 110.125)
    (step,) = summary.steps
    assert (step.kind, step.step, step.pid, step.start_us, step.duration_us) == ("global_step", 7, 10, 0.0, 100.0)


def test_launches_of_graphs_are_counted(tmp_path: Path) -> None:
    launches = [
        event("cuda_runtime", "cudaGraphLaunch", 1, 1),
        event("cuda_driver", "cuGraphLaunch", 3, 1),
        event("cuda_runtime", "cudaLaunchKernel", 5, 1),
    ]

    assert summarise(tmp_path, launches).graph_launches == 2


def test_copy_size_requires_the_size_of_all_copies(tmp_path: Path) -> None:
    sized_copy = event("gpu_memcpy", "Memcpy HtoD", 1, 2, pid=0)
    silent = event("gpu_memset", "Memset", 5, 1, pid=0)
    events = [
        sized_copy | {"args": {"bytes": 100}},
        sized_copy | {"args": {"bytes": 11}},
        silent | {"args": {"bytes": 1}},
        silent,
    ]

    summary = summarise(tmp_path, events)

    assert [(copy.name, copy.count, copy.total_us, copy.size_bytes) for copy in summary.copies] == [
        ("Memcpy HtoD", 2, 4.0, 111),
        ("Memset", 2, 2.0, None),
    ]


def test_readable_part_of_a_truncated_trace_is_summarised(tmp_path: Path) -> None:
    trace = {**HEAD, "traceEvents": EVENTS}
    cut = json.dumps(trace).index('"ph": "i"')

    summary = summarise(tmp_path, trace, cut=cut)

    assert summary.events == 12
    assert summary.problem == f"The JSON is not closed: it ends after {cut:,} bytes."
    assert kernels(summary) == GEMM_ETC


@pytest.mark.parametrize(
    "odd",
    [
        {"ph": "X", "cat": "kernel", "name": None, "pid": 0, "ts": 1, "dur": 1},
        {"ph": "X", "cat": "kernel", "name": "no time", "pid": 0},
        {"ph": "X", "cat": "kernel", "name": "no number", "pid": 0, "ts": "soon", "dur": 1},
        {"ph": "X", "cat": "kernel", "name": "nan", "pid": 0, "ts": float("nan"), "dur": 1},
        {"ph": "X", "cat": "kernel", "name": "far", "pid": 0, "ts": 1e300, "dur": 1},
        {"ph": "X", "cat": "kernel", "name": "farther", "pid": 0, "ts": "1e9999999", "dur": "-9e999999999"},
        {"ph": "X", "cat": ["kernel"], "name": "list", "pid": {"a": 1}, "tid": 1.5, "ts": [1], "dur": {}},
        {"ph": 1, "cat": "kernel", "name": "phase", "ts": 1, "dur": 1},
        {"name": "no phase"},
        "text",
        [1, {"ph": "X"}],
        {"ph": "M", "name": "process_name", "pid": 0, "args": None},
        {"ph": "M", "name": "process_name", "pid": [0], "args": {"name": 3}},
    ],
    ids=str,
)
def test_invalid_event_does_not_affect_other_events(tmp_path: Path, odd: Any) -> None:
    plain = [event("kernel", "k", 10 * n, 1, pid=0) for n in range(200)]

    summary = summarise(tmp_path, [*plain, odd, *plain])

    assert summary.whole
    assert [kernel.count for kernel in summary.kernels if kernel.name == "k"] == [400]


def test_odd_times_and_ids_are_taken_as_they_are_meant(tmp_path: Path) -> None:
    summary = summarise(
        tmp_path,
        [
            event("cpu_op", "string", "1704161511420306.491", "0.509", pid=-1),
            event("cpu_op", "number", 1704161511420306, 1, pid="Spans"),
            event("cpu_op", "no duration", 1704161511420306, None),
            event("cpu_op", "negative", 1704161511420306, -5),
            event("cpu_op", "too long", 1704161511420306, 1e15),
            event("cpu_op", "fine", 4203669603018.756, 0.001),
        ],
    )

    assert {op.name: op.total_us for op in summary.operators} == {
        "string": 0.509,
        "number": 1.0,
        "fine": 0.001,
    }
    assert {odd.name: odd.count for odd in summary.implausible} == {"no duration": 1, "negative": 1, "too long": 1}


def test_ascend_lanes_are_identified_by_process_name(tmp_path: Path) -> None:
    def name(pid: int, process: str) -> dict[str, Any]:
        return {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}}

    summary = summarise(
        tmp_path,
        [
            event(None, "MatMul", "1704161511420306.491", 2.5, pid=800),
            event(None, "AscendCL@aclrtMemcpy", "1704161511420306.491", 2.5, pid=9),
            event("cpu_op", "ProfilerStep#1", "1704161511420300.000", 9),
            name(800, "Ascend Hardware"),
            name(9, "CANN"),
        ],
    )

    assert kernels(summary) == [("MatMul", "Ascend Hardware", 1, 2.5, 2.5)]
    assert [device.device for device in summary.devices] == [800]
    assert [(step.step, step.pid, step.start_us, step.duration_us) for step in summary.steps] == [(1, 10, 0.0, 9.0)]


def test_operators_that_are_named_like_steps_are_steps(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    kernels = [event("kernel", "k", start, 1, pid=0) for start in (0, 8)]
    path.write_text(json.dumps([event("cpu_op", "decode 1", 0, 9), event("cpu_op", "mm", 1, 2), *kernels]))

    summary = summarise_trace(path, step_names=StepNames([r"(?P<decode>decode) \d+"]))

    assert [(step.kind, step.name, step.stage) for step in summary.steps] == [("iteration", "decode 1", "decode")]
    assert [operator.name for operator in summary.operators] == ["mm"]
    assert times(summary.annotations) == [("decode 1", 1, 7.0, 9.0, 9.0)]
    assert {cause.cause: cause.idle_us for cause in summary.devices[0].idle} == {
        "Python and other host code": 5.0,
        "operators": 2.0,
    }


def test_file_without_events_has_an_empty_summary(tmp_path: Path) -> None:
    summary = summarise(tmp_path, {"distributedInfo": None})

    assert not summary.whole
    assert summary.operators == ()
    assert summary.kernels == ()
    assert summary.devices == ()
    assert summary.steps == ()
    assert summary.rank is None
