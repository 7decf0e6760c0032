"""On-demand captures of a two-node torchrun job without a shared directory, using its TCPStore."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from processes import ending, free_port, until
from profdeck_torch.tcp_store import connect

pytestmark = [pytest.mark.torch, pytest.mark.slow]

JOB = Path(__file__).with_name("job_of_hosts.py")
Request = Callable[..., "subprocess.Popen[str]"]


def launch(node: int, address: str, port: int, directory: Path) -> list[str]:
    """Return the command that starts a node of the job."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--master-addr", address, "--master-port", str(port), "--node-rank", str(node)]
    return [*command, str(JOB), str(directory)]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int, list[int]]]:
    """Run a job. Yield the parent of its hosts' directories, the port of its store, and the PIDs of its launchers."""
    directory, port = tmp_path_factory.mktemp("hosts"), free_port()
    with ending() as started:
        for node in range(2):
            started.append(subprocess.Popen(launch(node, "127.0.0.1", port, directory), text=True))
        until((directory / "host0" / "live" / "on_demand.json").exists)
        yield directory, port, [process.pid for process in started]
        (directory / "host0" / "stop").touch()
        assert [process.wait(60) for process in started] == [0, 0]


@pytest.fixture
def request_capture() -> Iterator[Request]:
    """Return a function that starts `profdeck capture job`."""
    with ending() as started:

        def run(*options: object, within: Sequence[str] = ()) -> subprocess.Popen[str]:
            command = [*within, sys.executable, "-m", "profdeck", "capture", "job", *map(str, options)]
            pipe = subprocess.PIPE
            process = subprocess.Popen(
                command, stdout=pipe, stderr=pipe, text=True, env=os.environ | {"COLUMNS": "400"}
            )
            started.append(process)
            return process

        yield run


def await_capture(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, out + error
    document: dict[str, Any] = json.loads(out)
    return document


def ranks(document: dict[str, Any]) -> list[tuple[int, str]]:
    (capture,) = document["ls"]["captures"]
    return [(rank["rank"], rank["status"]) for rank in capture["ranks"]]


def locations(document: dict[str, Any]) -> list[tuple[str, bool]]:
    """Return each process's run directory and whether its files are in the requester's run directory."""
    return [(process["directory"], process["files_here"]) for process in document["processes"]]


def test_both_hosts_are_captured(job: tuple[Path, int, list[int]], request_capture: Request, tmp_path: Path) -> None:
    """Each host keeps its own files, and a killed requester does not block the next capture."""
    hosts, port, _ = job
    until(
        lambda: "2 processes" in (request_capture(hosts / "host0" / "live", "--steps", 1).communicate(timeout=120)[1])
    )
    killed = request_capture(hosts / "host0" / "live", "--in", 100_000)
    assert killed.stderr is not None
    assert any("will be captured" in line for line in killed.stderr)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    document = await_capture(request_capture(hosts / "host1" / "live", "--steps", 2, "--json"))
    assert document["complete"]
    assert document["last_step"] == document["first_step"] + 1
    assert ranks(document) == [(1, "complete")]
    assert locations(document) == [(str(hosts / "host0" / "live"), False), (str(hosts / "host1" / "live"), True)]
    # The requester's run directory has no files.
    document = await_capture(request_capture(tmp_path / "live", "--store", f"tcpstore:127.0.0.1:{port}", "--json"))
    assert (document["complete"], document["ls"]) == (True, None)
    assert locations(document) == [(str(hosts / f"host{rank}" / "live"), False) for rank in range(2)]


@pytest.mark.long
def test_suspended_store_does_not_stop_the_job(job: tuple[Path, int, list[int]], request_capture: Request) -> None:
    """The launcher of the first host serves the store."""
    hosts, _, launchers = job
    step_file = hosts / "host0" / "step"
    waiting = request_capture(hosts / "host1" / "live", "--in", 100_000)
    assert waiting.stderr is not None
    assert any("will be captured" in line for line in waiting.stderr)
    os.kill(launchers[0], signal.SIGSTOP)
    try:
        before = int(step_file.read_text())
        until(lambda: int(step_file.read_text()) > before + 500, timeout_s=60)  # 5 seconds of steps
    finally:
        os.kill(launchers[0], signal.SIGCONT)
    waiting.send_signal(signal.SIGINT)
    waiting.communicate(timeout=60)
    until(lambda: is_captured(request_capture(hosts / "host0" / "live", "--json")), every_s=1)


def is_captured(process: subprocess.Popen[str]) -> bool:
    out, _ = process.communicate(timeout=120)
    return bool(out) and process.returncode == 0


def test_unreachable_store_is_reported(request_capture: Request, tmp_path: Path) -> None:
    port = free_port()
    process = request_capture(tmp_path / "live", "--store", f"tcpstore:127.0.0.1:{port}")
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"Cannot connect to tcpstore:127.0.0.1:{port}" in error
    assert "Traceback" not in error


def test_closed_store_does_not_open_a_connection(job: tuple[Path, int, list[int]]) -> None:
    """A connection that is opened during interpreter shutdown would crash the process."""
    store = connect("live", f"127.0.0.1:{job[1]}")
    store.read("demand.json")
    store.close()
    with pytest.raises(ConnectionError, match="closed"):
        store.read("demand.json")
