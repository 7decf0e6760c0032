"""Many engines as one target: what a host, the manifests and `ls` see of them."""

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

Build = Callable[..., Profiler]
Read = Callable[..., Manifest]


# What is said of targets.


@pytest.mark.parametrize(
    ("text", "said"),
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
def test_reasons_are_sentences(text: str, said: str) -> None:
    assert sentence(text) == said


def test_a_target_is_named_once(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        servers[0].acts["status"] = [Act(raw=b"", close=True)]
        servers[1].acts["start"] = [Act(status=409, error="no")]
        servers[2].acts["start"] = [Act(content=b"{}")]
        await capture(build(urls(servers)))
        (said,) = (record.getMessage() for record in caplog.records if "continues without" in record.getMessage())
        where = [f"Replica {replica} ({server.url})" for replica, server in enumerate(servers)]
        assert said.partition("targets. ")[2] == (
            f"{where[0]} cannot be reached: it closed the connection without a response. Is the server running? "
            f"{where[1]}: /profdeck/start returned status 409: no. "
            f"{where[2]} has an incompatible version of profdeck: 'answer'."
        )

    with_servers(check, 4)


def test_what_is_known_of_a_failed_stop_is_the_fix(
    build: Build, manifest: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, gone = HttpEngine.command, TargetError("It has ended.", Outcome.UNREACHABLE, "Pass its new handle.")

    async def fail(self: HttpEngine, name: str, payload: Mapping[str, Any]) -> Answer:
        if name == "stop" and payload["request"] == "step1" and self.name == str(failing.url):
            raise gone
        return await command(self, name, payload)

    monkeypatch.setattr(HttpEngine, "command", fail)

    async def check(servers: list[SimulatedServer]) -> None:
        nonlocal failing
        failing = servers[1]
        profiler = build(urls(servers))
        await capture(profiler)
        failing.engine = SimulatedEngine()
        await capture(profiler, 3)

    failing = SimulatedServer()
    with_servers(check, 2)
    assert [(one.outcome, one.fix) for one in manifest().targets] == [
        (Outcome.FLUSHED, None),
        (Outcome.UNREACHABLE, "Pass its new handle."),
    ]
    assert [(one.outcome, one.fix) for one in manifest(3).targets] == [(Outcome.FLUSHED, None)] * 2


# What works.


def test_many_are_captured_as_one(build: Build, manifest: Read) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        profiler = build(urls(servers))
        async with profiler.capture(1) as found:
            assert found is not None
            assert (found.target, found.expected_ranks) == ("fleet of 8", ())
        assert [server.commands() for server in servers] == [GOOD] * 8
        told = [server.arrivals[1].body for server in servers]
        assert [body["replica"] for body in told] == [*range(8)]
        assert len({body["token"] for body in told}) == 8
        assert {(body["id"], body["run"], body["role"], body["first_step"]) for body in told} == {
            ("step1", "run", "rollout", 1)
        }
        assert all(server.arrivals[2].body["reason"] is None for server in servers)

    with_servers(check, 8)
    fleet = manifest()
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
        own = manifest(replica=replica)
        assert (own.status, own.target, own.replica, own.expected_ranks) == (
            Status.COMPLETE,
            record.name,
            replica,
            (0,),
        )
        assert own.targets == ()


def test_a_sample_records_and_the_others_are_left_alone(build: Build, manifest: Read) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        async with build(urls(servers), sample=2).capture(1):
            pass
        assert [server.commands() for server in servers] == [GOOD, [], [], [], GOOD, [], [], []]

    with_servers(check, 8)
    fleet = manifest()
    assert [record.replica for record in fleet.targets] == [0, 4]
    assert (fleet.status, fleet.notes[0]) == (
        Status.COMPLETE,
        "Selected 2 of 8 targets, because sample is 2.",
    )


def test_options_without_effect_are_noted(
    build: Build, manifest: Read, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = {"rollout.options": {"native_directory": str(tmp_path), "rpc_timeout_s": 60}}
    native = "native_directory has no effect: this engine has loaded profdeck instead of its own profiler."

    step = 1

    async def check(servers: list[SimulatedServer]) -> None:
        await capture(build(servers[0].url, own), step)

    with_servers(check, 1)
    assert manifest().notes == (native,)
    monkeypatch.setattr(HttpEngine, "cancels_late_calls", False)  # as engine objects are
    step = 3
    with_servers(check, 1)
    assert manifest(3).notes[0] == native
    assert re.fullmatch(r"rpc_timeout_s has no effect: calls of http://.* cannot be cancelled\.", manifest(3).notes[1])


def test_no_start_leaves_before_all_have_been_reached(build: Build) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        servers[3].acts["status"] = [Act(delay_s=0.1)]
        await capture(build(urls(servers)))
        reached_ns = max(server.arrivals[0].answered_ns or 0 for server in servers)
        assert all(server.arrivals[1].at_ns > reached_ns for server in servers)

    with_servers(check, 8)


def test_the_run_reads_back_complete(build: Build, recording: Callable[..., Any], tmp_path: Path) -> None:
    engines = [recording(ranks=2) for _ in range(3)]

    async def check(servers: list[SimulatedServer]) -> None:
        for server, engine in zip(servers, engines, strict=True):
            server.engine = engine
        profiler = build(urls(servers), {"rollout.iterations": {"count": 2}})
        for step in range(5):
            async with profiler.capture(step) as running:
                for engine in engines:
                    engine.iterate(2)
                if running is not None:
                    assert await profiler.await_window(10)

    with_servers(check, 3)
    report = read_run(tmp_path / "run")
    assert (report.status, report.problems) == (Status.COMPLETE, ())
    assert {(one.first_step, one.replica, len(one.ranks)) for one in report.captures} == {
        (step, replica, 2) for step in (1, 3) for replica in range(3)
    }
    assert {(one.first_step, one.replica, one.target.startswith("http")) for one in report.targets} == {
        (step, replica, replica is not None) for step in (1, 3) for replica in (None, 0, 1, 2)
    }
    assert [outcomes_of.outcome for one in report.targets for outcomes_of in one.targets] == [
        Outcome.ENDED_BY_ITSELF
    ] * 6
    for file in tmp_path.glob("run/step_000003/rollout/replica_001/*"):
        file.unlink()
    report = read_run(tmp_path / "run")
    (fleet,) = (one for one in report.targets if one.replica is None and one.first_step == 3)
    assert (report.status, fleet.problems) == (
        Status.MISSING,
        ("Replica 1 was expected to record, but wrote no files.",),
    )


def test_engine_objects_of_this_process(build: Build, tally: ModuleType, tmp_path: Path) -> None:
    engines = [tally.ToyEngine(blocking=True), tally.ToyEngine(), tally.ToyEngine(blocking=True)]
    profiler = build(engines, {"rollout.backend": "tally-engine"})

    async def main() -> None:
        async with profiler.capture(1):
            for engine in engines:
                engine.iterate("decode")

    asyncio.run(main())
    report = read_run(tmp_path / "run")
    assert (report.status, report.problems, len(report.captures)) == (Status.COMPLETE, (), 3)
    assert {one.target for one in report.targets} == {"fleet of 3", "toy"}
    assert all(engine.commands == [("start", "step1"), ("stop", "step1")] for engine in engines)


def test_the_fleets_manifest_is_on_disk_when_the_stop_returns_and_comes_last(
    build: Build, monkeypatch: pytest.MonkeyPatch, manifest: Read, tmp_path: Path
) -> None:
    synced: list[tuple[int, list[Status]]] = []
    fsync = os.fsync

    def seen(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_ino, [manifest(replica=replica).status for replica in range(3)]))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", seen)

    async def check(servers: list[SimulatedServer]) -> None:
        servers[1].acts["start"] = [Act(status=503)]
        await capture(build(urls(servers)))
        path = tmp_path / "run" / "step_000001" / "rollout" / "target.step1.json"
        # One wait for the disk, whatever the number of targets, whose own manifests have been written before.
        assert synced == [(path.stat().st_ino, [Status.COMPLETE, Status.FAILED, Status.COMPLETE])]

    with_servers(check, 3)


def test_a_repeated_step_keeps_what_the_first_one_left(build: Build, manifest: Read) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        for _ in range(2):
            await capture(build(urls(servers)))

    with_servers(check, 2)
    assert [record.capture for record in manifest(name="step1-take2").targets] == ["step1-take2"] * 2
    assert manifest(replica=1, name="step1-take2").status is Status.COMPLETE


def test_a_capture_that_is_asked_for_while_the_job_runs(build: Build, manifest: Read, tmp_path: Path) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        profiler = build(urls(servers), {"steps": [], "on_demand": True})
        request = requests.create_request(FileStore(tmp_path / "run"), 2, 2)
        for step in range(6):
            async with profiler.capture(step):
                pass
        assert [server.commands() for server in servers] == [GOOD] * 2
        (process,) = requests.read_processes(FileStore(tmp_path / "run"))
        assert (process.target, process.captures, process.problem) == ("fleet", ("step2",), None)
        assert {manifest(2, replica).demand for replica in (None, 0, 1)} == {request.token}

    with_servers(check, 2)


def test_boundaries_reach_a_backend_that_wants_them(
    build: Build, monkeypatch: pytest.MonkeyPatch, manifest: Read
) -> None:
    told = []

    @hookimpl
    def profile_step(_: SimulatedBackend, step: Step) -> None:
        told.append(str(step.unit))

    monkeypatch.setattr(SimulatedBackend, "profile_step", profile_step, raising=False)
    with ServersInThread(3) as servers, build(urls(servers), {"steps": ["1..2"]}) as profiler:
        for step in range(4):
            with profiler.capture(step):
                pass
    assert told == ["global_step"] * 3
    assert manifest().status is Status.COMPLETE


def test_the_window_of_all(build: Build) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        profiler = build(urls(servers), {"on_error": "warn"})
        told = []
        async with profiler.capture(1):
            engines = [server.engine for server in servers]
            for engine, count in zip(engines, (3, 2, 4), strict=True):
                assert isinstance(engine, SimulatedEngine)
                engine.iterations = count
            assert not await profiler.await_window(0, told.append)
            assert sorted(state.iterations for state in profiler.states.values()) == [2, 3, 4]
            assert profiler.states.keys() == set(urls(servers))
            engines[0].end_by_itself(5)
            await servers[1].stop()
            engines[2].end_by_itself(6)
            assert await profiler.await_window(5, told.append)
            await servers[1].start()
        assert [(state.ended, state.iterations) for state in told] == [(False, 2), (True, 5)]
        assert not any(state.writing for state in profiler.states.values())

    with_servers(check, 3)


def test_no_target_answers_about_its_window(build: Build) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        profiler = build(urls(servers), {"on_error": "warn"})
        async with profiler.capture(1):
            for server in servers:
                await server.stop()
            with pytest.raises(CaptureError, match=r"None of the 2 targets responded\. http://127.*cannot be reached"):
                await profiler.await_window(5)
            for server in servers:
                await server.start()

    with_servers(check, 2)


# What does not, under each policy.

POLICIES = [
    ({"policy": "any"}, True),
    ({"policy": "quorum", "quorum": 7}, True),
    ({"policy": "quorum", "quorum": 8}, False),
    ({"policy": "all"}, False),
]


@pytest.mark.parametrize(("policy", "goes_on"), POLICIES)
def test_one_refused_start_among_eight(
    build: Build, manifest: Read, tmp_path: Path, policy: Any, goes_on: bool, caplog: Any
) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        servers[5].acts["start"] = [Act(status=409, error="Step 1: cannot write to /profiles: Read-only.")]
        profiler = build(urls(servers), **policy)
        if goes_on:
            await profiler.astart(1)
            with pytest.raises(CaptureError, match="step1 is partial: 1 of 8 targets did not participate: 1 refused"):
                await profiler.astop()
        else:
            with pytest.raises(
                CaptureError, match=r"Only 7 of 8 targets have started \(policy .*\)\. Replica 5 \(http"
            ):
                await profiler.astart(1)
        # Whoever started is stopped; a stop of what was refused ends nothing.
        assert [server.commands() for server in servers] == [GOOD] * 8
        others = [server for server in servers if server is not servers[5]]
        assert all(server.engine.state is not RequestState.RECORDING for server in servers)  # type: ignore[attr-defined]
        told = {server.arrivals[2].body["reason"] for server in others}
        assert told == (
            {None} if goes_on else {"The start of the fleet was cancelled because too few targets participated."}
        )

    with_servers(check, 8)
    fleet = manifest()
    assert fleet.status is (Status.PARTIAL if goes_on else Status.FAILED)
    assert (fleet.needed, fleet.policy) == (
        {"any": 1, "all": 8}.get(policy["policy"], policy.get("quorum")),
        policy["policy"],
    )
    assert outcomes(fleet) == [Outcome.REFUSED if replica == 5 else Outcome.FLUSHED for replica in range(8)]
    refused = fleet.targets[5]
    assert refused.reason is not None
    assert "/profdeck/start returned status 409: Step 1: cannot write to /profiles: Read-only." in refused.reason
    assert (refused.fix, refused.started_ns) == (Outcome.REFUSED.fix, None)
    assert manifest(replica=5).status is Status.FAILED
    assert manifest(replica=4).status is (Status.COMPLETE if goes_on else Status.PARTIAL)
    lines = [line for line in ls._target_problems(read_run(tmp_path / "run")) if "rollout/5" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"Step 1, rollout/5, {refused.name}: refused: {refused.reason}")
    assert lines[0].endswith("Fix the problem described in the reason. The target was not changed.")
    assert ("continues without 1 of 8 targets. Replica 5 (http" in caplog.text) is goes_on


@pytest.mark.parametrize(("policy", "goes_on"), POLICIES)
def test_a_replica_that_is_gone_before_the_start(build: Build, manifest: Read, policy: Any, goes_on: bool) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        await servers[2].stop()
        profiler = build(urls(servers), **policy)
        await capture(profiler)
        left = [server for server in servers if server is not servers[2]]
        # Too few are known to be there: nothing is started at all.
        assert [server.commands() for server in left] == [GOOD if goes_on else ["status"]] * 7
        await servers[2].start()

    with_servers(check, 8)
    fleet = manifest()
    assert fleet.status is (Status.PARTIAL if goes_on else Status.FAILED)
    assert outcomes(fleet) == [
        Outcome.UNREACHABLE if replica == 2 else Outcome.FLUSHED if goes_on else None for replica in range(8)
    ]
    assert "cannot be reached" in str(fleet.targets[2].reason)
    if not goes_on:
        assert "Only 7 of 8 targets are ready" in fleet.problems[0]
        assert fleet.targets[0].reason == "The start of the fleet was cancelled because too few targets participated."
        assert manifest(replica=0).status is Status.FAILED


@pytest.mark.parametrize("policy", [{"policy": "any"}, {"policy": "all"}])
def test_a_replica_that_ends_between_start_and_stop(build: Build, manifest: Read, policy: Any, caplog: Any) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        profiler = build(urls(servers), {"on_error": "warn"}, **policy)
        async with profiler.capture(1):
            await servers[6].stop()
        await servers[6].start()

    with_servers(check, 8)
    fleet = manifest()
    assert (fleet.status, fleet.problems) == (Status.PARTIAL, ("1 of 8 targets are not complete: 1 unreachable.",))
    assert outcomes(fleet) == [Outcome.UNREACHABLE if replica == 6 else Outcome.FLUSHED for replica in range(8)]
    assert fleet.targets[6].fix == Outcome.UNREACHABLE.fix
    assert manifest(replica=6).status is Status.PARTIAL
    assert "Capture step1 is partial: 1 of 8" in caplog.text


def test_a_replica_that_ends_during_its_flush(build: Build, manifest: Read) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        engine = servers[1].engine
        assert isinstance(engine, SimulatedEngine)
        profiler = build(urls(servers))
        await profiler.astart(1)
        engine.flushed.clear()
        stopping = asyncio.create_task(profiler.astop())
        await servers[1].heard("stop")
        await servers[1].stop()
        with pytest.raises(CaptureError, match="step1 is partial"):
            await stopping
        await servers[1].start()

    with_servers(check, 3)
    assert outcomes(manifest()) == [Outcome.FLUSHED, Outcome.UNREACHABLE, Outcome.FLUSHED]


def test_a_slow_flush_is_waited_for(build: Build, manifest: Read) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        engine = servers[1].engine
        assert isinstance(engine, SimulatedEngine)
        profiler = build(urls(servers))
        await profiler.astart(1)
        engine.flushed.clear()
        stopping = asyncio.create_task(profiler.astop())
        await servers[1].heard("status", 4)  # it is asked again and again
        assert not stopping.done()
        assert manifest().status is Status.RECORDING
        # Nobody waits for the slow one but the whole.
        while manifest(replica=2).status is Status.RECORDING:  # noqa: ASYNC110  # a file tells nobody that it is there
            await asyncio.sleep(0.001)
        engine.flushed.set()
        await stopping

    with_servers(check, 3)
    assert outcomes(manifest()) == [Outcome.FLUSHED] * 3


@pytest.mark.parametrize(("command", "policy", "goes_on"), [("status", *POLICIES[3]), ("start", *POLICIES[0])])
def test_a_hung_server(build: Build, manifest: Read, command: str, policy: Any, goes_on: bool) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        servers[0].acts[command] = [Act(raw=b"", hang=True)]
        began_s = time.monotonic()
        await capture(build(urls(servers), **policy, start_timeout_s=1.6))
        assert time.monotonic() - began_s < 5
        assert all(server.engine.state is not RequestState.RECORDING for server in servers[1:])  # type: ignore[attr-defined]

    with_servers(check, 4)
    fleet = manifest()
    assert fleet.status is (Status.PARTIAL if goes_on else Status.FAILED)
    reached = goes_on or command == "start"
    assert outcomes(fleet) == [Outcome.TIMED_OUT, *[Outcome.FLUSHED if reached else None] * 3]
    assert fleet.targets[0].reason == (
        "The connection was not established within 0.8 seconds, half of start_timeout_s."
        if command == "status"
        else "The start did not finish within start_timeout_s=1.6 seconds."
    )
    assert manifest(replica=0).status is Status.FAILED


def test_a_target_that_hangs_at_the_gate_delays_the_others_and_no_more(
    build: Build, manifest: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hangs:
        manifests = ()

        async def start(self) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(SimulatedBackend, "native", lambda *_: Hangs())

    async def check(servers: list[SimulatedServer]) -> None:
        servers[0].acts["status"] = [Act(status=404)]
        backend = build(urls(servers), start_timeout_s=1.6)
        await capture(backend)

    with_servers(check, 3)
    assert outcomes(manifest()) == [Outcome.TIMED_OUT, Outcome.FLUSHED, Outcome.FLUSHED]


def test_nothing_is_kept_of_servers_that_are_gone(build: Build, tmp_path: Path) -> None:
    file = tmp_path / "targets.yaml"

    async def check(servers: list[SimulatedServer]) -> None:
        file.write_text(f"['{servers[0].url}', '{servers[1].url}']")
        profiler = build(None, {"steps": ["every 2"]}, file=str(file))
        (role,) = profiler._roles
        backend = role.backend
        assert isinstance(backend, FleetBackend)
        await capture(profiler, 2)
        kept = dict(backend._backends)
        file.write_text(f"['{servers[1].url}', '{servers[2].url}']")
        await capture(profiler, 4)
        assert [*backend._backends] == [servers[1].url, servers[2].url]
        assert backend._backends[servers[1].url] is kept[servers[1].url]

    with_servers(check, 3)


def test_what_a_target_can_come_to(build: Build, manifest: Read, tmp_path: Path) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        flushed, by_itself, missing, not_enabled, active = servers
        not_enabled.acts["status"] = [Act(status=404)]
        missing.engine.writes = False  # type: ignore[attr-defined]
        await active.engine.command("start", {"id": "other", "output": "/profiles", "run": "run", "role": "other"})
        profiler = build(urls(servers), {"rollout.iterations": {"count": 2}})
        await profiler.astart(1)
        by_itself.engine.end_by_itself(2)  # type: ignore[attr-defined]
        flushed.engine.iterations = 1  # type: ignore[attr-defined]
        with pytest.raises(CaptureError):
            await profiler.astop()
        assert active.engine.state is RequestState.RECORDING  # type: ignore[attr-defined]  # somebody else's goes on

    with_servers(check, 5)
    fleet = manifest()
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
    (whole,) = (target for target in data["targets"] if target["replica"] is None)
    assert (whole["policy"], whole["needed"], whole["start_skew_ms"]) == ("any", 1, fleet.start_skew_ms)
    assert [target["outcome"] for target in whole["targets"]] == [
        "flushed", "ended_by_itself", "files_missing", "not_enabled", "already_active",
    ]  # fmt: skip
    shown = "\n".join(ls._target_problems(read_run(tmp_path / "run")))
    assert f"rollout/3, {fleet.targets[3].name}: not_enabled: " in shown
    assert "Start the engine with PROFDECK_CONFIG in its environment" in shown


def test_an_engine_that_is_listed_twice_records_once(build: Build, manifest: Read) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        port = servers[0].url.rpartition(":")[2]
        await capture(build([f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port}/"]))
        assert servers[0].commands().count("stop") == 2  # that of the refused start has its own token
        assert servers[0].engine.state is RequestState.WRITING  # type: ignore[attr-defined]

    with_servers(check, 1)
    fleet = manifest()
    assert sorted(map(str, outcomes(fleet))) == ["already_active", "flushed"]
    (refused,) = (one for one in fleet.targets if one.outcome is Outcome.ALREADY_ACTIVE)
    assert "It belongs to this process, which is running." in str(refused.reason)


# Ends that come from elsewhere.


@pytest.mark.parametrize("command", ["status", "start"])
def test_a_start_that_is_cancelled_leaves_nothing_behind(build: Build, manifest: Read, command: str) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        servers[1].acts[command] = [Act(raw=b"", hang=True)]
        profiler = build(urls(servers))
        starting = asyncio.create_task(profiler.astart(1))
        for server in servers:
            await server.heard(command)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert profiler.active is None
        assert all(server.engine.state is not RequestState.RECORDING for server in servers)  # type: ignore[attr-defined]
        if command == "start":
            assert all("stop" in server.commands() for server in servers)

    with_servers(check, 3)
    assert manifest().status is Status.FAILED
    assert {manifest(replica=replica).status for replica in range(3)} <= {Status.FAILED, Status.PARTIAL}


def test_a_stop_that_is_cancelled_has_told_all_targets(build: Build, manifest: Read) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        for server in servers:
            server.acts["stop"] = [Act(delay_s=5), Act()]
        profiler = build(urls(servers))
        await profiler.astart(1)
        stopping = asyncio.create_task(profiler.astop())
        for server in servers:
            await server.heard("stop")
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        assert all(server.engine.state is RequestState.WRITING for server in servers)  # type: ignore[attr-defined]
        for server in servers:
            for task in server.tasks:
                task.cancel()
            await asyncio.gather(*server.tasks, return_exceptions=True)

    with_servers(check, 3)
    assert manifest().status is Status.PARTIAL


def test_close_stops_every_target(build: Build) -> None:
    with ServersInThread(3) as servers:
        profiler = build(urls(servers))
        profiler.start(1)
        profiler.close()
        assert [server.commands() for server in servers] == [GOOD] * 3


def test_a_driver_that_just_ends_stops_every_target(driver: Callable[..., Any], manifest: Read) -> None:
    """Also where connections and names have to be found again: at the exit of an interpreter there are no threads."""
    with ServersInThread(3) as servers:
        for server in servers:
            server.url = server.url.replace("127.0.0.1", "localhost")
        ends = driver(urls(servers), stops=False)
        ends.go_on()
        assert ends.said() == "started"
        for server in servers:
            server.in_its_loop(server.drop_idle)
        ends.go_on()
        assert ends.process.wait() == 0
        assert [server.commands() for server in servers] == [GOOD] * 3
    fleet = manifest()
    assert fleet.problems == ("The process ended in mid-capture.",)
    assert outcomes(fleet) == [Outcome.FLUSHED] * 3


def test_sigterm_stops_every_target(build: Build) -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with ServersInThread(3) as servers:
            profiler = build(urls(servers))
            profiler.start(1)
            signal.raise_signal(signal.SIGTERM)
            assert [server.commands() for server in servers] == [GOOD] * 3
            profiler.close()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_ctrl_c_during_a_start_stops_every_target(build: Build) -> None:
    with ServersInThread(3) as servers:
        servers[2].acts["start"] = [Act(raw=b"", hang=True)]
        profiler = build(urls(servers))

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


# What is refused before anything runs.


def test_what_a_config_cannot_mean(build: Build, settings: dict[str, Any], tmp_path: Path) -> None:
    url = "http://127.0.0.1:1"
    for handles, own, targets, message in (
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
            build(handles, own, **targets)
        assert message in str(caught.value)
    with pytest.raises(ConfigError, match="rollout: the replicas of several targets are numbered automatically"):
        Profiler.from_config(identity=Identity(role="rollout", replica=1), settings=settings, target=[url])


def test_a_backend_of_its_own_process_has_no_targets(tally: ModuleType) -> None:
    own = {"steps": [1], "trainer.backend": "tally"}
    with pytest.raises(ConfigError, match="trainer.targets: 'tally' records its own process and controls no targets"):
        Profiler.from_config(settings=own | {"trainer.targets": {"urls": ["http://127.0.0.1:1"]}})
    with pytest.raises(ConfigError, match="'tally' records its own process and does not accept the target"):
        Profiler.from_config(settings=own, target=["http://127.0.0.1:1"])


def test_of_many_ranks_the_first_one_asks(simulated: None, settings: dict[str, Any]) -> None:
    def enabled(rank: int, **own: Any) -> bool:
        identity = Identity(role="rollout", rank=rank, world_size=2)
        return Profiler.from_config(identity=identity, settings=settings, **own).enabled

    url = "http://127.0.0.1:1"
    assert enabled(1, target=[url])  # a rank may have engines of its own
    settings["rollout.targets"] = {"urls": [url]}
    assert [enabled(0), enabled(1)] == [True, False]
