"""Tests of paths and integrity checks of torch_npu directories. Fixtures are synthetic."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import ascend_files
import attrs
import pytest
from ascend_files import CPU, NPU, OUTPUT, analysed, database, kernel_rows, raw, trace_view
from hypothesis import given, strategies as st

from profdeck.base.processes import process_started
from profdeck_npu.artifact_kinds import AscendDirectoryKind
from profdeck_npu.traces.analysis_state import STATE_FILE, AnalysisState, read_state, write_state
from profdeck_npu.traces.check import check_directory, check_output
from profdeck_npu.traces.directory import AscendDirectory
from profdeck_traces.base.errors import TraceError
from profdeck_traces.base.files import directory_size
from profdeck_traces.inputs.artifact_kinds import FileCheck, chrome_trace, files_below, kind_of, size_to_read
from profdeck_traces.reading.reader import read_trace

TEXT_FILES = ("trace_view.json", "kernel_details.csv", "step_trace_time.csv", "communication.json")
NOBODY = 2**22 - 1  # no process has this id


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """An analysed directory."""
    directory = raw(tmp_path)
    analysed(directory)
    return directory


def state(state: Any, **changes: Any) -> AnalysisState:
    analysis_state = AnalysisState(
        state=state,
        host=socket.gethostname(),
        pid=os.getpid(),
        process_started=process_started(os.getpid()),
        started_ns=1,
        remedy="profdeck npu analyse DIR",
        expected=("trace_view.json", "kernel_details.csv"),
    )
    return attrs.evolve(analysis_state, **changes)


def test_directory_is_recognised_by_its_name(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(kind_of(directory), AscendDirectoryKind)
    assert kind_of(directory.parent) is None
    assert kind_of(directory.parent / "none_ascend_pt") is None
    file = directory.parent / "file_ascend_pt"
    file.touch()
    assert kind_of(file) is None
    monkeypatch.chdir(directory)
    assert isinstance(kind_of(Path()), AscendDirectoryKind)
    monkeypatch.chdir(OUTPUT)
    assert isinstance(kind_of(Path("..")), AscendDirectoryKind)


def test_paths_of_an_analysed_directory(directory: Path) -> None:
    paths, output = AscendDirectory(directory), directory / OUTPUT

    assert paths.output == output
    assert paths.trace_view == output / "trace_view.json"
    assert paths.kernel_details == output / "kernel_details.csv"
    assert paths.step_trace_time == output / "step_trace_time.csv"
    assert paths.communication == output / "communication.json"
    assert paths.database is None
    assert (paths.info, paths.rank) == (directory / "profiler_info_3.json", 3)
    database(output / "ascend_pytorch_profiler_3.db")
    assert paths.database == output / "ascend_pytorch_profiler_3.db"


def test_missing_files_are_none(tmp_path: Path) -> None:
    paths = AscendDirectory(raw(tmp_path, rank=None))

    assert (paths.output, paths.trace_view, paths.kernel_details, paths.database) == (None, None, None, None)
    assert (paths.step_trace_time, paths.communication, paths.rank) == (None, None, None)
    assert AscendDirectory(tmp_path / "none_ascend_pt").info is None


def test_directory_is_listed_as_one_artifact(directory: Path) -> None:
    (directory.parent / "step.json").touch()
    (directory.parent / "inner").mkdir()
    (directory.parent / "inner" / "a.json").touch()

    assert set(files_below(directory.parent)) == {
        directory, directory.parent / "step.json", directory.parent / "inner" / "a.json"
    }  # fmt: skip


def test_links_out_of_a_directory_are_not_counted(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "large").write_bytes(bytes(1_000_000))
    before = directory_size(directory)
    (directory / "link").symlink_to(elsewhere)
    (directory / "file").symlink_to(elsewhere / "large")

    assert directory_size(directory) == before


def test_chrome_trace_of_a_directory(directory: Path) -> None:
    trace = directory / OUTPUT / "trace_view.json"

    assert chrome_trace(directory) == trace
    assert chrome_trace(trace) == trace
    assert size_to_read(trace) == trace.stat().st_size
    assert size_to_read(directory) == trace.stat().st_size + (directory / OUTPUT / "kernel_details.csv").stat().st_size
    trace.unlink()
    with pytest.raises(TraceError, match=r"has no Chrome trace \(trace_view\.json\), only a kernel table\."):
        chrome_trace(directory)


def test_intact_directory_has_no_problem(directory: Path) -> None:
    assert check_directory(directory) == FileCheck(whole=True, problem=None, events=35)


def test_progress_covers_all_files(directory: Path) -> None:
    progress: list[tuple[int, int]] = []

    check_directory(directory, lambda bytes_read, total: progress.append((bytes_read, total)))

    read = sum((directory / OUTPUT / name).stat().st_size for name in TEXT_FILES)
    assert progress[-1] == (read, read)
    assert progress == sorted(progress)


@pytest.mark.parametrize("activities", [(CPU, NPU), (CPU,), (NPU,)])
def test_intact_raw_data_is_noted(tmp_path: Path, activities: tuple[str, ...]) -> None:
    check = check_directory(raw(tmp_path, activities=activities))

    assert (check.whole, check.problem, check.events) == (True, None, None)
    assert check.notes == ("raw data only, not analysed",)


@pytest.mark.parametrize(
    ("remove", "problem"),
    [
        ("profiler_info_3.json", "profiler_info.json is missing: the recording did not finish."),
        ("FRAMEWORK", "FRAMEWORK is missing, but the host was recorded."),
        ("PROF_000001_20260102030405678_ABCDEF", "PROF_*/device_* is missing, but the device was recorded."),
    ],
)
def test_missing_raw_data_is_reported(tmp_path: Path, remove: str, problem: str) -> None:
    directory = raw(tmp_path)
    lost = directory / remove
    shutil.rmtree(lost) if lost.is_dir() else lost.unlink()

    check = check_directory(directory)

    assert (check.whole, check.problem, check.notes) == (False, problem, ())


@pytest.mark.parametrize("info", ["", "{", '{"config": 3}', "[]", "\xff"])
def test_unreadable_info_file_is_reported(tmp_path: Path, info: str) -> None:
    directory = raw(tmp_path)
    (directory / "profiler_info_3.json").write_text(info, encoding="latin-1")

    problem = check_directory(directory).problem

    assert problem is not None
    assert problem.startswith("Cannot read profiler_info_3.json: ")


@pytest.mark.parametrize("info", ["{}", '{"config": {"common_config": {}, "experimental_config": null}}'])
def test_empty_info_file_is_accepted(tmp_path: Path, info: str) -> None:
    directory = raw(tmp_path)
    (directory / "profiler_info_3.json").write_text(info)

    assert check_directory(directory).whole


def test_empty_output_is_reported(tmp_path: Path) -> None:
    directory = raw(tmp_path)
    (directory / OUTPUT).mkdir()
    (directory / OUTPUT / "analyse.done").touch()

    assert check_directory(directory).problem == (
        "ASCEND_PROFILER_OUTPUT has neither trace_view.json nor a database: the analysis failed."
    )


def test_missing_kernel_table_is_reported(directory: Path) -> None:
    (directory / OUTPUT / "kernel_details.csv").unlink()

    check = check_directory(directory)

    assert (check.events, check.problem) == (35, "kernel_details.csv is missing, but the device was recorded.")


@pytest.mark.parametrize(("activities", "level"), [((CPU,), "Level1"), ((CPU, NPU), "Level_none")])
def test_kernel_table_is_optional_without_device_data(tmp_path: Path, activities: tuple[str, ...], level: str) -> None:
    directory = raw(tmp_path, activities=activities, level=level)
    (analysed(directory) / "kernel_details.csv").unlink()

    assert check_directory(directory).whole


def test_database_is_checked_and_noted(tmp_path: Path) -> None:
    directory = raw(tmp_path)
    output = directory / OUTPUT
    output.mkdir()
    database(output / "ascend_pytorch_profiler_3.db")

    check = check_directory(directory)

    assert (check.whole, check.events) == (True, None)
    assert check.notes == ("only a database, which profdeck does not read",)
    assert [file.name for file in output.iterdir()] == ["ascend_pytorch_profiler_3.db"]  # SQLite created no other files
    with pytest.raises(
        TraceError, match=r"has no timeline, only an unsupported database \(ascend_pytorch_profiler_3\.db\)\. Generate"
    ):
        read_trace(directory)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (lambda _: b"", "The file is empty."),
        (lambda data: data[:20], "is not an intact SQLite database: file is not a database."),
        (lambda data: data[: len(data) // 2], "is not an intact SQLite database: "),
        (lambda data: data[:-4096], "is not an intact SQLite database: "),
        (lambda data: data[:4096] + b"\xff" * 100 + data[4196:], "is not an intact SQLite database: "),
        (lambda _: b"x" * 10_000, "is not an intact SQLite database: file is not a database."),
    ],
)
def test_corrupt_database_is_reported(tmp_path: Path, content: Any, problem: str) -> None:
    directory = raw(tmp_path)
    output = analysed(directory)
    file = output / "ascend_pytorch_profiler.db"
    database(file)
    file.write_bytes(content(file.read_bytes()))

    check = check_directory(directory)

    assert not check.whole
    assert check.problem is not None
    assert check.problem.startswith("ascend_pytorch_profiler.db")
    assert problem in check.problem


@pytest.mark.parametrize("name", TEXT_FILES)
@pytest.mark.parametrize("content", [b"", b"\0" * 50, b"not what it should be\n", b'{"traceEvents": []}'])
def test_file_with_other_content_is_reported(directory: Path, name: str, content: bytes) -> None:
    (directory / OUTPUT / name).write_bytes(content)

    check = check_directory(directory)

    assert not check.whole
    assert check.problem is not None
    assert name in check.problem


@pytest.mark.parametrize("name", TEXT_FILES)
def test_directory_with_the_name_of_a_file_is_ignored(directory: Path, name: str) -> None:
    (directory / OUTPUT / name).unlink()
    (directory / OUTPUT / name).mkdir()

    check_directory(directory)  # does not raise; other tests check the problem


@given(data=st.data(), name=st.sampled_from(TEXT_FILES))
def test_truncated_file_is_reported(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, name: str) -> None:
    directory = raw(tmp_path_factory.mktemp("cut"))
    file = analysed(directory) / name
    content = file.read_bytes()
    # Truncation of a table after a complete line cannot be detected.
    cut = data.draw(
        st.integers(0, len(content) - 1).filter(lambda cut: name.endswith(".json") or content[cut - 1 : cut] != b"\n")
    )
    file.write_bytes(content[:cut])

    check = check_directory(directory)

    assert not check.whole
    assert check.problem is not None
    assert name in check.problem


def test_lost_device_data_of_the_first_step_is_reported(tmp_path: Path) -> None:
    directory = raw(tmp_path)
    analysed(directory, kernels=kernel_rows(ascend_files.KERNELS[4:], ascend_files.LEVEL_1))

    assert check_directory(directory).problem == (
        "No kernels in step 10: device data at the start of the window is lost."
    )
    assert check_output(directory, ["*.csv", "trace_view.json"]) is None  # the analysis itself succeeded


def test_lost_device_data_of_several_steps_is_reported(tmp_path: Path) -> None:
    directory = raw(tmp_path)
    kernels = [{**kernel, "Step Id": 12} for kernel in ascend_files.KERNELS[4:]]
    analysed(directory, kernels=kernel_rows(kernels, ascend_files.LEVEL_1))

    assert check_directory(directory).problem == (
        "No kernels in steps 10 to 11: device data at the start of the window is lost."
    )


@pytest.mark.parametrize(
    "steps",
    [
        [10, 10, 10, 10, "", ""],  # an idle step at the end
        ["", "", "", "", 11, 11],  # the first kernels exist but have no step
        ["", "", "", "", "", ""],
    ],
)
def test_steps_without_kernels_can_be_intact(tmp_path: Path, steps: list[object]) -> None:
    directory = raw(tmp_path)
    kernels = [{**kernel, "Step Id": step} for kernel, step in zip(ascend_files.KERNELS, steps, strict=True)]
    analysed(directory, kernels=kernel_rows(kernels, ascend_files.LEVEL_1))

    assert check_directory(directory).whole


def test_finished_analysis_requires_all_output_files(directory: Path) -> None:
    write_state(directory, state("done", pid=NOBODY))

    check = check_directory(directory)
    assert (check.whole, check.notes) == (True, ())

    (directory / OUTPUT / "kernel_details.csv").unlink()
    assert check_directory(directory).problem == (
        "ASCEND_PROFILER_OUTPUT/kernel_details.csv is missing, but the analysis has finished."
    )
    shutil.rmtree(directory / OUTPUT)
    assert check_directory(directory).problem == (
        "ASCEND_PROFILER_OUTPUT/trace_view.json is missing, but the analysis has finished. "
        "ASCEND_PROFILER_OUTPUT/kernel_details.csv is missing, but the analysis has finished."
    )


@pytest.mark.parametrize("pattern", ["../profiler_info_3.json", "/etc/passwd", "**", "[", ""])
def test_patterns_match_only_output_files(directory: Path, pattern: str) -> None:
    write_state(directory, state("done", expected=(pattern,)))

    problem = check_directory(directory).problem

    assert (problem is None) == (pattern == "**")


@pytest.mark.parametrize("name", ["pending", "running"])
def test_analysis_in_progress_is_reported(directory: Path, name: str) -> None:
    write_state(directory, state(name))

    check = check_directory(directory)

    assert (check.whole, check.events) == (False, None)
    assert check.problem == f"its analysis is in progress (process {os.getpid()})"
    with pytest.raises(TraceError, match=f"is being analysed by process {os.getpid()}. Wait until it has finished"):
        read_trace(directory)


@pytest.mark.parametrize("name", ["pending", "running"])
@pytest.mark.parametrize("changes", [{"pid": NOBODY}, {"process_started": "1"}])
def test_interrupted_analysis_is_reported_with_a_command(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    directory = raw(tmp_path)
    write_state(directory, state(name, **changes))

    assert check_directory(directory).problem == ("its analysis ended without a result; run: profdeck npu analyse DIR")
    with pytest.raises(TraceError, match="has no timeline: its analysis ended without a result; run: profdeck"):
        read_trace(directory)


@pytest.mark.parametrize("changes", [{"host": "elsewhere"}, {"pid_namespace": "pid:[1]"}])
def test_analysis_that_cannot_be_checked_is_not_called_ended(tmp_path: Path, changes: dict[str, Any]) -> None:
    directory = raw(tmp_path)
    write_state(directory, state("running", **changes))

    assert "has not finished its analysis, and its state is unknown" in (check_directory(directory).problem or "")
    with pytest.raises(TraceError, match="has no timeline: process .* has not finished its analysis"):
        read_trace(directory)


def test_failed_analysis_is_reported_with_reason_and_command(tmp_path: Path) -> None:
    directory = raw(tmp_path)
    write_state(directory, state("failed", problems=("no msprof.", "nothing else")))

    assert check_directory(directory).problem == (
        "its analysis failed: no msprof; nothing else; run: profdeck npu analyse DIR"
    )
    with pytest.raises(TraceError, match="its analysis failed: no msprof; nothing else; run: profdeck npu analyse DIR"):
        read_trace(directory)
    write_state(directory, state("failed", remedy=""))
    assert check_directory(directory).problem == "its analysis failed."


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"state": "asleep"}', b"\xff"])
def test_corrupt_state_is_reported_but_the_trace_is_readable(directory: Path, content: bytes) -> None:
    (directory / STATE_FILE).write_bytes(content)

    problem = check_directory(directory).problem
    assert problem is not None
    assert "Cannot read the analysis state in" in problem
    assert read_trace(directory).check.whole

    shutil.rmtree(directory / OUTPUT)
    with pytest.raises(TraceError, match="Cannot read the analysis state in"):
        read_trace(directory)


def test_reading_raw_data_raises_an_error_with_instructions(tmp_path: Path) -> None:
    directory = raw(tmp_path)

    with pytest.raises(TraceError) as caught:
        read_trace(directory)

    assert str(caught.value) == (
        f"{directory} has no timeline, only raw data. Generate text files with torch_npu on a host with CANN: "
        f"torch_npu.profiler.profiler.analyse('{directory}', max_process_number=1, export_type='text')."
    )


def test_only_expected_files_are_checked(directory: Path) -> None:
    expected = ["trace_view.json", "kernel_details.csv", "ascend_pytorch_profiler*.db"]
    assert check_output(directory, expected) == (
        "ASCEND_PROFILER_OUTPUT/ascend_pytorch_profiler*.db is missing, but the analysis has finished."
    )
    database(directory / OUTPUT / "ascend_pytorch_profiler_3.db")
    (directory / OUTPUT / "communication.json").write_text("{")  # not an expected file
    assert check_output(directory, expected) is None
    (directory / OUTPUT / "trace_view.json").write_text("[")
    problem = check_output(directory, expected)
    assert problem is not None
    assert problem.startswith("trace_view.json: The JSON is not closed")


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is closed to root")
@pytest.mark.parametrize("name", TEXT_FILES)
def test_file_without_read_permission_is_reported(directory: Path, name: str) -> None:
    (directory / OUTPUT / name).chmod(0)

    problem = check_directory(directory).problem

    assert problem is not None
    assert "Permission denied" in problem


def test_file_system_error_raises_a_trace_error(directory: Path) -> None:
    loop = directory / OUTPUT
    shutil.rmtree(loop)
    loop.symlink_to(loop)

    with pytest.raises(TraceError, match="Too many levels of symbolic links"):
        check_directory(directory)
    with pytest.raises(TraceError, match="Too many levels of symbolic links"):
        read_trace(directory)
    assert size_to_read(directory) == 0


def test_step_annotations_are_found_in_indented_json(tmp_path: Path) -> None:
    directory = raw(tmp_path)
    events = [*ascend_files.framework_events(), *ascend_files.msprof_events()]
    analysed(
        directory,
        trace=json.dumps(events, indent=2),
        kernels=kernel_rows(ascend_files.KERNELS[4:], ascend_files.LEVEL_1),
    )

    assert "No kernels in step 10" in (check_directory(directory).problem or "")
    assert read_state(directory) is None
    assert trace_view([{"a": 1}], [{"b": 2}]) == '[{"a": 1},{"b": 2}]'
