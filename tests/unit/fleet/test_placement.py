"""Tests of engines that are selected by GPU ranks of the job."""

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
def test_engine_ranks_on_the_selected_gpus_record(
    simulated_backend: None,
    settings: dict[str, Any],
    make_engine: Callable[..., Any],
    load_manifest: Callable[..., Manifest],
    tmp_path: Path,
    ranks: Any,
    recorded: dict[int, list[int]],
) -> None:
    engines = [make_engine(2), make_engine(2)]

    async def main() -> None:
        async with simulated_servers(2) as servers:
            targets = []
            for number, (server, engine) in enumerate(zip(servers, engines, strict=True)):
                server.engine = engine
                targets.append(PlacedEngine(server.url, (2 * number, 2 * number + 1)))
            role_settings = settings | {"rollout.ranks": ranks}
            profiler = Profiler.from_config(role="rollout", settings=role_settings, target=targets)
            async with profiler, profiler.capture(1):
                for engine in engines:
                    engine.iterate()
            assert [bool(server.commands()) for server in servers] == [number in recorded for number in range(2)]

    asyncio.run(main())
    report = read_run(tmp_path / "run")
    assert report.status == "complete", report.problems
    assert {capture.replica: [rank.rank for rank in capture.ranks] for capture in report.captures} == recorded
    assert [target.replica for target in load_manifest().targets] == [*recorded]


def test_gpu_ranks_without_an_engine_are_rejected(simulated_backend: None, settings: dict[str, Any]) -> None:
    target = PlacedEngine("http://127.0.0.1:9", [4, 5])  # never contacted
    profiler = Profiler.from_config(role="rollout", settings=settings | {"rollout.ranks": [0]}, target=target)
    message = r"\[0\] are GPU ranks of this job, .* Targets run on the GPU ranks 4, 5\."
    with profiler, pytest.raises(CaptureError, match=message):
        profiler.start(1)
