"""Tests of the device and stage times of steps, compared with a reference that counts instants."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from profdeck_traces.analysis.model import RankSummary
from profdeck_traces.analysis.summary import summarise_trace

Event = dict[str, Any]


def annotation(name: str, start: float, end: float, thread: int = 1) -> Event:
    return complete("user_annotation", name, start, end, thread)


def complete(category: str, name: str, start: float, end: float, thread: int = 1, **more: Any) -> Event:
    return {"ph": "X", "cat": category, "name": name, "pid": 9, "tid": thread, "ts": start, "dur": end - start, **more}


def kernel(name: str, start: float, end: float, *, stream: int = 7, device: int = 0) -> Event:
    return complete("kernel", name, start, end) | {"pid": device, "tid": stream}


def summarised(directory: Path, events: list[Event]) -> RankSummary:
    path = directory / "rank0.json"
    path.write_text(json.dumps(events), encoding="utf-8")
    return summarise_trace(path)


def test_stages_are_the_outermost_annotations_of_the_step_thread(tmp_path: Path) -> None:
    summary = summarised(
        tmp_path,
        [
            annotation("before", 0, 10),
            annotation("ProfilerStep#1", 10, 110),
            annotation("rollout", 10, 90),
            annotation("inside rollout", 20, 80),
            annotation("elsewhere", 20, 80, thread=2),
            annotation("update", 95, 105),
            complete("cpu_op", "aten::mm", 95, 100, thread=2),
            annotation("ProfilerStep#2", 110, 150),
            annotation("update", 140, 160),
        ],
    )

    host_times = summary.host_times
    assert host_times is not None
    assert (host_times.basis, host_times.steps, host_times.total_us) == ("global_step", 2, 140)
    assert [(stage.name, stage.count, stage.steps, stage.total_us, stage.median_us) for stage in host_times.stages] == [
        ("rollout", 1, 1, 80, 80),
        ("update", 2, 2, 20, 10),
    ]
    update = host_times.stages[1]
    assert [(state.state, state.time_us) for state in update.host] == [
        ("Python and other host code", 15),
        ("operators", 5),
    ]
    assert update.share == 20 / 140


def test_recording_without_steps_is_one_step(tmp_path: Path) -> None:
    summary = summarised(tmp_path, [annotation("forward", 10, 20), complete("cpu_op", "aten::mm", 15, 50)])

    host_times = summary.host_times
    assert host_times is not None
    assert (host_times.basis, host_times.steps, host_times.total_us, [stage.name for stage in host_times.stages]) == (
        "recording",
        1,
        40,
        ["forward"],
    )


def test_step_without_duration_has_no_stages(tmp_path: Path) -> None:
    summary = summarised(tmp_path, [complete("cpu_op", "aten::mm", 0, 5), annotation("ProfilerStep#3", 1, 1, thread=2)])

    host_times = summary.host_times
    assert host_times is not None
    assert (host_times.basis, host_times.steps, host_times.total_us, host_times.stages) == ("global_step", 1, 0, ())


def test_pause_between_recordings_is_not_in_a_step(tmp_path: Path) -> None:
    events = []
    for number, begin in enumerate((0, 1_000, 500_000, 501_000)):
        events += [annotation(f"ProfilerStep#{number}", begin, begin + 1_000), kernel("gemm", begin + 100, begin + 600)]

    steps = summarised(tmp_path, events).steps

    assert [device.duration_us for step in steps for device in step.devices] == [1_000, 1_000, 1_000, 1_000]


def test_gap_has_its_step_and_neighbouring_events(tmp_path: Path) -> None:
    summary = summarised(
        tmp_path,
        [
            annotation("ProfilerStep#7", 0, 100),
            kernel("gemm", 10, 20),
            kernel("softmax", 70, 80),
        ],
    )

    (gap,) = summary.devices[0].gaps
    assert (gap.step, gap.before, gap.after, gap.duration_us) == (7, "gemm", "softmax", 50)


TIMES = st.integers(0, 300)
EVENTS = st.lists(
    st.builds(
        lambda build, start, length: build(start, start + length),
        st.sampled_from(
            [
                lambda start, end: kernel("gemm", start, end),
                lambda start, end: kernel("ncclDevKernel_AllReduce", start, end, stream=9),
                lambda start, end: kernel("gemm", start, end, device=1),
                lambda start, end: complete("cpu_op", "aten::mm", start, end),
                lambda start, end: complete("cuda_runtime", "cudaDeviceSynchronize", start, end, thread=2),
            ]
        ),
        TIMES,
        st.integers(0, 40),
    ),
    max_size=25,
)


@given(EVENTS, st.lists(st.integers(1, 60), min_size=1, max_size=5))
def test_device_steps_equal_sums_over_instants(
    tmp_path_factory: pytest.TempPathFactory, events: list[Event], lengths: list[int]
) -> None:
    begins = list(itertools.accumulate([20, *lengths]))
    steps = [
        annotation(f"ProfilerStep#{number}", begin, end)
        for number, (begin, end) in enumerate(itertools.pairwise(begins))
    ]

    summary = summarised(tmp_path_factory.mktemp("trace"), [*steps, *events])

    origin = min(event["ts"] for event in (*steps, *events))
    for step in summary.steps:
        for device in step.devices:
            begin = round(device.start_us + origin)
            instants = range(begin, begin + round(device.duration_us))
            running = [
                {work["name"] for work in events if work["pid"] == device.device and _open(work, instant)}
                for instant in instants
            ]
            assert device.busy_us == sum(bool(names) for names in running)
            assert device.compute_us == sum("gemm" in names for names in running)
            assert device.exposed_communication_us == sum(names == {"ncclDevKernel_AllReduce"} for names in running)
            idle = Counter(
                _state(events, steps, instant) for instant, names in zip(instants, running, strict=True) if not names
            )
            assert {cause.cause: cause.idle_us for cause in device.idle} == idle
    host_times = summary.host_times
    assert host_times is not None
    states = Counter(_state(events, steps, instant) for instant in range(begins[0], begins[-1]))
    assert {state.state: state.time_us for state in host_times.states} == states


def _open(event: Event, instant: int) -> bool:
    return bool(event["ts"] <= instant < event["ts"] + event["dur"])


def _state(events: list[Event], steps: list[Event], instant: int) -> str:
    names = {event["name"] for event in events if _open(event, instant) and event["pid"] == 9}
    if "aten::mm" in names:
        return "operators"
    if "cudaDeviceSynchronize" in names:
        return "synchronising"
    return "Python and other host code" if any(_open(step, instant) for step in steps) else "nothing recorded"
