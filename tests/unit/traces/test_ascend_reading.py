"""Tests of reading a torch_npu directory as one trace. Only the last two tests use real files."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import ascend_files
import pytest
from ascend_files import KERNELS, LEVEL_0, LEVEL_1, NAME, OLD, OUTPUT, analysed, kernel_rows, raw, trace_view
from hypothesis import given, strategies as st

from profdeck_traces.analysis.step_names import StepNames
from profdeck_traces.analysis.summary import summarise_trace
from profdeck_traces.base.errors import TraceError
from profdeck_traces.inputs.sources import TraceSource
from profdeck_traces.merge import MergeSource, merge_traces
from profdeck_traces.reading.reader import read_trace
from profdeck_traces.reading.trace import Trace
from profdeck_traces.writing.selection import Selection
from profdeck_traces.writing.windows import iteration_window, read_extent, step_window, time_window

BASE_NS = ascend_files.BASE_US * 1000


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = raw(tmp_path)
    analysed(directory)
    return directory


def is_step(name: str) -> bool:
    return name.startswith("ProfilerStep#")


def contents(trace: Trace) -> Counter[tuple[str, str, tuple[Any, Any], int, int]]:
    """Return the category, name, process and thread, start and duration in ns of each event."""
    columns, tables = trace.events, trace.tables
    categories = [tables.categories[category] for category in tables.name_category]
    return Counter(
        (categories[name], tables.names[name], tables.tracks[track], start - BASE_NS, end - start)
        for name, track, start, end in zip(
            columns.name.tolist(),
            columns.track.tolist(),
            columns.start_ns.tolist(),
            columns.end_ns.tolist(),
            strict=True,
        )
    )


def names_in(events: Counter[Any], category: str) -> set[Any]:
    return {event[1:] for event in events if event[0] == category}


KERNELS_READ = {
    ("aclnnMatmul_MatMulV3Common_MatMulV3", (0, 16), 100_000, 40_500),
    ("aclnnMatmul_MatMulV3Common_MatMulV3", (0, 16), 1_100_000, 41_500),
    ("Cast", (0, 16), 150_000, 10_000),
    ("Cast", (0, 16), 1_020_000, 30_000),
    ("hcom_allReduce_", (0, "group 445"), 170_000, 100_250),
    ("hcom_allReduce_", (0, "group 445"), 1_170_000, 90_000),
}
PLACES = {
    ("ProfilerStep#10", (0, "steps"), 100_000, 950_000),
    ("ProfilerStep#11", (0, "steps"), 1_100_000, 160_000),
}
HOST = ascend_files.HOST
STEPS = {
    ("ProfilerStep#10", (HOST, HOST), 0, 990_000),
    ("ProfilerStep#11", (HOST, HOST), 1_000_000, 990_000),
}


def test_kernels_are_read_from_the_table_and_other_events_from_the_trace(directory: Path) -> None:
    trace = read_trace(directory)

    events = contents(trace)
    assert max(events.values()) == 1
    assert names_in(events, "kernel") == KERNELS_READ
    assert names_in(events, "gpu_user_annotation") == PLACES
    assert names_in(events, "cpu_op") == STEPS | {
        ("aten::mm", (HOST, HOST), 20_000, 30_000),
        ("aten::mm", (HOST, HOST), 1_030_000, 31_000),
    }
    assert names_in(events, "dequeue") == {("Dequeue@aclnnMatmul", (HOST, 4713), 40_000, 20_000)}
    assert names_in(events, "CANN") == {("AscendCL@aclnnMatmul", (ascend_files.CANN, 4713), 45_000, 10_000)}
    # Device lanes, with their waits and mstx ranges, are skipped. The communication lanes are not device lanes.
    assert {event[0] for event in events} == {
        "kernel", "gpu_user_annotation", "cpu_op", "dequeue", "CANN", "Communication", "Overlap Analysis"
    }  # fmt: skip
    assert trace.process_names[ascend_files.HARDWARE] == "Ascend Hardware"
    assert trace.thread_names[ascend_files.CANN, 4713] == "Thread 4713"
    assert (trace.path, trace.rank, trace.has_host) == (directory, 3, True)
    assert (trace.check.whole, trace.check.problem, trace.check.events) == (True, None, 35)
    assert trace.check.size_bytes == sum(
        (directory / OUTPUT / name).stat().st_size for name in ("trace_view.json", "kernel_details.csv")
    )
    assert trace.kernel_types["Cast"] == "Cast"
    assert trace.cores["AI_VECTOR_CORE"] == (2, 40_000)


@pytest.mark.parametrize("communication", ["Communication", "HCCL"])
def test_collectives_are_counted_once(directory: Path, communication: str) -> None:
    msprof = ascend_files.msprof_events(communication=communication)
    (directory / OUTPUT / "trace_view.json").write_text(trace_view(ascend_files.framework_events(), msprof))

    summary = summarise_trace(directory)

    assert [(kernel.name, kernel.count, kernel.total_us) for kernel in summary.kernels] == [
        ("hcom_allReduce_", 2, 190.25),
        ("aclnnMatmul_MatMulV3Common_MatMulV3", 2, 82.0),
        ("Cast", 2, 40.0),
    ]
    (device,) = summary.devices
    assert (device.busy_us, device.communication_us) == (312.25, 190.25)
    assert (summary.rank, summary.whole, summary.events) == (3, True, 35)


def test_steps_have_the_kernels_of_the_table(directory: Path) -> None:
    summary = summarise_trace(directory)

    # The last kernel of step 10 runs while the host is in step 11.
    assert [(step.name, step.start_us, step.duration_us, step.device_us) for step in summary.steps] == [
        ("ProfilerStep#10", 0.0, 990.0, 180.75),
        ("ProfilerStep#11", 1000.0, 990.0, 131.5),
    ]


@pytest.mark.parametrize("columns", [LEVEL_0, LEVEL_1, OLD])
def test_steps_are_read_from_the_table_without_host_annotations(directory: Path, columns: tuple[str, ...]) -> None:
    framework = [event for event in ascend_files.framework_events() if not is_step(event["name"])]
    (directory / OUTPUT / "trace_view.json").write_text(trace_view(framework, ascend_files.msprof_events()))
    (directory / OUTPUT / "kernel_details.csv").write_text(kernel_rows(KERNELS, columns))

    summary = summarise_trace(directory)

    assert [(step.name, step.duration_us, step.device_us) for step in summary.steps] == [
        ("ProfilerStep#10", 950.0, 180.75),
        ("ProfilerStep#11", 160.0, 131.5),
    ]


def test_steps_are_read_from_the_host_without_step_ids(directory: Path) -> None:
    (directory / OUTPUT / "kernel_details.csv").write_text(kernel_rows(KERNELS, LEVEL_1, steps=False))

    summary = summarise_trace(directory)

    assert [(step.name, step.duration_us, step.device_us) for step in summary.steps] == [
        ("ProfilerStep#10", 990.0, 150.75),  # from the kernels' times, as in other traces
        ("ProfilerStep#11", 990.0, 161.5),
    ]


def test_kernels_of_several_devices_are_separate(directory: Path) -> None:
    kernels = [{**kernel, "Device_id": number % 2} for number, kernel in enumerate(KERNELS)]
    (directory / OUTPUT / "kernel_details.csv").write_text(kernel_rows(kernels, LEVEL_1))

    summary = summarise_trace(directory)

    assert [device.device for device in summary.devices] == [0, 1]
    assert [step.device_us for step in summary.steps] == [180.75, 131.5]


def test_directory_without_a_table(directory: Path) -> None:
    (directory / OUTPUT / "kernel_details.csv").unlink()

    trace = read_trace(directory)

    assert contents(trace) == contents(read_trace(directory / OUTPUT / "trace_view.json"))
    assert len(names_in(contents(trace), "Ascend Hardware")) == 4
    assert (trace.path, trace.rank, trace.check.whole) == (directory, 3, True)


def test_directory_without_a_trace(directory: Path) -> None:
    (directory / OUTPUT / "trace_view.json").unlink()

    trace = read_trace(directory)

    assert names_in(contents(trace), "kernel") == KERNELS_READ
    assert (trace.path, trace.rank, trace.check.events, trace.has_host) == (directory, 3, 6, False)


def test_files_can_be_read_individually(directory: Path) -> None:
    assert summarise_trace(directory / OUTPUT / "kernel_details.csv").events == 6
    assert summarise_trace(directory / OUTPUT / "trace_view.json").events == 35


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is not Ascend's kernel_details.csv"),
        (b"Name,Type,Start Time(us),Duration(us)\r\n", "kernel_details.csv: The file has no rows."),
        (b"\0\xff", "is not Ascend's kernel_details.csv"),
    ],
)
def test_unreadable_table_is_reported(directory: Path, content: bytes, problem: str) -> None:
    (directory / OUTPUT / "kernel_details.csv").write_bytes(content)

    trace = read_trace(directory)

    assert len(names_in(contents(trace), "Ascend Hardware")) == 4  # device lanes replace the table
    assert not trace.check.whole
    assert trace.check.problem is not None
    assert problem in trace.check.problem


@pytest.mark.parametrize("content", [b"", b"[", b"no trace", b"{}"])
def test_unreadable_trace_is_reported(directory: Path, content: bytes) -> None:
    (directory / OUTPUT / "trace_view.json").write_bytes(content)

    trace = read_trace(directory)

    assert names_in(contents(trace), "kernel") == KERNELS_READ
    assert [step.step for step in summarise_trace(directory).steps] == [10, 11]
    assert not trace.check.whole
    assert trace.check.problem is not None
    assert trace.check.problem.startswith("trace_view.json: ")


def test_unreadable_table_and_trace_raise_a_trace_error(directory: Path) -> None:
    (directory / OUTPUT / "trace_view.json").unlink()
    (directory / OUTPUT / "kernel_details.csv").write_text("")

    with pytest.raises(TraceError, match="is not Ascend's kernel_details.csv"):
        read_trace(directory)


def test_problems_of_both_files_are_reported(directory: Path) -> None:
    (directory / OUTPUT / "trace_view.json").write_text("[")
    table = directory / OUTPUT / "kernel_details.csv"
    table.write_bytes(table.read_bytes()[:-20])

    problem = read_trace(directory).check.problem

    assert problem is not None
    assert problem.startswith(
        "kernel_details.csv: Line 7 does not have 16 columns with valid times. trace_view.json: The"
    )


def test_progress_covers_both_files(directory: Path) -> None:
    progress: list[tuple[int, int]] = []

    size_bytes = read_trace(
        directory, on_progress=lambda bytes_read, total: progress.append((bytes_read, total))
    ).check.size_bytes

    assert progress[-1] == (size_bytes, size_bytes)
    assert progress == sorted(progress)


events = st.lists(
    st.fixed_dictionaries(
        {
            "ph": st.sampled_from(["X", "X", "X", "M", "s"]),
            "name": st.sampled_from(["process_name", "ProfilerStep#10", "aten::mm", "Cast66", "Notify_Wait"]),
            "pid": st.integers(1, 4),
            "tid": st.integers(0, 2),
            "ts": st.integers(0, 10**6).map(lambda ns: f"{ns // 1000}.{ns % 1000:03}"),
            "dur": st.integers(0, 1000),
            "args": st.fixed_dictionaries(
                {"name": st.sampled_from(["Python", "CANN", "Ascend Hardware", "Communication", "HCCL"])}
            ),
        },
        optional={"cat": st.sampled_from(["cpu_op", "dequeue", "kernel"])},
    ),
    min_size=1,
    max_size=30,
)


@given(events)
def test_all_events_outside_device_lanes_are_kept(tmp_path_factory: Any, events: list[dict[str, Any]]) -> None:
    directory = raw(tmp_path_factory.mktemp("any"))
    output = analysed(directory, trace=json.dumps(events))

    merged_events = contents(read_trace(directory))

    alone = contents(read_trace(output / "trace_view.json"))
    table = {
        event: count
        for event, count in contents(read_trace(output / "kernel_details.csv")).items()
        if event[0] == "kernel"
    }
    expected = Counter({event: count for event, count in alone.items() if event[0] != "Ascend Hardware"}) + Counter(
        table
    )
    marked = any(event[0] == "cpu_op" and is_step(event[1]) for event in alone)
    ours = {event for event in merged_events if event[0] in {"gpu_user_annotation", "user_annotation"}}
    assert {event: count for event, count in merged_events.items() if event not in ours} == dict(expected)
    assert names_in(merged_events, "gpu_user_annotation") == PLACES
    assert len(names_in(merged_events, "user_annotation")) == (0 if marked else 2)


# Uses of the trace.


def test_step_window_includes_the_last_kernel(directory: Path) -> None:
    def extent(first: int, last: int) -> tuple[int | None, int | None]:
        selection = step_window(directory, range(first, last + 1))
        return selection.begin_ns, selection.end_ns

    assert extent(10, 10) == (BASE_NS, BASE_NS + 1_050_000)
    assert extent(10, 11) == (BASE_NS, BASE_NS + 1_990_000)
    with pytest.raises(TraceError, match=r"does not have the step 12: it has 10\.\.11\."):
        step_window(directory, range(12, 13))
    (directory / OUTPUT / "kernel_details.csv").write_text("nothing")
    assert extent(10, 10) == (BASE_NS, BASE_NS + 990_000)


def test_other_windows_equal_those_of_the_trace(directory: Path) -> None:
    assert read_extent(directory) == read_extent(directory / OUTPUT / "trace_view.json")
    assert time_window(directory, 0, 1000) == Selection(begin_ns=BASE_NS, end_ns=BASE_NS + 1000)
    with pytest.raises(TraceError, match="does not have the iteration 0"):
        iteration_window(directory, range(1), StepNames([".*"]))


def test_ranks_are_merged(tmp_path: Path) -> None:
    sources = []
    for rank in range(2):
        directory = raw(tmp_path, NAME.replace("0003", f"000{rank}"), rank=rank)
        analysed(directory)
        sources.append(MergeSource(directory, TraceSource(directory).label, rank))
    sources.append(MergeSource(raw(tmp_path, NAME.replace("0003", "0002")), "rank 2", 2))

    check = merge_traces(sources, tmp_path / "all.json", gzip=False)

    document = json.loads((tmp_path / "all.json").read_text())
    assert check.problem is not None
    assert check.problem.startswith("rank 2: ")
    assert "has no timeline, only raw data" in check.problem
    process_names = {
        event["args"]["name"]
        for event in document["traceEvents"]
        if event["ph"] == "M" and event["name"] == "process_name"
    }
    assert {"rank 0: Python", "rank 1: Ascend Hardware", "rank 1: Communication"} <= process_names
    assert sum(event["name"] == "Cast66" for event in document["traceEvents"]) == 2


@pytest.mark.shared_data
def test_real_files_are_combined(data: Path, tmp_path: Path) -> None:
    directory = raw(tmp_path)
    output = directory / OUTPUT
    output.mkdir()
    for name in ("kernel_details.csv", "trace_view.json"):  # from two different recordings
        shutil.copy(data / "npu" / name, output)
    events = json.loads((output / "trace_view.json").read_text())

    summary = summarise_trace(directory)

    assert (summary.whole, summary.problem, summary.events) == (True, None, len(events))
    assert (sum(kernel.count for kernel in summary.kernels), len(summary.devices)) == (591, 1)
    assert {stream.stream for stream in summary.devices[0].streams} == {
        *(16, 17),
        *("group 328", "group 445", "group 935"),
    }
    assert sum(operator.count for operator in summary.operators) == sum(
        event["ph"] == "X" and event.get("cat") == "cpu_op" and not is_step(event["name"]) for event in events
    )
    assert [(step.name, step.duration_us) for step in summary.steps] == [("ProfilerStep#1", 14091.97)]
    assert summary.steps[0].device_us == pytest.approx(summary.categories[0].total_us, rel=0.2)


@pytest.mark.shared_data
def test_real_trace_without_a_table_counts_waits_as_work(data: Path, tmp_path: Path) -> None:
    directory = raw(tmp_path)
    (directory / OUTPUT).mkdir()
    shutil.copy(data / "npu" / "trace_view.json", directory / OUTPUT)

    trace = read_trace(directory, is_step=is_step)

    assert len(names_in(contents(trace), "Ascend Hardware")) == 276
    assert [trace.tables.names[name] for name in trace.annotations.name] == ["ProfilerStep#1"]
