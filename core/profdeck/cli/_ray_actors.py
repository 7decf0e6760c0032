"""How `profdeck capture` finds the engines that actors of a running Ray job hold."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from profdeck.backends.api import EngineBackend
from profdeck.base.errors import CaptureError, ConfigError
from profdeck.base.outcome import Outcome
from profdeck.cli import kit
from profdeck.engine.transport.in_ray_actor import NoEngineError
from profdeck.engine.transport.ray_engine import RayActor
from profdeck.replicas.held_engines import AskActor, actors_that_match, ask_cluster
from profdeck.replicas.ray_actors import namespaces_of_jobs, require_ray

ALL = "*"
"""The names of all actors."""
_ANSWER_S = 10.0
_ADDRESS_VARIABLE = "RAY_ADDRESS"  # which is Ray's own


def join_cluster(until: ExitStack) -> None:
    """Join the Ray cluster that ``RAY_ADDRESS`` names, or that runs on this host, unless this process is in one.

    Raises:
        CaptureError: there is none.
        MissingLibraryError: Ray is not installed.
    """
    require_ray()
    import ray

    if ray.is_initialized():
        return
    address = os.environ.get(_ADDRESS_VARIABLE) or "auto"
    host, _, port = address.rpartition(":")
    try:
        if port.isdecimal() and "//" not in address:  # Ray tries for minutes
            socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise CaptureError(
            f"The Ray cluster at {_ADDRESS_VARIABLE}={address} cannot be joined: {why} Run this command "
            f"on a node of the cluster, or set {_ADDRESS_VARIABLE} to HOST:PORT of its head node."
        ) from None
    until.callback(ray.shutdown)


async def backend_of(actor: RayActor, backends: Mapping[str, type[EngineBackend]]) -> str:
    """Return the backend of the engine that an actor holds.

    Raises:
        NoEngineError: it holds none of theirs.
        CaptureError: it cannot be asked.
    """
    none = NoEngineError(f"{actor} holds no engine: no backend of engines is installed.", Outcome.REFUSED)
    for name, cls in backends.items():
        asked = cls(cls.Options())
        try:
            asked.bind(actor)
        except ConfigError:  # it controls no actors
            continue
        try:
            await asked.reach()
        except NoEngineError as error:
            none = error
        else:
            return name
        finally:
            await asked.release()
    raise none


def asking_by(backends: Mapping[str, type[EngineBackend]]) -> AskActor:
    """Return what asks an actor whether it holds an engine of one of the backends."""
    return lambda actor: backend_of(actor, backends)


async def namespace_of(patterns: Sequence[str], backends: Mapping[str, type[EngineBackend]]) -> str:
    """Return the namespace of the only job whose actors hold engines: each Ray job has one, as long as it names none.

    Args:
        patterns: of the names of actors.
        backends: of engines, by name.

    Raises:
        ConfigError: several jobs have engines.
        CaptureError: none has, or the cluster does not answer.
    """
    answered: dict[str, int] = {}
    silent: dict[str, int] = {}

    async def look(namespace: str) -> None:
        async def ask(actor: RayActor) -> None:
            await backend_of(actor, backends)
            answered[namespace] = answered.get(namespace, 0) + 1

        found, _ = await actors_that_match(patterns, namespace, None, ask)
        if others := len(found) - answered.get(namespace, 0):
            silent[namespace] = others

    namespaces = await ask_cluster(namespaces_of_jobs, patterns)
    await asyncio.gather(*map(look, namespaces))
    if len(answered) > 1:
        listed = ", ".join(f"{name} ({count})" for name, count in sorted(answered.items()))
        raise ConfigError(f"Several Ray jobs have engines; choose one by its --ray-namespace: {listed}.")
    if not answered:
        names = f"actors named {', '.join(patterns)}" if list(patterns) != [ALL] else "actors that have a name"
        listed = ", ".join(f"{count} in {name}" for name, count in sorted(silent.items()))
        text = f" Some do not say whether they do, as they are busy or lack profdeck: {listed}." if silent else ""
        raise CaptureError(
            f"No engine was found in the {names}, in {len(namespaces)} namespaces of the Ray cluster.{text} For an "
            "actor that has started a server, give the server's --url."
        )
    (namespace,) = answered
    if others := sum(count for name, count in silent.items() if name != namespace):
        kit.warn(f"{others} actors of other namespaces do not say whether they hold an engine; they are left out.")
    return namespace
