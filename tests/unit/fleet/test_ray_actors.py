"""Tests of engines in actors, without Ray: discovery in an actor, calls, and results."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import attrs
import pytest

from profdeck import __version__
from profdeck.base.blocking import run_in_thread
from profdeck.base.errors import TargetError
from profdeck.base.outcome import Outcome
from profdeck.config.structuring import structure
from profdeck.config.targets import TargetsConfig
from profdeck.engine.clusters import Actor, NoEngineError
from profdeck.engine.control.control_backend import ControlBackend
from profdeck.engine.engine import Engine
from profdeck.engine.options import EngineOptions
from profdeck.records.request import Answer, Reply, RequestState
from profdeck.replicas.discovery import ReplicaNumbers, discover, expand
from profdeck.replicas.start_gate import StartGate
from profdeck_ray import in_actor
from profdeck_ray.actors import matches
from profdeck_ray.engine import RayActor, RayEngine
from profdeck_ray.engine_discovery import PlacementGroup
from profdeck_traces.base.errors import ConfigError, MissingLibraryError


class Motor:
    """An engine object. If `awaited` is true, calls run in the actor's event loop."""

    def __init__(self, *, awaited: bool = False) -> None:
        self.awaited = awaited
        self.calls: list[Any] = []
        self.may_answer = threading.Event()
        self.may_answer.set()


class MotorEngine(Engine):
    def __init__(self, motor: Motor) -> None:
        self.name, self.blocking, self.motor = "Motor", not motor.awaited, motor

    async def has_profdeck(self) -> bool:
        return True

    async def command(self, command: str, payload: Mapping[str, Any]) -> Answer:
        self.motor.calls.append((command, dict(payload), threading.current_thread().name))
        if self.motor.awaited:
            await run_in_thread(self.motor.may_answer.wait)
        if command == "break":
            raise ValueError("engine failure")
        return Answer(ranks=(Reply(rank=0, world_size=1, host="there", pid=1, state=RequestState.IDLE),))

    async def start_profile(self, *, delay: int) -> None:
        self.motor.calls.append(("start_profile", delay))

    async def launched_with(self) -> Mapping[str, Any]:
        return {"directory": Path("/traces")}


@attrs.define
class MotorBackend(ControlBackend):
    name: ClassVar[str] = "motor"

    def connect(self, target: object) -> Engine:
        assert not isinstance(target, str)  # a string would be a URL
        if not isinstance(target, Motor):
            raise ConfigError(f"target: {type(target).__name__} is not a motor.")
        return MotorEngine(target)


class Holder:
    """Actor instance with the given attributes."""

    def __init__(self, **attributes: object) -> None:
        vars(self).update(attributes)


class MotorItself(Motor):
    """Actor whose class is the engine class."""


BACKEND = MotorBackend(EngineOptions())


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate an actor without an event loop, in which the backend is installed."""
    monkeypatch.setattr(in_actor, "load_backend", lambda _: MotorBackend)
    monkeypatch.setattr(in_actor, "_event_loop", lambda: None)
    monkeypatch.setattr(in_actor, "_connected", {})


@pytest.fixture
def actor_loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[asyncio.AbstractEventLoop]:
    """Simulate an actor with an event loop, which runs in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="loop")
    thread.start()
    monkeypatch.setattr(in_actor, "_event_loop", lambda: loop)
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def make_call(method: str = "has_profdeck", *arguments: Any, **changes: Any) -> dict[str, Any]:
    defaults = {"version": __version__, "backend": "motor", "options": {}, "attribute": None, "method": method}
    return {**defaults, "arguments": list(arguments), "keywords": {}, **changes}


def call_engine(instance: object, *arguments: Any, **changes: Any) -> dict[str, Any]:
    """Call the engine and poll for the result, as callers do."""
    reply = in_actor.ask(instance, "ticket", make_call(*arguments, **changes))
    while "waiting" in reply:
        reply = in_actor.fetch_result(instance, "ticket")
    return reply


# Engine discovery.


def test_single_engine_attribute_is_found() -> None:
    motor = Motor()
    holder = Holder(config={"a": 1}, number=3, url="http://127.0.0.1:1", motor=motor, same=motor, nothing=None)
    assert in_actor.find_engine(holder, BACKEND, None).target is motor


def test_actor_is_the_engine_if_no_attribute_is() -> None:
    itself = MotorItself()
    assert in_actor.find_engine(itself, BACKEND, None).target is itself
    inner = vars(itself)["inner"] = Motor()  # the actor may have the same methods as its engine
    assert in_actor.find_engine(itself, BACKEND, None).target is inner


def test_several_engine_attributes_need_a_path() -> None:
    first, second = Motor(), Motor()
    holder = Holder(first=first, second=second, worker=Holder(motor=second))
    with pytest.raises(TargetError) as caught:
        in_actor.find_engine(holder, BACKEND, None)
    assert str(caught.value) == (
        "2 attributes of Holder are engines of the backend 'motor': first (Motor), second (Motor)."
    )
    assert caught.value.outcome is Outcome.REFUSED
    assert caught.value.fix == "Select one in the role's targets, such as actor_attribute: first."
    assert in_actor.find_engine(holder, BACKEND, "worker.motor").target is second
    for path, error, message in (
        ("worker.engine", NoEngineError, "Holder.worker has no attribute 'engine'."),
        ("worker", ConfigError, "target: Holder is not a motor."),
        ("worker.motor.__module__", ConfigError, "Holder.worker.motor.__module__ is a string: "),
    ):
        with pytest.raises(error) as path_error:
            in_actor.find_engine(holder, BACKEND, path)
        assert str(path_error.value).startswith(message)


def test_actor_without_an_engine_reports_its_attributes() -> None:
    with pytest.raises(NoEngineError) as caught:
        in_actor.find_engine(Holder(engine=None, count=1), BACKEND, None)
    assert str(caught.value) == (
        "Holder does not hold an engine for the backend 'motor'. Its attributes: engine (NoneType), count (int)."
    )
    assert (caught.value.outcome, "actor_attribute" in caught.value.fix) == (Outcome.REFUSED, True)
    reply = call_engine(Holder())
    assert (reply["no_engine"], reply["outcome"]) == (True, "refused")
    assert "Its attributes: none." in reply["error"]


def test_actor_handles_are_not_engines() -> None:
    handle = type("ActorHandle", (Motor,), {"__module__": "ray.actor"})()
    with pytest.raises(NoEngineError):
        in_actor.find_engine(Holder(other=handle), BACKEND, None)


# Calls in the actor.


def test_blocking_engine_is_called_in_the_calling_thread() -> None:
    holder = Holder(motor=Motor())
    assert call_engine(holder)["value"] is True
    reply = call_engine(holder, "command", "start", {"id": "step1"})
    assert reply["value"]["ranks"][0]["host"] == "there"
    assert holder.motor.calls == [("start", {"id": "step1"}, "MainThread")]
    assert call_engine(holder, "launched_with")["value"] == {"directory": "/traces"}  # plain data


def test_async_engine_is_called_in_the_event_loop(actor_loop: asyncio.AbstractEventLoop) -> None:
    motor = Motor(awaited=True)
    holder = Holder(motor=motor)
    motor.may_answer.clear()
    assert "waiting" in in_actor.ask(holder, "one", make_call("command", "start", {}))
    assert "waiting" in in_actor.fetch_result(holder, "one")
    motor.may_answer.set()
    reply: dict[str, Any] = {"waiting": True}
    while "waiting" in reply:
        reply = in_actor.fetch_result(holder, "one")
    assert reply["value"]["frontends"] == {}
    assert [thread for _, _, thread in motor.calls] == ["loop"]
    second_fetch = in_actor.fetch_result(holder, "one")  # a result can be fetched only once
    assert (second_fetch["outcome"], second_fetch["error"]) == ("unreachable", "The actor restarted during the call.")


def test_forgotten_call_is_not_cancelled(actor_loop: asyncio.AbstractEventLoop) -> None:
    motor = Motor(awaited=True)
    holder = Holder(motor=motor)
    motor.may_answer.clear()
    in_actor.ask(holder, "one", make_call("command", "start", {}))
    in_actor.forget(holder, "one")
    in_actor.forget(holder, "one")
    motor.may_answer.set()
    assert "value" in call_engine(holder, "command", "stop", {})
    assert [command for command, _, _ in motor.calls] == ["start", "stop"]


def test_async_engine_in_an_actor_without_an_event_loop_is_refused() -> None:
    reply = call_engine(Holder(motor=Motor(awaited=True)))
    assert reply["outcome"] == "refused"
    assert reply["error"] == "Motor must be called on its own event loop, but the actor has no event loop."
    assert "async methods" in reply["fix"]


def test_errors_are_returned_as_replies() -> None:
    holder = Holder(motor=Motor())
    assert call_engine(holder, "command", "break", {})["error"] == "ValueError: engine failure"
    for method in ("_private", "name", "no_such"):
        assert f"has no method '{method}'" in call_engine(holder, method)["error"]
    assert "options.no_such" not in call_engine(holder, options={})
    assert "unknown key 'no_such'" in call_engine(holder, options={"no_such": 1})["error"]
    reply = call_engine(holder, version="0.0")
    assert (reply["outcome"], reply["fix"]) == (
        "refused",
        "Install the same version of profdeck on both sides.",
    )


def test_connection_is_kept_until_the_engine_is_replaced() -> None:
    holder = Holder(motor=Motor())
    call_engine(holder)
    (first,) = in_actor._connected.values()
    call_engine(holder)
    assert [*in_actor._connected.values()] == [first]
    second = vars(holder)["motor"] = Motor()
    call_engine(holder, "command", "status", {})  # commands of a capture use the connected engine
    assert [*in_actor._connected.values()] == [first]
    call_engine(holder)
    assert [engine.target for engine in in_actor._connected.values()] == [second]


# Results for callers.


class SimulatedRay(ModuleType):
    """The parts of Ray that callers need in addition to a handle."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.joined = True

    def is_initialized(self) -> bool:
        return self.joined


class SimulatedHandle:
    """Handle of an actor in this process. If `busy` is true, calls wait."""

    def __init__(self, instance: object, *, busy: bool = False) -> None:
        self.instance, self.busy = instance, busy
        self.sent: list[str] = []

    @property
    def __ray_call__(self) -> SimulatedHandle:
        return self

    def remote(self, function: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        self.sent.append(function.__name__)
        future = asyncio.get_running_loop().create_future()
        if not self.busy:
            future.set_result(function(self.instance, *arguments))
        return future


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> SimulatedRay:
    simulated_ray = SimulatedRay()
    monkeypatch.setitem(sys.modules, "ray", simulated_ray)
    return simulated_ray


def connect_engine(handle: SimulatedHandle, timeout_s: float = 10.0) -> RayEngine:
    actor = RayActor(handle, "a1", None, "Actor(Holder, a1)")
    return RayEngine(actor, backend="motor", options=EngineOptions(rpc_timeout_s=timeout_s))


def test_commands_and_native_profiler_calls_are_forwarded(
    ray: SimulatedRay, actor_loop: asyncio.AbstractEventLoop
) -> None:
    motor = Motor(awaited=True)
    engine = connect_engine(SimulatedHandle(Holder(motor=motor)))

    async def main() -> None:
        assert engine.name == "Actor(Holder, a1)"
        assert await engine.has_profdeck()
        answer = await engine.command("start", {"id": "step1"})
        assert (answer.ranks[0].host, answer.frontends) == ("there", {})
        await engine.start_profile(delay=3)
        assert await engine.launched_with() == {"directory": "/traces"}
        assert await engine.is_here()

    asyncio.run(main())
    assert [call[0] for call in motor.calls] == ["start", "start_profile"]
    assert motor.calls[1] == ("start_profile", 3)


def test_only_starts_wait_for_the_gate(ray: SimulatedRay) -> None:
    handle = SimulatedHandle(Holder(motor=Motor()))
    engine = connect_engine(handle)

    async def main() -> None:
        gate = StartGate(timeout_s=10)
        gate_pass, other = gate.issue(), gate.issue()
        engine.gate = gate_pass
        await engine.wait_for_gate()
        await engine.has_profdeck()
        await engine.command("status", {})
        assert gate_pass.passed_ns is None
        starting = asyncio.create_task(engine.command("start", {}))
        await asyncio.sleep(0)
        sent_count = len(handle.sent)
        other.abandon()
        await starting
        assert gate_pass.passed_ns is not None
        assert len(handle.sent) == sent_count + 1

    asyncio.run(main())


def test_call_of_a_busy_actor_times_out(ray: SimulatedRay) -> None:
    engine = connect_engine(SimulatedHandle(Holder(motor=Motor()), busy=True), timeout_s=0.01)
    with pytest.raises(TargetError) as caught:
        asyncio.run(engine.command("start", {}))
    assert str(caught.value) == "Actor(Holder, a1) did not answer within rpc_timeout_s=0.01 seconds."
    assert caught.value.outcome is Outcome.TIMED_OUT
    assert "max_concurrency" in caught.value.fix


def test_result_of_a_timed_out_call_is_discarded(ray: SimulatedRay, actor_loop: asyncio.AbstractEventLoop) -> None:
    motor = Motor(awaited=True)
    motor.may_answer.clear()
    handle = SimulatedHandle(Holder(motor=motor))
    with pytest.raises(TargetError, match="did not answer"):
        asyncio.run(connect_engine(handle, timeout_s=0.02).command("start", {}))
    motor.may_answer.set()
    assert (handle.sent[0], handle.sent[-1]) == ("ask", "forget")
    assert not in_actor._pending


def test_call_after_leaving_the_cluster_does_not_start_a_new_one(ray: SimulatedRay) -> None:
    ray.joined = False
    handle = SimulatedHandle(Holder(motor=Motor()))
    with pytest.raises(TargetError, match="has left the Ray cluster") as caught:
        asyncio.run(connect_engine(handle).has_profdeck())
    assert (caught.value.outcome, handle.sent) == (Outcome.UNREACHABLE, [])


def test_errors_are_raised_with_their_types(ray: SimulatedRay) -> None:
    engine = connect_engine(SimulatedHandle(Holder()))
    with pytest.raises(NoEngineError, match="^Holder does not hold an engine"):
        asyncio.run(engine.has_profdeck())
    with pytest.raises(AttributeError):
        _ = engine._no_such


# Targets.


def test_only_ray_handles_are_converted_to_actors() -> None:
    assert [RayActor.of(target) for target in ("http://127.0.0.1:1", Motor(), None, 3)] == [None] * 4
    assert [PlacementGroup.of(target) for target in ("http://127.0.0.1:1", Motor(), None, 3)] == [None] * 4
    actor = RayActor(Motor(), "a1", None, "one")
    assert RayActor.of(actor, "worker") is actor
    assert actor == RayActor(Motor(), "a1", None, "other")
    assert actor != RayActor(Motor(), "a1", "worker", "one")
    client = type("ClientActorHandle", (), {"__module__": "ray.util.client.common"})()
    with pytest.raises(ConfigError, match="Ray Client handle, which is not supported"):
        RayActor.of(client)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"actors": ["a", "a"]}, "actors: expected distinct names"),
        ({"actors": [""]}, "actors: expected distinct names"),
        ({"actor_namespace": "jobs"}, "actor_namespace: this key applies to actors"),
        ({"actor_attribute": "worker..engine"}, "actor_attribute: expected a dotted path"),
        ({"actor_attribute": "engine()"}, "actor_attribute: expected a dotted path"),
    ],
)
def test_invalid_actor_configs_are_rejected(config: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        structure(config, TargetsConfig, where="targets")


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["*"], ["rollout_0", "rollout_10", "Rollout_0", "r[0]"]),
        (["rollout_*"], ["rollout_0", "rollout_10"]),
        (["*_0", "r[0]*"], ["rollout_0", "Rollout_0", "r[0]"]),
        (["rollout"], []),
    ],
)
def test_actor_name_patterns(patterns: list[str], expected: list[str]) -> None:
    names = ["rollout_0", "rollout_10", "Rollout_0", "r[0]", ""]
    assert [name for name in names if matches(name, patterns)] == expected


def test_actor_lookup_needs_a_cluster(ray: SimulatedRay) -> None:
    ray.joined = False
    with pytest.raises(TargetError, match="Looking up actors by name requires a Ray cluster, but this process has not"):
        asyncio.run(discover(TargetsConfig(actors=("replica_0",)), ReplicaNumbers(), reject_actor))
    with pytest.raises(TargetError, match="Looking up a placement group requires a Ray cluster") as caught:
        asyncio.run(expand([PlacementGroup("b2")], ReplicaNumbers(), reject_actor))
    assert (caught.value.outcome, "ray.init" in caught.value.fix) == (Outcome.UNREACHABLE, True)


async def reject_actor(_: Actor) -> bool:
    raise AssertionError("no actor may be queried")


def test_actor_lookup_needs_ray(
    monkeypatch: pytest.MonkeyPatch, simulated_backend: None, settings: dict[str, Any]
) -> None:
    from profdeck import Profiler

    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "ray")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with contextlib.suppress(KeyError), pytest.raises(MissingLibraryError, match=r"pip install 'profdeck\[ray\]'"):
        Profiler.from_config(role="rollout", settings=settings | {"rollout.targets.actors": ["replica_0"]})
