"""A standing rule on a fleet that changes: workers join, leave, are scaled down in mid-capture, and restart."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import HealthCheck, given, settings, strategies as st

from profdeck import Profiler
from profdeck.base.errors import CaptureError
from profdeck.base.outcome import Outcome
from profdeck.records.manifest import Manifest
from simulated_servers import SimulatedEngine, SimulatedServer, simulated_servers

BuildProfiler = Callable[..., Profiler]
LoadManifest = Callable[..., Manifest]
CAPTURES = 12
RUNS = itertools.count()
# What happens to a server while it is recorded, and what its stop comes to then.
EVENTS = {"nothing": Outcome.FLUSHED, "is scaled down": Outcome.UNREACHABLE, "restarts": Outcome.FILES_MISSING}


async def end(server: SimulatedServer) -> None:
    await server.stop()
    server.engine = SimulatedEngine()  # nothing of a process outlives it


async def come_back(server: SimulatedServer) -> None:
    await server.start(port=int(server.url.rpartition(":")[2]))


async def captured(profiler: Profiler, step: int, events: list[tuple[SimulatedServer, str]]) -> None:
    """Capture a step, while things happen to servers."""
    with contextlib.suppress(CaptureError):  # that it is partial
        await profiler.astart(step)
        for server, event in events:
            if event != "nothing":
                await end(server)
            if event == "restarts":
                await come_back(server)
        await profiler.astop()


@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms())
def test_captures_are_of_the_fleet_as_it_is_then(
    build_profiler: BuildProfiler, load_manifest: LoadManifest, tmp_path: Path, chance: Random
) -> None:
    file, numbers = tmp_path / "targets.yaml", dict[str, int]()
    own: dict[str, Any] = {"steps": ["every 2"], "output": str(tmp_path / str(next(RUNS)))}

    async def main() -> None:
        async with simulated_servers(6) as servers:
            file.write_text(f"- {servers[0].url}")
            profiler = build_profiler(None, own, file=str(file))
            for step in range(2, 2 * CAPTURES + 1, 2):
                listed = chance.sample(servers, chance.randint(2, 6))
                file.write_text("\n".join(f"- {server.url}" for server in listed))
                away = [server for server in listed[1:] if chance.random() < 0.2]  # one at least is there
                events = [(server, chance.choice([*EVENTS])) for server in listed if server not in away]
                for server in away:
                    await end(server)
                await captured(profiler, step, events)
                for server in [*away, *(server for server, event in events if event == "is scaled down")]:
                    await come_back(server)
                check(step, {server.url: EVENTS[event] for server, event in events}, [server.url for server in away])

    def check(step: int, recorded: dict[str, Outcome], away: list[str]) -> None:
        fleet = load_manifest(step, output=Path(own["output"]))
        assert {one.name: one.outcome for one in fleet.targets} == recorded | dict.fromkeys(away, Outcome.UNREACHABLE)
        assert {one.name for one in fleet.targets if one.took_part} == set(recorded)
        for one in fleet.targets:
            assert numbers.setdefault(one.name, one.replica) == one.replica
            if one.took_part:
                assert load_manifest(step, one.replica, output=Path(own["output"])).target == one.name
        assert len(set(numbers.values())) == len(numbers)

    asyncio.run(asyncio.wait_for(main(), 120))
