"""Driver that captures engines in actors, including failures. It writes its results as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import held_engines
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from profdeck import Profiler
from profdeck.base.errors import CaptureError
from profdeck_traces.base.errors import ConfigError

OUTPUT, RESULTS, ADDRESS = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
NAMESPACE = "rollouts"
results: dict[str, Any] = {}


class Without:
    """Actor whose process cannot import profdeck.

    Its class is in the main module, so Ray pickles it by value and the actor does not import `held_engines`.
    """

    def make(self) -> None:
        class Hiding:
            @staticmethod
            def find_spec(name: str, *_: object) -> None:
                if name.partition(".")[0] == "profdeck":
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        assert "profdeck" not in sys.modules
        sys.meta_path.insert(0, Hiding())  # type: ignore[arg-type]  # implements only `find_spec`


def make(kind: type, group: Any = None, **options: Any) -> Any:
    """Create an actor and its engine."""
    if group is not None:
        options |= {"scheduling_strategy": PlacementGroupSchedulingStrategy(group)}
    actor = ray.remote(num_cpus=0 if group is None else 1)(kind).options(**options).remote()
    if hasattr(kind, "make"):
        ray.get(actor.make.remote())
    return actor


def settings(step: int, **own: Any) -> dict[str, Any]:
    """Return the config of a capture. In the names of keyword arguments, ``__`` replaces a dot."""
    return {
        "output": str(OUTPUT),
        "run": "run",
        "steps": [step],
        "on_error": "raise",
        "on_demand": False,
        "rollout.backend": "held",
        "rollout.options.device_options": {"thread_bound": False},
        **{f"rollout.{key.replace('__', '.')}": value for key, value in own.items()},
    }


def captured(name: str, step: int, target: object, iterate: tuple[Any, ...] = (), then: Any = None, **own: Any) -> Any:
    """Capture a step and add the outcome to `results`."""
    found: dict[str, Any] = {}
    results[name] = found
    try:
        profiler = Profiler.from_config(settings=settings(step, **own), role="rollout", target=target)
    except ConfigError as error:
        found["config_error"] = str(error)
        return None
    capture = None
    try:
        with profiler.capture(step) as capture:
            ray.get([actor.iterate.remote(2) for actor in iterate])
            if then is not None:
                then()
    except CaptureError as error:
        found["error"] = str(error)
        cause: BaseException | None = error
        while cause is not None:
            if (outcome := getattr(cause, "outcome", None)) is not None:
                found["outcome"], found["fix"] = str(outcome), getattr(cause, "fix", None)
            cause = cause.__cause__
    if capture is None:
        return None
    fleet = capture.fleet
    found |= {"status": str(capture.status), "problems": capture.problems, "notes": capture.notes, "step": step}
    if fleet is not None:
        found["targets"] = {one.replica: [one.name, str(one.outcome), one.reason, one.fix] for one in fleet.targets}
    return capture


def what_works() -> None:
    """Capture all kinds of actors."""
    first, second = make(held_engines.AsyncActor), make(held_engines.AsyncActor)
    sync, threaded = make(held_engines.SyncActor), make(held_engines.SyncActor, max_concurrency=3)
    itself = ray.remote(num_cpus=0)(held_engines.Itself).remote()
    actors = (first, second, sync, threaded, itself)
    captured("all", 1, list(actors), actors)

    captured("single", 2, first, (first,))
    asyncio.run(in_a_loop(3, [first, sync]))
    deep = make(held_engines.Deep)
    captured("deep", 4, deep, (deep,), targets__actor_attribute="worker.engine")
    captured("deep_unsaid", 5, deep)


async def in_a_loop(step: int, actors: list[Any]) -> None:
    """Capture one step in an async driver that controls engines only."""
    profiler = Profiler.from_config(role=None, targets={"rollout": actors}, settings=settings(step))
    async with profiler.capture(step):
        captures = profiler.captures
        await asyncio.gather(*(actor.iterate.remote(2) for actor in actors))
    results["loop"] = {role: str(capture.status) for role, capture in captures.items()}


def groups() -> None:
    """Capture placement groups, and actors by name."""
    group = placement_group([{"CPU": 1}] * 5)
    ray.get(group.ready())
    kept = [make(held_engines.AsyncActor, group=group, name=f"replica_{number}") for number in (10, 9)]
    kept.append(make(held_engines.SyncActor, group=group))  # without a name
    bare = ray.remote(num_cpus=1)(held_engines.SyncActor)
    strategy = PlacementGroupSchedulingStrategy(group)
    kept.append(bare.options(name="trainer", scheduling_strategy=strategy).remote())  # without an engine
    outside = make(held_engines.AsyncActor, name="replica_8")
    captured("group", 20, group, (kept[0], kept[1]))
    ray.kill(kept[1])
    new = make(held_engines.AsyncActor, group=group, name="replica_7")
    captured("group_changed", 21, [outside, group], (outside, kept[0], new))
    named = {"targets__actors": ["replica_8", "replica_10", "replica_1"]}
    captured("named", 22, None, (outside, kept[0]), **named)
    captured("other_namespace", 23, None, **named, targets__actor_namespace="nowhere")
    empty = placement_group([{"CPU": 1}])
    captured("empty_group", 24, empty)
    captured("both", 25, [group], **named)
    captured("group_twice", 26, [group, group])
    orphan(outside)
    ray.util.remove_placement_group(group)


DRIVER = """
import json, sys, ray
from profdeck import Profiler
address, namespace, settings = json.loads(sys.argv[1])
ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="ERROR")
profiler = Profiler.from_config(role="rollout", settings=settings, target=ray.get_actor("replica_8"))
profiler.start(*settings["steps"])
print("started", flush=True)
sys.stdin.read()
"""


def orphan(actor: Any) -> None:
    """Test the next driver after one that is killed during a capture, and a driver that exits without a stop."""

    def start(step: int) -> subprocess.Popen[str]:
        told = json.dumps([ADDRESS, NAMESPACE, settings(step)])
        command = [sys.executable, "-c", DRIVER, told]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with start(30) as driver:
        assert driver.stdout is not None
        results["first_driver"] = driver.stdout.readline().strip()
        captured("living_owner", 31, actor)
        driver.kill()
    captured("orphan", 32, actor, (actor,))
    with start(33) as driver:
        assert driver.stdout is not None
        results["last_driver"] = driver.stdout.readline().strip()
        ray.get(actor.iterate.remote(2))
    results["ended"] = ray.get(actor.about.remote())


def what_goes_wrong() -> None:
    """Capture actors that exited, restart, block or have no engine."""
    fine = make(held_engines.AsyncActor)
    dead, dying = make(held_engines.AsyncActor), make(held_engines.SyncActor)
    pid = ray.get(dying.pid.remote())
    ray.kill(dead)
    bare = ray.remote(num_cpus=0)(held_engines.SyncActor).remote()
    without = make(Without)
    broken = ray.remote(num_cpus=0)(Broken).remote()
    captured(
        "lost",
        40,
        [fine, dead, dying, bare, without, broken],
        (fine, dying),
        then=lambda: os.kill(pid, signal.SIGKILL),
    )
    restarting = make(held_engines.Restarting, max_restarts=1)
    captured("restarted", 44, [fine, restarting], (fine, restarting), then=lambda: restart(restarting))
    captured("restarted_after", 45, restarting, (restarting,))
    late()


def restart(actor: Any) -> None:
    """Kill the process of an actor, and wait until Ray has restarted it."""
    pid = ray.get(actor.pid.remote())
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(ray.exceptions.RayActorError):  # raised during the restart
            if ray.get(actor.pid.remote()) != pid:
                return
        time.sleep(0.1)
    raise AssertionError("The actor did not come back.")


class Broken:
    """Actor whose constructor fails."""

    def __init__(self) -> None:
        raise ValueError("it does not work")


def late() -> None:
    """Block an actor after the profiler has connected to it but before recording starts."""
    actor = make(held_engines.SyncActor)
    fifo = OUTPUT.parent / "fifo"
    os.mkfifo(fifo)
    waiting, gate_s = [], 0.5

    async def gate() -> None:
        waiting.append(actor.wait.remote(str(fifo)))
        threading.Timer(2 * gate_s, fifo.write_text, ["go on"]).start()

    profiler = Profiler.from_config(settings=settings(52, options__rpc_timeout_s=gate_s), role="rollout", target=actor)
    (role,) = profiler._roles
    backend = role.backend
    assert isinstance(backend, held_engines.HeldBackend)
    assert backend.wait_for(gate)
    try:
        profiler.start(52)
    except CaptureError as error:
        results["late"] = {"error": str(error)}
    ray.get(waiting)
    results["late"]["about"] = ray.get(actor.about.remote())
    captured("after", 53, actor, (actor,))


if __name__ == "__main__":
    logging.getLogger("profdeck").addHandler(logging.StreamHandler())
    ray.init(address=ADDRESS, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    what_works()
    groups()
    what_goes_wrong()
    RESULTS.write_text(json.dumps(results))
