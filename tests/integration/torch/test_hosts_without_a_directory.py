"""Captures on demand of a torchrun job of two nodes that share no directory, through its TCPStore."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from processes import ending, until

pytestmark = pytest.mark.torch

JOB = Path(__file__).with_name("job_of_hosts.py")
Ask = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """Start a job, and end it by itself; yields where its hosts write, and the port of its store."""
    directory = tmp_path_factory.mktemp("hosts")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    launcher += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    with ending() as started:
        for node in range(2):
            command = [*launcher, "--node-rank", str(node), str(JOB), str(directory)]
            started.append(subprocess.Popen(command, text=True))
        until(lambda: (directory / "host0" / "live" / "on_demand.json").exists())
        yield directory, port
        (directory / "host0" / "stop").touch()
        assert [process.wait(60) for process in started] == [0, 0]


@pytest.fixture
def ask() -> Iterator[Ask]:
    with ending() as started:

        def run(*options: object) -> subprocess.Popen[str]:
            command = [sys.executable, "-m", "profdeck", "capture", *map(str, options)]
            pipe = subprocess.PIPE
            process = subprocess.Popen(
                command, stdout=pipe, stderr=pipe, text=True, env=os.environ | {"COLUMNS": "400"}
            )
            started.append(process)
            return process

        yield run


def captured(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, out + error
    found: dict[str, Any] = json.loads(out)
    return found


def ranks(found: dict[str, Any]) -> list[tuple[int, str]]:
    (capture,) = found["ls"]["captures"]
    return [(rank["rank"], rank["status"]) for rank in capture["ranks"]]


def test_both_hosts_are_captured_into_one_run(job: tuple[Path, int], ask: Ask, tmp_path: Path) -> None:
    hosts, port = job
    until(lambda: "2 processes" in (ask("--run", hosts / "host0" / "live", "--steps", 1).communicate(timeout=120)[1]))
    found = captured(ask("--run", hosts / "host1" / "live", "--steps", 2, "--json"))
    assert found["complete"]
    assert found["last_step"] == found["first_step"] + 1
    assert ranks(found) == [(0, "complete"), (1, "complete")]
    # from a host that has nothing of the run
    elsewhere = tmp_path / "live"
    found = captured(ask("--run", elsewhere, "--store", f"tcpstore:127.0.0.1:{port}", "--json"))
    assert (found["complete"], ranks(found)) == (True, [(0, "complete"), (1, "complete")])
    assert len(list(elsewhere.glob("step_*/trainer/rank_*.trace.json.gz"))) == 2


def test_a_killed_requester_leaves_nothing_behind(job: tuple[Path, int], ask: Ask) -> None:
    run = job[0] / "host0" / "live"
    killed = ask("--run", run, "--in", 100_000)
    assert killed.stderr is not None
    assert any("will be captured" in line for line in killed.stderr)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    found = captured(ask("--run", run, "--json"))
    assert ranks(found) == [(0, "complete"), (1, "complete")]


def test_a_store_that_is_not_there_is_said(ask: Ask, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        process = ask("--run", tmp_path / "live", "--store", f"tcpstore:127.0.0.1:{port}")
        _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"127.0.0.1:{port}" in error
    assert "Traceback" not in error
