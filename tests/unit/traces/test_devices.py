"""Tests of device times and host states, with fixed examples and a reference that evaluates each instant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import attrs
import numpy as np
import pytest
from hypothesis import given, strategies as st

from profdeck_traces.analysis.detail_model import IdleCause
from profdeck_traces.analysis.devices import COMMUNICATES, COMPUTES, MOVES, DeviceTimes
from profdeck_traces.analysis.host_states import CAUSES, NOT_READ, Host, HostEvent, innermost
from profdeck_traces.analysis.model import DeviceSummary, Gap, StreamSummary
from profdeck_traces.analysis.step_names import StepNames
from profdeck_traces.analysis.steps import find_steps
from profdeck_traces.reading.columns import Columns, CompleteEvent, by_start, columns_of
from profdeck_traces.reading.identifiers import Id


class Event(NamedTuple):
    """A complete event, in nanoseconds."""

    category: str
    name: str
    start: int
    end: int
    pid: Id = 10
    tid: Id = 1


def columns(events: Sequence[Event]) -> Columns:
    """Return the events as columns sorted by start."""
    return by_start(
        columns_of(
            CompleteEvent(event.name, event.category, event.pid, event.tid, event.start, event.end - event.start)
            for event in events
        )
    )


def states_in(events: list[Event], begin: int, end: int) -> dict[str, int]:
    """Return the duration of each state from begin to end, without states of zero duration."""
    times = Host.of(columns(events)).times((np.array([begin]), np.array([end])))
    return {cause: int(time) for cause, (time,) in zip(CAUSES, times, strict=True) if time}


@pytest.mark.parametrize(
    ("category", "name", "state"),
    [
        ("cuda_runtime", "cudaLaunchKernelExC", "launching"),
        ("cuda_driver", "cuLaunchKernel", "launching"),
        ("cuda_runtime", "cudaGraphLaunch", "launching"),
        ("cuda_runtime", "hipExtModuleLaunchKernel", "launching"),
        ("CANN", "AscendCL@aclnnMm", "launching"),
        ("CANN", "AscendCL@aclnnMmGetWorkspaceSize", "other runtime calls"),
        ("CANN", "AscendCL@aclrtSynchronizeStreamWithTimeout", "synchronising"),
        ("cuda_runtime", "cudaDeviceSynchronize", "synchronising"),
        ("cuda_runtime", "cudaEventQuery", "synchronising"),
        ("cuda_runtime", "cudaStreamWaitEvent", "other runtime calls"),
        ("cuda_runtime", "hipMemcpyWithStream", "copying"),
        ("cuda_runtime", "cudaMemsetAsync", "copying"),
        ("cuda_runtime", "cudaMallocAsync", "allocating"),
        ("cuda_driver", "cuMemCreate", "allocating"),
        ("cuda_runtime", "cudaFree", "allocating"),
        ("cpu_op", "aten::copy_", "operators"),
        ("cpu_op", "cudaLaunchKernel", "operators"),
        ("python_function", "cudaFree", "Python and other host code"),
        ("user_annotation", "ProfilerStep#1", "Python and other host code"),
        ("overhead", "Activity Buffer Request", "profiler overhead"),
        ("Trace", "PyTorch Profiler (0)", "nothing recorded"),
        ("kernel", "gemm", "nothing recorded"),
        ("gpu_user_annotation", "ProfilerStep#1", "nothing recorded"),
    ],
)
def test_event_has_a_state(category: str, name: str, state: str) -> None:
    assert states_in([Event(category, name, 0, 5)], 0, 5) == {state: 5}


def test_runtime_call_determines_the_state_of_a_stack() -> None:
    events = [
        Event("user_annotation", "step", 0, 100),
        Event("cpu_op", "aten::mm", 10, 60),
        Event("cuda_runtime", "cudaStreamIsCapturing", 20, 25),
        Event("cuda_runtime", "cudaLaunchKernel", 30, 40),
        Event("kernel", "gemm", 150, 200, pid=0),
    ]

    assert states_in(events, 5, 110) == {
        "launching": 10,
        "other runtime calls": 5,
        "operators": 35,
        "Python and other host code": 45,
        "nothing recorded": 10,
    }


def test_waiting_thread_does_not_hide_other_threads() -> None:
    events = [
        Event("cpu_op", "aten::item", 0, 100, tid=1),
        Event("cuda_runtime", "cudaStreamSynchronize", 10, 90, tid=1),
        Event("cpu_op", "AddmmBackward0", 30, 50, tid=2),
        Event("python_function", "wait", 0, 100, tid=3),
        Event("cuda_runtime", "cudaLaunchKernel", 60, 65, tid=4),
    ]

    assert states_in(events, 0, 100) == {"launching": 5, "operators": 20 + 20, "synchronising": 55}


def test_each_span_has_separate_times() -> None:
    events = [Event("cpu_op", "a", 0, 10), Event("cuda_runtime", "cudaFree", 5, 20), Event("overhead", "o", 8, 9)]

    times = Host.of(columns(events)).times((np.array([0, 7, 19]), np.array([5, 12, 20])))

    assert dict(zip(CAUSES, map(list, times), strict=True)) == {cause: [0, 0, 0] for cause in CAUSES} | {
        "operators": [5, 0, 0],
        "allocating": [0, 4, 1],
        "profiler overhead": [0, 1, 0],
    }


def test_innermost_event_of_the_busiest_thread_is_found() -> None:
    state = list(CAUSES).index
    python = HostEvent(state("Python and other host code"), 0, 100, track=0, name=0)
    operator = HostEvent(state("operators"), 5, 90, track=0, name=1)
    inner = HostEvent(state("operators"), 5, 80, track=0, name=2)
    waits = HostEvent(state("synchronising"), 9, 100, track=1, name=4)

    assert innermost([python, operator, inner, waits]) == inner
    assert innermost([waits, python]) == waits
    assert innermost([]) is None


def test_event_of_a_gap_is_open_for_more_than_half_of_it() -> None:
    host = Host.of(
        columns(
            [Event("cpu_op", name, start, end) for name, start, end in (("a", 0, 50), ("b", 20, 40), ("c", 60, 99))]
        )
    )

    def open_in(begin: int, end: int) -> list[int]:
        return [event.begin_ns for event in host.open_in(begin, end)]

    assert open_in(10, 60) == [0]
    assert open_in(20, 50) == [0, 20]
    assert open_in(20, 60) == [0]
    assert open_in(60, 100) == [60]
    assert open_in(50, 60) == []


def summarise(events: Sequence[Event], *, with_host: bool = True) -> tuple[DeviceSummary, ...]:
    recorded = columns(events)
    names = recorded.tables.names
    communication = np.array(["nccl" in name for name in names])
    memory = np.array([name.startswith("Mem") for name in names])
    work = np.where(communication, COMMUNICATES, np.where(memory, MOVES, COMPUTES))
    steps = find_steps(recorded, StepNames([]))
    host = Host.of(recorded) if with_host else None
    return DeviceTimes(recorded, work, {0: "GPU A"}, steps, host, np.zeros(len(steps), dtype=bool)).summaries()


def kernel(name: str, start: int, end: int, *, device: int = 0, stream: int = 7) -> Event:
    kind = "gpu_memcpy" if name.startswith("Mem") else "kernel"
    return Event(kind, name, start, end, pid=device, tid=stream)


EVENTS = [
    Event("user_annotation", "step", 0, 100_000),
    Event("cpu_op", "aten::mm", 30_000, 38_000),
    Event("cuda_runtime", "cudaLaunchKernel", 30_500, 36_000),
    Event("cuda_runtime", "cudaDeviceSynchronize", 52_000, 61_000, tid=2),
    kernel("gemm", 10_000, 20_000),
    kernel("gemm", 15_000, 30_000, stream=8),
    kernel("nccl", 18_000, 30_000, stream=9),
    kernel("nccl", 40_000, 50_000, stream=9),
    kernel("Memcpy", 45_000, 46_500, stream=7),
    kernel("gemm", 60_000, 60_125),
    kernel("gemm", 1_000, 2_000, device=1),
]


def test_times_and_idle_causes_are_computed() -> None:
    first, second = summarise(EVENTS)

    assert first == DeviceSummary(
        device=0,
        name="GPU A",
        events=6,
        span_us=50.125,
        busy_us=30.125,
        idle_us=20.0,
        compute_us=20.125,
        communication_us=22.0,
        memory_us=1.5,
        overlap_us=13.5,
        exposed_communication_us=8.5,
        streams=(
            StreamSummary(stream=7, events=3, busy_us=11.625),
            StreamSummary(stream=8, events=1, busy_us=15.0),
            StreamSummary(stream=9, events=2, busy_us=22.0),
        ),
        idle=(
            IdleCause(cause="synchronising", idle_us=8.0, share=0.4),
            IdleCause(cause="launching", idle_us=5.5, share=0.275),
            IdleCause(cause="Python and other host code", idle_us=4.0, share=0.2),
            IdleCause(cause="operators", idle_us=2.5, share=0.125),
        ),
        gaps=(
            Gap(
                start_us=30.0,
                duration_us=10.0,
                cause="launching",
                host="cudaLaunchKernel",
                before="nccl",
                after="nccl",
            ),
            Gap(
                start_us=50.0,
                duration_us=10.0,
                cause="synchronising",
                host="cudaDeviceSynchronize",
                before="nccl",
                after="gemm",
            ),
        ),
    )
    assert (second.device, second.name, second.events, second.span_us, second.busy_us) == (1, None, 1, 1.0, 1.0)
    assert (second.idle, second.gaps) == ((), ())


def test_gaps_without_host_events_have_no_causes() -> None:
    first, _ = summarise([event for event in EVENTS if event.pid != 10], with_host=False)

    assert first.idle == ()
    assert first.gaps == (
        Gap(start_us=29.0, duration_us=10.0, cause=NOT_READ, host=None, before="nccl", after="nccl"),
        Gap(start_us=49.0, duration_us=10.0, cause=NOT_READ, host=None, before="nccl", after="gemm"),
    )


def test_ten_longest_gaps_are_kept() -> None:
    # Gaps of 5, 10, 5, 10, ...
    starts = [0]
    for number in range(19):
        starts.append(starts[-1] + 1 + (10 if number % 2 else 5))
    events = [kernel("gemm", start, start + 1) for start in starts]

    (device,) = summarise(events)

    assert [gap.duration_us for gap in device.gaps] == [0.01] * 9 + [0.005]
    assert device.gaps[-1].start_us == 0.001


TIMES = st.tuples(st.integers(0, 60), st.sampled_from([0, 1, 2, 3, 5, 8, 20, 45]))
KERNELS = st.lists(
    st.builds(
        lambda name, time, device, stream: kernel(name, time[0], sum(time), device=device, stream=stream),
        st.sampled_from(["gemm", "relu", "nccl", "Memcpy"]),
        TIMES,
        st.integers(0, 1),
        st.integers(7, 8),
    ),
    min_size=1,
    max_size=12,
)
HOST_STATES = {
    ("overhead", "o"): "profiler overhead",
    ("cuda_runtime", "cudaLaunchKernel"): "launching",
    ("cuda_runtime", "cudaFree"): "allocating",
    ("cuda_runtime", "cudaMemcpyAsync"): "copying",
    ("cuda_driver", "cuCtxGetCurrent"): "other runtime calls",
    ("cpu_op", "aten::mm"): "operators",
    ("cpu_op", "aten::add"): "operators",
    ("cuda_runtime", "cudaStreamSynchronize"): "synchronising",
    ("python_function", "f"): "Python and other host code",
    ("Trace", "t"): "nothing recorded",
}
HOST = st.lists(
    st.builds(
        lambda kind, time, thread: Event(*kind, time[0], sum(time), tid=thread),
        st.sampled_from(list(HOST_STATES)),
        TIMES,
        st.integers(1, 3),
    ),
    max_size=12,
)


def state_at(events: Sequence[Event], instant: int) -> str:
    """Return the first state of the table that applies to a thread."""
    states = {"nothing recorded"}
    for thread in (1, 2, 3):
        on_thread = {
            HOST_STATES[event.category, event.name]
            for event in events
            if event.pid == 10 and event.tid == thread and event.start <= instant < event.end
        }
        states |= on_thread - {"operators"} if "synchronising" in on_thread else on_thread
    return min(states, key=list(CAUSES).index)


def reference(events: Sequence[Event], device: int) -> dict[str, object]:
    """Reference implementation: evaluate each instant."""
    device_events = [event for event in events if event.pid == device]
    origin, begin, end = (
        min(e.start for e in events),
        min(e.start for e in device_events),
        max(e.end for e in device_events),
    )
    running = [
        {event.name for event in device_events if event.start <= instant < event.end} for instant in range(begin, end)
    ]
    idle = [state_at(events, begin + offset) for offset, names in enumerate(running) if not names]
    gaps = []
    start = begin
    while start < end:
        stop = next((later for later in range(start, end) if running[later - begin]), end)
        if stop > start:
            states = [state_at(events, instant) for instant in range(start, stop)]
            cause = max(CAUSES, key=lambda cause: (states.count(cause), -list(CAUSES).index(cause)))
            gaps.append((-(stop - start), (start - origin) / 1000, cause))
        start = stop + 1
    return {
        "events": len(device_events),
        "span": end - begin,
        "busy": sum(map(bool, running)),
        "compute": sum(bool(names & {"gemm", "relu"}) for names in running),
        "communication": sum("nccl" in names for names in running),
        "memory": sum("Memcpy" in names for names in running),
        "overlap": sum("nccl" in names and len(names) > 1 for names in running),
        "idle": {cause: idle.count(cause) for cause in CAUSES if cause in idle},
        "gaps": [(start, -length, cause) for length, start, cause in sorted(gaps)][:10],
    }


def as_reference(device: DeviceSummary) -> dict[str, object]:
    def ns(time_us: float) -> int:
        return round(time_us * 1000)

    assert ns(device.exposed_communication_us) == ns(device.communication_us) - ns(device.overlap_us)
    assert sum(stream.events for stream in device.streams) == device.events
    return {
        "events": device.events,
        "span": ns(device.span_us),
        "busy": ns(device.busy_us),
        "compute": ns(device.compute_us),
        "communication": ns(device.communication_us),
        "memory": ns(device.memory_us),
        "overlap": ns(device.overlap_us),
        "idle": {cause.cause: ns(cause.idle_us) for cause in device.idle},
        "gaps": [(gap.start_us, ns(gap.duration_us), gap.cause) for gap in device.gaps],
    }


@given(KERNELS, HOST)
def test_times_equal_the_reference(kernels: list[Event], host: list[Event]) -> None:
    events = kernels + host

    for device in summarise(events):
        assert as_reference(device) == reference(events, int(str(device.device)))


@given(KERNELS, HOST)
def test_gaps_are_the_same_without_the_host(kernels: list[Event], host: list[Event]) -> None:
    for alone, device in zip(summarise(kernels + host, with_host=False), summarise(kernels + host), strict=True):
        assert (alone.idle, {gap.cause for gap in alone.gaps} <= {NOT_READ}) == ((), True)
        causes = [(gap.cause, gap.host) for gap in device.gaps]
        gaps = [
            attrs.evolve(gap, cause=cause, host=event) for gap, (cause, event) in zip(alone.gaps, causes, strict=True)
        ]
        assert attrs.evolve(alone, idle=device.idle, gaps=tuple(gaps)) == device


@given(KERNELS, HOST)
def test_host_event_of_a_gap_is_selected_from_all_events(kernels: list[Event], host: list[Event]) -> None:
    events = kernels + host
    tables = columns(events).tables
    origin = min(event.start for event in events)
    states = list(CAUSES)
    recorded = [event for event in host if event.category != "Trace"]
    everything = [
        HostEvent(
            states.index(HOST_STATES[event.category, event.name]),
            event.start,
            event.end,
            tables.tracks.index((event.pid, event.tid)),
            tables.names.index(event.name),
        )
        for event in recorded
    ]

    for device in summarise(events):
        for gap in device.gaps:
            begin = origin + round(gap.start_us * 1000)
            end = begin + round(gap.duration_us * 1000)
            chosen = innermost(
                event for event in everything if 2 * (min(event.end_ns, end) - max(event.begin_ns, begin)) > end - begin
            )
            assert gap.host == (chosen and tables.names[chosen.name])
