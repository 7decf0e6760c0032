"""`profdeck capture start` and `stop`, of simulated servers."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from profdeck.records.status import Status
from profdeck.verification.reading import read_run
from simulated_servers import Act, RecordingEngine, ServersInThread, SimulatedServer, offer

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def servers(tally: ModuleType, tmp_path: Path) -> Iterator[list[SimulatedServer]]:  # it is recorded by
    with ServersInThread(3) as running:
        for server in running:
            server.output = str(tmp_path / "profiles")
            server.engine = RecordingEngine("tally-device")
        yield running


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    site = tmp_path / "site"
    site.mkdir()
    return os.environ | {"PYTHONPATH": os.pathsep.join([offer(site), *filter(None, sys.path)])}


@pytest.fixture
def capture(environ: dict[str, str], tmp_path: Path) -> Command:
    """Run `profdeck capture` as a process."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "profdeck", "capture", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environ, check=False, capture_output=True, text=True, timeout=120
        )

    return run


def by_url(servers: list[SimulatedServer]) -> list[str]:
    return [part for server in servers for part in ("--url", server.url)]


def await_command(server: SimulatedServer, command: str) -> None:
    deadline = time.monotonic() + 60
    while command not in server.commands():
        assert time.monotonic() < deadline
        time.sleep(0.02)  # its events are of another thread's loop


def test_what_some_servers_record_is_stopped_later(
    servers: list[SimulatedServer], capture: Command, tmp_path: Path
) -> None:
    servers[1].acts["start"] = [Act(status=500)]
    started = capture("start", *by_url(servers), "--run", "held", "--json")
    assert started.returncode == 0, started.stderr
    news = json.loads(started.stdout)
    assert (Path(news["run"]), news["recording"], len(news["servers"])) == (tmp_path / "profiles" / "held", 2, 3)
    ended = capture("stop", "--run", "profiles/held", "--json")
    report = json.loads(ended.stdout)
    assert [server["url"] for server in report["servers"]] == [server["url"] for server in news["servers"]]
    assert (ended.returncode, report["complete"]) == (1, False)  # one has not taken part
    assert not list((tmp_path / "profiles" / "held").glob("held*"))


@pytest.mark.slow
def test_all_that_is_wrong_is_said_by_the_start(servers: list[SimulatedServer], capture: Command) -> None:
    wrong = capture("start", *by_url(servers), "--set", "server.options.no_such=1")
    assert (wrong.returncode, "no_such" in wrong.stderr) == (2, True)
    for server in servers:
        server.acts["start"] = [Act(status=500)]
    none = capture("start", *by_url(servers), "--run", "none")
    assert (none.returncode, "0 of 3 targets have started" in none.stderr) == (1, True)
    nothing = capture("stop", "--run", "profiles/none")
    assert (nothing.returncode, "no capture is held there" in nothing.stderr) == (2, True)
    assert "cannot be used with stop" in capture("stop", "--run", "x", "--url", "http://127.0.0.1:1").stderr
    assert "--run RUN" in capture("stop").stderr
    assert "start requires servers" in capture("start", "--run", "x").stderr


def test_ctrl_c_while_it_starts_leaves_nothing_behind(
    servers: list[SimulatedServer], environ: dict[str, str], tmp_path: Path
) -> None:
    servers[0].acts["start"] = [Act(delay_s=30)]
    command = [sys.executable, "-m", "profdeck", "capture", "start", *by_url(servers), "--run", "ended"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, text=True)
    await_command(servers[1], "start")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    await_command(servers[1], "stop")
    assert not (tmp_path / "profiles" / "ended" / "held.json").exists()


def test_a_held_capture_is_whole(servers: list[SimulatedServer], capture: Command, tmp_path: Path) -> None:
    started = capture("start", *by_url(servers), "--run", "whole")
    assert "3 servers recording. To stop and see what came of it:" in started.stderr
    assert started.stdout == "profdeck capture stop --run profiles/whole\n"
    for server in servers:
        server.in_its_loop(functools.partial(server.engine.iterate, 3))
    ended = capture("stop", "--run", "profiles/whole")
    assert ended.returncode == 0, ended.stderr + ended.stdout
    assert read_run(tmp_path / "profiles" / "whole").status is Status.COMPLETE
