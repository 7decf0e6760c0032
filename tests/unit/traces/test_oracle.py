"""Tests that compare summaries with an independent reference."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import oracle
import pytest
from hypothesis import given, strategies as st
from real_traces import each

from profdeck_traces.analysis.model import RankSummary
from profdeck_traces.analysis.summary import summarise_trace


def summary_facts(summary: RankSummary) -> dict[str, Any]:
    """Return the values of a summary in the format of the oracle."""
    return {
        "events": summary.events,
        "kernels": {(row.kind, row.name): (row.count, ns(row.total_us), ns(row.max_us)) for row in summary.kernels},
        "copies": sorted(
            (row.name, row.count, -1 if row.size_bytes is None else row.size_bytes) for row in summary.copies
        ),
        "operators": {
            row.name: (row.count, ns(row.total_us), ns(row.max_us), ns(row.self_us)) for row in summary.operators
        },
        "annotations": {
            row.name: (row.count, ns(row.total_us), ns(row.max_us), ns(row.self_us)) for row in summary.annotations
        },
        "devices": {
            row.device: {
                "events": row.events,
                "span": ns(row.span_us),
                "busy": ns(row.busy_us),
                "communication": ns(row.communication_us),
                "overlap": ns(row.overlap_us),
                "memory": ns(row.memory_us),
            }
            for row in summary.devices
        },
        "steps": [
            (row.name, ns(row.duration_us), ns(row.device_us)) for row in summary.steps if row.kind == "global_step"
        ],
    }


def ns(time_us: float | None) -> int | None:
    return None if time_us is None else round(time_us * 1000)


def check_summary(path: Path) -> None:
    """Check that a trace's summary matches the oracle."""
    summary = summarise_trace(path)
    assert summary_facts(summary) == oracle.facts(
        path, {(kernel.kind, kernel.name): kernel.category for kernel in summary.kernels}
    )


@pytest.mark.shared_data
@each("gpu/*.json.gz")
def test_real_traces_are_summarised_as_by_the_oracle(path: Path) -> None:
    check_summary(path)


TIMES = st.integers(0, 40_000).map(lambda time: time / 1000) | st.integers(0, 40)
DURATIONS = st.integers(0, 12_000).map(lambda time: time / 1000) | st.sampled_from([0, 0, 1, 5, 40])
HOST_NAMES = st.sampled_from(["aten::mm", "forward", "é", 'a "kernel"', "kernel", "gpu_memcpy", "}, {", "process_name"])
WORK_NAMES = st.sampled_from(["gemm", "ncclDevKernel_AllReduce", "é", "Memcpy HtoD", "kernel"])


@st.composite
def host_events(draw: st.DrawFn) -> dict[str, Any]:
    category = draw(st.sampled_from(["cpu_op", "user_annotation", "python_function", "cuda_runtime"]))
    name, thread = draw(HOST_NAMES), draw(st.sampled_from([1, 2, "pool"]))
    event = {"ph": "X", "cat": category, "name": name, "pid": 9, "tid": thread, "ts": draw(TIMES)}
    return event | {"dur": draw(DURATIONS)}


@st.composite
def device_events(draw: st.DrawFn) -> dict[str, Any]:
    category = draw(st.sampled_from(["kernel", "kernel", "gpu_memcpy", "gpu_memset", "hpu_op"]))
    event = {"ph": draw(st.sampled_from("XXXXXi")), "cat": category, "name": draw(WORK_NAMES)}
    return event | {
        "pid": draw(st.integers(0, 1)),
        "tid": draw(st.integers(7, 8)),
        "ts": draw(TIMES),
        "dur": draw(DURATIONS),
    }


OTHERS = st.sampled_from(
    [
        {"ph": "M", "name": "process_name", "pid": 9, "ts": 0, "args": {"name": "python"}},
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "pid": 9, "tid": 1, "ts": 3, "id": 4},
        {"ph": "i", "cat": "cpu_op", "name": "mark", "pid": 9, "tid": 1, "ts": 3, "s": "t"},
        {"name": "no phase", "ts": 3},
    ]
)
# Text after the name, the times and the args, or instead of them.
ARGS = st.sampled_from(
    [
        {"args": {"stream": 7, "bytes": 64}},
        {"args": {"bytes": 2, "cat": "kernel"}},
        {"args": {}},
        {"args": {"a": {"b": [1, "kernel"]}}},
        {},
    ]
)


@st.composite
def with_args(draw: st.DrawFn, events: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    event = draw(events)
    if "args" not in event:
        event = event | draw(ARGS)
    if draw(st.integers(0, 9)) == 0:
        event = dict(draw(st.permutations(list(event.items()))))
    return event


@st.composite
def steps(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Draw consecutive steps and their device work, with or without IDs that connect them."""
    position, on_device, events = 0.0, 0.0, []
    are_connected = draw(st.booleans())
    for number in range(draw(st.integers(0, 4))):
        duration = draw(st.integers(1, 15))
        annotation = {"cat": "user_annotation", "name": f"ProfilerStep#{number}", "pid": 9, "tid": 1}
        events.append({"ph": "X", **annotation, "ts": position, "dur": duration, "args": {"External id": number}})
        if are_connected:
            on_device = max(on_device, position) + draw(st.integers(0, 5))
            work = {"cat": "gpu_user_annotation", "name": f"ProfilerStep#{number}", "pid": 0, "tid": 7}
            events.append({"ph": "X", **work, "ts": on_device, "dur": 2, "args": {"External id": number}})
            on_device += 3
        position += duration + draw(st.integers(0, 2))
    return events


LAYOUTS = st.sampled_from([{"indent": 2}, {"separators": (",", ":")}, {}])


@given(
    events=st.lists(with_args(host_events() | device_events() | OTHERS), max_size=30),
    marks=steps(),
    layout=LAYOUTS,
    ascii_only=st.booleans(),
    order=st.randoms(use_true_random=False),
)
def test_any_trace_is_summarised_as_by_the_oracle(
    events: list[dict[str, Any]],
    marks: list[dict[str, Any]],
    layout: Any,
    ascii_only: bool,
    order: Any,
) -> None:
    events = [*events, *marks]
    order.shuffle(events)
    if not any("ph" in event for event in events):
        return
    document = {"schemaVersion": 1, "traceEvents": events, "distributedInfo": {"rank": 3, "world_size": 8}}
    text = json.dumps(document, ensure_ascii=ascii_only, **layout).encode()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "a.pt.trace.json.gz"
        path.write_bytes(gzip.compress(text, 1))
        check_summary(path)
