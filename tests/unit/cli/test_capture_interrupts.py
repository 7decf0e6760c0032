"""Tests for `profdeck capture servers` in a process: Ctrl-C, SIGTERM and terminal progress."""

from __future__ import annotations

import contextlib
import functools
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from processes import ending, until
from profdeck.records.manifest import Manifest, read_manifest
from profdeck.records.request import RequestState
from simulated_servers import Act, RecordingEngine, ServersInThread, SimulatedEngine, SimulatedServer, install_backends

Start = Callable[..., "subprocess.Popen[str]"]
Read = Callable[[], Manifest]


@pytest.fixture(scope="module")
def simulated_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a PYTHONPATH with the backends of simulated servers."""
    return install_backends(tmp_path_factory.mktemp("site"))


@pytest.fixture
def start(simulated_path: str) -> Iterator[Start]:
    """Yield a function that starts the command in a new process. Running processes are killed after the test."""
    with ending() as started:

        def run(*arguments: object, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
            path = os.pathsep.join([simulated_path, *filter(None, sys.path)])
            process = subprocess.Popen(
                [sys.executable, "-m", "profdeck", "capture", "servers", *map(str, arguments)],
                env=os.environ | {"PYTHONPATH": path, "COLUMNS": "200"},
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
            started.append(process)
            return process

        yield run


@pytest.fixture
def manifest(tmp_path: Path) -> Read:
    """Return a function that reads the manifest of the fleet's capture."""
    return lambda: read_manifest(tmp_path / "profiles" / "run" / "step_000000" / "server" / "target.step0.json")


@contextlib.contextmanager
def run_servers(count: int, output: Path) -> Iterator[list[SimulatedServer]]:
    """Run servers whose engines run no iterations by default."""
    with ServersInThread(count) as servers:
        for server in servers:
            server.output = str(output / "profiles")
        yield servers


def engine_of(server: SimulatedServer) -> SimulatedEngine:
    assert isinstance(server.engine, SimulatedEngine)
    return server.engine


def url_options(servers: list[SimulatedServer]) -> list[str]:
    return [argument for server in servers for argument in ("--url", server.url)]


# Signals.


def wait_for_recording(servers: list[SimulatedServer]) -> None:
    """Wait until all servers have been polled for progress after their start."""
    until(lambda: all(server.commands().count("status") >= 3 for server in servers))


def interrupt(process: subprocess.Popen[str], number: signal.Signals = signal.SIGINT) -> None:
    """Send a signal and wait until the command exits with status 130."""
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr


@pytest.mark.parametrize(
    ("number", "window", "code", "status"),
    [
        (signal.SIGINT, (), 0, "complete"),
        (signal.SIGTERM, (), 0, "complete"),
        (signal.SIGTERM, ("--iterations", 1000), 1, "partial"),
    ],
)
def test_signal_stops_recording_on_all_servers(
    start: Start,
    tmp_path: Path,
    manifest: Read,
    tally: ModuleType,
    number: signal.Signals,
    window: tuple[object, ...],
    code: int,
    status: str,
) -> None:
    with run_servers(2, tmp_path) as servers:
        for server in servers:
            server.engine, server.iterations_after_start = RecordingEngine("tally-device"), 3
        process = start(*url_options(servers), *window, "--set", "run=run")
        wait_for_recording(servers)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
        assert process.returncode == code, stderr
        assert "Stopping the recording. Press Ctrl-C again to exit without waiting for files." in stderr
        assert f"2 captures; ranks: 2 {status}" in stdout
    assert {record.outcome for record in manifest().targets} == {"flushed"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_during_start_stops_all_servers(
    start: Start, tmp_path: Path, manifest: Read, number: signal.Signals
) -> None:
    with run_servers(8, tmp_path) as servers:
        servers[3].acts["start"] = [Act(delay_s=0.5)]
        process = start(*url_options(servers), "--set", "run=run")
        until(lambda: "start" in servers[3].commands())
        interrupt(process, number)
        assert all("stop" in server.commands() for server in servers)
        until(lambda: not any(server.tasks for server in servers))
        other_servers = [server for server in servers if server is not servers[3]]
        assert RequestState.RECORDING not in {engine_of(server).state for server in other_servers}
    assert manifest().status == "failed"


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_exits_while_files_are_written(start: Start, tmp_path: Path, manifest: Read, presses: int) -> None:
    """With two presses, the first stops the recording. The servers continue to write their files."""
    with run_servers(8, tmp_path) as servers:
        slow_engine = engine_of(servers[5])
        servers[5].run_in_loop(slow_engine.flushed.clear)
        process = start(*url_options(servers), "--set", "run=run")
        wait_for_recording(servers)
        if presses == 1:
            for server in servers:
                server.run_in_loop(functools.partial(engine_of(server).end_window, 5))
        else:
            process.send_signal(signal.SIGINT)
        until(lambda: all("stop" in server.commands() for server in servers))
        interrupt(process)
        assert {engine_of(server).state for server in servers} == {RequestState.WRITING}
    assert manifest().status == "partial"


# Progress.


def test_terminal_shows_progress_of_recording_and_files(start: Start, tmp_path: Path) -> None:
    controller, terminal = pty.openpty()
    output = b""

    def read_until(text: bytes) -> None:
        nonlocal output
        while text not in output:
            assert select.select([controller], [], [], 60)[0], output
            output += os.read(controller, 65536)

    with run_servers(4, tmp_path) as servers:
        slow_engine = engine_of(servers[2])
        servers[2].run_in_loop(slow_engine.flushed.clear)
        process = start(*url_options(servers), "--iterations", 5, "--set", "run=run", stderr=terminal)
        read_until(b"0 of 4 targets have recorded 5 iterations")
        for server in servers[:3]:
            server.run_in_loop(functools.partial(engine_of(server).iterate, 9))
        read_until(b"3 of 4 targets have recorded 5 iterations")
        servers[3].run_in_loop(functools.partial(engine_of(servers[3]).iterate, 5))
        read_until(f"Waiting for the files of {servers[2].url}".encode())
        servers[2].run_in_loop(slow_engine.flushed.set)
        process.wait(60)
    os.close(terminal)
    os.close(controller)


# Concurrent commands.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_commands_that_capture_into_one_run_are_stopped_separately(
    start: Start, tmp_path: Path, tally: ModuleType, number: signal.Signals
) -> None:
    with run_servers(2, tmp_path) as servers:
        for server in servers:
            server.engine, server.iterations_after_start = RecordingEngine("tally-device"), 3
        processes = [start("--url", server.url, "--set", "run=run") for server in servers]
        for server in servers:
            wait_for_recording([server])
        for process, server, other in zip(processes, servers, reversed(servers), strict=True):
            stops_of_other = other.commands().count("stop")
            process.send_signal(number)
            stdout, stderr = process.communicate(timeout=60)
            assert (process.returncode, "stop" in server.commands()) == (0, True), stderr
            assert "profiles/run: 1 capture; ranks: 1 complete;" in stdout
            assert other.commands().count("stop") == stops_of_other
    manifests = [read_manifest(path) for path in (tmp_path / "profiles" / "run").rglob("target.*.json")]
    assert {record.target: record.status for record in manifests} == {server.url: "complete" for server in servers}
