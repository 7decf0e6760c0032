"""Tests for traces that other tools and old or broken recorders wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profdeck_traces.analysis.model import RankSummary
from profdeck_traces.analysis.run_model import Finding
from profdeck_traces.analysis.summary import summarise_trace
from profdeck_traces.base.errors import TraceError
from profdeck_traces.loading import summarise

Event = dict[str, Any]
STEP_US, KERNEL_US, KERNELS = 1000.0, 60.0, 8


def recording(steps: int = 6, start_us: float = 1_000_000.0) -> list[Event]:
    """Return steps of 1 ms, each with 8 operators that launch a kernel of 60 us on one stream."""
    events: list[Event] = []
    for step in range(steps):
        begin_us = start_us + step * STEP_US
        mark = {"name": f"ProfilerStep#{step}", "args": {"External id": 1000 + step}}
        host = {"ph": "X", "pid": 100, "tid": 100}
        events.append({**host, **mark, "cat": "user_annotation", "ts": begin_us, "dur": STEP_US - 10})
        for kernel in range(KERNELS):
            call_us = begin_us + 20 + kernel * 100
            args = {"correlation": step * KERNELS + kernel + 1}
            events += [
                {**host, "cat": "cpu_op", "name": "aten::mm", "ts": call_us, "dur": 30.0},
                {
                    **host,
                    "cat": "cuda_runtime",
                    "name": "cudaLaunchKernel",
                    "ts": call_us + 5,
                    "dur": 8.0,
                    "args": args,
                },
                {
                    "ph": "X",
                    "cat": "kernel",
                    "name": "gemm",
                    "pid": 0,
                    "tid": 7,
                    "args": args,
                    "ts": call_us + 20,
                    "dur": KERNEL_US,
                },
            ]
    return events


def kernels(events: list[Event]) -> list[Event]:
    return [event for event in events if event["cat"] == "kernel"]


@pytest.fixture
def summary_of(tmp_path: Path) -> Callable[[list[Event]], tuple[RankSummary, tuple[Finding, ...]]]:
    """Return a function that summarises events, and returns the findings as well."""

    def summarised(events: list[Event]) -> tuple[RankSummary, tuple[Finding, ...]]:
        path = tmp_path / "trace.json"
        path.write_text(json.dumps({"traceEvents": events}))
        run, errors = summarise([path])
        assert errors == []
        (rank,) = run.ranks
        return rank, run.findings

    return summarised


SummaryOf = Callable[[list[Event]], tuple[RankSummary, tuple[Finding, ...]]]


def test_sound_recording_has_no_such_finding(summary_of: SummaryOf) -> None:
    rank, findings = summary_of(recording())
    assert (rank.launches, rank.launches_without_work, rank.unrecorded_steps) == (48, 0, ())
    assert rank.implausible == ()
    assert {finding.rule for finding in findings} & {"device-not-recorded", "implausible-times"} == set()


def test_categories_of_torch_1_8_are_known(summary_of: SummaryOf) -> None:
    old = {"cpu_op": "Operator", "cuda_runtime": "Runtime", "kernel": "Kernel", "user_annotation": "Operator"}
    rank, _ = summary_of([{**event, "cat": old[event["cat"]]} for event in recording()])
    expected, _ = summary_of(recording())
    assert rank.busy_us == expected.busy_us
    assert [step.step for step in rank.steps] == list(range(6))
    assert [kernel.count for kernel in rank.kernels] == [48]


def test_trace_without_known_categories_has_no_summary(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    events = [{**event, "cat": "rail"} for event in recording()] + [{"ph": "X", "name": "a", "ts": 1, "dur": 2}]
    path.write_text(json.dumps(events))
    with pytest.raises(TraceError, match=r"no event has a category that profdeck knows.*rail \(150\), none \(1\)"):
        summarise_trace(path)


def test_launches_without_kernels_are_a_device_that_was_not_recorded(summary_of: SummaryOf) -> None:
    rank, findings = summary_of([event for event in recording() if event["cat"] != "kernel"])
    assert (rank.launches, rank.launches_without_work, rank.devices) == (48, 48, ())
    (finding,) = [finding for finding in findings if finding.rule == "device-not-recorded"]
    assert finding.text == "The device was not recorded: 48 launches have no kernel (trace.json)."


def test_device_time_of_steps_without_recorded_kernels_is_unknown(summary_of: SummaryOf) -> None:
    events = [event for event in recording(8) if event["cat"] != "kernel" or event["ts"] > 1_003_000]
    rank, findings = summary_of(events)
    assert rank.unrecorded_steps == (0, 1, 2)
    assert [step.device_us for step in rank.steps] == [None] * 3 + [KERNELS * KERNEL_US] * 5
    assert [len(step.devices) for step in rank.steps] == [0] * 3 + [1] * 5
    (finding,) = [finding for finding in findings if finding.rule == "device-not-recorded"]
    assert "steps 0..2 have launches only" in finding.text


@pytest.mark.parametrize(
    ("change", "count"),
    [
        ({"ts": 0.0, "dur": 0.0}, 1),  # the device reported no time
        ({"ts": 8_000.0, "dur": 12.0}, 1),  # from an earlier recording
        ({"dur": 1_600_000.0}, 1),  # the end is reported late
        ({"dur": 20_000.0}, 0),  # queued work may end after the host
    ],
)
def test_device_times_outside_of_the_recording_are_counted_apart(
    summary_of: SummaryOf, change: Event, count: int
) -> None:
    events = recording(start_us=20_000_000.0)
    kernels(events)[19].update(change)
    rank, findings = summary_of(events)
    assert sum(implausible.count for implausible in rank.implausible) == count
    assert sum(kernel.count for kernel in rank.kernels) == 48 - count
    assert [finding.rule for finding in findings].count("implausible-times") == count
    assert all(device.busy_us <= device.span_us for device in rank.devices)


def test_kernels_of_a_graph_belong_to_the_iteration_that_launched_it(summary_of: SummaryOf) -> None:
    events: list[Event] = []
    for iteration in range(8):
        begin_us = 1_000_000.0 + iteration * 2000
        host = {"ph": "X", "pid": 100, "tid": 100}
        name = "execute_context_0(0)_generation_32(32)"
        args = {"correlation": iteration + 1, "External id": 0}
        events += [
            {**host, "cat": "user_annotation", "name": name, "ts": begin_us, "dur": 300.0},
            {**host, "cat": "cuda_runtime", "name": "hipGraphLaunch", "ts": begin_us + 50, "dur": 100.0, "args": args},
        ]
        device = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 0, "dur": 44.0, "args": args}
        events += [{**device, "ts": begin_us + 150 + kernel * 45} for kernel in range(40)]
    rank, _ = summary_of(events)
    assert [step.device_us for step in rank.steps] == [40 * 44.0] * 8  # although the annotation ends after 0.3 ms
    assert rank.iterations[0].tokens_per_s == pytest.approx(32 / (39 * 45 + 44) * 1e6)
