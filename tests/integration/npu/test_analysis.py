"""Tests of the analysis with the real torch_npu, on recordings with the stub driver.

The msprof stub invents the device rows, so their times have no meaning.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from profdeck.base.processes import is_running, process_started, process_stat
from profdeck_npu.analysis import LOG, analyse, is_analysed
from profdeck_npu.traces.analysis_state import OUTPUT, AnalysisState
from profdeck_npu.traces.check import check_directory

PATIENCE_S = 240.0
CAPTURES = """
import torch, torch_npu
from torch_npu import profiler as p
from torch_npu.profiler.experimental_config import ProfilerLevel

CPU, NPU = p.ProfilerActivity.CPU, p.ProfilerActivity.NPU
x = torch.ones(4).to("npu")

def record(name, activities=(CPU, NPU), level=ProfilerLevel.Level1, **config):
    config = p._ExperimentalConfig(profiler_level=level, **config)
    handler = p.tensorboard_trace_handler("raw", name, analyse_flag=False)
    schedule = p.schedule(wait=0, warmup=1, active=2, repeat=1)
    prof = p.profile(activities=activities, schedule=schedule, on_trace_ready=handler, experimental_config=config)
    prof.start()
    for _ in range(3):
        x + 1
        torch.npu.synchronize()
        prof.step()
    prof.stop()

record("text")
record("db", export_type=["db"])
record("cpu", activities=(CPU,))
record("ranges", level=ProfilerLevel.Level_none, mstx=True)
"""

Raw = Callable[..., Path]


@pytest.fixture(scope="module")
def recorded(driver, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("recorded")
    with driver.jobs(home) as jobs:
        jobs(CAPTURES)
    return home / "raw"


@pytest.fixture
def raw(recorded: Path, tmp_path: Path) -> Raw:
    """Return a function that copies one of the captures."""

    def copy(name: str, to: str = "") -> Path:
        (source,) = recorded.glob(f"{name}_*_ascend_pt")
        return shutil.copytree(source, tmp_path / source.name.replace(name, to or name, 1))

    return copy


@pytest.fixture(autouse=True)
def _with_driver(driver, msprof_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the stub driver and the msprof stub available to child processes."""
    monkeypatch.setenv("LD_LIBRARY_PATH", driver.environ["LD_LIBRARY_PATH"])
    monkeypatch.setenv("PATH", msprof_path)
    monkeypatch.setenv("STUB_MSPROF_PIDS", str(tmp_path / "msprof_pids"))


def await_hanging_msprof(tmp_path: Path, timeout_s: float = PATIENCE_S) -> tuple[int, list[int]] | None:
    """Wait until msprof hangs. Return its PID and the PIDs of the analysis's process group."""
    file = tmp_path / "msprof_pids"
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        for pid in map(int, file.read_text().split()) if file.exists() else ():
            with contextlib.suppress(OSError):
                if b"--export=on" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid, members(os.getpgid(pid))
        time.sleep(0.02)
    return None


def members(group: int) -> list[int]:
    """Return the PIDs in a process group. The group ID is field 5 of ``/proc/<pid>/stat``, see proc(5)."""
    stats = {int(path.parent.name): process_stat(int(path.parent.name)) for path in Path("/proc").glob("[0-9]*/stat")}
    return [pid for pid, stat in stats.items() if stat and int(stat[2]) == group]


def is_alive(pid: int) -> bool:
    return is_running(socket.gethostname(), pid, process_started(pid))


def read_raw_data(directory: Path) -> dict[str, bytes]:
    """Return the contents of the raw files, keyed by relative path."""
    files = [*directory.glob("FRAMEWORK/*"), *directory.glob("PROF_*/*/data/*"), *directory.glob("profiler_*.json")]
    return {str(file.relative_to(directory)): file.read_bytes() for file in files}


@contextlib.contextmanager
def analysing(directory: Path, **options) -> Iterator[Callable[[], AnalysisState]]:
    """Analyse in another thread. Yield a function that waits for the analysis and returns its state."""
    states: list[AnalysisState] = []
    cancelled = threading.Event()
    thread = threading.Thread(target=lambda: states.append(analyse(directory, cancelled=cancelled, **options)))
    thread.start()

    def state() -> AnalysisState:
        thread.join(PATIENCE_S)
        assert states, "the analysis did not finish"
        return states[0]

    try:
        yield state
    finally:
        cancelled.set()
        thread.join()


def test_text_output_is_intact(raw: Raw) -> None:
    directory = raw("text")
    before = read_raw_data(directory)
    assert "raw data only" in check_directory(directory).notes[0]
    state = analyse(directory)
    assert (state.state, state.problems) == ("done", ())
    assert state.expected == ("trace_view.json", "kernel_details.csv")
    check = check_directory(directory)
    assert (check.whole, check.problem) == (True, None)
    assert check.events
    assert (directory / OUTPUT / "communication.json").exists()
    assert read_raw_data(directory) == before
    assert is_analysed(directory)


def test_each_capture_has_its_expected_files(raw: Raw) -> None:
    for name, patterns in (
        ("db", ("ascend_pytorch_profiler*.db",)),
        ("ranges", ("trace_view.json",)),
    ):
        directory = raw(name)
        state = analyse(directory)
        assert (state.state, state.expected) == ("done", patterns), state.problems
        assert check_directory(directory).problem is None


def test_host_only_capture_does_not_need_msprof(raw: Raw, driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", driver.environ["PATH"])
    assert shutil.which("msprof") is None
    directory = raw("cpu")
    state = analyse(directory)
    assert (state.state, state.problems, state.expected) == ("done", (), ("trace_view.json",))
    assert check_directory(directory).whole


def test_analysis_can_be_repeated_after_msprof_fails(raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = raw("text")
    before = read_raw_data(directory)
    monkeypatch.setenv("STUB_MSPROF", "fail")
    state = analyse(directory)
    assert state.state == "failed"
    assert f"{OUTPUT}/kernel_details.csv is missing" in state.problems[0]
    assert "Failed to export CANN TEXT Profiling data" in (directory / LOG).read_text()
    assert (directory / OUTPUT / "analyse.done").exists()  # written by torch_npu on success
    check = check_directory(directory)
    assert not check.whole
    assert f"run: profdeck npu analyse {directory}" in (check.problem or "")
    assert read_raw_data(directory) == before
    monkeypatch.delenv("STUB_MSPROF")
    state = analyse(directory)
    assert (state.state, state.problems) == ("done", ())
    assert check_directory(directory).whole
    assert read_raw_data(directory) == before


def test_killed_worker_is_reported_as_failure(raw: Raw, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    directory = raw("text")
    monkeypatch.setenv("STUB_MSPROF", "hang")
    with analysing(directory) as state:
        processes = await_hanging_msprof(tmp_path)
        assert processes, "msprof was never started"
        msprof, group = processes
        leader = os.getpgid(msprof)
        (worker,) = map(int, Path(f"/proc/{leader}/task/{leader}/children").read_text().split())
        os.kill(worker, signal.SIGKILL)  # like the OOM killer
        os.kill(msprof, signal.SIGKILL)  # torch_npu waits for the worker's child processes, then exits with 0
        problems = state().problems
    assert problems == (f"torch_npu's process died before it finished (often: out of memory) (see {LOG})",)
    assert not any(map(is_alive, group))
