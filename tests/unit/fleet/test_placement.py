"""Ranks of a job that are GPUs: each engine records with those of its own ranks that run on them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profdeck import PlacedEngine, Profiler
from profdeck.base.errors import CaptureError
from profdeck.records.manifest import Manifest
from profdeck.verification.run_report import read_run
from simulated_servers import simulated_servers


@pytest.mark.parametrize(
    ("ranks", "recorded"),
    [
        ([0], {0: [0]}),
        ([1, 2], {0: [1], 1: [0]}),
        ([3], {1: [1]}),
        ([0, 1, 9], {0: [0, 1]}),
        ("all", {0: [0, 1], 1: [0, 1]}),
    ],
)
def test_the_ranks_on_those_gpus_record(
    simulated: None,
    settings: dict[str, Any],
    recording: Callable[..., Any],
    manifest: Callable[..., Manifest],
    tmp_path: Path,
    ranks: Any,
    recorded: dict[int, list[int]],
) -> None:
    engines = [recording(2), recording(2)]

    async def main() -> None:
        async with simulated_servers(2) as servers:
            targets = []
            for number, (server, engine) in enumerate(zip(servers, engines, strict=True)):
                server.engine = engine
                targets.append(PlacedEngine(server.url, (2 * number, 2 * number + 1)))
            own = settings | {"rollout.ranks": ranks}
            profiler = Profiler.from_config(role="rollout", settings=own, target=targets)
            async with profiler, profiler.capture(1):
                for engine in engines:
                    engine.iterate()
            asked = [server.commands() for server in servers]
            assert [bool(commands) for commands in asked] == [number in recorded for number in range(2)]

    asyncio.run(main())
    report = read_run(tmp_path / "run")
    assert report.status == "complete", report.problems
    assert {one.replica: [rank.rank for rank in one.ranks] for one in report.captures} == recorded
    assert [target.replica for target in manifest().targets] == [*recorded]


def test_ranks_on_which_no_engine_runs_are_refused(simulated: None, settings: dict[str, Any]) -> None:
    target = PlacedEngine("http://127.0.0.1:9", [4, 5])  # one alone, at which nobody is asked
    profiler = Profiler.from_config(role="rollout", settings=settings | {"rollout.ranks": [0]}, target=target)
    said = r"\[0\] are GPU ranks of this job, .* Targets run on the GPU ranks 4, 5\."
    with profiler, pytest.raises(CaptureError, match=said):
        profiler.start(1)
