"""Outcomes of starts and stops: each failure has an outcome code and a fix, also if it is wrapped in another error."""

from __future__ import annotations

import asyncio
import copy
import pickle
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import attrs
import pytest

from profdeck import Capture, Identity
from profdeck.base.errors import CaptureError, LeaseError, TargetError, target_error
from profdeck.base.outcome import Outcome
from profdeck.config.schedule import Iterations
from profdeck.config.structuring import structure, unstructure
from profdeck.engine.control import control_backend, engine_profiler as natives, outcomes
from profdeck.engine.control.control_backend import ControlBackend
from profdeck.engine.control.engine_profiler import OwnProfilerCapture, TraceOrigin
from profdeck.engine.engine import Engine
from profdeck.engine.options import EngineOptions
from profdeck.engine.transport.http_engine import HttpEngine
from profdeck.engine.worker.recorder import EngineRecorder, handle_command, reply_data
from profdeck.records.capture import CaptureRecord
from profdeck.records.request import Answer, CaptureRequest, Recorded, Reply, RequestState
from profdeck_sglang.server import SglangServer
from profdeck_traces.base.errors import describe_error
from profdeck_vllm.server import VllmServer
from simulated_servers import Act, SimulatedEngine, SimulatedServer

# Errors.


def test_failure_outcomes_have_a_fix() -> None:
    fine = {Outcome.STARTED, Outcome.FLUSHED, Outcome.ENDED_BY_ITSELF}
    assert {outcome for outcome in Outcome if not outcome.fix} == fine


def test_target_error_survives_pickling_and_copying() -> None:
    error = TargetError("It does not.", Outcome.ALREADY_ACTIVE)
    for copied in (pickle.loads(pickle.dumps(error)), copy.copy(error)):  # noqa: S301  # trusted data
        assert (str(copied), copied.outcome, copied.fix) == ("It does not.", Outcome.ALREADY_ACTIVE, error.fix)
    assert error.fix == "Wait until the other capture has ended, or stop it."
    assert TargetError("", Outcome.REFUSED, "Do this.").fix == "Do this."
    assert describe_error(error) == "It does not."


def test_long_messages_are_truncated() -> None:
    text = describe_error(ValueError("x" * 10_000_000))
    assert len(text) < 11_000
    assert text.endswith("(9,990,000 more characters)")


def test_target_error_is_found_in_the_causes_of_an_error() -> None:
    inner = TargetError("It does not.", Outcome.NOT_ENABLED)
    wrapped = CaptureError("Capture step1 did not start: It does not.")
    wrapped.__cause__ = inner
    assert target_error(inner) is target_error(wrapped) is inner
    timeout = target_error(TimeoutError("The operation did not finish within 3 seconds."))
    assert (timeout.outcome, str(timeout)) == (
        Outcome.TIMED_OUT,
        "TimeoutError: The operation did not finish within 3 seconds.",
    )
    for error in (CaptureError("no"), LeaseError("no")):
        assert (target_error(error).outcome, str(target_error(error))) == (Outcome.REFUSED, "no")


# Replies of engine processes.


def build_reply(**fields: Any) -> Reply:
    return Reply(rank=0, world_size=1, host="here", pid=1, state=RequestState.IDLE, **fields)


def test_refusal_key_is_omitted_from_accepted_replies() -> None:
    data = unstructure(build_reply())
    assert "refusal" not in data
    assert structure(data, Reply, where="") == build_reply()
    rejected = build_reply(error="no", refusal=Outcome.ALREADY_ACTIVE)
    assert unstructure(rejected)["refusal"] == "already_active"
    assert structure(unstructure(rejected), Reply, where="") == rejected
    assert structure(unstructure(rejected) | {"refusal": None}, Reply, where="").refusal is None


def test_rejected_command_has_an_outcome(tally: ModuleType, tmp_path: Path) -> None:
    recorder = EngineRecorder(Identity(), "tally-device", {})
    request = {"id": "step1", "output": str(tmp_path), "run": "run", "role": "rollout"}

    def send_command(name: str, payload: Any) -> tuple[Outcome | None, bool]:
        reply = handle_command(name, payload, recorder, recorder.start, recorder.stop)
        assert structure(reply_data(reply), Reply, where="") == reply
        return reply.refusal, reply.error is not None

    assert send_command("start", request | {"options": {"fail_at_all": 1}}) == (Outcome.REFUSED, True)
    assert send_command("status", {}) == (None, False)
    assert send_command("start", request) == (None, False)
    assert send_command("start", request | {"id": "step2"}) == (Outcome.ALREADY_ACTIVE, True)
    assert send_command("pause", {}) == (Outcome.REFUSED, True)
    assert send_command("stop", {"request": "step1"}) == (None, False)
    assert send_command("stop", {}) == (Outcome.REFUSED, True)


# Simulated servers.


@attrs.define
class Backend(ControlBackend):
    """The backend of simulated servers."""

    name: ClassVar[str] = "simulated"
    native_capture_class: Callable[..., Any] | None = None

    def connect(self, target: object) -> Engine:
        return HttpEngine(str(target), timeout_s=self.options.rpc_timeout_s)

    def native(self, engine: Engine, capture: Capture, request: CaptureRequest) -> Any:
        assert self.native_capture_class is not None
        return self.native_capture_class(engine, self.options, capture, request)


def create_capture(path: Path, **fields: Any) -> Capture:
    capture = CaptureRecord(
        id="step1", directory=path, identity=Identity(), first_step=1, current_step=1, target="simulated"
    )
    capture.request = CaptureRequest(id="step1", output=path, run="run", role="rollout", **fields)
    return capture


def run_with_server(
    check: Callable[[SimulatedServer, SimulatedEngine, Backend], Awaitable[None]], ranks: int = 1, **options: Any
) -> None:
    async def main() -> None:
        engine = SimulatedEngine(ranks)
        async with SimulatedServer(engine) as server:
            backend = Backend(EngineOptions(**options))
            backend.bind(server.url)
            await check(server, engine, backend)
            assert not server.tasks

    asyncio.run(main())


async def fail_start(backend: Backend, capture: Capture) -> Outcome:
    with pytest.raises(TargetError) as caught:
        await backend.profile_start(capture)
    assert backend.outcome is None
    return caught.value.outcome


@pytest.mark.parametrize(
    ("iterations", "outcome"), [(4, Outcome.FLUSHED), (5, Outcome.ENDED_BY_ITSELF), (6, Outcome.ENDED_BY_ITSELF)]
)
def test_complete_window_ends_by_itself(tmp_path: Path, iterations: int, outcome: Outcome) -> None:
    async def check(server: SimulatedServer, engine: SimulatedEngine, backend: Backend) -> None:
        capture = create_capture(tmp_path, iterations=Iterations(count=5))
        await backend.profile_start(capture)
        engine.end_window(iterations)
        await backend.profile_stop(capture)
        assert backend.outcome is outcome

    run_with_server(check, ranks=2)  # the request selects only one of the ranks


class FullDiskEngine(SimulatedEngine):
    """An engine that reports a full disk for each recording."""

    def _recorded(self, rank: int) -> Recorded:
        return attrs.evolve(super()._recorded(rank), size_bytes=0, problems=("No space left on device.",))


def test_rank_that_cannot_write_its_files_is_reported(tmp_path: Path) -> None:
    async def check(server: SimulatedServer, engine: SimulatedEngine, backend: Backend) -> None:
        server.engine = FullDiskEngine()
        capture = create_capture(tmp_path)
        await backend.profile_start(capture)
        await backend.profile_stop(capture)
        assert backend.outcome is Outcome.FILES_MISSING
        assert capture.problems == ["Rank 0 wrote no file.", "Rank 0: No space left on device."]

    run_with_server(check)


def test_restarted_target_is_reported(tmp_path: Path) -> None:
    async def check(server: SimulatedServer, engine: SimulatedEngine, backend: Backend) -> None:
        capture = create_capture(tmp_path)
        await backend.profile_start(capture)
        engine.request = None
        await backend.profile_stop(capture)
        assert backend.outcome is Outcome.FILES_MISSING
        assert "Its process may have been restarted." in capture.problems[0]

    run_with_server(check)


def test_slow_flush_times_out(tmp_path: Path) -> None:
    async def check(server: SimulatedServer, engine: SimulatedEngine, backend: Backend) -> None:
        capture = create_capture(tmp_path)
        await backend.profile_start(capture)
        engine.flushed.clear()
        await backend.profile_stop(capture)
        assert backend.outcome is Outcome.TIMED_OUT
        assert "After flush_timeout_s=0.05 seconds, the files of rank 0" in capture.problems[0]

    run_with_server(check, flush_timeout_s=0.05)


def test_hanging_stop_times_out(tmp_path: Path) -> None:
    async def check(server: SimulatedServer, engine: SimulatedEngine, backend: Backend) -> None:
        capture = create_capture(tmp_path)
        await backend.profile_start(capture)
        server.acts["stop"] = [Act(raw=b"", hang=True)]
        await backend.profile_stop(capture)
        assert backend.outcome is Outcome.TIMED_OUT

    run_with_server(check, rpc_timeout_s=0.1)


def test_failed_starts_have_an_outcome_and_are_rolled_back(tmp_path: Path) -> None:
    async def check(server: SimulatedServer, engine: SimulatedEngine, backend: Backend) -> None:
        server.acts["start"] = [Act(status=503), Act(status=401), Act(raw=b"", close=True), Act()]
        capture = create_capture(tmp_path)
        assert await fail_start(backend, capture) is Outcome.REFUSED
        assert await fail_start(backend, capture) is Outcome.REFUSED
        assert await fail_start(backend, capture) is Outcome.UNREACHABLE
        assert await fail_start(backend, create_capture(tmp_path, ranks=(0, 7))) is Outcome.REFUSED
        assert server.commands() == ["status", "start", "stop"] * 4  # a failed start may have started some ranks
        other_backend = Backend(EngineOptions())
        other_backend.bind(server.url)
        await other_backend.profile_start(create_capture(tmp_path))
        assert await fail_start(backend, capture) is Outcome.ALREADY_ACTIVE
        assert engine.state is RequestState.RECORDING  # the roll-back does not stop the other backend's capture
        await other_backend.profile_stop(capture)

    run_with_server(check)


def test_rejected_start_has_the_outcome_of_its_ranks() -> None:
    request = CaptureRequest(id="step1", output=Path(), run="run", role="rollout")
    active = build_reply(error="Busy.", refusal=Outcome.ALREADY_ACTIVE)
    timed_out = build_reply(error="Late.", refusal=Outcome.TIMED_OUT)
    without_outcome = build_reply(error="No.")
    for ranks, frontends, outcome in (
        ((without_outcome,), {}, Outcome.REFUSED),
        ((without_outcome, active), {}, Outcome.ALREADY_ACTIVE),
        ((build_reply(),), {"tokenizer": active}, Outcome.ALREADY_ACTIVE),
        ((without_outcome, timed_out), {}, Outcome.TIMED_OUT),
        ((timed_out, active), {}, Outcome.ALREADY_ACTIVE),
    ):
        with pytest.raises(TargetError) as caught:
            outcomes.check_started(request, Answer(ranks=ranks, frontends=frontends))
        assert caught.value.outcome is outcome


def test_roll_back_of_a_hanging_server_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_backend, "_ROLL_BACK_S", 1.0)

    async def check(server: SimulatedServer, engine: SimulatedEngine, backend: Backend) -> None:
        server.acts[""] = [Act(raw=b"", hang=True)]
        server.acts["status"] = [Act()]
        start = asyncio.ensure_future(backend.profile_start(create_capture(tmp_path)))
        await server.wait_for_command("start")
        began_s = time.monotonic()
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert time.monotonic() - began_s < 5
        assert server.commands() == ["status", "start", "stop"]
        while server.connections:
            server.disconnected.clear()
            await server.disconnected.wait()

    run_with_server(check, rpc_timeout_s=60)


# The engine's own profiler.


class NativeCapture(OwnProfilerCapture[HttpEngine, EngineOptions]):
    """A capture by a profiler that writes the files in `written_files` when it stops."""

    backend: ClassVar[str] = "simulated"
    title: ClassVar[str] = "Simulated"
    glob: ClassVar[str] = "*.trace.json"
    remedy: ClassVar[str] = ""
    written_files: ClassVar[dict[str, str]] = {}
    stop_error: ClassVar[CaptureError | None] = None

    async def start(self) -> None:
        directory = self._request.output / "native"
        directory.mkdir(exist_ok=True)
        self.watch(directory)

    async def end(self) -> None:
        assert self._directory is not None
        for name, text in self.written_files.items():
            (self._directory / name).write_text(text)
        if self.stop_error is not None:
            raise self.stop_error

    def parse_name(self, path: Path) -> TraceOrigin | None:
        return TraceOrigin(int(path.name[0]))


COMPLETE_TRACE = '{"traceEvents": [{"ph": "X", "name": "a", "ts": 1, "dur": 1, "pid": 1, "tid": 1}]}'
HANG = TargetError("It hangs.", Outcome.TIMED_OUT, "Wake it up.")


@pytest.mark.parametrize(
    ("written_files", "stop_error", "outcome"),
    [
        ({"0.trace.json": COMPLETE_TRACE}, None, Outcome.FLUSHED),
        ({"0.trace.json": COMPLETE_TRACE}, HANG, Outcome.FLUSHED),  # its files are complete despite the error
        ({"0.trace.json": COMPLETE_TRACE[:-3]}, None, Outcome.FILES_MISSING),
        ({}, None, Outcome.FILES_MISSING),
        ({"1.trace.json": COMPLETE_TRACE}, None, Outcome.FILES_MISSING),  # a rank that was not requested
        ({}, HANG, Outcome.TIMED_OUT),
        ({}, CaptureError("no"), Outcome.REFUSED),
    ],
)
def test_own_profiler_outcome_depends_on_files_and_stop_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    written_files: dict[str, str],
    stop_error: CaptureError | None,
    outcome: Outcome,
) -> None:
    monkeypatch.setattr(natives, "_QUIET_S", 0.0)
    monkeypatch.setattr(NativeCapture, "written_files", written_files)
    monkeypatch.setattr(NativeCapture, "stop_error", stop_error)

    async def check(server: SimulatedServer, engine: SimulatedEngine, backend: Backend) -> None:
        server.acts["status"] = [Act(status=404)]
        backend.native_capture_class = NativeCapture
        capture = create_capture(tmp_path)
        await backend.profile_start(capture)
        assert backend.outcome is Outcome.STARTED
        await backend.profile_stop(capture)
        assert backend.outcome is outcome
        assert backend.fix == (target_error(stop_error).fix if stop_error and outcome is not Outcome.FLUSHED else None)
        assert bool(capture.problems) == (outcome is not Outcome.FLUSHED or stop_error is not None)

    # Files are awaited only if the stop timed out.
    run_with_server(check, flush_timeout_s=0.3 if stop_error is HANG else 3600)


def test_own_profiler_traces_on_another_host_are_missing(tmp_path: Path) -> None:
    async def check(server: SimulatedServer, engine: SimulatedEngine, backend: Backend) -> None:
        server.acts["status"] = [Act(status=404)]
        backend.native_capture_class = NativeCapture
        capture = create_capture(tmp_path)
        await backend.profile_start(capture)
        (tmp_path / "native").rename(tmp_path / "elsewhere")
        backend._native.written_files = {}  # type: ignore[union-attr]  # set by the start
        await backend.profile_stop(capture)
        assert backend.outcome is Outcome.FILES_MISSING

    run_with_server(check)


def test_vllm_server_errors_have_outcomes() -> None:
    async def main() -> None:
        async with SimulatedServer() as server:
            engine = VllmServer(server.url, timeout_s=30)
            server.acts = {
                "version": [
                    Act(content=b'{"version": "0.20.0"}'),
                    Act(content=b"[]"),
                    Act(content=b'{"version": "1.0"}'),
                ],
                "start_profile": [Act(status=404), Act(content=b""), Act(status=409)],
            }
            assert await engine.read_launch_config() == {}
            assert await engine.is_vllm()
            with pytest.raises(TargetError, match="did not return a vLLM version") as caught:
                await engine.start_profile(max_iterations=3)
            assert caught.value.outcome is Outcome.NOT_ENABLED
            await engine.start_profile(max_iterations=3)
            with pytest.raises(TargetError, match="another profile is already active") as caught:
                await engine.start_profile()
            assert caught.value.outcome is Outcome.ALREADY_ACTIVE
            server.acts["version"] = [Act(content=b'{"version": "0.20.0"}')]
            with pytest.raises(TargetError, match="older than 0.32.0, whose /start_profile ignores max_it") as caught:
                await engine.start_profile(max_iterations=3)
            assert (caught.value.outcome, "PROFDECK_CONFIG" in caught.value.fix) == (Outcome.REFUSED, True)
            await engine.close()

    asyncio.run(main())


def test_sglang_server_errors_have_outcomes() -> None:
    async def main() -> None:
        async with SimulatedServer() as server:
            engine = SglangServer(server.url, timeout_s=30)
            info = b'{"tp_size": 1, "version": "0.5.20", "internal_states": []}'
            server.acts = {
                "server_info": [Act(content=info), Act(content=info), Act(content=b"{}"), Act(content=b"<html>")],
                "start_profile": [Act(content=b""), Act(status=500)],
            }
            assert await engine.is_sglang()
            assert (await engine.read_launch_arguments())["tp_size"] == 1
            for _ in range(2):
                with pytest.raises(TargetError, match="did not return SGLang.s info") as caught:
                    await engine.read_launch_arguments()
                assert caught.value.outcome is Outcome.NOT_ENABLED
            await engine.start_profile(num_steps=1)
            with pytest.raises(
                TargetError, match="SGLang's /start_profile failed; the reason is only in the"
            ) as caught:
                await engine.start_profile()
            assert caught.value.outcome is Outcome.REFUSED
            assert await engine.is_local()
            assert not await SglangServer("http://elsewhere", timeout_s=1).is_local()
            await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("server_class", [VllmServer, SglangServer])
def test_own_profiler_start_waits_for_the_gate(server_class: Any) -> None:
    async def main() -> None:
        async with SimulatedServer() as server:
            engine = server_class(server.url, timeout_s=30)
            server.acts = {"": [Act(content=b"")]}
            commands_before_the_gate: list[str] = []

            async def gate() -> None:
                commands_before_the_gate.extend(server.commands())

            engine.gate = gate
            await engine.wait_for_gate()
            assert commands_before_the_gate == []
            await engine.start_profile()
            await engine.stop_profile()
            assert (commands_before_the_gate, server.commands()) == ([], ["start_profile", "stop_profile"])
            await engine.close()

    asyncio.run(main())


def test_engine_object_start_waits_for_the_gate() -> None:
    class EngineObject(Engine):
        def __init__(self) -> None:
            self.name = "object"
            self.commands: list[str] = []

        async def has_profdeck(self) -> bool:
            return True

        async def command(self, command: str, payload: Any) -> Any:  # noqa: ARG002  # interface of Engine
            self.commands.append(command)
            return Answer(ranks=(build_reply(),))

    class ObjectBackend(Backend):
        def connect(self, target: object) -> Engine:
            assert isinstance(target, Engine)
            return target

    async def main() -> None:
        engine = EngineObject()
        backend = ObjectBackend(EngineOptions())
        backend.bind(engine)
        commands_at_the_gate: list[list[str]] = []

        async def gate() -> None:
            commands_at_the_gate.append([*engine.commands])

        engine.gate = gate
        await backend.profile_start(create_capture(Path()))
        assert (commands_at_the_gate, engine.commands) == ([[]], ["start"])

    asyncio.run(main())
