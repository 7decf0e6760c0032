"""Helpers for tests that capture several simulated servers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from profdeck import Profiler
from profdeck.base.errors import CaptureError
from profdeck.base.outcome import Outcome
from profdeck.records.manifest import Manifest
from simulated_servers import SimulatedServer, simulated_servers

GOOD = ["status", "start", "stop"]
"""The requests of a capture without failures."""


def urls(servers: Sequence[SimulatedServer]) -> list[str]:
    return [server.url for server in servers]


def outcomes(manifest: Manifest) -> list[Outcome | None]:
    return [record.outcome for record in manifest.targets]


def with_servers(check: Callable[[list[SimulatedServer]], Awaitable[None]], count: int) -> None:
    """Run `check` with `count` simulated servers, then wait until all their connections are closed."""

    async def main() -> None:
        async with simulated_servers(count) as servers:
            await check(servers)
            for server in servers:
                await asyncio.gather(*server.tasks)
                if server.connections:
                    await server.disconnected.wait()

    asyncio.run(asyncio.wait_for(main(), 60))


async def capture(profiler: Profiler, step: int = 1) -> None:
    """Capture one step, ignoring any `CaptureError`."""
    try:
        async with profiler.capture(step):
            pass
    except CaptureError:
        assert profiler.active is None
