"""Tests of captures of several roles, each with its own targets, in addition to the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fleet_captures import GOOD
from profdeck import Profiler, Status
from profdeck.backends.api import TargetState
from profdeck.base.errors import CaptureError
from profdeck.records.manifest import Manifest, is_manifest, read_manifest
from profdeck.verification.run_report import read_run
from profdeck_traces.base.errors import ConfigError
from simulated_servers import Act, ServersInThread, simulated_servers


@pytest.fixture
def config(simulated_backend: None, tally: ModuleType, settings: dict[str, Any]) -> dict[str, Any]:
    """Config of a job with a trainer, rollouts and a reward model."""
    del settings["on_error"]
    return settings | {"trainer.backend": "tally", "reward.backend": "simulated"}


def read_manifests(path: Path) -> dict[tuple[str, str, int | None], Manifest]:
    """Return the manifests of a run by role, capture and replica."""
    files = filter(is_manifest, sorted(path.glob("run/step_*/**/*.json")))
    return {(manifest.role, manifest.capture, manifest.replica): manifest for manifest in map(read_manifest, files)}


def test_one_run_contains_trainer_and_all_roles(
    config: dict[str, Any], make_engine: Callable[..., Any], tmp_path: Path
) -> None:
    engines = [make_engine() for _ in range(3)]

    async def main() -> None:
        async with simulated_servers(3) as servers:
            for server, engine in zip(servers, engines, strict=True):
                server.engine = engine
            job_settings = config | {
                "rollout.targets": {"urls": [server.url for server in servers[:2]], "policy": "all"}
            }
            trainer = Profiler.from_config(settings=job_settings)
            fleet = Profiler.from_config(role=None, targets={"reward": [servers[2].url]}, settings=job_settings)
            assert fleet.enabled
            async with fleet:
                for step in range(5):
                    async with trainer.capture(step), fleet.capture(step):
                        assert [*fleet.captures] == (["rollout", "reward"] if step in {1, 3} else [])
                        assert {capture.id for capture in fleet.captures.values()} <= {f"step{step}"}
                        for engine in engines:
                            engine.iterate()
            assert fleet.active is None

    asyncio.run(main())
    report = read_run(tmp_path / "run")
    assert (report.status, report.problems) == (Status.COMPLETE, ())
    assert {(capture.role, capture.replica) for capture in report.captures} == {
        ("trainer", None), ("rollout", 0), ("rollout", 1), ("reward", 0),
    }  # fmt: skip
    assert {capture for _, capture, _ in read_manifests(tmp_path)} == {"step1", "step3"}


def test_one_profiler_captures_trainer_and_engines(config: dict[str, Any], tmp_path: Path) -> None:
    """The trainer starts recording after the engines, so its trace does not include their start."""
    with ServersInThread(2) as servers:
        targets = {"rollout.targets": {"urls": [servers[0].url]}}
        with Profiler.from_config(settings=config | targets, targets={"reward": [servers[1].url]}) as profiler:
            for step in range(3):
                with profiler.capture(step):
                    assert [*profiler.captures] == (["trainer", "rollout", "reward"] if step == 1 else [])
        assert [server.commands() for server in servers] == [GOOD] * 2
    assert {manifest.status for manifest in read_manifests(tmp_path).values()} == {Status.COMPLETE}
    started = {(manifest.role, manifest.replica): manifest.started_ns for manifest in read_manifests(tmp_path).values()}
    assert started["trainer", None] > max(started["rollout", 0], started["reward", 0])


def test_failed_trainer_start_stops_the_engines(config: dict[str, Any]) -> None:
    with ServersInThread(1) as (server,):
        settings = config | {"trainer.options.fail_at": "start", "on_error": "raise"}
        with Profiler.from_config(settings=settings, targets={"rollout": [server.url]}) as profiler:
            with pytest.raises(CaptureError, match="start does not work"):
                profiler.start(1)
            assert profiler.captures == {}
        assert server.commands() == GOOD


def test_sync_captures_of_two_roles(config: dict[str, Any], tmp_path: Path) -> None:
    with ServersInThread(3) as servers:
        urls = [server.url for server in servers]
        with Profiler.from_config(
            role=None, targets={"rollout": urls[:2], "reward": urls[2:]}, settings=config
        ) as fleet:
            for step in range(5):
                with fleet.capture(step):
                    assert (set(fleet.captures) == {"rollout", "reward"}) is (step in {1, 3})
                    fleet.step(step)
        assert [server.commands() for server in servers] == [GOOD * 2] * 3
    assert {manifest.status for manifest in read_manifests(tmp_path).values()} == {Status.COMPLETE}


def test_capture_of_several_steps(config: dict[str, Any], tmp_path: Path) -> None:
    async def main() -> None:
        async with simulated_servers(2) as servers:
            fleet = Profiler.from_config(
                role=None,
                targets={"rollout": [servers[0].url], "reward": [servers[1].url]},
                settings=config | {"steps": ["1..2"]},
            )
            for step in range(4):
                await fleet.astart(step)
                await fleet.astep(step)
                await fleet.astop()
            assert [server.commands() for server in servers] == [GOOD] * 2

    asyncio.run(main())
    assert {(manifest.capture, manifest.last_step) for manifest in read_manifests(tmp_path).values()} == {("step1", 2)}


@pytest.mark.parametrize(("role_settings", "last"), [({}, 2), ({"rollout.iterations": {"count": 1}}, 1)])
def test_last_step_of_an_engine_capture(
    config: dict[str, Any], make_engine: Callable[..., Any], tmp_path: Path, role_settings: dict[str, Any], last: int
) -> None:
    engine = make_engine()

    async def main() -> None:
        async with simulated_servers(1) as (server,):
            server.engine = engine
            job_settings = config | role_settings | {"steps": ["1..2"]}
            trainer = Profiler.from_config(settings=job_settings)
            async with Profiler.from_config(
                role=None, targets={"rollout": [server.url]}, settings=job_settings
            ) as fleet:
                for step in range(4):
                    async with trainer.capture(step), fleet.capture(step):
                        engine.iterate()

    asyncio.run(main())
    report = read_run(tmp_path / "run")
    assert {(capture.role, capture.id): (capture.first_step, capture.last_step) for capture in report.captures} == {
        ("trainer", "step1"): (1, 2),
        ("rollout", "step1"): (1, last),
    }


def run_stage(fleet: Profiler, name: str, *, form: str) -> None:
    """Run an empty stage as a context manager or decorator, sync or async."""

    async def enter_async() -> None:
        async with fleet.stage(name):
            pass

    @fleet.stage(name)
    def decorated() -> None:
        pass

    @fleet.stage(name)
    async def decorated_async() -> None:
        pass

    if form == "with":
        with fleet.stage(name):
            pass
    elif form == "decorated":
        decorated()
    else:
        asyncio.run(enter_async() if form == "async with" else decorated_async())


@pytest.mark.parametrize("form", ["with", "decorated", "async with", "decorated async"])
def test_stages_in_discrete_mode_are_captures_of_all_roles(config: dict[str, Any], tmp_path: Path, form: str) -> None:
    with ServersInThread(2) as servers:
        targets = {role: [server.url] for role, server in zip(("rollout", "reward"), servers, strict=True)}
        fleet = Profiler.from_config(role=None, targets=targets, settings=config | {"mode": "discrete"})
        for step in (0, 1):
            with fleet.capture(step):
                assert fleet.active is None
                run_stage(fleet, "generate", form=form)
                run_stage(fleet, "generate", form=form)
                assert fleet.active is None
            run_stage(fleet, "generate", form=form)  # outside of the step
        fleet.close()
        assert [server.commands() for server in servers] == [GOOD * 2] * 2
    assert {(role, capture): manifest.status for (role, capture, replica), manifest in read_manifests(tmp_path).items()
            if replica is None} == {
        (role, f"step1-generate{number}"): Status.COMPLETE for role in targets for number in ("", "-2")
    }  # fmt: skip


def test_stage_starts_all_roles_concurrently(config: dict[str, Any]) -> None:
    with ServersInThread(2) as servers:
        for server in servers:
            server.acts["status"] = [Act(delay_s=0.2)]
        targets = {role: [server.url] for role, server in zip(("rollout", "reward"), servers, strict=True)}
        with (
            Profiler.from_config(role=None, targets=targets, settings=config | {"mode": "discrete"}) as fleet,
            fleet.capture(1),
        ):
            with fleet.stage("generate"):
                assert [*fleet.captures] == ["rollout", "reward"]
            first, second = (server.arrivals[0] for server in servers)
    assert first.replied_ns is not None
    assert second.received_ns < first.replied_ns


def test_failed_stage_start_stops_the_other_roles_if_errors_are_raised(config: dict[str, Any]) -> None:
    with ServersInThread(2) as servers:
        servers[1].acts["start"] = [Act(status=503)]
        targets = {role: [server.url] for role, server in zip(("rollout", "reward"), servers, strict=True)}
        settings = config | {"mode": "discrete", "on_error": "raise"}
        with Profiler.from_config(role=None, targets=targets, settings=settings) as fleet, fleet.capture(1):
            with pytest.raises(CaptureError, match="Only 0 of 1 targets have started"), fleet.stage("generate"):
                pass
            assert fleet.active is None
        assert [server.commands()[-1] for server in servers] == ["stop", "stop"]


def test_exception_in_a_stage_is_recorded(config: dict[str, Any], tmp_path: Path) -> None:
    with ServersInThread(1) as (server,):
        fleet = Profiler.from_config(
            role=None, targets={"rollout": [server.url]}, settings=config | {"mode": "discrete"}
        )
        with pytest.raises(ZeroDivisionError), fleet.capture(1), fleet.stage("generate"):
            _ = 1 / 0
        fleet.close()
    assert {manifest.problems[0] for manifest in read_manifests(tmp_path).values()} == {
        "An exception ended it: ZeroDivisionError: division by zero."
    }


def test_stage_in_continuous_mode_is_part_of_the_capture(config: dict[str, Any]) -> None:
    with ServersInThread(1) as (server,):
        with Profiler.from_config(role=None, targets={"rollout": [server.url]}, settings=config) as fleet:
            for step in (0, 1):
                with fleet.capture(step) as running, fleet.stage("generate"):
                    assert fleet.active is running
        assert server.commands() == GOOD


def test_invalid_stages_are_rejected(config: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    settings = config | {"on_error": "raise"}
    fleet = Profiler.from_config(role=None, targets={"rollout": ["http://127.0.0.1:1"]}, settings=settings)
    with pytest.raises(ConfigError, match="stage: expected a letter"):
        fleet.stage("a/b")
    inactive = Profiler()
    inactive.stage("a/b")
    assert "stage: expected a letter" in caplog.text
    for profiler in (fleet, inactive):
        with pytest.raises(ConfigError, match="stage 'generate' cannot decorate the generator"):

            @profiler.stage("generate")
            def batches() -> Iterator[int]:
                yield 1


def test_roles_start_concurrently(config: dict[str, Any]) -> None:
    async def main() -> None:
        async with simulated_servers(2) as servers:
            for server in servers:
                server.acts["status"] = [Act(delay_s=0.2)]
            targets = {role: [server.url] for role, server in zip(("rollout", "reward"), servers, strict=True)}
            fleet = Profiler.from_config(role=None, targets=targets, settings=config)
            async with fleet.capture(1):
                pass
            first, second = (server.arrivals[0] for server in servers)
            assert first.replied_ns is not None
            assert second.received_ns < first.replied_ns

    asyncio.run(main())


@pytest.mark.parametrize("sync", [False, True])
def test_failed_role_start_stops_the_other_roles_if_errors_are_raised(
    config: dict[str, Any], tmp_path: Path, sync: bool
) -> None:
    with ServersInThread(2) as servers:
        servers[1].acts["start"] = [Act(status=503)]
        targets = {role: [server.url] for role, server in zip(("rollout", "reward"), servers, strict=True)}
        fleet = Profiler.from_config(role=None, targets=targets, settings=config | {"on_error": "raise"})
        with pytest.raises(CaptureError, match="Only 0 of 1 targets have started"):
            if sync:
                fleet.start(1)
            else:
                asyncio.run(fleet.astart(1))
        assert fleet.active is None
        assert [server.commands()[-1] for server in servers] == ["stop", "stop"]
        fleet.close()
    manifests = read_manifests(tmp_path)
    assert manifests["reward", "step1", None].status is Status.FAILED
    assert (
        "The start of another role failed: Capture step1 did not start"
        in manifests["rollout", "step1", None].problems[0]
    )


def test_failed_role_start_does_not_affect_the_other_roles_by_default(config: dict[str, Any], tmp_path: Path) -> None:
    async def main() -> None:
        async with simulated_servers(2) as servers:
            servers[1].acts["start"] = [Act(status=503)]
            targets = {role: [server.url] for role, server in zip(("rollout", "reward"), servers, strict=True)}
            fleet = Profiler.from_config(role=None, targets=targets, settings=config)
            async with fleet.capture(1):
                assert [*fleet.captures] == ["rollout"]

    asyncio.run(main())
    manifests = read_manifests(tmp_path)
    assert manifests["reward", "step1", None].status is Status.FAILED
    assert manifests["rollout", "step1", None].status is Status.COMPLETE


def test_exception_stops_all_roles(config: dict[str, Any], tmp_path: Path) -> None:
    with ServersInThread(2) as servers:
        targets = {role: [server.url] for role, server in zip(("rollout", "reward"), servers, strict=True)}
        with Profiler.from_config(role=None, targets=targets, settings=config) as fleet:
            with pytest.raises(ZeroDivisionError), fleet.capture(1):
                _ = 1 / 0
            assert fleet.active is None
        assert [server.commands() for server in servers] == [GOOD] * 2
    reasons = {manifest.problems[0] for manifest in read_manifests(tmp_path).values()}
    assert reasons == {"An exception ended it: ZeroDivisionError: division by zero."}


def test_cancelled_start_stops_all_roles(config: dict[str, Any], tmp_path: Path) -> None:
    async def main() -> None:
        async with simulated_servers(2) as servers:
            servers[1].acts["start"] = [Act(raw=b"", hang=True)]
            targets = {role: [server.url] for role, server in zip(("rollout", "reward"), servers, strict=True)}
            fleet = Profiler.from_config(role=None, targets=targets, settings=config)
            starting = asyncio.create_task(fleet.astart(1))
            for server in servers:
                await server.wait_for_command("start")
            while "rollout" not in fleet.captures:  # noqa: ASYNC110  # no event signals the start
                await asyncio.sleep(0)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            assert fleet.active is None
            assert [server.commands()[-1] for server in servers] == ["stop", "stop"]

    asyncio.run(main())
    manifests = read_manifests(tmp_path)
    assert manifests["rollout", "step1", None].problems[0] == "Interrupted."
    assert manifests["rollout", "step1", 0].problems[0] == "Interrupted."


def test_window_ends_when_the_windows_of_all_roles_end(config: dict[str, Any]) -> None:
    async def main() -> None:
        async with simulated_servers(2) as servers:
            targets = {role: [server.url] for role, server in zip(("rollout", "reward"), servers, strict=True)}
            fleet = Profiler.from_config(role=None, targets=targets, settings=config)
            assert not await fleet.await_window(5)  # no capture is running
            states: list[TargetState] = []
            async with fleet.capture(1):
                servers[0].engine.end_window(2)  # type: ignore[attr-defined]
                assert not await fleet.await_window(0)
                servers[1].engine.end_window(2)  # type: ignore[attr-defined]
                assert await fleet.await_window(5, states.append)
            assert [(state.ended, state.iterations) for state in states] == [(True, 2)] * 2

    asyncio.run(main())


def test_sync_start_in_an_event_loop_suggests_the_async_method(config: dict[str, Any]) -> None:
    async def main() -> None:
        async with simulated_servers(1) as (server,):
            job_settings = config | {"on_error": "raise"}
            fleet = Profiler.from_config(role=None, targets={"rollout": [server.url]}, settings=job_settings)
            with pytest.raises(CaptureError, match="Use 'await profiler.astart"):
                fleet.start(1)
            fleet.stop()
            assert server.commands() == []

    asyncio.run(main())


def test_disabled_profiler_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for settings in (None, {"steps": [1], "trainer.backend": "tally"}):
        fleet = Profiler.from_config(role=None, settings=settings)
        assert not fleet.enabled
        with fleet, fleet.capture(1) as running, fleet.stage("generate"):
            assert running is None
        assert fleet.stage("generate")(read_manifests) is read_manifests
        fleet.stop()


def test_step_without_a_capture_needs_no_event_loop(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Profiler.from_config(role=None, targets={"rollout": ["http://127.0.0.1:1"]}, settings=config)

    def raise_if_created() -> None:
        raise AssertionError

    monkeypatch.setattr(asyncio, "Runner", raise_if_created)
    for step in (0, 2, 4):
        with fleet.capture(step) as running, fleet.stage("generate"):
            assert running is None


def test_invalid_targets_are_rejected_at_construction(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="target: the list is empty"):
        Profiler.from_config(role=None, targets={"rollout": []}, settings=config)
    with pytest.raises(ConfigError, match="target: a target needs a role. Pass role='rollout'"):
        Profiler.from_config(role=None, target="http://127.0.0.1:1", settings=config)
    with pytest.raises(ConfigError, match="targets: the role 'rollout' already has a target"):
        Profiler.from_config(role="rollout", target="x", targets={"rollout": ["y"]}, settings=config)
    with pytest.raises(ConfigError, match="rollout.targets.policy: expected one of any, quorum, all"):
        Profiler.from_config(role=None, settings=config | {"rollout.targets": {"policy": "most"}})
