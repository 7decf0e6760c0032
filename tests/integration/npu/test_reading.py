"""Tests of reading the output of torch_npu's real analysis. The msprof stub invents the device rows."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from profdeck_npu.traces.check import check_directory
from profdeck_npu.traces.directory import AscendDirectory
from profdeck_traces.analysis.summary import summarise_trace
from profdeck_traces.inputs.sources import find_sources
from profdeck_traces.reading.reader import read_trace
from profdeck_traces.writing.trim import trim_trace
from profdeck_traces.writing.windows import step_window

RECORD = """
import os, sys
import torch, torch_npu
from torch_npu.profiler import AiCMetrics, ProfilerActivity, ProfilerLevel
from torch_npu.profiler import _ExperimentalConfig, profile, schedule, tensorboard_trace_handler
from torch_npu.profiler.profiler import analyse

CPU, NPU = ProfilerActivity.CPU, ProfilerActivity.NPU

def record(name, export, level=ProfilerLevel.Level1, activities=(CPU, NPU), **options):
    config = _ExperimentalConfig(
        profiler_level=level, aic_metrics=AiCMetrics.AiCoreNone, export_type=export, **options
    )
    prof = profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=1, active=3, repeat=1),
        on_trace_ready=tensorboard_trace_handler(".", name, analyse_flag=False),
        experimental_config=config,
    )
    x = torch.ones(4).to("npu")
    prof.start()
    for _ in range(4):
        x + 1
        x * 2
        torch.npu.synchronize()
        prof.step()
    prof.stop()
    return prof.prof_if.prof_path
"""
ANALYSED = (
    RECORD
    + """
os.environ["RANK"] = "3"
for name, export, options in (
    ("level1", "text", {}),
    ("level0", "text", {"level": ProfilerLevel.Level0}),
    ("both", ["text", "db"], {"mstx": True}),
    ("device", "text", {"activities": (NPU,)}),
):
    analyse(record(name, export, **options), 1)
os.environ["STUB_DRIVER_LOSE_TASKS"] = "2"
analyse(record("lost", "text"), 1)
os.environ["STUB_MSPROF"] = "fail"
analyse(record("failed", "text"), 1)
"""
)


@pytest.fixture(scope="module")
def folder(driver, msprof_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Directories of one process, keyed by the start of their names."""
    folder = tmp_path_factory.mktemp("recorded")
    with driver.jobs(folder, PATH=msprof_path) as jobs:
        jobs(ANALYSED)
        yield folder


@pytest.fixture
def directory(folder: Path, request: pytest.FixtureRequest) -> Path:
    (directory,) = folder.glob(f"{request.param}_*_ascend_pt")
    return directory


def rows(directory: Path) -> list[dict[str, str]]:
    table = AscendDirectory(directory).kernel_details
    assert table is not None
    with table.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def events(directory: Path) -> list[dict[str, Any]]:
    trace = AscendDirectory(directory).trace_view
    assert trace is not None
    return json.loads(trace.read_text(encoding="utf-8"))


def test_all_directories_are_found(folder: Path) -> None:
    sources = find_sources([folder])
    assert len(sources) == len(list(folder.glob("*_ascend_pt")))
    assert {(source.rank, source.label) for source in sources} == {(3, "rank 3")}


@pytest.mark.parametrize("directory", ["level1", "level0", "both"], indirect=True)
def test_all_rows_and_events_of_a_directory_are_read(directory: Path) -> None:
    table, trace = rows(directory), events(directory)
    check = check_directory(directory)
    assert (check.whole, check.problem, check.notes) == (True, None, ())
    assert check.events == sum("ph" in event for event in trace)
    summary = summarise_trace(directory)
    assert (summary.whole, summary.problem, summary.events, summary.rank) == (True, None, check.events, 3)
    assert sum(kernel.count for kernel in summary.kernels) == len(table)
    assert {kernel.name for kernel in summary.kernels} == {row["Type"] for row in table}
    assert [(kernel.type, kernel.kind) for kernel in summary.kernels] == [
        (kernel.name, "kernel") for kernel in summary.kernels
    ]
    assert summary.busy_us == pytest.approx(sum(float(row["Duration(us)"]) for row in table), abs=0.01)
    operators = [event for event in trace if event.get("cat") == "cpu_op" and not event["name"].startswith("Profiler")]
    assert sum(operator.count for operator in summary.operators) == len(operators) > 0
    assert set(read_trace(directory).process_names.values()) >= {"Python", "Ascend Hardware"}


@pytest.mark.parametrize("directory", ["level1", "both"], indirect=True)
def test_host_steps_have_the_kernels_of_the_table(directory: Path) -> None:
    expected: dict[int, float] = {}
    for row in rows(directory):
        expected[int(row["Step Id"])] = expected.get(int(row["Step Id"]), 0.0) + float(row["Duration(us)"])
    annotation_us = {event["name"]: event["dur"] for event in events(directory) if event.get("cat") == "cpu_op"}
    steps = summarise_trace(directory).steps
    assert [step.step for step in steps] == [1, 2, 3]
    assert [step.duration_us for step in steps] == [
        pytest.approx(annotation_us[step.name], abs=0.001) for step in steps
    ]
    assert {step.step: step.device_us for step in steps} == {
        step: pytest.approx(device_us, abs=0.01) for step, device_us in expected.items()
    }


@pytest.mark.parametrize("directory", ["level1"], indirect=True)
def test_collectives_have_their_group_and_are_counted_once(directory: Path) -> None:
    events = read_trace(directory).events
    kernels = events[events.tables.names_of_categories(frozenset({"kernel"}))[events.name]]
    collective_rows = [row for row in rows(directory) if row["Accelerator Core"] == "COMMUNICATION"]
    streams = [row["Stream ID"] for row in rows(directory)]
    assert {kernels.tables.tracks[track] for track in kernels.track} == {
        (0, "group 123" if stream == "N/A" else int(stream)) for stream in streams
    }
    summary = summarise_trace(directory)
    assert (
        sum(kernel.count for kernel in summary.kernels if kernel.category == "communication")
        == len(collective_rows)
        > 0
    )
    # trace_view.json has the same collectives as waits on a device stream and in lanes outside the device.
    view = AscendDirectory(directory).trace_view
    assert view is not None
    assert sum(kernel.count for kernel in summarise_trace(view).kernels if kernel.name == "EVENT_WAIT") == len(
        collective_rows
    )
    assert "EVENT_WAIT" not in {kernel.name for kernel in summary.kernels}


@pytest.mark.parametrize("directory", ["level1"], indirect=True)
def test_step_is_trimmed_with_its_kernels(directory: Path, tmp_path: Path) -> None:
    check = trim_trace(directory, tmp_path / "part.json", step_window(directory, range(2, 3)))
    assert check.whole
    trimmed_events = [event for event in json.loads((tmp_path / "part.json").read_text()) if event["ph"] == "X"]
    expected_starts = {float(row["Start Time(us)"]) for row in rows(directory) if row["Step Id"] == "2"}
    assert expected_starts <= {float(event["ts"]) for event in trimmed_events}


@pytest.mark.parametrize("directory", ["device"], indirect=True)
def test_device_only_recording_has_no_steps(directory: Path) -> None:
    summary = summarise_trace(directory)
    assert check_directory(directory).whole
    assert (summary.steps, summary.operators) == ((), ())
    assert sum(kernel.count for kernel in summary.kernels) == len(rows(directory))
    assert "Step Id" not in rows(directory)[0]


@pytest.mark.parametrize("directory", ["lost"], indirect=True)
def test_lost_device_data_is_reported(directory: Path) -> None:
    assert check_directory(directory).problem == (
        "No kernels in step 1: device data at the start of the window is lost."
    )


@pytest.mark.parametrize("directory", ["failed"], indirect=True)
def test_failed_analysis_is_reported(directory: Path) -> None:
    problem = check_directory(directory).problem
    assert problem is not None
    # The analysis has written the host events but not closed the array, to append the device events.
    assert problem.startswith(
        "kernel_details.csv is missing, but the device was recorded. trace_view.json: The JSON is not closed"
    )
    assert summarise_trace(directory).operators
