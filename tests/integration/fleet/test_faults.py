"""Tests of faults of real servers in a fleet: all targets stop, and no recorded data is lost.

The shared servers keep running. Only the last tests kill servers, which they start themselves.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_servers import Server, SglangServer, kill_group, wait_until_ready
from servers import TOKEN, busy, call, router_workers, states, wait_until_idle

from processes import until
from profdeck import Profiler
from profdeck.base.errors import CaptureError
from profdeck.base.outcome import Outcome
from profdeck.engine.control import control_backend
from profdeck.records.run_directory import replica_directory
from profdeck.records.status import Status
from profdeck.records.targets import TargetRecord
from profdeck.replicas.fleet_backend import FleetBackend
from profdeck.verification.report_model import RankReport, TargetReport
from profdeck.verification.run_report import read_run

Rollouts = Callable[[dict[str, Any]], Profiler]
StartDriver = Callable[[dict[str, Any]], "subprocess.Popen[str]"]
Remount = Callable[[str], None]


@pytest.fixture
def victim(begin: Any) -> Server:
    """A vLLM server that a test can kill."""
    return wait_until_ready(begin.vllm())


@pytest.fixture
def doomed(begin: Any, reward: SglangServer) -> SglangServer:
    """An SGLang server that a test can kill."""
    return wait_until_ready(begin.sglang())


def settings(root: Path, run: str, servers: Sequence[Server], backend: str = "vllm", **own: Any) -> dict[str, Any]:
    """Return the config of a job that captures steps 0 and 2. Keyword arguments are keys of its targets."""
    common = {"output": str(root), "run": run, "steps": [0, 2], "on_error": "raise", "on_demand": False}
    targets = {"urls": [server.url for server in servers], **own}
    return common | {"rollout.backend": backend, "rollout.targets": targets}


def fleet_of(root: Path, run: str, step: int = 0) -> TargetReport:
    """Return the report of a fleet."""
    (found,) = (one for one in read_run(root / run).targets if one.policy and one.first_step == step)
    return found


def records(root: Path, run: str, step: int = 0) -> dict[str, TargetRecord]:
    """Return the target records of a fleet by URL."""
    return {record.name: record for record in fleet_of(root, run, step).targets}


def ranks(root: Path, run: str) -> dict[int | None, RankReport]:
    """Return the report of each replica's only rank in a run with one capture."""
    return {capture.replica: rank for capture in read_run(root / run).captures for rank in capture.ranks}


# Servers that hang.


def test_server_that_hangs_at_its_start_does_not_record_when_it_resumes(
    workers: tuple[Server, Server], root: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy, hung = workers
    profiler = rollouts(settings(root, "hangs-at-start", workers, start_timeout_s=6.0))
    fired = FleetBackend._start_members

    async def hang_and_fire(self: FleetBackend, *arguments: Any) -> Any:
        hung.process.send_signal(signal.SIGSTOP)  # the server has replied to the status request
        return await fired(self, *arguments)

    monkeypatch.setattr(FleetBackend, "_start_members", hang_and_fire)
    try:
        began = time.monotonic()
        profiler.start(0)
        took_s = time.monotonic() - began
        healthy.complete()
    finally:
        hung.process.send_signal(signal.SIGCONT)
    with pytest.raises(CaptureError, match=r"1 of 2 targets did not participate: 1 timed_out"):
        profiler.stop()
    assert took_s < 6 + control_backend._ROLL_BACK_S + 1
    found = records(root, "hangs-at-start")
    assert (found[healthy.url].outcome, found[hung.url].outcome) == (Outcome.FLUSHED, Outcome.TIMED_OUT)
    assert found[hung.url].reason == "The start did not finish within start_timeout_s=6 seconds."
    hung.complete()
    assert wait_until_idle(*workers)


def test_server_that_hangs_at_its_stop_stops_when_it_resumes(
    workers: tuple[Server, Server], root: Path, rollouts: Rollouts
) -> None:
    healthy, hung = workers
    profiler = rollouts(settings(root, "hangs-at-stop", workers, stop_timeout_s=5.0))
    profiler.start(0)
    for worker in workers:
        worker.complete()
    began = time.monotonic()
    hung.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(CaptureError, match=r"1 of 2 targets are not complete: 1 timed_out"):
            profiler.stop()
    finally:
        hung.process.send_signal(signal.SIGCONT)
    assert time.monotonic() - began < 5 + control_backend._ROLL_BACK_S + 1
    found = records(root, "hangs-at-stop")
    assert (found[healthy.url].outcome, found[hung.url].outcome) == (Outcome.FLUSHED, Outcome.TIMED_OUT)
    assert found[hung.url].reason == "The stop did not finish within stop_timeout_s=5 seconds."
    hung.complete()
    assert wait_until_idle(*workers)
    left = ranks(root, "hangs-at-stop")
    assert all(rank.events and all(file.whole for file in rank.artifacts) for rank in left.values())
    # The server receives two stops. The second one reports the timeout.
    assert {rank.status for rank in left.values()} <= {Status.COMPLETE, Status.PARTIAL}


# Drivers.

DRIVER = """
import json, sys
from profdeck import Profiler

profiler = Profiler.from_config(role="rollout", settings=json.loads(sys.argv[1]))
profiler.start(0)
print("started", flush=True)
sys.stdin.readline()
profiler.stop()
print("stopped", flush=True)
"""


@pytest.fixture
def start_driver() -> Iterator[StartDriver]:
    """Function that starts a driver with a running capture. The driver stops it when a line is written to its stdin."""
    started: list[subprocess.Popen[str]] = []

    def start(config: dict[str, Any]) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", DRIVER, json.dumps(config)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, env=os.environ | TOKEN, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        started.append(process)
        assert process.stdout is not None
        if process.stdout.readline() != "started\n":
            raise AssertionError(process.communicate()[1])
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_next_driver_stops_the_captures_of_a_killed_driver(
    workers: tuple[Server, Server], root: Path, rollouts: Rollouts, start_driver: StartDriver
) -> None:
    first, second = workers
    driver = start_driver(settings(root, "orphans", workers))
    first.complete()
    driver.kill()
    driver.wait()
    second.complete()
    assert (states(first), states(second)) == ({"recording"}, {"recording"})
    profiler = rollouts(settings(root, "adopters", workers))
    profiler.start(0)
    first.complete()
    second.complete()
    profiler.stop()
    assert wait_until_idle(*workers)
    after = fleet_of(root, "adopters")
    assert after.status is Status.COMPLETE
    assert {record.outcome for record in after.targets} == {Outcome.FLUSHED}
    said = [note for note in after.notes if f"whose owner has exited: step0 of process {driver.pid} on" in note]
    assert len(said) == 2, after.notes
    orphans = ranks(root, "orphans")
    assert sorted(orphans) == [0, 1]
    for rank in orphans.values():
        assert (rank.status, bool(rank.events)) == (Status.PARTIAL, True)
        assert "has exited" in " ".join(rank.problems)
        assert all(artifact.whole for artifact in rank.artifacts)


# A host that cannot write.


@pytest.fixture
def remount(engines: Any, workers: tuple[Server, Server], root: Path) -> Iterator[Remount]:
    """Return a function that remounts the runs directory on the second host as ``ro`` or ``rw``."""
    if not engines.on_two_hosts:
        pytest.skip("there is no other host: unshare is not allowed to make namespaces here")

    def mount(how: str) -> None:
        enter = ["nsenter", "--target", str(workers[1].process.pid), "--mount"]
        subprocess.run([*enter, "mount", "-o", f"remount,{how},bind", root], check=True)

    yield mount
    mount("rw")


def test_start_on_a_read_only_host_is_refused(
    workers: tuple[Server, Server], remount: Remount, root: Path, rollouts: Rollouts
) -> None:
    healthy, elsewhere = workers
    profiler = rollouts(settings(root, "read-only", workers))
    remount("ro")
    profiler.start(0)
    healthy.complete()
    with pytest.raises(CaptureError, match=r"1 of 2 targets did not participate: 1 refused"):
        profiler.stop()
    found = records(root, "read-only")
    assert (found[healthy.url].outcome, found[elsewhere.url].outcome) == (Outcome.FLUSHED, Outcome.REFUSED)
    assert "Read-only file system" in str(found[elsewhere.url].reason)
    assert wait_until_idle(*workers)
    remount("rw")
    profiler.start(2)
    for worker in workers:
        worker.complete()
    profiler.stop()
    assert fleet_of(root, "read-only", 2).status is Status.COMPLETE


def test_host_that_becomes_read_only_loses_only_its_own_files(
    workers: tuple[Server, Server], remount: Remount, root: Path, rollouts: Rollouts
) -> None:
    healthy, elsewhere = workers
    profiler = rollouts(settings(root, "turned", workers))
    profiler.start(0)
    for worker in workers:
        worker.complete()
    remount("ro")
    with pytest.raises(CaptureError, match=r"1 of 2 targets are not complete: 1 files_missing"):
        profiler.stop()
    found = records(root, "turned")
    assert (found[healthy.url].outcome, found[elsewhere.url].outcome) == (Outcome.FLUSHED, Outcome.FILES_MISSING)
    assert "Read-only file system" in str(found[elsewhere.url].reason)
    assert ranks(root, "turned")[found[healthy.url].replica].status is Status.COMPLETE
    assert elsewhere.complete()
    assert wait_until_idle(*workers)


# Servers that are killed.

SLOW = {"with_stack": True, "record_shapes": True, "profile_memory": True}
"""Options that make traces large and slow to write."""


@pytest.mark.long
def test_replica_killed_during_its_flush(
    reward: SglangServer, doomed: SglangServer, root: Path, rollouts: Rollouts
) -> None:
    config = settings(root, "flush", [reward, doomed], "sglang") | {"rollout.options": SLOW}
    profiler = rollouts(config)

    async def capture() -> None:
        await profiler.astart(0)
        with busy(doomed, clients=4):
            await asyncio.to_thread(reward.complete)
            await asyncio.to_thread(wait_for_iterations, doomed, 150)
        stopping = asyncio.create_task(profiler.astop())
        # Wait for the temporary trace file: when a route replies, the trace may be complete.
        written = replica_directory(root / "flush/step_000000/rollout", 1)
        await asyncio.to_thread(until, lambda: list(written.glob(".rank_*.tmp")), every_s=0.001)
        kill_group(doomed.process)
        await stopping

    with pytest.raises(CaptureError, match=r"1 of 2 targets are not complete: 1 unreachable"):
        asyncio.run(capture())
    found = records(root, "flush")
    assert (found[reward.url].outcome, found[doomed.url].outcome) == (Outcome.FLUSHED, Outcome.UNREACHABLE)
    # A killed process may exit late if it is writing.
    until(lambda: ranks(root, "flush")[found[doomed.url].replica].status is not Status.RECORDING, every_s=0.05)
    left = ranks(root, "flush")
    assert left[found[reward.url].replica].status is Status.COMPLETE
    assert left[found[doomed.url].replica].status is Status.MISSING
    assert wait_until_idle(reward)


def wait_for_iterations(server: Server, count: int) -> None:
    """Wait until a server has recorded `count` iterations."""
    until(lambda: call(server, "GET", "status").json()["answer"]["ranks"][0]["iterations"] >= count, every_s=0.05)


@pytest.fixture
def router(workers: tuple[Server, Server], victim: Server, start_router: Callable[..., Server]) -> Server:
    """A router that detects the exit of a worker after at least ten seconds."""
    urls = [worker.url for worker in (*workers, victim)]
    checks = ["--health-check-interval-secs", "5", "--health-failure-threshold", "3"]
    return start_router("vllm-router", "--policy", "round_robin", *checks, "--worker-urls", *urls)


@pytest.mark.long
def test_replica_killed_during_a_capture_is_absent_from_later_captures(
    workers: tuple[Server, Server], victim: Server, router: Server, root: Path, rollouts: Rollouts
) -> None:
    behind = {"rollout.targets": {"router": router.url}, "steps": [0, 2, 4]}
    profiler = rollouts(settings(root, "killed", ()) | behind)
    profiler.start(0)
    for server in (*workers, victim):
        server.complete()
    kill_group(victim.process)
    with pytest.raises(CaptureError, match=r"1 of 3 targets are not complete: 1 unreachable"):
        profiler.stop()
    found = records(root, "killed")
    assert found.pop(victim.url).outcome is Outcome.UNREACHABLE
    assert {record.outcome for record in found.values()} == {Outcome.FLUSHED}
    left = {
        capture.replica: capture.ranks[0] for capture in read_run(root / "killed").captures if capture.first_step == 0
    }
    assert sorted(rank.status for rank in left.values()) == [Status.COMPLETE, Status.COMPLETE, Status.MISSING]
    # The router has not detected the exit, so the worker is contacted.
    assert router_workers(router)[victim.url]["is_healthy"]
    absent = r"1 of 3 targets did not participate: 1 unreachable"
    with pytest.raises(CaptureError, match=absent), profiler.capture(2):
        for worker in workers:
            worker.complete()
    assert "cannot be reached: Connection refused" in str(records(root, "killed", 2)[victim.url].reason)
    # The router has detected the exit, so the worker is not contacted.
    until(lambda: not router_workers(router)[victim.url]["is_healthy"], every_s=0.05)
    with pytest.raises(CaptureError, match=absent), profiler.capture(4):
        for _ in workers:
            router.complete()
    whole = fleet_of(root, "killed", 4)
    assert {record.name: record.reason for record in whole.targets if not record.took_part} == {
        victim.url: "The router reports that this worker is unhealthy, so it was not contacted."
    }
    assert wait_until_idle(*workers)
    # With the policy `all`, no target starts.
    strict = rollouts(settings(root, "strict", [*workers, victim], policy="all"))
    with pytest.raises(CaptureError, match=r"Only 2 of 3 targets are ready \(policy all\)"):
        strict.start(0)
    assert wait_until_idle(*workers)
    assert not ranks(root, "strict")
