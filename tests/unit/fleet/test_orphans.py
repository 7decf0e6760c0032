"""Captures whose driver is gone, and drivers that want the same targets."""

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

Build = Callable[..., Profiler]
Read = Callable[..., Manifest]
GONE = ProcessId(pid=2**22 + 1, process_started="1")  # above the highest pid of Linux


def asked(**changes: Any) -> dict[str, Any]:
    request = CaptureRequest(id="old", output=Path("/profiles"), run="old", role="rollout", owner=GONE)
    return dict(unstructure(attrs.evolve(request, **changes)))


def test_the_driver_is_killed_and_the_next_one_ends_what_it_left(
    build: Build, driver: Callable[..., Any], recording: Callable[..., Any], manifest: Read, tmp_path: Path
) -> None:
    engines = [recording() for _ in range(3)]
    with ServersInThread(3) as servers:
        for server, engine in zip(servers, engines, strict=True):
            server.engine = engine
        killed = driver(urls(servers))
        killed.go_on()
        assert killed.said() == "started"
        for engine in engines:
            engine.iterate(2)
        killed.kill()
        assert all(engine.active for engine in engines)
        profiler = build(urls(servers), policy="all")
        profiler.start(3)
        for engine in engines:
            engine.iterate(3)
        profiler.stop()
        profiler.close()
    fleet = manifest(3)
    who = ProcessId().host
    assert fleet.status is Status.COMPLETE
    assert [record.outcome for record in fleet.targets] == [Outcome.FLUSHED] * 3
    (note,) = manifest(3, replica=1).notes
    assert note == (
        f"Stopped abandoned captures whose owner has exited: step1 of process {killed.process.pid} on {who}."
    )
    assert f"Replica 1 ({fleet.targets[1].name}): {note}" in fleet.notes
    report = read_run(tmp_path / "run")
    ranks = {(one.first_step, one.replica): one.ranks[0] for one in report.captures}
    assert {key: (rank.status, rank.events) for key, rank in ranks.items()} == {
        **{(1, replica): (Status.PARTIAL, 4) for replica in range(3)},  # nothing of it is lost
        **{(3, replica): (Status.COMPLETE, 6) for replica in range(3)},
    }
    assert ranks[1, 0].problems == (
        f"Its owner (process {killed.process.pid} on {who}) has exited; {ProcessId()} stopped it.",
    )
    assert {one.status for one in report.targets if one.first_step == 1} == {Status.MISSING}


def test_one_target_alone_is_freed_as_well(build: Build, manifest: Read) -> None:
    async def main() -> None:
        async with simulated_servers(1) as (server,):
            await server.engine.command("start", asked())
            profiler = build(server.url)
            async with profiler.capture(1):
                pass
            # The refused start is taken back, and changes nothing; the orphan ends by its own token.
            assert server.commands() == ["status", "start", "stop", "status", "stop", "start", "stop"]

    asyncio.run(main())
    assert manifest().status is Status.COMPLETE
    assert manifest().notes == (f"Stopped abandoned captures whose owner has exited: old of {GONE}.",)


@pytest.mark.parametrize(
    ("owner", "words", "fix"),
    [
        (ProcessId(), "It belongs to this process, which is running.", "end that process."),
        (ProcessId(pid=1, host="far"), "to process 1 on far. This host cannot determine", "send the ID"),
        (attrs.evolve(GONE, pid_namespace="pid:[1]"), "cannot determine whether that process", "send the ID"),
        (None, "Capture old is recording in this engine.", Outcome.ALREADY_ACTIVE.fix),
    ],
)  # fmt: skip
def test_what_belongs_to_others_is_left_alone(build: Build, owner: ProcessId | None, words: str, fix: str) -> None:
    async def main() -> TargetError:
        async with simulated_servers(1) as (server,):
            await server.engine.command("start", asked(owner=owner))
            with pytest.raises(CaptureError) as caught:
                await build(server.url).astart(1)
            assert isinstance(server.engine, SimulatedEngine)
            assert server.engine.state is RequestState.RECORDING
            return target_error(caught.value)

    error = asyncio.run(main())
    assert error.outcome is Outcome.ALREADY_ACTIVE
    assert words in str(error)
    assert fix in error.fix


class Ends(SimulatedEngine):
    """What is active ends as soon as somebody else has been refused; or something else begins, so often."""

    again = 0

    async def command(self, command: str, payload: Any) -> Any:
        replies = await super().command(command, payload)
        if replies[0].get("refusal"):
            self.state = RequestState.ENDED
        elif command == "status" and self.state is RequestState.ENDED and self.again:
            self.again -= 1
            self.state = RequestState.RECORDING
        return replies


def test_what_has_ended_meanwhile_is_in_nobodys_way(build: Build, manifest: Read) -> None:
    async def main() -> None:
        async with SimulatedServer(Ends()) as server:
            await server.engine.command("start", asked(owner=None))
            async with build(server.url).capture(1):
                pass

    asyncio.run(main())
    assert manifest().status is Status.COMPLETE
    assert manifest().notes == ("The first start was refused because of another capture, which has ended since.",)


def test_an_engine_that_is_never_free_is_left_alone(build: Build) -> None:
    async def main() -> None:
        async with SimulatedServer(engine := Ends()) as server:
            engine.again = 9
            await server.engine.command("start", asked())
            with pytest.raises(CaptureError, match="Capture old is recording in this engine"):
                await build(server.url).astart(1)
            assert server.commands().count("start") == 3

    asyncio.run(main())


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("policy", ["any", "all"])
def test_of_two_drivers_at_once_one_gets_each_target(
    build: Build, driver: Callable[..., Any], policy: str, tmp_path: Path, *, late: bool
) -> None:
    with ServersInThread(4) as servers:
        if late:  # so that whoever comes second to the others gets this one
            servers[0].acts["start"] = [Act(delay_s=1.0), Act()]
        own = {"rollout.targets": {"policy": policy}, "on_error": "raise"}
        drivers = [driver(urls(servers), run=f"run{number}", **own) for number in range(2)]
        for one in drivers:
            one.go_on()
        said = [one.said() for one in drivers]
        engines = [server.engine for server in servers]
        held = [
            engine.asked.run
            for engine in engines
            if isinstance(engine, SimulatedEngine) and engine.asked and engine.state is RequestState.RECORDING
        ]
        started = [number for number, line in enumerate(said) if line == "started"]
        if policy == "any":
            assert len(held) == 4
            assert {f"run{number}" for number in started} >= set(held)
        else:
            # Whoever lost one gave back all that it had, and nothing of the other one.
            assert set(held) == {f"run{number}" for number in started}
            assert len(held) == 4 * len(started)
            assert len(started) <= 1
        for number, line in enumerate(said):
            if number not in started:
                other = drivers[1 - number].process.pid
                assert f"It belongs to process {other} on" in line
        for one in drivers:
            one.go_on()
        for number in started:
            lost = 4 - held.count(f"run{number}")
            missed = f"{lost} of 4 targets did not participate: {lost} already_active."
            assert drivers[number].said() == (f"stopped: Capture step1 is partial: {missed}" if lost else "stopped")
        assert all(
            engine.state is not RequestState.RECORDING for engine in engines if isinstance(engine, SimulatedEngine)
        )
