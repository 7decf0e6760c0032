"""Test of repeated captures of a fleet whose workers join, leave, exit during a capture, and restart."""

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
# Events of a server during its capture, and the resulting outcomes.
EVENTS = {"nothing": Outcome.FLUSHED, "is scaled down": Outcome.UNREACHABLE, "restarts": Outcome.FILES_MISSING}


async def kill(server: SimulatedServer) -> None:
    await server.stop()
    server.engine = SimulatedEngine()  # discard the state of the process


async def restart(server: SimulatedServer) -> None:
    await server.start(port=int(server.url.rpartition(":")[2]))


async def capture_with_events(profiler: Profiler, step: int, events: list[tuple[SimulatedServer, str]]) -> None:
    """Capture a step. The events occur between start and stop."""
    with contextlib.suppress(CaptureError):  # raised if the capture is partial
        await profiler.astart(step)
        for server, event in events:
            if event != "nothing":
                await kill(server)
            if event == "restarts":
                await restart(server)
        await profiler.astop()


@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms())
def test_captures_follow_changes_of_the_fleet(
    build_profiler: BuildProfiler, load_manifest: LoadManifest, tmp_path: Path, random: Random
) -> None:
    file, replica_numbers = tmp_path / "targets.yaml", dict[str, int]()
    overrides: dict[str, Any] = {"steps": ["every 2"], "output": str(tmp_path / str(next(RUNS)))}

    async def main() -> None:
        async with simulated_servers(6) as servers:
            file.write_text(f"- {servers[0].url}")
            profiler = build_profiler(None, overrides, file=str(file))
            for step in range(2, 2 * CAPTURES + 1, 2):
                listed = random.sample(servers, random.randint(2, 6))
                file.write_text("\n".join(f"- {server.url}" for server in listed))
                # The first server stays reachable: a capture without any target would fail.
                unreachable = [server for server in listed[1:] if random.random() < 0.2]
                events = [(server, random.choice([*EVENTS])) for server in listed if server not in unreachable]
                for server in unreachable:
                    await kill(server)
                await capture_with_events(profiler, step, events)
                for server in [*unreachable, *(server for server, event in events if event == "is scaled down")]:
                    await restart(server)
                check(
                    step,
                    {server.url: EVENTS[event] for server, event in events},
                    [server.url for server in unreachable],
                )

    def check(step: int, recorded: dict[str, Outcome], unreachable: list[str]) -> None:
        fleet = load_manifest(step, output=Path(overrides["output"]))
        assert {record.name: record.outcome for record in fleet.targets} == recorded | dict.fromkeys(
            unreachable, Outcome.UNREACHABLE
        )
        assert {record.name for record in fleet.targets if record.took_part} == set(recorded)
        for record in fleet.targets:
            assert replica_numbers.setdefault(record.name, record.replica) == record.replica
            if record.took_part:
                assert load_manifest(step, record.replica, output=Path(overrides["output"])).target == record.name
        assert len(set(replica_numbers.values())) == len(replica_numbers)

    asyncio.run(asyncio.wait_for(main(), 120))
