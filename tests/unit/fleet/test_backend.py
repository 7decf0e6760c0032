"""Tests of fleets: captures of several engines, their manifests and the output of `ls`."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fleet_captures import GOOD, capture, outcomes, urls, with_servers
from profdeck import Profiler, Status, Step, hookimpl
from profdeck.base.errors import CaptureError, TargetError
from profdeck.base.identity import Identity
from profdeck.base.outcome import Outcome
from profdeck.base.text import sentence
from profdeck.cli import ls
from profdeck.engine.transport.http_engine import HttpEngine
from profdeck.on_demand import requests
from profdeck.on_demand.stores import FileStore
from profdeck.records.manifest import Manifest
from profdeck.records.request import Answer, RequestState
from profdeck.replicas.fleet_backend import FleetBackend
from profdeck.verification.run_report import read_run
from profdeck_traces.base.errors import ConfigError
from simulated_servers import (
    Act,
    ServersInThread,
    SimulatedBackend,
    SimulatedEngine,
    SimulatedServer,
)

BuildProfiler = Callable[..., Profiler]
LoadManifest = Callable[..., Manifest]


# Messages about targets.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("interrupted", "Interrupted."),
        ("the profiler was closed", "The profiler was closed."),
        ("It is well.", "It is well."),
        ("http://127.0.0.1:1 cannot be reached", "http://127.0.0.1:1 cannot be reached."),
        ("http://127.0.0.1:1 cannot be reached. Is it up?", "http://127.0.0.1:1 cannot be reached. Is it up?"),
        ("iterations.first: no", "iterations.first: no."),
        ("vllm.LLM.sleep: no", "vllm.LLM.sleep: no."),
        ("1 of 2", "1 of 2."),
    ],
)
def test_reasons_are_sentences(text: str, expected: str) -> None:
    assert sentence(text) == expected


def test_warning_names_each_target_once(build_profiler: BuildProfiler, caplog: pytest.LogCaptureFixture) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        servers[0].acts["status"] = [Act(raw=b"", close=True)]
        servers[1].acts["start"] = [Act(status=409, error="no")]
        servers[2].acts["start"] = [Act(content=b"{}")]
        await capture(build_profiler(urls(servers)))
        (message,) = (record.getMessage() for record in caplog.records if "continues without" in record.getMessage())
        replicas = [f"Replica {replica} ({server.url})" for replica, server in enumerate(servers)]
        assert message.partition("targets. ")[2] == (
            f"{replicas[0]} cannot be reached: it closed the connection without a response. Is the server running? "
            f"{replicas[1]}: /profdeck/start returned status 409: no. "
            f"{replicas[2]} has an incompatible version of profdeck: 'answer'."
        )

    with_servers(check, 4)


def test_fix_of_a_failed_stop_is_recorded(
    build_profiler: BuildProfiler, load_manifest: LoadManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, error = HttpEngine.command, TargetError("It has ended.", Outcome.UNREACHABLE, "Pass its new handle.")

    async def fail(self: HttpEngine, name: str, payload: Mapping[str, Any]) -> Answer:
        if name == "stop" and payload["request"] == "step1" and self.name == str(failing.url):
            raise error
        return await command(self, name, payload)

    monkeypatch.setattr(HttpEngine, "command", fail)

    async def check(servers: list[SimulatedServer]) -> None:
        nonlocal failing
        failing = servers[1]
        profiler = build_profiler(urls(servers))
        await capture(profiler)
        failing.engine = SimulatedEngine()
        await capture(profiler, 3)

    failing = SimulatedServer()
    with_servers(check, 2)
    assert [(record.outcome, record.fix) for record in load_manifest().targets] == [
        (Outcome.FLUSHED, None),
        (Outcome.UNREACHABLE, "Pass its new handle."),
    ]
    assert [(record.outcome, record.fix) for record in load_manifest(3).targets] == [(Outcome.FLUSHED, None)] * 2


# Successful captures.


def test_fleet_is_one_capture(build_profiler: BuildProfiler, load_manifest: LoadManifest) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        profiler = build_profiler(urls(servers))
        async with profiler.capture(1) as running:
            assert running is not None
            assert (running.target, running.expected_ranks) == ("fleet of 8", ())
        assert [server.commands() for server in servers] == [GOOD] * 8
        requests = [server.arrivals[1].body for server in servers]
        assert [body["replica"] for body in requests] == [*range(8)]
        assert len({body["token"] for body in requests}) == 8
        assert {(body["id"], body["run"], body["role"], body["first_step"]) for body in requests} == {
            ("step1", "run", "rollout", 1)
        }
        assert all(server.arrivals[2].body["reason"] is None for server in servers)

    with_servers(check, 8)
    fleet = load_manifest()
    assert (fleet.status, fleet.problems, fleet.backend) == (Status.COMPLETE, (), "simulated")
    assert (fleet.policy, fleet.needed, fleet.expected_ranks) == ("any", 1, ())
    assert fleet.start_skew_ms is not None
    assert outcomes(fleet) == [Outcome.FLUSHED] * 8
    for replica, record in enumerate(fleet.targets):
        assert (record.replica, record.capture, record.reason, record.fix) == (replica, "step1", None, None)
        assert record.sent_ns is not None
        assert record.started_ns is not None
        assert record.ended_ns is not None
        assert fleet.started_ns < record.sent_ns < record.started_ns < record.ended_ns
        target_manifest = load_manifest(replica=replica)
        assert (
            target_manifest.status,
            target_manifest.target,
            target_manifest.replica,
            target_manifest.expected_ranks,
        ) == (
            Status.COMPLETE,
            record.name,
            replica,
            (0,),
        )
        assert target_manifest.targets == ()


def test_only_sampled_targets_receive_requests(build_profiler: BuildProfiler, load_manifest: LoadManifest) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        async with build_profiler(urls(servers), sample=2).capture(1):
            pass
        assert [server.commands() for server in servers] == [GOOD, [], [], [], GOOD, [], [], []]

    with_servers(check, 8)
    fleet = load_manifest()
    assert [record.replica for record in fleet.targets] == [0, 4]
    assert fleet.found == 8
    assert (fleet.status, fleet.notes[0]) == (
        Status.COMPLETE,
        "Selected 2 of 8 targets, because sample is 2.",
    )


def test_options_without_effect_are_noted(
    build_profiler: BuildProfiler, load_manifest: LoadManifest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    overrides = {"rollout.options": {"native_directory": str(tmp_path), "rpc_timeout_s": 60}}
    native_note = "native_directory has no effect: this engine has loaded profdeck instead of its own profiler."

    step = 1

    async def check(servers: list[SimulatedServer]) -> None:
        await capture(build_profiler(servers[0].url, overrides), step)

    with_servers(check, 1)
    assert load_manifest().notes == (native_note,)
    monkeypatch.setattr(HttpEngine, "cancels_late_calls", False)  # like engine objects
    step = 3
    with_servers(check, 1)
    assert load_manifest(3).notes[0] == native_note
    assert re.fullmatch(
        r"rpc_timeout_s has no effect: calls of http://.* cannot be cancelled\.", load_manifest(3).notes[1]
    )


def test_starts_are_sent_after_all_targets_are_reached(build_profiler: BuildProfiler) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        servers[3].acts["status"] = [Act(delay_s=0.1)]
        await capture(build_profiler(urls(servers)))
        reached_ns = max(server.arrivals[0].replied_ns or 0 for server in servers)
        assert all(server.arrivals[1].received_ns > reached_ns for server in servers)

    with_servers(check, 8)


def test_run_of_a_fleet_is_complete(
    build_profiler: BuildProfiler, make_engine: Callable[..., Any], tmp_path: Path
) -> None:
    engines = [make_engine(ranks=2) for _ in range(3)]

    async def check(servers: list[SimulatedServer]) -> None:
        for server, engine in zip(servers, engines, strict=True):
            server.engine = engine
        profiler = build_profiler(urls(servers), {"rollout.iterations": {"count": 2}})
        for step in range(5):
            async with profiler.capture(step) as running:
                for engine in engines:
                    engine.iterate(2)
                if running is not None:
                    assert await profiler.await_window(10)

    with_servers(check, 3)
    report = read_run(tmp_path / "run")
    assert (report.status, report.problems) == (Status.COMPLETE, ())
    assert {(capture.first_step, capture.replica, len(capture.ranks)) for capture in report.captures} == {
        (step, replica, 2) for step in (1, 3) for replica in range(3)
    }
    assert {(target.first_step, target.replica, target.target.startswith("http")) for target in report.targets} == {
        (step, replica, replica is not None) for step in (1, 3) for replica in (None, 0, 1, 2)
    }
    assert [record.outcome for target in report.targets for record in target.targets] == [Outcome.ENDED_BY_ITSELF] * 6
    for file in tmp_path.glob("run/step_000003/rollout/replica_001/*"):
        file.unlink()
    report = read_run(tmp_path / "run")
    (fleet,) = (target for target in report.targets if target.replica is None and target.first_step == 3)
    assert (report.status, fleet.problems) == (
        Status.MISSING,
        ("Replica 1 was expected to record, but wrote no files.",),
    )


def test_engine_objects_are_captured(build_profiler: BuildProfiler, tally: ModuleType, tmp_path: Path) -> None:
    engines = [tally.ToyEngine(blocking=True), tally.ToyEngine(), tally.ToyEngine(blocking=True)]
    profiler = build_profiler(engines, {"rollout.backend": "tally-engine"})

    async def main() -> None:
        async with profiler.capture(1):
            for engine in engines:
                engine.iterate("decode")

    asyncio.run(main())
    report = read_run(tmp_path / "run")
    assert (report.status, report.problems, len(report.captures)) == (Status.COMPLETE, (), 3)
    assert {target.target for target in report.targets} == {"fleet of 3", "toy"}
    assert all(engine.commands == [("start", "step1"), ("stop", "step1")] for engine in engines)


def test_fleet_manifest_is_synced_after_target_manifests_are_written(
    build_profiler: BuildProfiler, monkeypatch: pytest.MonkeyPatch, load_manifest: LoadManifest, tmp_path: Path
) -> None:
    synced: list[tuple[int, list[Status]]] = []
    fsync = os.fsync

    def record_sync(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_ino, [load_manifest(replica=replica).status for replica in range(3)]))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record_sync)

    async def check(servers: list[SimulatedServer]) -> None:
        servers[1].acts["start"] = [Act(status=503)]
        await capture(build_profiler(urls(servers)))
        path = tmp_path / "run" / "step_000001" / "rollout" / "target.step1.json"
        # Only the fleet's manifest is synced, after the targets' manifests are written.
        assert synced == [(path.stat().st_ino, [Status.COMPLETE, Status.FAILED, Status.COMPLETE])]

    with_servers(check, 3)


def test_repeated_step_keeps_the_manifests_of_the_first_capture(
    build_profiler: BuildProfiler, load_manifest: LoadManifest
) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        for _ in range(2):
            await capture(build_profiler(urls(servers)))

    with_servers(check, 2)
    assert [record.capture for record in load_manifest(name="step1-take2").targets] == ["step1-take2"] * 2
    assert load_manifest(replica=1, name="step1-take2").status is Status.COMPLETE


def test_on_demand_capture(build_profiler: BuildProfiler, load_manifest: LoadManifest, tmp_path: Path) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        profiler = build_profiler(urls(servers), {"steps": [], "on_demand": True})
        request = requests.create_request(FileStore(tmp_path / "run"), 2, 2)
        for step in range(6):
            async with profiler.capture(step):
                pass
        assert [server.commands() for server in servers] == [GOOD] * 2
        (process,) = requests.read_processes(FileStore(tmp_path / "run"))
        assert (process.target, process.captures, process.problem) == ("fleet", ("step2",), None)
        assert {load_manifest(2, replica).demand for replica in (None, 0, 1)} == {request.token}

    with_servers(check, 2)


def test_step_boundaries_are_passed_to_the_backend_hook(
    build_profiler: BuildProfiler, monkeypatch: pytest.MonkeyPatch, load_manifest: LoadManifest
) -> None:
    units = []

    @hookimpl
    def profile_step(_: SimulatedBackend, step: Step) -> None:
        units.append(str(step.unit))

    monkeypatch.setattr(SimulatedBackend, "profile_step", profile_step, raising=False)
    with ServersInThread(3) as servers, build_profiler(urls(servers), {"steps": ["1..2"]}) as profiler:
        for step in range(4):
            with profiler.capture(step):
                pass
    assert units == ["global_step"] * 3
    assert load_manifest().status is Status.COMPLETE


def test_window_ends_when_all_reachable_targets_have_ended(build_profiler: BuildProfiler) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        profiler = build_profiler(urls(servers), {"on_error": "warn"})
        states = []
        async with profiler.capture(1):
            engines = [server.engine for server in servers]
            for engine, count in zip(engines, (3, 2, 4), strict=True):
                assert isinstance(engine, SimulatedEngine)
                engine.iterations = count
            assert not await profiler.await_window(0, states.append)
            assert sorted(state.iterations for state in profiler.states.values()) == [2, 3, 4]
            assert profiler.states.keys() == set(urls(servers))
            engines[0].end_window(5)
            await servers[1].stop()
            engines[2].end_window(6)
            assert await profiler.await_window(5, states.append)
            await servers[1].start()
        assert [(state.ended, state.iterations) for state in states] == [(False, 2), (True, 5)]
        assert not any(state.writing for state in profiler.states.values())

    with_servers(check, 3)


def test_window_fails_if_no_target_responds(build_profiler: BuildProfiler) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        profiler = build_profiler(urls(servers), {"on_error": "warn"})
        async with profiler.capture(1):
            for server in servers:
                await server.stop()
            with pytest.raises(CaptureError, match=r"None of the 2 targets responded\. http://127.*cannot be reached"):
                await profiler.await_window(5)
            for server in servers:
                await server.start()

    with_servers(check, 2)


# Failures under each policy.

POLICIES = [
    ({"policy": "any"}, True),
    ({"policy": "quorum", "quorum": 7}, True),
    ({"policy": "quorum", "quorum": 8}, False),
    ({"policy": "all"}, False),
]


@pytest.mark.parametrize(("policy", "continues"), POLICIES)
def test_refused_start_of_one_target(
    build_profiler: BuildProfiler,
    load_manifest: LoadManifest,
    tmp_path: Path,
    policy: Any,
    continues: bool,
    caplog: Any,
) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        servers[5].acts["start"] = [Act(status=409, error="Step 1: cannot write to /profiles: Read-only.")]
        profiler = build_profiler(urls(servers), **policy)
        if continues:
            await profiler.astart(1)
            with pytest.raises(CaptureError, match="step1 is partial: 1 of 8 targets did not participate: 1 refused"):
                await profiler.astop()
        else:
            with pytest.raises(
                CaptureError, match=r"Only 7 of 8 targets have started \(policy .*\)\. Replica 5 \(http"
            ):
                await profiler.astart(1)
        # The refused target receives a stop, too, which has no effect.
        assert [server.commands() for server in servers] == [GOOD] * 8
        started = [server for server in servers if server is not servers[5]]
        assert all(server.engine.state is not RequestState.RECORDING for server in servers)  # type: ignore[attr-defined]
        reasons = {server.arrivals[2].body["reason"] for server in started}
        assert reasons == (
            {None} if continues else {"The start of the fleet was cancelled because too few targets participated."}
        )

    with_servers(check, 8)
    fleet = load_manifest()
    assert fleet.status is (Status.PARTIAL if continues else Status.FAILED)
    assert (fleet.needed, fleet.policy) == (
        {"any": 1, "all": 8}.get(policy["policy"], policy.get("quorum")),
        policy["policy"],
    )
    assert outcomes(fleet) == [Outcome.REFUSED if replica == 5 else Outcome.FLUSHED for replica in range(8)]
    refused = fleet.targets[5]
    assert refused.reason is not None
    assert "/profdeck/start returned status 409: Step 1: cannot write to /profiles: Read-only." in refused.reason
    assert (refused.fix, refused.started_ns) == (Outcome.REFUSED.fix, None)
    assert load_manifest(replica=5).status is Status.FAILED
    assert load_manifest(replica=4).status is (Status.COMPLETE if continues else Status.PARTIAL)
    lines = [line for line in ls._target_problems(read_run(tmp_path / "run")) if "rollout/5" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"Step 1, rollout/5, {refused.name}: refused: {refused.reason}")
    assert lines[0].endswith("Fix the problem described in the reason. The target was not changed.")
    assert ("continues without 1 of 8 targets. Replica 5 (http" in caplog.text) is continues


@pytest.mark.parametrize(("policy", "continues"), POLICIES)
def test_replica_that_exits_before_the_start(
    build_profiler: BuildProfiler, load_manifest: LoadManifest, policy: Any, continues: bool
) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        await servers[2].stop()
        profiler = build_profiler(urls(servers), **policy)
        await capture(profiler)
        reachable = [server for server in servers if server is not servers[2]]
        # If too few targets are reachable, no target is started.
        assert [server.commands() for server in reachable] == [GOOD if continues else ["status"]] * 7
        await servers[2].start()

    with_servers(check, 8)
    fleet = load_manifest()
    assert fleet.status is (Status.PARTIAL if continues else Status.FAILED)
    assert outcomes(fleet) == [
        Outcome.UNREACHABLE if replica == 2 else Outcome.FLUSHED if continues else None for replica in range(8)
    ]
    assert "cannot be reached" in str(fleet.targets[2].reason)
    if not continues:
        assert "Only 7 of 8 targets are ready" in fleet.problems[0]
        assert fleet.targets[0].reason == "The start of the fleet was cancelled because too few targets participated."
        assert load_manifest(replica=0).status is Status.FAILED


@pytest.mark.parametrize("policy", [{"policy": "any"}, {"policy": "all"}])
def test_replica_that_exits_between_start_and_stop(
    build_profiler: BuildProfiler, load_manifest: LoadManifest, policy: Any, caplog: Any
) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        profiler = build_profiler(urls(servers), {"on_error": "warn"}, **policy)
        async with profiler.capture(1):
            await servers[6].stop()
        await servers[6].start()

    with_servers(check, 8)
    fleet = load_manifest()
    assert (fleet.status, fleet.problems) == (Status.PARTIAL, ("1 of 8 targets are not complete: 1 unreachable.",))
    assert outcomes(fleet) == [Outcome.UNREACHABLE if replica == 6 else Outcome.FLUSHED for replica in range(8)]
    assert fleet.targets[6].fix == Outcome.UNREACHABLE.fix
    assert load_manifest(replica=6).status is Status.PARTIAL
    assert "Capture step1 is partial: 1 of 8" in caplog.text


def test_replica_that_exits_during_its_flush(build_profiler: BuildProfiler, load_manifest: LoadManifest) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        engine = servers[1].engine
        assert isinstance(engine, SimulatedEngine)
        profiler = build_profiler(urls(servers))
        await profiler.astart(1)
        engine.flushed.clear()
        stopping = asyncio.create_task(profiler.astop())
        await servers[1].wait_for_command("stop")
        await servers[1].stop()
        with pytest.raises(CaptureError, match="step1 is partial"):
            await stopping
        await servers[1].start()

    with_servers(check, 3)
    assert outcomes(load_manifest()) == [Outcome.FLUSHED, Outcome.UNREACHABLE, Outcome.FLUSHED]


def test_stop_waits_for_a_slow_flush(build_profiler: BuildProfiler, load_manifest: LoadManifest) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        engine = servers[1].engine
        assert isinstance(engine, SimulatedEngine)
        profiler = build_profiler(urls(servers))
        await profiler.astart(1)
        engine.flushed.clear()
        stopping = asyncio.create_task(profiler.astop())
        await servers[1].wait_for_command("status", 4)  # polled repeatedly
        assert not stopping.done()
        assert load_manifest().status is Status.RECORDING
        # Only the fleet's manifest waits for the slow target.
        while load_manifest(replica=2).status is Status.RECORDING:  # noqa: ASYNC110  # no event signals a file change
            await asyncio.sleep(0.001)
        engine.flushed.set()
        await stopping

    with_servers(check, 3)
    assert outcomes(load_manifest()) == [Outcome.FLUSHED] * 3


@pytest.mark.parametrize(("command", "policy", "continues"), [("status", *POLICIES[3]), ("start", *POLICIES[0])])
def test_server_that_hangs_during_the_start(
    build_profiler: BuildProfiler, load_manifest: LoadManifest, command: str, policy: Any, continues: bool
) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        servers[0].acts[command] = [Act(raw=b"", hang=True)]
        began_s = time.monotonic()
        await capture(build_profiler(urls(servers), **policy, start_timeout_s=1.6))
        assert time.monotonic() - began_s < 5
        assert all(server.engine.state is not RequestState.RECORDING for server in servers[1:])  # type: ignore[attr-defined]

    with_servers(check, 4)
    fleet = load_manifest()
    assert fleet.status is (Status.PARTIAL if continues else Status.FAILED)
    reached = continues or command == "start"
    assert outcomes(fleet) == [Outcome.TIMED_OUT, *[Outcome.FLUSHED if reached else None] * 3]
    assert fleet.targets[0].reason == (
        "The connection was not established within 0.8 seconds, half of start_timeout_s."
        if command == "status"
        else "The start did not finish within start_timeout_s=1.6 seconds."
    )
    assert load_manifest(replica=0).status is Status.FAILED


def test_target_that_hangs_at_the_start_gate_only_delays_others(
    build_profiler: BuildProfiler, load_manifest: LoadManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    class HangingProfiler:
        manifests = ()

        async def start(self) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(SimulatedBackend, "native", lambda *_: HangingProfiler())

    async def check(servers: list[SimulatedServer]) -> None:
        servers[0].acts["status"] = [Act(status=404)]
        profiler = build_profiler(urls(servers), start_timeout_s=1.6)
        await capture(profiler)

    with_servers(check, 3)
    assert outcomes(load_manifest()) == [Outcome.TIMED_OUT, Outcome.FLUSHED, Outcome.FLUSHED]


def test_backends_of_removed_servers_are_released(build_profiler: BuildProfiler, tmp_path: Path) -> None:
    file = tmp_path / "targets.yaml"

    async def check(servers: list[SimulatedServer]) -> None:
        file.write_text(f"['{servers[0].url}', '{servers[1].url}']")
        profiler = build_profiler(None, {"steps": ["every 2"]}, file=str(file))
        (role,) = profiler._roles
        backend = role.backend
        assert isinstance(backend, FleetBackend)
        await capture(profiler, 2)
        previous = dict(backend._backends)
        file.write_text(f"['{servers[1].url}', '{servers[2].url}']")
        await capture(profiler, 4)
        assert [*backend._backends] == [servers[1].url, servers[2].url]
        assert backend._backends[servers[1].url] is previous[servers[1].url]

    with_servers(check, 3)


def test_outcomes_of_targets(build_profiler: BuildProfiler, load_manifest: LoadManifest, tmp_path: Path) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        flushed, by_itself, missing, not_enabled, active = servers
        not_enabled.acts["status"] = [Act(status=404)]
        missing.engine.has_files = False  # type: ignore[attr-defined]
        await active.engine.command("start", {"id": "other", "output": "/profiles", "run": "run", "role": "other"})
        profiler = build_profiler(urls(servers), {"rollout.iterations": {"count": 2}})
        await profiler.astart(1)
        by_itself.engine.end_window(2)  # type: ignore[attr-defined]
        flushed.engine.iterations = 1  # type: ignore[attr-defined]
        with pytest.raises(CaptureError):
            await profiler.astop()
        assert active.engine.state is RequestState.RECORDING  # type: ignore[attr-defined]  # the other owner's capture continues

    with_servers(check, 5)
    fleet = load_manifest()
    assert outcomes(fleet) == [
        Outcome.FLUSHED,
        Outcome.ENDED_BY_ITSELF,
        Outcome.FILES_MISSING,
        Outcome.NOT_ENABLED,
        Outcome.ALREADY_ACTIVE,
    ]
    assert fleet.problems == (
        "2 of 5 targets did not participate: 1 not_enabled, 1 already_active.",
        "1 of 5 targets are not complete: 1 files_missing.",
    )
    data = ls.plain(read_run(tmp_path / "run"))
    (fleet_data,) = (target for target in data["targets"] if target["replica"] is None)
    assert (fleet_data["policy"], fleet_data["needed"], fleet_data["start_skew_ms"]) == ("any", 1, fleet.start_skew_ms)
    assert [target["outcome"] for target in fleet_data["targets"]] == [
        "flushed", "ended_by_itself", "files_missing", "not_enabled", "already_active",
    ]  # fmt: skip
    listing = "\n".join(ls._target_problems(read_run(tmp_path / "run")))
    assert f"rollout/3, {fleet.targets[3].name}: not_enabled: " in listing
    assert "Start the engine with PROFDECK_CONFIG in its environment" in listing


def test_engine_listed_twice_records_once(build_profiler: BuildProfiler, load_manifest: LoadManifest) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        port = servers[0].url.rpartition(":")[2]
        await capture(build_profiler([f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port}/"]))
        assert servers[0].commands().count("stop") == 2  # the stop of the refused start has a different token
        assert servers[0].engine.state is RequestState.WRITING  # type: ignore[attr-defined]

    with_servers(check, 1)
    fleet = load_manifest()
    assert sorted(map(str, outcomes(fleet))) == ["already_active", "flushed"]
    (refused,) = (record for record in fleet.targets if record.outcome is Outcome.ALREADY_ACTIVE)
    assert "It belongs to this process, which is running." in str(refused.reason)


# Cancellation, exit and signals.


@pytest.mark.parametrize("command", ["status", "start"])
def test_cancelled_start_stops_all_targets(
    build_profiler: BuildProfiler, load_manifest: LoadManifest, command: str
) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        servers[1].acts[command] = [Act(raw=b"", hang=True)]
        profiler = build_profiler(urls(servers))
        starting = asyncio.create_task(profiler.astart(1))
        for server in servers:
            await server.wait_for_command(command)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert profiler.active is None
        assert all(server.engine.state is not RequestState.RECORDING for server in servers)  # type: ignore[attr-defined]
        if command == "start":
            assert all("stop" in server.commands() for server in servers)

    with_servers(check, 3)
    assert load_manifest().status is Status.FAILED
    assert {load_manifest(replica=replica).status for replica in range(3)} <= {Status.FAILED, Status.PARTIAL}


def test_cancelled_stop_has_stopped_all_targets(build_profiler: BuildProfiler, load_manifest: LoadManifest) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        for server in servers:
            server.acts["stop"] = [Act(delay_s=5), Act()]
        profiler = build_profiler(urls(servers))
        await profiler.astart(1)
        stopping = asyncio.create_task(profiler.astop())
        for server in servers:
            await server.wait_for_command("stop")
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        assert all(server.engine.state is RequestState.WRITING for server in servers)  # type: ignore[attr-defined]
        for server in servers:
            for task in server.tasks:
                task.cancel()
            await asyncio.gather(*server.tasks, return_exceptions=True)

    with_servers(check, 3)
    assert load_manifest().status is Status.PARTIAL


def test_close_stops_every_target(build_profiler: BuildProfiler) -> None:
    with ServersInThread(3) as servers:
        profiler = build_profiler(urls(servers))
        profiler.start(1)
        profiler.close()
        assert [server.commands() for server in servers] == [GOOD] * 3


def test_driver_that_exits_without_a_stop_stops_every_target(
    start_driver: Callable[..., Any], load_manifest: LoadManifest
) -> None:
    """The exit handler must connect and resolve names again, although it cannot start threads."""
    with ServersInThread(3) as servers:
        for server in servers:
            server.url = server.url.replace("127.0.0.1", "localhost")
        driver = start_driver(urls(servers), stops=False)
        driver.resume()
        assert driver.read_line() == "started"
        for server in servers:
            server.run_in_loop(server.drop_idle)
        driver.resume()
        assert driver.process.wait() == 0
        assert [server.commands() for server in servers] == [GOOD] * 3
    fleet = load_manifest()
    assert fleet.problems == ("The process ended in mid-capture.",)
    assert outcomes(fleet) == [Outcome.FLUSHED] * 3


def test_sigterm_stops_every_target(build_profiler: BuildProfiler) -> None:
    previous_handler = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with ServersInThread(3) as servers:
            profiler = build_profiler(urls(servers))
            profiler.start(1)
            signal.raise_signal(signal.SIGTERM)
            assert [server.commands() for server in servers] == [GOOD] * 3
            profiler.close()
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def test_ctrl_c_during_a_start_stops_every_target(build_profiler: BuildProfiler) -> None:
    with ServersInThread(3) as servers:
        servers[2].acts["start"] = [Act(raw=b"", hang=True)]
        profiler = build_profiler(urls(servers))

        def interrupt() -> None:
            while any("start" not in server.commands() for server in servers):
                time.sleep(0.001)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            profiler.start(1)
        thread.join()
        assert all("stop" in server.commands() for server in servers)
        profiler.close()


# Invalid configs.


def test_invalid_target_configs_are_rejected(
    build_profiler: BuildProfiler, settings: dict[str, Any], tmp_path: Path
) -> None:
    url = "http://127.0.0.1:1"
    for handles, overrides, targets, message in (
        (None, {}, {"policy": "all"}, "targets: no target is specified. Set urls, router, file or actors"),
        ([url], {}, {"urls": [url]}, "targets: both the host and the config specify targets."),
        ([], {}, {}, "target: the list is empty"),
        (["ftp://x"], {}, {}, "target: 'ftp://x' is not a valid server URL"),
        ([url, url], {}, {}, f"target: the list contains {url} twice"),
        (None, {}, {"urls": ["127.0.0.1:1"]}, "urls: '127.0.0.1:1' is not the URL of a server"),
        (None, {}, {"router": "nowhere"}, "router: 'nowhere' is not the URL of a server"),
        (None, {}, {"file": str(tmp_path / "targets.yaml")}, "targets.yaml: cannot be read"),
        (None, {}, {"urls": [url], "policy": "quorum"}, "quorum: the policy 'quorum' requires this key"),
        (None, {}, {"urls": [url], "quorum": 2}, "quorum: the policy 'quorum' requires this key"),
        (None, {}, {"urls": [url], "replicas": []}, "replicas: expected numbers that are at least 0"),
        (None, {}, {"urls": [url], "worker_types": ["decoder"]}, "Did you mean 'decode'?"),
        ([url], {"rollout.iterations": {"count": 1, "first": 0}}, {}, "iterations.first: with this option, the"),
    ):
        with pytest.raises(ConfigError) as caught:
            build_profiler(handles, overrides, **targets)
        assert message in str(caught.value)
    with pytest.raises(ConfigError, match="rollout: the replicas of several targets are numbered automatically"):
        Profiler.from_config(identity=Identity(role="rollout", replica=1), settings=settings, target=[url])


def test_targets_of_an_in_process_backend_are_rejected(tally: ModuleType) -> None:
    settings = {"steps": [1], "trainer.backend": "tally"}
    with pytest.raises(ConfigError, match="trainer.targets: 'tally' records its own process and controls no targets"):
        Profiler.from_config(settings=settings | {"trainer.targets": {"urls": ["http://127.0.0.1:1"]}})
    with pytest.raises(ConfigError, match="'tally' records its own process and does not accept the target"):
        Profiler.from_config(settings=settings, target=["http://127.0.0.1:1"])


def test_only_the_first_rank_controls_configured_targets(simulated_backend: None, settings: dict[str, Any]) -> None:
    def is_enabled(rank: int, **arguments: Any) -> bool:
        identity = Identity(role="rollout", rank=rank, world_size=2)
        return Profiler.from_config(identity=identity, settings=settings, **arguments).enabled

    url = "http://127.0.0.1:1"
    assert is_enabled(1, target=[url])  # targets from the host belong to this rank
    settings["rollout.targets"] = {"urls": [url]}
    assert [is_enabled(0), is_enabled(1)] == [True, False]
