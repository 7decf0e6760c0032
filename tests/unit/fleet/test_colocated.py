"""Engines on the trainer's devices: whoever asks them learns that they wait for their turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from profdeck import Profiler, Status
from profdeck.backends.api import TargetState
from profdeck.base import leases
from profdeck.records.manifest import Manifest
from profdeck.verification.run_report import read_run
from simulated_servers import simulated_servers

HELD = "gpu-1, held by this process (trainer, step1)"


@pytest.fixture
def engine(tally: ModuleType, make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return an engine whose rank records the device that the trainer is on."""
    monkeypatch.setattr(tally.TallyBackend, "devices", lambda _: ("gpu-1",))
    return make_engine()


def test_who_waits_for_the_window_is_told_for_whom_it_waits(
    simulated_backend: None,
    settings: dict[str, Any],
    engine: Any,
    load_manifest: Callable[..., Manifest],
    tmp_path: Path,
) -> None:
    told: list[TargetState] = []

    async def main() -> None:
        async with simulated_servers(1) as (server,):
            server.engine = engine
            own = settings | {"rollout.iterations": {"count": 2}}
            profiler = Profiler.from_config(role="rollout", settings=own, target=server.url)
            held = leases.acquire_lease(["gpu-1"], holder="trainer, step1")
            async with profiler.capture(1):
                assert not await profiler.await_window(0, told.append)
                held.release()
                engine.iterate(2)
                assert await profiler.await_window(10, told.append)

    asyncio.run(asyncio.wait_for(main(), 60))
    assert [(state.ended, state.waits_for) for state in told] == [(False, HELD), (True, None)]
    target = load_manifest()
    assert (target.status, target.problems) == (Status.COMPLETE, ())
    (note,) = target.notes
    assert note == f"At the start, rank 0 on {target.host} waited for {HELD}."
    assert read_run(tmp_path / "run").status is Status.COMPLETE


@pytest.mark.parametrize("first", ["fleet", "trainer"])
def test_a_job_in_either_order(
    simulated_backend: None,
    settings: dict[str, Any],
    engine: Any,
    load_manifest: Callable[..., Manifest],
    tmp_path: Path,
    first: str,
) -> None:
    """Who starts first in a step has the device first, and who comes second has the rest of it, if there is one."""
    del settings["on_error"]
    settings |= {"rollout.iterations": {"count": 2}, "trainer.backend": "tally", "steps": [1]}

    async def main() -> None:
        async with simulated_servers(1) as (server,):
            server.engine = engine
            trainer = Profiler.from_config(settings=settings)
            fleet = Profiler.from_config(role=None, settings=settings, targets={"rollout": [server.url]})
            one, two = (fleet, trainer) if first == "fleet" else (trainer, fleet)
            async with fleet, one.capture(1), two.capture(1):
                async with trainer.stage("generate"):
                    engine.iterate(3)
                async with trainer.stage("update"):
                    pass

    asyncio.run(asyncio.wait_for(main(), 60))
    report = read_run(tmp_path / "run")
    ranks = {capture.role: capture.ranks[0] for capture in report.captures}
    if first == "fleet":
        assert report.status is Status.COMPLETE
        assert "s for gpu-1, held by this process (rollout, step1), and started in step 1." in ranks["trainer"].notes[0]
    else:
        assert (ranks["trainer"].status, ranks["rollout"].status) == (Status.COMPLETE, Status.MISSING)
        assert f"s for {HELD}." in ranks["rollout"].problems[0]
        (note,) = load_manifest().notes
        assert note.endswith(f"waited for {HELD}.")
        assert any("The device did not become available" in problem for problem in load_manifest(replica=0).problems)
