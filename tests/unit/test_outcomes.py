"""How starts and stops come out: each failure has a code and a fix, whatever it was wrapped into."""

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


def test_failures_say_what_to_do() -> None:
    fine = {Outcome.STARTED, Outcome.FLUSHED, Outcome.ENDED_BY_ITSELF}
    assert {outcome for outcome in Outcome if not outcome.fix} == fine


def test_an_error_about_a_target_crosses_processes() -> None:
    error = TargetError("It does not.", Outcome.ALREADY_ACTIVE)
    for same in (pickle.loads(pickle.dumps(error)), copy.copy(error)):  # noqa: S301  # our own
        assert (str(same), same.outcome, same.fix) == ("It does not.", Outcome.ALREADY_ACTIVE, error.fix)
    assert error.fix == "Wait until the other capture has ended, or stop it."
    assert TargetError("", Outcome.REFUSED, "Do this.").fix == "Do this."
    assert describe_error(error) == "It does not."


def test_the_code_survives_what_it_is_wrapped_into() -> None:
    inner = TargetError("It does not.", Outcome.NOT_ENABLED)
    wrapped = CaptureError("Capture step1 did not start: It does not.")
    wrapped.__cause__ = inner
    assert target_error(inner) is target_error(wrapped) is inner
    late = target_error(TimeoutError("The operation did not finish within 3 seconds."))
    assert (late.outcome, str(late)) == (
        Outcome.TIMED_OUT,
        "TimeoutError: The operation did not finish within 3 seconds.",
    )
    for other in (CaptureError("no"), LeaseError("no")):
        assert (target_error(other).outcome, str(target_error(other))) == (Outcome.REFUSED, "no")


# What crosses to the engine.


def reply(**given: Any) -> Reply:
    return Reply(rank=0, world_size=1, host="here", pid=1, state=RequestState.IDLE, **given)


def test_older_readers_know_all_keys_of_a_reply_that_refuses_nothing() -> None:
    data = unstructure(reply())
    assert "refusal" not in data
    assert structure(data, Reply, where="") == reply()
    refused = reply(error="no", refusal=Outcome.ALREADY_ACTIVE)
    assert unstructure(refused)["refusal"] == "already_active"
    assert structure(unstructure(refused), Reply, where="") == refused
    assert structure(unstructure(refused) | {"refusal": None}, Reply, where="").refusal is None


def test_a_process_refuses_with_a_code(tally: ModuleType, tmp_path: Path) -> None:
    recorder = EngineRecorder(Identity(), "tally-device", {})
    request = {"id": "step1", "output": str(tmp_path), "run": "run", "role": "rollout"}

    def command(name: str, payload: Any) -> tuple[Outcome | None, bool]:
        answer = handle_command(name, payload, recorder, recorder.start, recorder.stop)
        assert structure(reply_data(answer), Reply, where="") == answer
        return answer.refusal, answer.error is not None

    assert command("start", request | {"options": {"fail_at_all": 1}}) == (Outcome.REFUSED, True)
    assert command("status", {}) == (None, False)
    assert command("start", request) == (None, False)
    assert command("start", request | {"id": "step2"}) == (Outcome.ALREADY_ACTIVE, True)
    assert command("pause", {}) == (Outcome.REFUSED, True)
    assert command("stop", {"request": "step1"}) == (None, False)
    assert command("stop", {}) == (Outcome.REFUSED, True)


# A target.


@attrs.define
class Backend(ControlBackend):
    """The backend of simulated servers."""

    name: ClassVar[str] = "simulated"
    natively: Callable[..., Any] | None = None

    def connect(self, target: object) -> Engine:
        return HttpEngine(str(target), timeout_s=self.options.rpc_timeout_s)

    def native(self, engine: Engine, capture: Capture, request: CaptureRequest) -> Any:
        assert self.natively is not None
        return self.natively(engine, self.options, capture, request)


def capture_of(path: Path, **asked: Any) -> Capture:
    made = CaptureRecord(
        id="step1", directory=path, identity=Identity(), first_step=1, current_step=1, target="simulated"
    )
    made.request = CaptureRequest(id="step1", output=path, run="run", role="rollout", **asked)
    return made


def with_target(
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


async def failed_start(backend: Backend, capture: Capture) -> Outcome:
    with pytest.raises(TargetError) as caught:
        await backend.profile_start(capture)
    assert backend.outcome is None
    return caught.value.outcome


@pytest.mark.parametrize(
    ("iterations", "outcome"), [(4, Outcome.FLUSHED), (5, Outcome.ENDED_BY_ITSELF), (6, Outcome.ENDED_BY_ITSELF)]
)
def test_a_window_that_was_full_ended_by_itself(tmp_path: Path, iterations: int, outcome: Outcome) -> None:
    async def check(server: SimulatedServer, engine: SimulatedEngine, backend: Backend) -> None:
        capture = capture_of(tmp_path, iterations=Iterations(count=5))
        await backend.profile_start(capture)
        engine.end_by_itself(iterations)
        await backend.profile_stop(capture)
        assert backend.outcome is outcome

    with_target(check, ranks=2)  # of which one is not asked


class Full(SimulatedEngine):
    """Its disk is full: it names what it could not write."""

    def _recorded(self, rank: int) -> Recorded:
        return attrs.evolve(super()._recorded(rank), size_bytes=0, problems=("No space left on device.",))


def test_a_rank_whose_files_could_not_be_written(tmp_path: Path) -> None:
    async def check(server: SimulatedServer, engine: SimulatedEngine, backend: Backend) -> None:
        server.engine = Full()
        capture = capture_of(tmp_path)
        await backend.profile_start(capture)
        await backend.profile_stop(capture)
        assert backend.outcome is Outcome.FILES_MISSING
        assert capture.problems == ["Rank 0 wrote no file.", "Rank 0: No space left on device."]

    with_target(check)


def test_a_target_that_was_restarted(tmp_path: Path) -> None:
    async def check(server: SimulatedServer, engine: SimulatedEngine, backend: Backend) -> None:
        capture = capture_of(tmp_path)
        await backend.profile_start(capture)
        engine.asked = None
        await backend.profile_stop(capture)
        assert backend.outcome is Outcome.FILES_MISSING
        assert "Its process may have been restarted." in capture.problems[0]

    with_target(check)


def test_a_flush_that_takes_too_long(tmp_path: Path) -> None:
    async def check(server: SimulatedServer, engine: SimulatedEngine, backend: Backend) -> None:
        capture = capture_of(tmp_path)
        await backend.profile_start(capture)
        engine.flushed.clear()
        await backend.profile_stop(capture)
        assert backend.outcome is Outcome.TIMED_OUT
        assert "After flush_timeout_s=0.05 seconds, the files of rank 0" in capture.problems[0]

    with_target(check, flush_timeout_s=0.05)


def test_a_server_that_hangs_at_the_stop(tmp_path: Path) -> None:
    async def check(server: SimulatedServer, engine: SimulatedEngine, backend: Backend) -> None:
        capture = capture_of(tmp_path)
        await backend.profile_start(capture)
        server.acts["stop"] = [Act(raw=b"", hang=True)]
        await backend.profile_stop(capture)
        assert backend.outcome is Outcome.TIMED_OUT

    with_target(check, rpc_timeout_s=0.1)


def test_starts_that_are_refused(tmp_path: Path) -> None:
    async def check(server: SimulatedServer, engine: SimulatedEngine, backend: Backend) -> None:
        server.acts["start"] = [Act(status=503), Act(status=401), Act(raw=b"", close=True), Act()]
        capture = capture_of(tmp_path)
        assert await failed_start(backend, capture) is Outcome.REFUSED
        assert await failed_start(backend, capture) is Outcome.REFUSED
        assert await failed_start(backend, capture) is Outcome.UNREACHABLE
        assert await failed_start(backend, capture_of(tmp_path, ranks=(0, 7))) is Outcome.REFUSED
        assert server.commands() == ["status", "start", "stop"] * 4  # what may have started is stopped
        other = Backend(EngineOptions())
        other.bind(server.url)
        await other.profile_start(capture_of(tmp_path))
        assert await failed_start(backend, capture) is Outcome.ALREADY_ACTIVE
        assert engine.state is RequestState.RECORDING  # the roll-back of the one does not end the other
        await other.profile_stop(capture)

    with_target(check)


def test_an_engine_in_this_process_refuses_with_the_code_of_its_ranks() -> None:
    request = CaptureRequest(id="step1", output=Path(), run="run", role="rollout")
    active = reply(error="Busy.", refusal=Outcome.ALREADY_ACTIVE)
    late = reply(error="Late.", refusal=Outcome.TIMED_OUT)
    old = reply(error="No.")
    for ranks, frontends, outcome in (
        ((old,), {}, Outcome.REFUSED),
        ((old, active), {}, Outcome.ALREADY_ACTIVE),
        ((reply(),), {"tokenizer": active}, Outcome.ALREADY_ACTIVE),
        ((old, late), {}, Outcome.TIMED_OUT),
        ((late, active), {}, Outcome.ALREADY_ACTIVE),
    ):
        with pytest.raises(TargetError) as caught:
            outcomes.check_started(request, Answer(ranks=ranks, frontends=frontends))
        assert caught.value.outcome is outcome


def test_the_roll_back_of_a_hung_server_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_backend, "_ROLL_BACK_S", 0.05)

    async def check(server: SimulatedServer, engine: SimulatedEngine, backend: Backend) -> None:
        server.acts[""] = [Act(raw=b"", hang=True)]
        server.acts["status"] = [Act()]
        start = asyncio.ensure_future(backend.profile_start(capture_of(tmp_path)))
        await server.heard("start")
        began_s = time.monotonic()
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert time.monotonic() - began_s < 5
        assert server.commands() == ["status", "start", "stop"]
        while server.connections:
            server.gone.clear()
            await server.gone.wait()

    with_target(check, rpc_timeout_s=60)


# The engine's own profiler.


class Natively(OwnProfilerCapture[HttpEngine, EngineOptions]):
    """A capture by a profiler that leaves what `LEAVES` says."""

    backend: ClassVar[str] = "simulated"
    title: ClassVar[str] = "Simulated"
    glob: ClassVar[str] = "*.trace.json"
    remedy: ClassVar[str] = ""
    leaves: ClassVar[dict[str, str]] = {}
    error: ClassVar[CaptureError | None] = None

    async def start(self) -> None:
        directory = self._request.output / "native"
        directory.mkdir(exist_ok=True)
        self.watch(directory)

    async def end(self) -> None:
        assert self._directory is not None
        for name, text in self.leaves.items():
            (self._directory / name).write_text(text)
        if self.error is not None:
            raise self.error

    def parse_name(self, path: Path) -> TraceOrigin | None:
        return TraceOrigin(int(path.name[0]))


WHOLE = '{"traceEvents": [{"ph": "X", "name": "a", "ts": 1, "dur": 1, "pid": 1, "tid": 1}]}'
HUNG = TargetError("It hangs.", Outcome.TIMED_OUT, "Wake it up.")


@pytest.mark.parametrize(
    ("leaves", "error", "outcome"),
    [
        ({"0.trace.json": WHOLE}, None, Outcome.FLUSHED),
        ({"0.trace.json": WHOLE}, HUNG, Outcome.FLUSHED),  # its files are whole all the same
        ({"0.trace.json": WHOLE[:-3]}, None, Outcome.FILES_MISSING),
        ({}, None, Outcome.FILES_MISSING),
        ({"1.trace.json": WHOLE}, None, Outcome.FILES_MISSING),  # of a rank that was not asked for
        ({}, HUNG, Outcome.TIMED_OUT),
        ({}, CaptureError("no"), Outcome.REFUSED),
    ],
)
def test_a_capture_by_the_own_profiler(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    leaves: dict[str, str],
    error: CaptureError | None,
    outcome: Outcome,
) -> None:
    monkeypatch.setattr(natives, "_QUIET_S", 0.0)
    monkeypatch.setattr(Natively, "leaves", leaves)
    monkeypatch.setattr(Natively, "error", error)

    async def check(server: SimulatedServer, engine: SimulatedEngine, backend: Backend) -> None:
        server.acts["status"] = [Act(status=404)]
        backend.natively = Natively
        capture = capture_of(tmp_path)
        await backend.profile_start(capture)
        assert backend.outcome is Outcome.STARTED
        await backend.profile_stop(capture)
        assert backend.outcome is outcome
        assert backend.fix == (target_error(error).fix if error and outcome is not Outcome.FLUSHED else None)
        assert bool(capture.problems) == (outcome is not Outcome.FLUSHED or error is not None)

    # Only of who does not answer files may still come.
    with_target(check, flush_timeout_s=0.3 if error is HUNG else 3600)


def test_traces_on_another_host(tmp_path: Path) -> None:
    async def check(server: SimulatedServer, engine: SimulatedEngine, backend: Backend) -> None:
        server.acts["status"] = [Act(status=404)]
        backend.natively = Natively
        capture = capture_of(tmp_path)
        await backend.profile_start(capture)
        (tmp_path / "native").rename(tmp_path / "elsewhere")
        backend._native.leaves = {}  # type: ignore[union-attr]  # it has been started
        await backend.profile_stop(capture)
        assert backend.outcome is Outcome.FILES_MISSING

    with_target(check)


def test_servers_of_vllm_have_codes() -> None:
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


def test_servers_of_sglang_have_codes() -> None:
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


@pytest.mark.parametrize("cls", [VllmServer, SglangServer])
def test_starts_of_the_own_profiler_wait_for_the_gate(cls: Any) -> None:
    async def main() -> None:
        async with SimulatedServer() as server:
            engine = cls(server.url, timeout_s=30)
            server.acts = {"": [Act(content=b"")]}
            asked: list[str] = []

            async def gate() -> None:
                asked.extend(server.commands())

            engine.gate = gate
            await engine.wait_for_gate()
            assert asked == []
            await engine.start_profile()
            await engine.stop_profile()
            assert (asked, server.commands()) == ([], ["start_profile", "stop_profile"])
            await engine.close()

    asyncio.run(main())


def test_an_engine_object_waits_for_the_gate_before_it_is_asked() -> None:
    class Object(Engine):
        def __init__(self) -> None:
            self.name = "object"
            self.asked: list[str] = []

        async def has_profdeck(self) -> bool:
            return True

        async def command(self, command: str, payload: Any) -> Any:  # noqa: ARG002  # its interface
            self.asked.append(command)
            return Answer(ranks=(reply(),))

    class ObjectBackend(Backend):
        def connect(self, target: object) -> Engine:
            assert isinstance(target, Engine)
            return target

    async def main() -> None:
        engine = Object()
        backend = ObjectBackend(EngineOptions())
        backend.bind(engine)
        passed: list[list[str]] = []

        async def gate() -> None:
            passed.append([*engine.asked])

        engine.gate = gate
        await backend.profile_start(capture_of(Path()))
        assert (passed, engine.asked) == ([[]], ["start"])

    asyncio.run(main())
