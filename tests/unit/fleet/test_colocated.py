"""Tests of engines that share devices with the trainer and wait for the device lease."""

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

HOLDER = "gpu-1, held by this process (trainer, step1)"


@pytest.fixture
def engine(tally: ModuleType, make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine whose rank records the trainer's device."""
    monkeypatch.setattr(tally.TallyBackend, "devices", lambda _: ("gpu-1",))
    return make_engine()


def test_window_states_name_the_lease_holder(
    simulated_backend: None,
    settings: dict[str, Any],
    engine: Any,
    load_manifest: Callable[..., Manifest],
    tmp_path: Path,
) -> None:
    states: list[TargetState] = []

    async def main() -> None:
        async with simulated_servers(1) as (server,):
            server.engine = engine
            role_settings = settings | {"rollout.iterations": {"count": 2}}
            profiler = Profiler.from_config(role="rollout", settings=role_settings, target=server.url)
            lease = leases.acquire_lease(["gpu-1"], holder="trainer, step1")
            async with profiler.capture(1):
                assert not await profiler.await_window(0, states.append)
                lease.release()
                engine.iterate(2)
                assert await profiler.await_window(10, states.append)

    asyncio.run(asyncio.wait_for(main(), 60))
    assert [(state.ended, state.waits_for) for state in states] == [(False, HOLDER), (True, None)]
    target = load_manifest()
    assert (target.status, target.problems) == (Status.COMPLETE, ())
    (note,) = target.notes
    assert note == f"At the start, rank 0 on {target.host} waited for {HOLDER}."
    assert read_run(tmp_path / "run").status is Status.COMPLETE


@pytest.mark.parametrize("first", ["fleet", "trainer"])
def test_trainer_and_fleet_on_one_device_in_either_order(
    simulated_backend: None,
    settings: dict[str, Any],
    engine: Any,
    load_manifest: Callable[..., Manifest],
    tmp_path: Path,
    first: str,
) -> None:
    """The second capture starts when the first one releases the device, if the step has not ended by then."""
    del settings["on_error"]
    settings |= {"rollout.iterations": {"count": 2}, "trainer.backend": "tally", "steps": [1]}

    async def main() -> None:
        async with simulated_servers(1) as (server,):
            server.engine = engine
            trainer = Profiler.from_config(settings=settings)
            fleet = Profiler.from_config(role=None, settings=settings, targets={"rollout": [server.url]})
            earlier, later = (fleet, trainer) if first == "fleet" else (trainer, fleet)
            async with fleet, earlier.capture(1), later.capture(1):
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
        assert f"s for {HOLDER}." in ranks["rollout"].problems[0]
        (note,) = load_manifest().notes
        assert note.endswith(f"waited for {HOLDER}.")
        assert any("The device did not become available" in problem for problem in load_manifest(replica=0).problems)
