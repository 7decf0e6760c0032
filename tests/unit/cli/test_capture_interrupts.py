"""Server captures by a `profdeck capture` process: Ctrl-C, SIGTERM and terminal progress."""

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
from simulated_servers import Act, RecordingEngine, ServersInThread, SimulatedEngine, SimulatedServer, offer

Start = Callable[..., "subprocess.Popen[str]"]
Read = Callable[[], Manifest]


@pytest.fixture(scope="module")
def simulated_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a PYTHONPATH with the backends of simulated servers."""
    return offer(tmp_path_factory.mktemp("site"))


@pytest.fixture
def start(simulated_path: str) -> Iterator[Start]:
    """Yield a function that starts the command in a new process. Remaining processes are ended after the test."""
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
    """Return a function that reads the manifest of the complete capture."""
    return lambda: read_manifest(tmp_path / "profiles" / "run" / "step_000000" / "server" / "target.step0.json")


@contextlib.contextmanager
def running(count: int, output: Path) -> Iterator[list[SimulatedServer]]:
    """Run servers on this host that iterate only when the test tells them to."""
    with ServersInThread(count) as servers:
        for server in servers:
            server.output = str(output / "profiles")
        yield servers


def engine(server: SimulatedServer) -> SimulatedEngine:
    assert isinstance(server.engine, SimulatedEngine)
    return server.engine


def url_options(servers: list[SimulatedServer]) -> list[str]:
    return [part for server in servers for part in ("--url", server.url)]


# Signals.


def recording(servers: list[SimulatedServer], state: RequestState = RequestState.RECORDING) -> Callable[[], bool]:
    return lambda: all(engine(server).state is state for server in servers)


def is_recording_checked(servers: list[SimulatedServer]) -> Callable[[], bool]:
    """Return a predicate: True when all servers have been polled for progress after their start."""
    return lambda: all(server.commands().count("status") >= 3 for server in servers)


def interrupted(process: subprocess.Popen[str], number: signal.Signals = signal.SIGINT) -> None:
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said


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
    with running(2, tmp_path) as servers:
        for server in servers:
            server.engine, server.traffic = RecordingEngine("tally-device"), 3
        process = start(*url_options(servers), *window, "--set", "run=run")
        until(is_recording_checked(servers))
        process.send_signal(number)
        listed, said = process.communicate(timeout=60)
        assert process.returncode == code, said
        assert "Stopping the recording. Press Ctrl-C again to exit without waiting for files." in said
        assert f"2 captures; ranks: 2 {status}" in listed
    assert {record.outcome for record in manifest().targets} == {"flushed"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_during_start(start: Start, tmp_path: Path, manifest: Read, number: signal.Signals) -> None:
    with running(8, tmp_path) as servers:
        servers[3].acts["start"] = [Act(delay_s=0.5)]
        process = start(*url_options(servers), "--set", "run=run")
        until(lambda: "start" in servers[3].commands())
        interrupted(process, number)
        assert all("stop" in server.commands() for server in servers)
        until(lambda: not any(server.tasks for server in servers))
        others = [server for server in servers if server is not servers[3]]
        assert RequestState.RECORDING not in {engine(server).state for server in others}
    assert manifest().status == "failed"


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_while_files_are_written(start: Start, tmp_path: Path, manifest: Read, presses: int) -> None:
    """Ctrl-C during the flush, or before and during the flush, exits. The servers still write their files."""
    with running(8, tmp_path) as servers:
        slow = engine(servers[5])
        servers[5].in_its_loop(slow.flushed.clear)
        process = start(*url_options(servers), "--set", "run=run")
        until(is_recording_checked(servers))
        if presses == 1:
            for server in servers:
                server.in_its_loop(functools.partial(engine(server).end_by_itself, 5))
        else:
            process.send_signal(signal.SIGINT)
        until(lambda: all("stop" in server.commands() for server in servers))
        interrupted(process)
        assert recording(servers, RequestState.WRITING)()
    assert manifest().status == "partial"


# Progress.


def test_progress_on_a_terminal(start: Start, tmp_path: Path) -> None:
    terminal, program = pty.openpty()
    shown = b""

    def see(text: bytes) -> None:
        nonlocal shown
        while text not in shown:
            assert select.select([terminal], [], [], 60)[0], shown
            shown += os.read(terminal, 65536)

    with running(4, tmp_path) as servers:
        slow = engine(servers[2])
        servers[2].in_its_loop(slow.flushed.clear)
        process = start(*url_options(servers), "--iterations", 5, "--set", "run=run", stderr=program)
        see(b"0 of 4 targets have recorded 5 iterations")
        for server in servers[:3]:
            server.in_its_loop(functools.partial(engine(server).iterate, 9))
        see(b"3 of 4 targets have recorded 5 iterations")
        servers[3].in_its_loop(functools.partial(engine(servers[3]).iterate, 5))
        see(f"Waiting for the files of {servers[2].url}".encode())
        servers[2].in_its_loop(slow.flushed.set)
        process.wait(60)
    os.close(program)
    os.close(terminal)
