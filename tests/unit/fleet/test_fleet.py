"""Several roles with targets of their own, beside the trainer."""

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
def config(simulated: None, tally: ModuleType, settings: dict[str, Any]) -> dict[str, Any]:
    """The config of a job with a trainer, rollouts and a reward model."""
    del settings["on_error"]
    return settings | {"trainer.backend": "tally", "reward.backend": "simulated"}


def manifests(path: Path) -> dict[tuple[str, str, int | None], Manifest]:
    """Return the manifests of a run: by role, capture and replica."""
    files = filter(is_manifest, sorted(path.glob("run/step_*/**/*.json")))
    return {(one.role, one.capture, one.replica): one for one in map(read_manifest, files)}


def test_a_whole_step_is_in_one_run(config: dict[str, Any], recording: Callable[..., Any], tmp_path: Path) -> None:
    engines = [recording() for _ in range(3)]

    async def main() -> None:
        async with simulated_servers(3) as servers:
            for server, engine in zip(servers, engines, strict=True):
                server.engine = engine
            own = config | {"rollout.targets": {"urls": [server.url for server in servers[:2]], "policy": "all"}}
            trainer = Profiler.from_config(settings=own)
            fleet = Profiler.from_config(role=None, targets={"reward": [servers[2].url]}, settings=own)
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
    assert {(one.role, one.replica) for one in report.captures} == {
        ("trainer", None), ("rollout", 0), ("rollout", 1), ("reward", 0),
    }  # fmt: skip
    assert {capture for _, capture, _ in manifests(tmp_path)} == {"step1", "step3"}


def test_one_profiler_captures_trainer_and_engines(config: dict[str, Any], tmp_path: Path) -> None:
    """The trainer starts recording after the engines, so its trace does not include their start."""
    with ServersInThread(2) as servers:
        targets = {"rollout.targets": {"urls": [servers[0].url]}}
        with Profiler.from_config(settings=config | targets, targets={"reward": [servers[1].url]}) as profiler:
            for step in range(3):
                with profiler.capture(step):
                    assert [*profiler.captures] == (["trainer", "rollout", "reward"] if step == 1 else [])
        assert [server.commands() for server in servers] == [GOOD] * 2
    assert {one.status for one in manifests(tmp_path).values()} == {Status.COMPLETE}
    started = {(one.role, one.replica): one.started_ns for one in manifests(tmp_path).values()}
    assert started["trainer", None] > max(started["rollout", 0], started["reward", 0])


def test_failed_trainer_start_stops_the_engines(config: dict[str, Any]) -> None:
    with ServersInThread(1) as (server,):
        settings = config | {"trainer.options.fail_at": "start", "on_error": "raise"}
        with Profiler.from_config(settings=settings, targets={"rollout": [server.url]}) as profiler:
            with pytest.raises(CaptureError, match="start does not work"):
                profiler.start(1)
            assert profiler.captures == {}
        assert server.commands() == GOOD


def test_a_sync_host(config: dict[str, Any], tmp_path: Path) -> None:
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
    assert {one.status for one in manifests(tmp_path).values()} == {Status.COMPLETE}


def test_a_capture_of_several_steps(config: dict[str, Any], tmp_path: Path) -> None:
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
    assert {(one.capture, one.last_step) for one in manifests(tmp_path).values()} == {("step1", 2)}


@pytest.mark.parametrize(("asked", "last"), [({}, 2), ({"rollout.iterations": {"count": 1}}, 1)])
def test_what_an_engine_recorded_to_the_end_is_of_all_the_steps(
    config: dict[str, Any], recording: Callable[..., Any], tmp_path: Path, asked: dict[str, Any], last: int
) -> None:
    engine = recording()

    async def main() -> None:
        async with simulated_servers(1) as (server,):
            server.engine = engine
            own = config | asked | {"steps": ["1..2"]}
            trainer = Profiler.from_config(settings=own)
            async with Profiler.from_config(role=None, targets={"rollout": [server.url]}, settings=own) as fleet:
                for step in range(4):
                    async with trainer.capture(step), fleet.capture(step):
                        engine.iterate()

    asyncio.run(main())
    report = read_run(tmp_path / "run")
    assert {(one.role, one.id): (one.first_step, one.last_step) for one in report.captures} == {
        ("trainer", "step1"): (1, 2),
        ("rollout", "step1"): (1, last),
    }


def a_stage_of(fleet: Profiler, name: str, *, as_what: str) -> None:
    """Pass a stage in one of the ways in which a host can."""

    async def passes() -> None:
        async with fleet.stage(name):
            pass

    @fleet.stage(name)
    def passed() -> None:
        pass

    @fleet.stage(name)
    async def passed_async() -> None:
        pass

    if as_what == "with":
        with fleet.stage(name):
            pass
    elif as_what == "decorated":
        passed()
    else:
        asyncio.run(passes() if as_what == "async with" else passed_async())


@pytest.mark.parametrize("as_what", ["with", "decorated", "async with", "decorated async"])
def test_in_discrete_mode_stages_are_captures_of_all_roles(
    config: dict[str, Any], tmp_path: Path, as_what: str
) -> None:
    with ServersInThread(2) as servers:
        targets = {role: [server.url] for role, server in zip(("rollout", "reward"), servers, strict=True)}
        fleet = Profiler.from_config(role=None, targets=targets, settings=config | {"mode": "discrete"})
        for step in (0, 1):
            with fleet.capture(step):
                assert fleet.active is None
                a_stage_of(fleet, "generate", as_what=as_what)
                a_stage_of(fleet, "generate", as_what=as_what)
                assert fleet.active is None
            a_stage_of(fleet, "generate", as_what=as_what)  # outside of the step
        fleet.close()
        assert [server.commands() for server in servers] == [GOOD * 2] * 2
    assert {(role, capture): one.status for (role, capture, replica), one in manifests(tmp_path).items()
            if replica is None} == {
        (role, f"step1-generate{number}"): Status.COMPLETE for role in targets for number in ("", "-2")
    }  # fmt: skip


def test_the_stages_of_roles_start_at_the_same_time(config: dict[str, Any]) -> None:
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
    assert first.answered_ns is not None
    assert second.at_ns < first.answered_ns


def test_a_stage_that_does_not_start_takes_the_others_back_if_that_is_an_error(config: dict[str, Any]) -> None:
    with ServersInThread(2) as servers:
        servers[1].acts["start"] = [Act(status=503)]
        targets = {role: [server.url] for role, server in zip(("rollout", "reward"), servers, strict=True)}
        settings = config | {"mode": "discrete", "on_error": "raise"}
        with Profiler.from_config(role=None, targets=targets, settings=settings) as fleet, fleet.capture(1):
            with pytest.raises(CaptureError, match="Only 0 of 1 targets have started"), fleet.stage("generate"):
                pass
            assert fleet.active is None
        assert [server.commands()[-1] for server in servers] == ["stop", "stop"]


def test_an_exception_in_a_stage_ends_it_for_all_roles(config: dict[str, Any], tmp_path: Path) -> None:
    with ServersInThread(1) as (server,):
        fleet = Profiler.from_config(
            role=None, targets={"rollout": [server.url]}, settings=config | {"mode": "discrete"}
        )
        with pytest.raises(ZeroDivisionError), fleet.capture(1), fleet.stage("generate"):
            _ = 1 / 0
        fleet.close()
    assert {one.problems[0] for one in manifests(tmp_path).values()} == {
        "An exception ended it: ZeroDivisionError: division by zero."
    }


def test_a_stage_in_continuous_mode_is_part_of_the_capture(config: dict[str, Any]) -> None:
    with ServersInThread(1) as (server,):
        with Profiler.from_config(role=None, targets={"rollout": [server.url]}, settings=config) as fleet:
            for step in (0, 1):
                with fleet.capture(step) as running, fleet.stage("generate"):
                    assert fleet.active is running
        assert server.commands() == GOOD


def test_what_cannot_be_a_stage(config: dict[str, Any]) -> None:
    fleet = Profiler.from_config(role=None, targets={"rollout": ["http://127.0.0.1:1"]}, settings=config)
    for one in (fleet, Profiler()):
        with pytest.raises(ConfigError, match="stage 'a/b': expected a letter"):
            one.stage("a/b")
        with pytest.raises(ConfigError, match="stage 'generate' cannot decorate the generator"):

            @one.stage("generate")
            def batches() -> Iterator[int]:
                yield 1


def test_roles_start_at_the_same_time(config: dict[str, Any]) -> None:
    async def main() -> None:
        async with simulated_servers(2) as servers:
            for server in servers:
                server.acts["status"] = [Act(delay_s=0.2)]
            targets = {role: [server.url] for role, server in zip(("rollout", "reward"), servers, strict=True)}
            fleet = Profiler.from_config(role=None, targets=targets, settings=config)
            async with fleet.capture(1):
                pass
            first, second = (server.arrivals[0] for server in servers)
            assert first.answered_ns is not None
            assert second.at_ns < first.answered_ns

    asyncio.run(main())


@pytest.mark.parametrize("sync", [False, True])
def test_a_role_that_fails_takes_the_others_back_if_that_is_an_error(
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
    found = manifests(tmp_path)
    assert found["reward", "step1", None].status is Status.FAILED
    assert (
        "The start of another role failed: Capture step1 did not start" in found["rollout", "step1", None].problems[0]
    )


def test_a_role_that_fails_leaves_the_others_alone_by_default(config: dict[str, Any], tmp_path: Path) -> None:
    async def main() -> None:
        async with simulated_servers(2) as servers:
            servers[1].acts["start"] = [Act(status=503)]
            targets = {role: [server.url] for role, server in zip(("rollout", "reward"), servers, strict=True)}
            fleet = Profiler.from_config(role=None, targets=targets, settings=config)
            async with fleet.capture(1):
                assert [*fleet.captures] == ["rollout"]

    asyncio.run(main())
    found = manifests(tmp_path)
    assert found["reward", "step1", None].status is Status.FAILED
    assert found["rollout", "step1", None].status is Status.COMPLETE


def test_an_exception_ends_all_roles(config: dict[str, Any], tmp_path: Path) -> None:
    with ServersInThread(2) as servers:
        targets = {role: [server.url] for role, server in zip(("rollout", "reward"), servers, strict=True)}
        with Profiler.from_config(role=None, targets=targets, settings=config) as fleet:
            with pytest.raises(ZeroDivisionError), fleet.capture(1):
                _ = 1 / 0
            assert fleet.active is None
        assert [server.commands() for server in servers] == [GOOD] * 2
    reasons = {one.problems[0] for one in manifests(tmp_path).values()}
    assert reasons == {"An exception ended it: ZeroDivisionError: division by zero."}


def test_a_cancelled_step_ends_all_roles(config: dict[str, Any], tmp_path: Path) -> None:
    async def main() -> None:
        async with simulated_servers(2) as servers:
            servers[1].acts["start"] = [Act(raw=b"", hang=True)]
            targets = {role: [server.url] for role, server in zip(("rollout", "reward"), servers, strict=True)}
            fleet = Profiler.from_config(role=None, targets=targets, settings=config)
            starting = asyncio.create_task(fleet.astart(1))
            for server in servers:
                await server.heard("start")
            while "rollout" not in fleet.captures:  # noqa: ASYNC110  # there is no event to wait for
                await asyncio.sleep(0)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            assert fleet.active is None
            assert [server.commands()[-1] for server in servers] == ["stop", "stop"]

    asyncio.run(main())
    found = manifests(tmp_path)
    assert found["rollout", "step1", None].problems[0] == "Interrupted."
    assert found["rollout", "step1", 0].problems[0] == "Interrupted."


def test_the_windows_of_all_roles(config: dict[str, Any]) -> None:
    async def main() -> None:
        async with simulated_servers(2) as servers:
            targets = {role: [server.url] for role, server in zip(("rollout", "reward"), servers, strict=True)}
            fleet = Profiler.from_config(role=None, targets=targets, settings=config)
            assert not await fleet.await_window(5)  # nothing runs
            states: list[TargetState] = []
            async with fleet.capture(1):
                servers[0].engine.end_by_itself(2)  # type: ignore[attr-defined]
                assert not await fleet.await_window(0)
                servers[1].engine.end_by_itself(2)  # type: ignore[attr-defined]
                assert await fleet.await_window(5, states.append)
            assert [(state.ended, state.iterations) for state in states] == [(True, 2)] * 2

    asyncio.run(main())


def test_inside_of_a_loop_the_sync_calls_name_the_async_ones(config: dict[str, Any]) -> None:
    async def main() -> None:
        async with simulated_servers(1) as (server,):
            own = config | {"on_error": "raise"}
            fleet = Profiler.from_config(role=None, targets={"rollout": [server.url]}, settings=own)
            with pytest.raises(CaptureError, match="Use 'await profiler.astart"):
                fleet.start(1)
            fleet.stop()
            assert server.commands() == []

    asyncio.run(main())


def test_a_job_that_is_not_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for settings in (None, {"steps": [1], "trainer.backend": "tally"}):
        fleet = Profiler.from_config(role=None, settings=settings)
        assert not fleet.enabled
        with fleet, fleet.capture(1) as running, fleet.stage("generate"):
            assert running is None
        assert fleet.stage("generate")(manifests) is manifests
        fleet.stop()


def test_an_idle_step_of_a_fleet_needs_no_event_loop(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Profiler.from_config(role=None, targets={"rollout": ["http://127.0.0.1:1"]}, settings=config)

    def never() -> None:
        raise AssertionError

    monkeypatch.setattr(asyncio, "Runner", never)
    for step in (0, 2, 4):
        with fleet.capture(step) as running, fleet.stage("generate"):
            assert running is None


def test_what_is_wrong_is_found_before_the_job(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="target: the list is empty"):
        Profiler.from_config(role=None, targets={"rollout": []}, settings=config)
    with pytest.raises(ConfigError, match="target: a target needs a role. Pass role='rollout'"):
        Profiler.from_config(role=None, target="http://127.0.0.1:1", settings=config)
    with pytest.raises(ConfigError, match="targets: the role 'rollout' already has a target"):
        Profiler.from_config(role="rollout", target="x", targets={"rollout": ["y"]}, settings=config)
    with pytest.raises(ConfigError, match="rollout.targets.policy: expected one of any, quorum, all"):
        Profiler.from_config(role=None, settings=config | {"rollout.targets": {"policy": "most"}})
