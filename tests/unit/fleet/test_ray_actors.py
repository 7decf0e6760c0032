"""Tests for engines in actors, without Ray: discovery in an actor, calls, and the results for callers."""

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
    """An engine object. If `awaited` is true, it is called in an event loop."""

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
            raise ValueError("it does not work")
        return Answer(ranks=(Reply(rank=0, world_size=1, host="there", pid=1, state=RequestState.IDLE),))

    async def start_profile(self, *, delay: int) -> None:
        self.motor.calls.append(("start_profile", delay))

    async def launched_with(self) -> Mapping[str, Any]:
        return {"directory": Path("/traces")}


@attrs.define
class MotorBackend(ControlBackend):
    name: ClassVar[str] = "motor"

    def connect(self, target: object) -> Engine:
        assert not isinstance(target, str)  # text would be a URL
        if not isinstance(target, Motor):
            raise ConfigError(f"target: {type(target).__name__} is no motor.")
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


def call(method: str = "has_profdeck", *arguments: Any, **changes: Any) -> dict[str, Any]:
    whole = {"version": __version__, "backend": "motor", "options": {}, "attribute": None, "method": method}
    return {**whole, "arguments": list(arguments), "keywords": {}, **changes}


def asked(instance: object, *arguments: Any, **changes: Any) -> dict[str, Any]:
    """Call the engine and poll for the result, as callers do."""
    answer = in_actor.ask(instance, "ticket", call(*arguments, **changes))
    while "waiting" in answer:
        answer = in_actor.fetch_result(instance, "ticket")
    return answer


# Discovery of the engine.


def test_the_only_attribute_that_is_an_engine_is_it() -> None:
    motor = Motor()
    holder = Holder(config={"a": 1}, number=3, url="http://127.0.0.1:1", motor=motor, same=motor, nothing=None)
    assert in_actor.find_engine(holder, BACKEND, None).target is motor


def test_the_actor_itself_counts_when_no_attribute_does() -> None:
    itself = MotorItself()
    assert in_actor.find_engine(itself, BACKEND, None).target is itself
    inner = vars(itself)["inner"] = Motor()  # an actor can have the same methods as its engine
    assert in_actor.find_engine(itself, BACKEND, None).target is inner


def test_a_path_says_which_of_several_it_is() -> None:
    first, second = Motor(), Motor()
    holder = Holder(first=first, second=second, worker=Holder(motor=second))
    with pytest.raises(TargetError) as several:
        in_actor.find_engine(holder, BACKEND, None)
    assert str(several.value) == (
        "2 attributes of Holder are engines of the backend 'motor': first (Motor), second (Motor)."
    )
    assert several.value.outcome is Outcome.REFUSED
    assert several.value.fix == "Select one in the role's targets, such as actor_attribute: first."
    assert in_actor.find_engine(holder, BACKEND, "worker.motor").target is second
    for path, error, text in (
        ("worker.engine", NoEngineError, "Holder.worker has no attribute 'engine'."),
        ("worker", ConfigError, "target: Holder is no motor."),
        ("worker.motor.__module__", ConfigError, "Holder.worker.motor.__module__ is a string: "),
    ):
        with pytest.raises(error) as caught:
            in_actor.find_engine(holder, BACKEND, path)
        assert str(caught.value).startswith(text)


def test_an_actor_without_an_engine_says_what_it_has() -> None:
    with pytest.raises(NoEngineError) as caught:
        in_actor.find_engine(Holder(engine=None, count=1), BACKEND, None)
    assert str(caught.value) == (
        "Holder does not hold an engine for the backend 'motor'. Its attributes: engine (NoneType), count (int)."
    )
    assert (caught.value.outcome, "actor_attribute" in caught.value.fix) == (Outcome.REFUSED, True)
    answer = asked(Holder())
    assert (answer["no_engine"], answer["outcome"]) == (True, "refused")
    assert "Its attributes: none." in answer["error"]


def test_handles_of_other_actors_are_no_engines() -> None:
    handle = type("ActorHandle", (Motor,), {"__module__": "ray.actor"})()
    with pytest.raises(NoEngineError):
        in_actor.find_engine(Holder(other=handle), BACKEND, None)


# Calls in the actor.


def test_a_blocking_engine_is_called_at_once() -> None:
    holder = Holder(motor=Motor())
    assert asked(holder)["value"] is True
    answer = asked(holder, "command", "start", {"id": "step1"})
    assert answer["value"]["ranks"][0]["host"] == "there"
    assert holder.motor.calls == [("start", {"id": "step1"}, "MainThread")]
    assert asked(holder, "launched_with")["value"] == {"directory": "/traces"}  # plain data


def test_an_awaited_engine_is_called_in_the_event_loop(actor_loop: asyncio.AbstractEventLoop) -> None:
    motor = Motor(awaited=True)
    holder = Holder(motor=motor)
    motor.may_answer.clear()
    assert "waiting" in in_actor.ask(holder, "one", call("command", "start", {}))
    assert "waiting" in in_actor.fetch_result(holder, "one")
    motor.may_answer.set()
    answer: dict[str, Any] = {"waiting": True}
    while "waiting" in answer:
        answer = in_actor.fetch_result(holder, "one")
    assert answer["value"]["frontends"] == {}
    assert [where for _, _, where in motor.calls] == ["loop"]
    gone = in_actor.fetch_result(holder, "one")  # a result can be fetched only once
    assert (gone["outcome"], gone["error"]) == ("unreachable", "The actor restarted during the call.")


def test_a_call_that_nobody_waits_for_goes_on(actor_loop: asyncio.AbstractEventLoop) -> None:
    motor = Motor(awaited=True)
    holder = Holder(motor=motor)
    motor.may_answer.clear()
    in_actor.ask(holder, "one", call("command", "start", {}))
    in_actor.forget(holder, "one")
    in_actor.forget(holder, "one")
    motor.may_answer.set()
    assert "value" in asked(holder, "command", "stop", {})
    assert [command for command, _, _ in motor.calls] == ["start", "stop"]


def test_an_awaited_engine_in_an_actor_without_a_loop_is_refused() -> None:
    answer = asked(Holder(motor=Motor(awaited=True)))
    assert answer["outcome"] == "refused"
    assert answer["error"] == "Motor must be called on its own event loop, but the actor has no event loop."
    assert "async methods" in answer["fix"]


def test_what_fails_is_an_answer() -> None:
    holder = Holder(motor=Motor())
    assert asked(holder, "command", "break", {})["error"] == "ValueError: it does not work"
    for method in ("_private", "name", "no_such"):
        assert f"has no method '{method}'" in asked(holder, method)["error"]
    assert "options.no_such" not in asked(holder, options={})
    assert "unknown key 'no_such'" in asked(holder, options={"no_such": 1})["error"]
    other = asked(holder, version="0.0")
    assert (other["outcome"], other["fix"]) == (
        "refused",
        "Install the same version of profdeck on both sides.",
    )


def test_an_engine_keeps_what_it_was_asked_for_until_the_actor_makes_another() -> None:
    holder = Holder(motor=Motor())
    asked(holder)
    (first,) = in_actor._connected.values()
    asked(holder)
    assert [*in_actor._connected.values()] == [first]
    second = vars(holder)["motor"] = Motor()
    asked(holder, "command", "status", {})  # that of the capture that runs
    assert [*in_actor._connected.values()] == [first]
    asked(holder)
    assert [one.target for one in in_actor._connected.values()] == [second]


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
    simulated = SimulatedRay()
    monkeypatch.setitem(sys.modules, "ray", simulated)
    return simulated


def engine_of(handle: SimulatedHandle, timeout_s: float = 10.0) -> RayEngine:
    actor = RayActor(handle, "a1", None, "Actor(Holder, a1)")
    return RayEngine(actor, backend="motor", options=EngineOptions(rpc_timeout_s=timeout_s))


def test_commands_and_the_calls_of_own_profilers_are_forwarded(
    ray: SimulatedRay, actor_loop: asyncio.AbstractEventLoop
) -> None:
    motor = Motor(awaited=True)
    engine = engine_of(SimulatedHandle(Holder(motor=motor)))

    async def main() -> None:
        assert engine.name == "Actor(Holder, a1)"
        assert await engine.has_profdeck()
        answer = await engine.command("start", {"id": "step1"})
        assert (answer.ranks[0].host, answer.frontends) == ("there", {})
        await engine.start_profile(delay=3)
        assert await engine.launched_with() == {"directory": "/traces"}
        assert await engine.is_here()

    asyncio.run(main())
    assert [one[0] for one in motor.calls] == ["start", "start_profile"]
    assert motor.calls[1] == ("start_profile", 3)


def test_a_start_waits_for_the_gate_and_nothing_else_does(ray: SimulatedRay) -> None:
    handle = SimulatedHandle(Holder(motor=Motor()))
    engine = engine_of(handle)

    async def main() -> None:
        gate = StartGate(timeout_s=10)
        mine, other = gate.issue(), gate.issue()
        engine.gate = mine
        await engine.wait_for_gate()
        await engine.has_profdeck()
        await engine.command("status", {})
        assert mine.passed_ns is None
        starting = asyncio.create_task(engine.command("start", {}))
        await asyncio.sleep(0)
        sent = len(handle.sent)
        other.abandon()
        await starting
        assert mine.passed_ns is not None
        assert len(handle.sent) == sent + 1

    asyncio.run(main())


def test_a_busy_actor_is_given_up_in_time(ray: SimulatedRay) -> None:
    engine = engine_of(SimulatedHandle(Holder(motor=Motor()), busy=True), timeout_s=0.01)
    with pytest.raises(TargetError) as caught:
        asyncio.run(engine.command("start", {}))
    assert str(caught.value) == "Actor(Holder, a1) did not answer within rpc_timeout_s=0.01 seconds."
    assert caught.value.outcome is Outcome.TIMED_OUT
    assert "max_concurrency" in caught.value.fix


def test_a_slow_engine_is_given_up_and_its_result_forgotten(
    ray: SimulatedRay, actor_loop: asyncio.AbstractEventLoop
) -> None:
    motor = Motor(awaited=True)
    motor.may_answer.clear()
    handle = SimulatedHandle(Holder(motor=motor))
    with pytest.raises(TargetError, match="did not answer"):
        asyncio.run(engine_of(handle, timeout_s=0.02).command("start", {}))
    motor.may_answer.set()
    assert (handle.sent[0], handle.sent[-1]) == ("ask", "forget")
    assert not in_actor._pending


def test_a_host_that_has_left_the_cluster_does_not_start_another(ray: SimulatedRay) -> None:
    ray.joined = False
    handle = SimulatedHandle(Holder(motor=Motor()))
    with pytest.raises(TargetError, match="has left the Ray cluster") as caught:
        asyncio.run(engine_of(handle).has_profdeck())
    assert (caught.value.outcome, handle.sent) == (Outcome.UNREACHABLE, [])


def test_errors_come_through_with_their_codes(ray: SimulatedRay) -> None:
    engine = engine_of(SimulatedHandle(Holder()))
    with pytest.raises(NoEngineError, match="^Holder does not hold an engine"):
        asyncio.run(engine.has_profdeck())
    with pytest.raises(AttributeError):
        _ = engine._no_such


# Targets.


def test_only_what_is_of_ray_is_an_actor() -> None:
    assert [RayActor.of(target) for target in ("http://127.0.0.1:1", Motor(), None, 3)] == [None] * 4
    assert [PlacementGroup.of(target) for target in ("http://127.0.0.1:1", Motor(), None, 3)] == [None] * 4
    one = RayActor(Motor(), "a1", None, "one")
    assert RayActor.of(one, "worker") is one
    assert one == RayActor(Motor(), "a1", None, "other")
    assert one != RayActor(Motor(), "a1", "worker", "one")
    client = type("ClientActorHandle", (), {"__module__": "ray.util.client.common"})()
    with pytest.raises(ConfigError, match="Ray Client handle, which is not supported"):
        RayActor.of(client)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"actors": ["a", "a"]}, "actors: expected distinct names"),
        ({"actors": [""]}, "actors: expected distinct names"),
        ({"actor_namespace": "jobs"}, "actor_namespace: this key applies to actors"),
        ({"actor_attribute": "worker..engine"}, "actor_attribute: expected a dotted path"),
        ({"actor_attribute": "engine()"}, "actor_attribute: expected a dotted path"),
    ],
)
def test_what_a_config_cannot_mean(config: Mapping[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text.replace("(", r"\(")):
        structure(config, TargetsConfig, where="targets")


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["*"], ["rollout_0", "rollout_10", "Rollout_0", "r[0]"]),
        (["rollout_*"], ["rollout_0", "rollout_10"]),
        (["*_0", "r[0]*"], ["rollout_0", "Rollout_0", "r[0]"]),
        (["rollout"], []),
    ],
)
def test_which_names_match(patterns: list[str], names: list[str]) -> None:
    every = ["rollout_0", "rollout_10", "Rollout_0", "r[0]", ""]
    assert [name for name in every if matches(name, patterns)] == names


def test_actors_by_name_need_a_cluster(ray: SimulatedRay) -> None:
    ray.joined = False
    with pytest.raises(TargetError, match="Looking up actors by name requires a Ray cluster, but this process has not"):
        asyncio.run(discover(TargetsConfig(actors=("replica_0",)), ReplicaNumbers(), _never))
    with pytest.raises(TargetError, match="Looking up a placement group requires a Ray cluster") as caught:
        asyncio.run(expand([PlacementGroup("b2")], ReplicaNumbers(), _never))
    assert (caught.value.outcome, "ray.init" in caught.value.fix) == (Outcome.UNREACHABLE, True)


async def _never(_: Actor) -> bool:
    raise AssertionError("there is nobody to ask")


def test_actors_by_name_need_ray(monkeypatch: pytest.MonkeyPatch, simulated: None, settings: dict[str, Any]) -> None:
    from profdeck import Profiler

    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "ray")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with contextlib.suppress(KeyError), pytest.raises(MissingLibraryError, match=r"pip install 'profdeck\[ray\]'"):
        Profiler.from_config(role="rollout", settings=settings | {"rollout.targets.actors": ["replica_0"]})
