"""Tests of abandoned captures, whose driver has exited, and of drivers that compete for targets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from fleet_captures import urls
from profdeck import Profiler, Status
from profdeck.base.errors import CaptureError, TargetError, target_error
from profdeck.base.outcome import Outcome
from profdeck.base.processes import ProcessId
from profdeck.config.structuring import unstructure
from profdeck.records.manifest import Manifest
from profdeck.records.request import CaptureRequest, RequestState
from profdeck.verification.run_report import read_run
from simulated_servers import Act, ServersInThread, SimulatedEngine, SimulatedServer, simulated_servers

BuildProfiler = Callable[..., Profiler]
LoadManifest = Callable[..., Manifest]
EXITED = ProcessId(pid=2**22 + 1, process_started="1")  # above the highest PID on Linux


def start_body(**changes: Any) -> dict[str, Any]:
    request = CaptureRequest(id="old", output=Path("/profiles"), run="old", role="rollout", owner=EXITED)
    return dict(unstructure(attrs.evolve(request, **changes)))


def test_next_driver_stops_the_captures_of_a_killed_driver(
    build_profiler: BuildProfiler,
    start_driver: Callable[..., Any],
    make_engine: Callable[..., Any],
    load_manifest: LoadManifest,
    tmp_path: Path,
) -> None:
    engines = [make_engine() for _ in range(3)]
    with ServersInThread(3) as servers:
        for server, engine in zip(servers, engines, strict=True):
            server.engine = engine
        driver = start_driver(urls(servers))
        driver.resume()
        assert driver.read_line() == "started"
        for engine in engines:
            engine.iterate(2)
        driver.kill()
        assert all(engine.active for engine in engines)
        profiler = build_profiler(urls(servers), policy="all")
        profiler.start(3)
        for engine in engines:
            engine.iterate(3)
        profiler.stop()
        profiler.close()
    fleet = load_manifest(3)
    host = ProcessId().host
    assert fleet.status is Status.COMPLETE
    assert [record.outcome for record in fleet.targets] == [Outcome.FLUSHED] * 3
    (note,) = load_manifest(3, replica=1).notes
    assert note == (
        f"Stopped abandoned captures whose owner has exited: step1 of process {driver.process.pid} on {host}."
    )
    assert f"Replica 1 ({fleet.targets[1].name}): {note}" in fleet.notes
    report = read_run(tmp_path / "run")
    ranks = {(capture.first_step, capture.replica): capture.ranks[0] for capture in report.captures}
    assert {key: (rank.status, rank.events) for key, rank in ranks.items()} == {
        **{(1, replica): (Status.PARTIAL, 4) for replica in range(3)},  # the recorded events are kept
        **{(3, replica): (Status.COMPLETE, 6) for replica in range(3)},
    }
    assert ranks[1, 0].problems == (
        f"Its owner (process {driver.process.pid} on {host}) has exited; {ProcessId()} stopped it.",
    )
    assert {target.status for target in report.targets if target.first_step == 1} == {Status.MISSING}


def test_abandoned_capture_of_a_single_target_is_stopped(
    build_profiler: BuildProfiler, load_manifest: LoadManifest
) -> None:
    async def main() -> None:
        async with simulated_servers(1) as (server,):
            await server.engine.command("start", start_body())
            profiler = build_profiler(server.url)
            async with profiler.capture(1):
                pass
            # The first stop reverts the refused start. The second one has the token of the abandoned capture.
            assert server.commands() == ["status", "start", "stop", "status", "stop", "start", "stop"]

    asyncio.run(main())
    assert load_manifest().status is Status.COMPLETE
    assert load_manifest().notes == (f"Stopped abandoned captures whose owner has exited: old of {EXITED}.",)


def test_two_drivers_each_read_the_result_of_their_own_capture(
    build_profiler: BuildProfiler, make_engine: Callable[..., Any], tmp_path: Path
) -> None:
    engine = make_engine()

    async def main() -> None:
        async with SimulatedServer(engine) as server:
            first, second = (
                build_profiler(server.url, {"run": name, "rollout.iterations": {"count": 2}}) for name in ("a", "b")
            )
            await first.astart(1)
            engine.iterate(2)
            assert await first.await_window(10)
            while engine.ranks[0].reply().state is not RequestState.ENDED:  # noqa: ASYNC110  # a thread writes the files
                await asyncio.sleep(0.01)
            await second.astart(1)  # starts before the first driver reads its result
            assert await first.await_window(10)
            await first.astop()
            engine.iterate(2)
            await second.astop()

    asyncio.run(main())
    for name in ("a", "b"):
        report = read_run(tmp_path / name)
        assert (report.status, report.problems) == (Status.COMPLETE, ())
        assert [target.problems for target in report.targets] == [()]


@pytest.mark.parametrize(
    ("owner", "message", "fix"),
    [
        (ProcessId(), "It belongs to this process, which is running.", "end that process."),
        (ProcessId(pid=1, host="far"), "to process 1 on far. This host cannot determine", "send the ID"),
        (attrs.evolve(EXITED, pid_namespace="pid:[1]"), "cannot determine whether that process", "send the ID"),
        (None, "Capture old is recording in this engine.", Outcome.ALREADY_ACTIVE.fix),
    ],
)  # fmt: skip
def test_captures_of_other_owners_are_not_stopped(
    build_profiler: BuildProfiler, owner: ProcessId | None, message: str, fix: str
) -> None:
    async def main() -> TargetError:
        async with simulated_servers(1) as (server,):
            await server.engine.command("start", start_body(owner=owner))
            with pytest.raises(CaptureError) as caught:
                await build_profiler(server.url).astart(1)
            assert isinstance(server.engine, SimulatedEngine)
            assert server.engine.state is RequestState.RECORDING
            return target_error(caught.value)

    error = asyncio.run(main())
    assert error.outcome is Outcome.ALREADY_ACTIVE
    assert message in str(error)
    assert fix in error.fix


class ReoccupiedEngine(SimulatedEngine):
    """Engine whose capture ends after a refused start. Then another capture starts, `restarts` times in total."""

    restarts = 0

    async def command(self, command: str, payload: Any) -> Any:
        replies = await super().command(command, payload)
        if replies[0].get("refusal"):
            self.state = RequestState.ENDED
        elif command == "status" and self.state is RequestState.ENDED and self.restarts:
            self.restarts -= 1
            self.state = RequestState.RECORDING
        return replies


def test_start_is_retried_if_the_other_capture_has_ended(
    build_profiler: BuildProfiler, load_manifest: LoadManifest
) -> None:
    async def main() -> None:
        async with SimulatedServer(ReoccupiedEngine()) as server:
            await server.engine.command("start", start_body(owner=None))
            async with build_profiler(server.url).capture(1):
                pass

    asyncio.run(main())
    assert load_manifest().status is Status.COMPLETE
    assert load_manifest().notes == ("The first start was refused because of another capture, which has ended since.",)


def test_start_is_retried_a_limited_number_of_times(build_profiler: BuildProfiler) -> None:
    async def main() -> None:
        async with SimulatedServer(engine := ReoccupiedEngine()) as server:
            engine.restarts = 9
            await server.engine.command("start", start_body())
            with pytest.raises(CaptureError, match="Capture old is recording in this engine"):
                await build_profiler(server.url).astart(1)
            assert server.commands().count("start") == 3

    asyncio.run(main())


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("policy", ["any", "all"])
def test_concurrent_drivers_never_share_a_target(
    build_profiler: BuildProfiler, start_driver: Callable[..., Any], policy: str, tmp_path: Path, *, late: bool
) -> None:
    with ServersInThread(4) as servers:
        if late:  # the driver that is second at the other servers can be first at this one
            servers[0].acts["start"] = [Act(delay_s=1.0), Act()]
        overrides = {"rollout.targets": {"policy": policy}, "on_error": "raise"}
        drivers = [start_driver(urls(servers), run=f"run{number}", **overrides) for number in range(2)]
        for driver in drivers:
            driver.resume()
        lines = [driver.read_line() for driver in drivers]
        engines = [server.engine for server in servers]
        recorded_runs = [
            engine.request.run
            for engine in engines
            if isinstance(engine, SimulatedEngine) and engine.request and engine.state is RequestState.RECORDING
        ]
        started = [number for number, line in enumerate(lines) if line == "started"]
        if policy == "any":
            assert len(recorded_runs) == 4
            assert {f"run{number}" for number in started} >= set(recorded_runs)
        else:
            # A driver that did not get all targets released its own targets, but not the other driver's.
            assert set(recorded_runs) == {f"run{number}" for number in started}
            assert len(recorded_runs) == 4 * len(started)
            assert len(started) <= 1
        for number, line in enumerate(lines):
            if number not in started:
                other_pid = drivers[1 - number].process.pid
                assert f"It belongs to process {other_pid} on" in line
        for driver in drivers:
            driver.resume()
        for number in started:
            missing = 4 - recorded_runs.count(f"run{number}")
            problem = f"{missing} of 4 targets did not participate: {missing} already_active."
            assert drivers[number].read_line() == (
                f"stopped: Capture step1 is partial: {problem}" if missing else "stopped"
            )
        assert all(
            engine.state is not RequestState.RECORDING for engine in engines if isinstance(engine, SimulatedEngine)
        )
