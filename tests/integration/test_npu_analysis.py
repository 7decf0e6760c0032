"""Analysis of NPU captures with a stub of torch_npu: processes, time limits, states and the command line.

The stub is in tests/packages/torch_npu_stub. The tests in tests/integration/npu use the real torch_npu.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from processes import until
from profdeck import Identity
from profdeck.base.processes import is_running, process_started
from profdeck.cli import app
from profdeck.records.capture import CaptureRecord
from profdeck.records.manifest import ManifestWriter, write_manifest
from profdeck_npu.analysis import (
    LOG,
    TIMEOUT_S,
    AnalysisInProgressError,
    analyse,
    default_processes,
    expected_files,
    is_analysed,
)
from profdeck_npu.background import request
from profdeck_npu.traces.analysis_state import OUTPUT, STATE_FILE, AnalysisState, read_state, write_state
from profdeck_npu.traces.check import check_directory
from profdeck_traces.cli.terminal import ExitCode

STUB = Path(__file__).parents[1] / "packages" / "torch_npu_stub"
PATIENCE_S = 120.0
DEADLINES_S = (1, 4, 16, 64)
RAW = ("FRAMEWORK/torch.op_range", "PROF_000001_1_A/device_0/data/x", "PROF_000001_1_A/host/data/y")

Make = Callable[..., Path]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(autouse=True)
def _torch_npu_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make the stubs of torch_npu and msprof available to this process and its children."""
    site, programs = tmp_path / "site", tmp_path / "bin"
    metadata = site / "torch_npu-2.13.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.13.0\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STUB), *filter(None, sys.path)]))
    programs.mkdir()
    (programs / "msprof").write_text("#!/bin/sh\n")
    (programs / "msprof").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("TMPDIR", str(programs))
    for name in ("STUB_ANALYSIS", "STUB_ANALYSIS_PIDS", "COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def raw(tmp_path: Path) -> Make:
    """Return a function that writes a raw torch_npu directory."""

    def make(name: str = "rank_0000.step10", *, below: Path = tmp_path / "step_000010" / "trainer", **config) -> Path:
        directory = below / f"{name}_4711_20260101000000000_ascend_pt"
        for file in RAW:
            (directory / file).parent.mkdir(parents=True, exist_ok=True)
            (directory / file).write_text(f"raw {file}")
        common = {"activities": config.pop("activities", ["ProfilerActivity.CPU", "ProfilerActivity.NPU"])}
        experimental = {"_profiler_level": "Level1", "_export_type": ["text"]} | config
        info = {"config": {"common_config": common, "experimental_config": experimental}}
        (directory / "profiler_info.json").write_text(json.dumps(info))
        return directory

    return make


@pytest.fixture
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pipe to which the torch_npu stub writes its PIDs before it hangs."""
    pipe = tmp_path / "pids"
    os.mkfifo(pipe)
    monkeypatch.setenv("STUB_ANALYSIS_PIDS", str(pipe))
    return pipe


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts Python code. Running processes are killed after the test."""
    started: list[subprocess.Popen[str]] = []

    def run(code: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, *map(str, arguments)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def cli(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [*map(str, arguments)], prog_name="profdeck")


def await_hanging_stub(pipe: Path) -> list[int]:
    """Wait until the torch_npu stub hangs and return its PIDs."""
    output = b""
    descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # does not wait for a writer, which may have died
    try:
        while True:
            assert select.select([descriptor], [], [], PATIENCE_S)[0], "the stub does not hang"
            if not (chunk := os.read(descriptor, 4096)):
                return [int(line) for line in output.split()]
            output += chunk
    finally:
        os.close(descriptor)


def is_alive(pid: int) -> bool:
    return is_running(socket.gethostname(), pid, process_started(pid))


def await_end(pid: int) -> None:
    """Wait until a process exits that is not a child of this process."""
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            assert select.select([handle], [], [], PATIENCE_S)[0], f"process {pid} does not exit"
        finally:
            os.close(handle)


def require_state(directory: Path) -> AnalysisState:
    state = read_state(directory)
    assert state is not None
    return state


def assert_raw_data_are_intact(directory: Path) -> None:
    assert {file: (directory / file).read_text() for file in RAW} == {file: f"raw {file}" for file in RAW}


# --- Expected files


@pytest.mark.parametrize(
    ("config", "export", "patterns"),
    [
        ({}, (), {"trace_view.json", "kernel_details.csv"}),
        ({"activities": ["ProfilerActivity.CPU"]}, (), {"trace_view.json"}),
        ({"_profiler_level": "Level_none"}, (), {"trace_view.json"}),
        ({"_export_type": ["db"]}, (), {"ascend_pytorch_profiler*.db"}),
        ({"_export_type": "db"}, (), {"ascend_pytorch_profiler*.db"}),
        ({"_export_type": ["db"]}, ("text",), {"trace_view.json", "kernel_details.csv"}),
        (
            {"_export_type": ["db", "text"]},
            (),
            {"trace_view.json", "kernel_details.csv", "ascend_pytorch_profiler*.db"},
        ),
        ({"_export_type": []}, (), {"trace_view.json", "kernel_details.csv"}),
    ],
)
def test_expected_files_depend_on_the_recording(raw: Make, config, export, patterns) -> None:
    assert {*expected_files(raw(**config), export)} == patterns


@pytest.mark.parametrize("content", [None, "", "{", '{"config": 3}', "\udcff"])
def test_expected_files_without_an_info_file(raw: Make, content: str | None) -> None:
    directory = raw()
    (directory / "profiler_info.json").unlink()
    if content is not None:
        (directory / "profiler_info_3.json").write_bytes(content.encode(errors="surrogateescape"))
    assert expected_files(directory) == ("trace_view.json", "kernel_details.csv")
    for file in (directory / "PROF_000001_1_A" / "device_0").rglob("*"):
        file.rename(directory / "PROF_000001_1_A" / file.name)
    (directory / "PROF_000001_1_A" / "device_0").rmdir()
    assert expected_files(directory) == ("trace_view.json",)


# --- One analysis


def test_successful_analysis(raw: Make) -> None:
    directory = raw()
    assert not is_analysed(directory)
    begun_ns = time.time_ns()
    state = analyse(directory)
    assert state == read_state(directory)
    assert (state.state, state.problems, state.pid, state.host) == ("done", (), os.getpid(), socket.gethostname())
    assert state.process_started == process_started(os.getpid())
    assert state.expected == ("trace_view.json", "kernel_details.csv")
    assert state.ended_ns is not None
    assert begun_ns < state.started_ns < state.ended_ns < time.time_ns()
    assert is_analysed(directory)
    check = check_directory(directory)
    assert (check.whole, check.problem) == (True, None)
    assert_raw_data_are_intact(directory)
    (directory / OUTPUT / "kernel_details.csv").unlink()
    assert not is_analysed(directory)


@pytest.mark.parametrize(
    ("todo", "problem"),
    [
        ("nothing", f"{OUTPUT}/trace_view.json is missing"),
        ("damaged", "trace_view.json: "),
        ("lost worker", f"torch_npu's process died before it finished (often: out of memory) (see {LOG})"),
        ("killed", "its process was killed by signal 9 (often: out of memory)"),
        ("no library", "The backend 'npu' cannot be used in this process: torch_npu 2.13.0 is"),
    ],
)
def test_incomplete_output_fails_despite_exit_code_zero(
    raw: Make, monkeypatch: pytest.MonkeyPatch, todo: str, problem: str
) -> None:
    directory = raw()
    monkeypatch.setenv("STUB_ANALYSIS", todo)
    state = analyse(directory)
    assert state.state == "failed"
    assert state.problems[0].startswith(problem)
    assert state == read_state(directory)
    assert not is_analysed(directory)
    check = check_directory(directory)
    assert check.problem is not None
    assert not check.whole
    assert f"run: profdeck npu analyse {directory}" in check.problem
    assert_raw_data_are_intact(directory)


def test_output_of_an_earlier_analysis_is_removed(raw: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = raw()
    analyse(directory)
    monkeypatch.setenv("STUB_ANALYSIS", "stale")
    assert analyse(directory).state == "failed"
    assert not is_analysed(directory)


def test_missing_msprof_is_detected_before_the_start(
    raw: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    directory = raw()
    analyse(directory)
    before = {file: file.stat().st_mtime_ns for file in (directory / OUTPUT).iterdir()}
    monkeypatch.setenv("PATH", str(tmp_path))
    state = analyse(directory)  # without CANN, the earlier result is kept
    assert state.state == "failed"
    assert "msprof" in state.problems[0]
    assert "set_env.sh" in state.problems[0]
    assert require_state(directory).state == "done"
    assert {file: file.stat().st_mtime_ns for file in (directory / OUTPUT).iterdir()} == before
    (directory / STATE_FILE).unlink()  # as if torch_npu had analysed the directory without profdeck
    assert is_analysed(directory)
    assert analyse(directory).state == "failed"
    assert read_state(directory) is None
    assert is_analysed(directory)
    never = raw("rank_0001.step10")
    assert analyse(never).state == "failed"
    assert require_state(never).state == "failed"


def test_directory_without_raw_data_fails(tmp_path: Path) -> None:
    directory = tmp_path / "x_ascend_pt"
    directory.mkdir()
    assert analyse(directory).problems == ("there is no raw data: the directory has neither FRAMEWORK nor PROF_*",)


def test_intermediate_files_of_a_killed_msprof_are_removed(raw: Make) -> None:
    directory = raw()
    for path in ("PROF_000001_1_A/host/sqlite", "PROF_000001_1_A/device_0/sqlite"):
        (directory / path).mkdir()
        (directory / path / "half.db").touch()
    assert analyse(directory).state == "done"
    assert not [*directory.rglob("sqlite")]
    assert_raw_data_are_intact(directory)


UNWRITABLE = """
import sys
from pathlib import Path
from profdeck_npu.analysis import analyse
print(*analyse(Path(sys.argv[1])).problems)
"""


def test_read_only_directory_fails(raw: Make) -> None:
    directory = raw()
    directory.chmod(0o555)
    command = [sys.executable, "-c", UNWRITABLE, str(directory)]
    if os.geteuid() == 0:  # root can write anywhere without this restriction
        command = ["/usr/bin/setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
        if not Path(command[0]).exists():
            pytest.skip("root may write anywhere, and there is no setpriv to forbid it")
    try:
        result = subprocess.run(command, check=True, capture_output=True, text=True)
    finally:
        directory.chmod(0o755)
    assert result.stdout.startswith("it cannot be analysed: PermissionError: [Errno 13] Permission denied:")
    assert result.stdout.endswith("; copy it to a writable location, and analyse the copy\n")
    assert "Cannot save the analysis state" in result.stderr
    assert not (directory / STATE_FILE).exists()
    assert analyse(directory).state == "done"


def test_earlier_result_is_kept_if_torch_npu_cannot_be_loaded(raw: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = raw()
    earlier_state = analyse(directory)
    monkeypatch.setenv("STUB_ANALYSIS", "no library")
    assert analyse(directory).state == "failed"
    assert require_state(directory) == earlier_state
    assert check_directory(directory).whole


# --- Time limits, interrupts and orphaned processes


def test_time_limit_kills_all_processes(raw: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    directory = raw()
    monkeypatch.setenv("STUB_ANALYSIS", "hang")
    monkeypatch.setenv("STUB_ANALYSIS_PIDS", str(tmp_path / "file"))
    for timeout_s in DEADLINES_S:
        state = analyse(directory, timeout_s=timeout_s)
        if (tmp_path / "file").exists():  # otherwise, the host is slow and the analysis has not started yet
            break
    hanging_pids = await_hanging_stub(tmp_path / "file")
    assert len(hanging_pids) == 2
    assert not any(map(is_alive, hanging_pids))
    assert state.state == "failed"
    assert state.problems == (f"it was killed at its time limit of {timeout_s} s",)
    assert require_state(directory) == state
    monkeypatch.setenv("STUB_ANALYSIS", "")
    assert analyse(directory).state == "done"


def test_orphans_of_the_analysis_are_killed(raw: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STUB_ANALYSIS", "orphan")
    monkeypatch.setenv("STUB_ANALYSIS_PIDS", str(tmp_path / "file"))
    assert analyse(raw()).state == "done"
    (pid,) = await_hanging_stub(tmp_path / "file")
    assert not is_alive(pid)


ANALYSE = """
import sys
from pathlib import Path
from profdeck_npu.analysis import analyse
analyse(Path(sys.argv[1]))
"""


def test_concurrent_analysis_raises_an_error(
    raw: Make, monkeypatch: pytest.MonkeyPatch, pids: Path, start: Start
) -> None:
    directory = raw()
    monkeypatch.setenv("STUB_ANALYSIS", "hang")
    caller = start(ANALYSE, directory)
    hanging_pids = await_hanging_stub(pids)
    running = require_state(directory)
    with pytest.raises(AnalysisInProgressError, match=rf"is being analysed by process {caller.pid} on "):
        analyse(directory)
    assert require_state(directory) == running
    result = cli("npu", "analyse", "--json", "--force", directory)
    assert result.exit_code == ExitCode.INCOMPLETE
    (entry,) = json.loads(result.stdout)["directories"]
    assert entry["outcome"] == "busy"
    assert f"process {caller.pid}" in entry["problems"][0]
    assert all(map(is_alive, hanging_pids))


def test_child_of_a_killed_analysis_is_killed(raw: Make, monkeypatch: pytest.MonkeyPatch, pids: Path) -> None:
    directory = raw()
    monkeypatch.setenv("STUB_ANALYSIS", "hang")
    states: list[AnalysisState] = []
    worker = threading.Thread(target=lambda: states.append(analyse(directory)))
    worker.start()
    leader, child = await_hanging_stub(pids)
    os.kill(leader, signal.SIGKILL)
    worker.join()
    assert not is_alive(child)
    assert states[0].problems[0].startswith("its process was killed by signal 9")


# --- Analysis after a capture


def start_analysis(*directories: Path) -> int:
    """Request the analysis of all directories and return the PID of the process that runs it."""
    request(directories, TIMEOUT_S)
    (pid,) = {require_state(directory).pid for directory in directories}
    return pid


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Occupy all analysis slots of this host. Yield a function that releases them."""
    with contextlib.ExitStack() as stack:
        for slot in range(default_processes()):
            path = tmp_path / "bin" / f"profdeck-analysis-{os.getuid()}-{slot}.lock"
            fcntl.flock(stack.enter_context(path.open("w")), fcntl.LOCK_EX)
        yield stack.close


def test_detached_process_analyses_all_directories_of_a_rank(raw: Make) -> None:
    directories = [raw("rank_0000.step10.mb0000-0003"), raw("rank_0000.step10.mb0004-0007")]
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    before = children.read_text()
    pid = start_analysis(*directories)
    assert children.read_text() == before  # not a child process: engines kill the children of their workers
    assert require_state(directories[0]).expected == ("trace_view.json", "kernel_details.csv")
    await_end(pid)
    for directory in directories:
        assert (require_state(directory).state, require_state(directory).pid) == ("done", pid)
        assert check_directory(directory).whole
    assert "Traceback" not in (directories[0] / LOG).read_text()


def test_detached_process_waits_for_a_slot(raw: Make, slots: Callable[[], None]) -> None:
    directory = raw()
    pid = start_analysis(directory)
    assert (require_state(directory).state, require_state(directory).is_active) == ("pending", True)
    assert "in progress" in (check_directory(directory).problem or "")
    busy = cli("npu", "analyse", directory)
    assert busy.exit_code == ExitCode.INCOMPLETE
    assert f"it is being analysed by process {pid}" in busy.stdout
    assert require_state(directory).state == "pending"
    slots()
    await_end(pid)
    assert require_state(directory).state == "done"


def test_detached_process_keeps_the_result_of_a_faster_analysis(raw: Make, slots: Callable[[], None]) -> None:
    directory = raw()
    pid = start_analysis(directory)
    faster_state = analyse(directory)
    slots()
    await_end(pid)
    assert require_state(directory) == faster_state


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_analysis_can_be_rerun_if_its_process_was_killed(
    raw: Make, monkeypatch: pytest.MonkeyPatch, pids: Path, number: signal.Signals
) -> None:
    directories = [raw("rank_0000.step10.mb0000"), raw("rank_0000.step10.mb0001")]
    monkeypatch.setenv("STUB_ANALYSIS", "hang")
    pid = start_analysis(*directories)
    hanging_pids = await_hanging_stub(pids)
    os.kill(pid, number)
    for process in (pid, *hanging_pids):
        await_end(process)
    states = [require_state(directory) for directory in directories]
    assert [(state.state, state.is_active) for state in states] == [("running", False), ("pending", False)]
    for directory in directories:
        assert "run: profdeck npu analyse" in (check_directory(directory).problem or "")
    monkeypatch.setenv("STUB_ANALYSIS", "")
    assert cli("npu", "analyse", *directories).exit_code == ExitCode.OK
    assert all(check_directory(directory).whole for directory in directories)


def test_analysis_fails_if_its_process_cannot_start(
    raw: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = raw()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: 1 / 0)
    request([directory], TIMEOUT_S)
    state = require_state(directory)
    assert (state.state, state.problems[0]) == (
        "failed",
        "it could not be started: ZeroDivisionError: division by zero",
    )
    assert "cannot be started" in caplog.text


def test_analysis_is_not_in_progress_if_its_process_exits_immediately(
    raw: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = raw()
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    request([directory], TIMEOUT_S)
    until(lambda: not require_state(directory).is_active)  # the shell that starts the process exits a moment later
    assert "run: profdeck npu analyse" in (check_directory(directory).problem or "")


def test_request_without_a_directory_does_not_raise(tmp_path: Path) -> None:
    request([], TIMEOUT_S)
    request([tmp_path / "gone_ascend_pt"], TIMEOUT_S)


# --- The command line


def test_analysed_run_is_skipped(raw: Make, tmp_path: Path) -> None:
    ranks = [raw(f"rank_{rank:04d}.step10") for rank in range(2)]
    (ranks[0] / "PROF_000001_1_A" / "x_ascend_pt").mkdir()  # nested directories are ignored
    result = cli("npu", "analyse", "--processes", "2", tmp_path, ranks[1])
    assert result.exit_code == ExitCode.OK, result.output
    assert "2 directories: 2 done" in result.stdout
    assert all(check_directory(directory).whole for directory in ranks)
    states = [require_state(directory) for directory in ranks]
    result = cli("npu", "analyse", "--json", tmp_path)
    assert result.exit_code == ExitCode.OK
    entries = json.loads(result.stdout)["directories"]
    assert entries == [
        {"path": str(directory), "outcome": "kept", "duration_s": None, "problems": [], "remedy": None}
        for directory in ranks
    ]
    assert [require_state(directory) for directory in ranks] == states
    cli("npu", "analyse", "--force", ranks[0])
    assert require_state(ranks[0]).started_ns > states[0].started_ns


def test_failure_is_reported_with_instructions(raw: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    directory = raw()
    monkeypatch.setenv("STUB_ANALYSIS", "nothing")
    result = cli("npu", "analyse", tmp_path)
    assert result.exit_code == ExitCode.INCOMPLETE
    assert "kernel_details.csv is missing" in result.stdout
    assert f"(see {LOG})" in result.stdout
    assert "it says why" in (directory / LOG).read_text()
    assert "The raw data is unchanged" in result.stdout
    result = cli("npu", "analyse", "--json", directory)
    (entry,) = json.loads(result.stdout)["directories"]
    assert entry["remedy"] == f"profdeck npu analyse {directory}"
    assert (entry["outcome"], entry["duration_s"] > 0) == ("failed", True)


def test_export_and_timeout_are_passed_to_the_analysis(
    raw: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    directory = raw()
    result = cli("npu", "analyse", "--export", "text", "--export", "db", directory)
    assert result.exit_code == ExitCode.OK, result.output
    assert len(require_state(directory).expected) == 3
    assert "1 kept" in cli("npu", "analyse", "--export", "db", directory).stdout
    analyse(directory, export=("text",))
    assert "1 done" in cli("npu", "analyse", "--export", "db", directory).stdout
    monkeypatch.setenv("STUB_ANALYSIS", "hang")
    monkeypatch.setenv("STUB_ANALYSIS_PIDS", str(tmp_path / "file"))
    result = cli("npu", "analyse", "--force", "--timeout", "0.5", directory)
    assert result.exit_code == ExitCode.INCOMPLETE
    assert "it was killed at its time limit of 0.5 s" in result.stdout


CLI = "from profdeck.cli import main; main()"


def test_interrupted_command_kills_its_processes(
    raw: Make, monkeypatch: pytest.MonkeyPatch, pids: Path, start: Start, tmp_path: Path
) -> None:
    ranks = [raw(f"rank_{rank:04d}.step10") for rank in range(2)]
    monkeypatch.setenv("STUB_ANALYSIS", "hang")
    command = start(CLI, "npu", "analyse", "--processes", "1", tmp_path)
    hanging_pids = await_hanging_stub(pids)
    command.send_signal(signal.SIGINT)
    stdout, _ = command.communicate(timeout=PATIENCE_S)
    assert command.returncode == ExitCode.INTERRUPTED, stdout
    assert not any(map(is_alive, hanging_pids))
    assert (require_state(ranks[0]).state, require_state(ranks[0]).problems) == ("failed", ("it was interrupted",))
    assert read_state(ranks[1]) is None
    for directory in ranks:
        assert_raw_data_are_intact(directory)


def test_active_recording_is_not_analysed(raw: Make) -> None:
    directory = raw()
    capture = CaptureRecord(
        id="step10", directory=directory.parent, identity=Identity(), first_step=10, current_step=10
    )
    write_manifest(capture, ManifestWriter(backend="npu", versions={}, options={}, expected_ranks=(0, 1)))
    result = cli("npu", "analyse", "--force", capture.directory)
    assert result.exit_code == ExitCode.INCOMPLETE
    assert f"process {os.getpid()} is still recording" in result.stdout
    assert not (directory / OUTPUT).exists()


def test_analysis_of_another_host_requires_force(raw: Make) -> None:
    directory = raw()
    state = AnalysisState(state="pending", host="another-host", pid=1, process_started="1", started_ns=1)
    write_state(directory, state)
    result = cli("npu", "analyse", directory)
    assert result.exit_code == ExitCode.INCOMPLETE
    assert "process 1 on another-host" in result.stdout
    assert "--force" in result.stdout
    assert cli("npu", "analyse", "--force", directory).exit_code == ExitCode.OK
    assert require_state(directory).state == "done"


def test_corrupt_state_is_replaced(raw: Make) -> None:
    directory = raw()
    (directory / STATE_FILE).write_text("{")
    assert cli("npu", "analyse", directory).exit_code == ExitCode.OK
    assert require_state(directory).state == "done"


@pytest.mark.parametrize(
    ("path", "message"),
    [(".", "No torch_npu recording found in"), ("gone", "does not exist"), ("file", "is not a directory")],
)
def test_path_without_a_recording_raises_an_error(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "file").touch()
    result = cli("npu", "analyse", tmp_path / path)
    assert result.exit_code == ExitCode.UNREADABLE
    assert message in result.stderr


def test_missing_torch_npu_is_reported(raw: Make, tmp_path: Path) -> None:
    directory = raw()
    (metadata,) = (tmp_path / "site").glob("*.dist-info")
    (metadata / "METADATA").unlink()
    metadata.rmdir()
    result = cli("npu", "analyse", directory)
    assert result.exit_code == ExitCode.PLUGIN
    assert "pip install 'profdeck[npu]'" in result.stderr
