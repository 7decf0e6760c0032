"""Control of engines in Ray actors through actor handles.

The actor's class does not change: ``__ray_call__`` (Ray 2.40 to 2.60) runs the functions of `profdeck_ray.in_actor` in
the actor's process. These functions connect the backend to the engine object. `RayEngine` forwards calls to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from profdeck import ProfdeckError, __version__
from profdeck.engines import (
    Actor,
    Answer,
    Engine,
    EngineOptions,
    FileHost,
    FilePart,
    MessageTimes,
    NoEngineError,
    Outcome,
    PartedFiles,
    RemoteFiles,
    better_clock,
    compare_clocks,
)
from profdeck.plugin import ConfigError, TargetError, describe_error, structure, unstructure
from profdeck_ray import in_actor

_FIRST_POLL_S = 0.002
_LAST_POLL_S = 0.1
_MAX_ERROR_LENGTH = 500

_GONE = "Check the actor's log. If another actor has replaced it, pass the new handle or set targets.actors."
_BUSY = (
    "The actor may be running a blocking call, or as many calls as its max_concurrency allows. Start and stop captures "
    "outside such calls, make the actor's methods async, or increase its max_concurrency."
)


@attrs.frozen
class RayActor(Actor):
    """A Ray actor that holds an engine. Handles of the same actor are equal."""

    handle: Any = attrs.field(eq=False, repr=False)
    id: str
    attribute: str | None = None
    """Dotted path from the actor to its engine. ``None``: use the only engine found."""
    name: str = attrs.field(default="", eq=False)
    """Name in manifests, such as ``Actor(Rollout, rollout_0)``."""

    def __str__(self) -> str:
        return self.name

    def engine(self, *, backend: str, options: EngineOptions) -> RayEngine:
        """Return an object that controls the actor's engine through the handle."""
        return RayEngine(self, backend=backend, options=options)

    @classmethod
    def of(cls, target: object, attribute: str | None = None, name: str | None = None) -> RayActor | None:
        """Return the actor for a Ray handle, or ``None`` for any other object.

        Args:
            target: Any object that the host passes as a target.
            attribute: Dotted path from the actor to its engine.
            name: The actor's name in its cluster, if known.

        Raises:
            ConfigError: The target is a Ray Client handle.
        """
        if isinstance(target, cls):
            return target
        module = sys.modules.get("ray.actor")  # a process that has a handle has imported this module
        if module is not None and isinstance(target, module.ActorHandle):
            text = repr(target)  # Actor(Rollout, 810ad9aca4373a87b1be688e01000000)
            identity = target._actor_id.hex()  # noqa: SLF001  # no public attribute for the ID (Ray 2.40 to 2.60)
            return cls(target, identity, attribute, text.replace(identity, name) if name else text)
        if type(target).__module__.startswith("ray.util.client"):
            raise ConfigError(
                f"target: {target!r} is a Ray Client handle, which is not supported. Run the host on a cluster node "
                "and call ray.init(address='auto')."
            )
        return None


class RayEngine(Engine):
    """Controls the engine in a Ray actor."""

    late_fix = _BUSY

    def __init__(self, actor: RayActor, *, backend: str, options: EngineOptions) -> None:
        """Args:
        actor: The actor that holds the engine.
        backend: Name of the backend that connects to the engine.
        options: Options of the backend.
        """
        self.name = actor.name
        self._actor = actor
        self._connection = {"backend": backend, "options": unstructure(options), "attribute": actor.attribute}
        self._timeout_s = options.rpc_timeout_s
        self._host: str | None = None

    async def has_profdeck(self) -> bool:
        """Find the engine, and return whether its processes have loaded profdeck."""
        return bool(await self._call("has_profdeck"))

    async def command(self, command: str, payload: Mapping[str, Any]) -> Answer:
        """Send a command. A start command waits for the start gate."""
        data = await self._call("command", command, dict(payload), starts=command == "start")
        try:
            return structure(data, Answer, where="answer")
        except ProfdeckError as error:
            raise TargetError(f"{self.name} runs another profdeck version: {error}", Outcome.REFUSED) from None

    def files(self, output: Path) -> RemoteFiles:
        """Return access to the files of the engine's ranks on the actor's node."""
        return _ActorFiles(self, output)

    async def part(self, output: Path, place: str, offset: int) -> FilePart:
        """Fetch a chunk of a file from the output directory on the actor's node."""
        async with self._time_limit():
            answer = await self._request(in_actor.read_part, str(output), place, offset)
        self._host = answer["host"]
        fields = attrs.fields_dict(FilePart)  # another version may send more fields
        return FilePart(**{name: value for name, value in answer["part"].items() if name in fields})

    async def arrive(self) -> None:
        """Do nothing, because the start command waits for the gate."""

    async def is_here(self) -> bool:
        """Return whether the engine's files are on this host."""
        return await self.host() == socket.gethostname()

    async def host(self) -> str:
        """Return the name of the actor's host."""
        if self._host is None:
            await self.has_profdeck()
        assert self._host is not None  # noqa: S101  # set by any reply
        return self._host

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        """Forward calls that control the engine's own profiler, such as ``start_profile``."""
        if name.startswith("_"):
            raise AttributeError(name)

        async def forward(*arguments: Any, **keywords: Any) -> Any:
            return await self._call(name, *arguments, starts=name.startswith("start_"), **keywords)

        return forward

    async def _call(self, method: str, *arguments: Any, starts: bool = False, **keywords: Any) -> Any:
        """Call a coroutine method of the engine and wait for its result.

        Args:
            method: Name of the method.
            arguments: Plain data.
            starts: Whether the call waits for the start gate.
            keywords: Plain data.

        Raises:
            TargetError: The actor has exited, did not respond in time, or returned an error.
        """
        call = {
            "version": __version__,
            **self._connection,
            "method": method,
            "arguments": list(arguments),
            "keywords": keywords,
        }
        if starts and self.gate is not None:
            await self.gate()
        async with self._time_limit():
            answer = await self._wait_for_answer(call)
        self._host = answer["host"]
        if "error" not in answer:
            return answer["value"]
        error_class = NoEngineError if answer["no_engine"] else TargetError
        raise error_class(answer["error"], Outcome(answer["outcome"]), answer["fix"])

    @contextlib.asynccontextmanager
    async def _time_limit(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            text = f"{self.name} did not answer within rpc_timeout_s={self._timeout_s:g} seconds."
            fix = f"{_BUSY} If the actor is only slow, increase rpc_timeout_s."
            raise TargetError(text, Outcome.TIMED_OUT, fix) from None

    async def _wait_for_answer(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Send a call and poll for its result."""
        ticket, pause_s = secrets.token_hex(8), _FIRST_POLL_S
        try:
            answer = await self._request(in_actor.ask, ticket, call)
            while "waiting" in answer:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LAST_POLL_S)
                answer = await self._request(in_actor.fetch_result, ticket)
        except asyncio.CancelledError:
            # Ray cannot cancel a call that was already sent to an actor, so a start may still arrive. The stop that
            # follows a cancelled start arrives after it.
            with contextlib.suppress(Exception):  # the result is not needed
                self._send(in_actor.forget, ticket)
            raise
        return answer

    def _send(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function in the actor and return the Ray object reference of its result."""
        if not sys.modules["ray"].is_initialized():  # Ray would start a new cluster
            text = f"{self.name} cannot be reached: this process has left the Ray cluster."
            raise TargetError(text, Outcome.UNREACHABLE, "End captures before ray.shutdown().")
        return self._actor.handle.__ray_call__.remote(function, *arguments)

    async def _request(self, function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
        """Run a function in the actor, return its result and update the clock offset.

        Raises:
            TargetError: The call failed.
        """
        sent_ns = time.time_ns()
        reference = self._send(function, *arguments)
        try:
            answer: dict[str, Any] = await reference
        except Exception as error:
            raise self._as_target_error(error) from error
        if "times" in answer:  # other versions may omit them
            times = MessageTimes(*answer["times"])
            self.clock = better_clock(self.clock, compare_clocks(answer["host"], sent_ns, times, time.time_ns()))
        return answer

    def _as_target_error(self, error: Exception) -> TargetError:
        """Convert an exception raised by a Ray call to a `TargetError`."""
        from ray.exceptions import RayTaskError

        if not isinstance(error, RayTaskError):  # usually RayActorError
            return TargetError(f"{self.name} cannot be reached: {_shorten(error)}", Outcome.UNREACHABLE, _GONE)
        cause = error.cause
        # Ray wraps import errors of the function in the actor's process in this attribute.
        missing = getattr(cause, "client_exc", cause)
        if isinstance(missing, ImportError | AttributeError):
            return TargetError(
                f"The process of {self.name} cannot import profdeck {__version__}: {missing}.",
                Outcome.NOT_ENABLED,
                f"Install profdeck {__version__} on the actor's node or in its runtime_env.",
            )
        return TargetError(f"{self.name}: {describe_error(cause)}", Outcome.REFUSED)


@attrs.frozen
class _ActorFiles(PartedFiles):
    """Files on an actor's node."""

    _engine: RayEngine
    _output: Path

    async def source(self) -> FileHost:
        """Return the host and directory of the files."""
        await self.part("", 0)  # the reply contains the host
        return FileHost(await self._engine.host(), str(self._output))

    async def part(self, place: str, offset: int) -> FilePart:
        """Fetch a chunk of a file, or a directory listing."""
        return await self._engine.part(self._output, place, offset)


def _shorten(error: Exception) -> str:
    """Strip colours, tracebacks, tables and advice from a Ray error message."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line for line in plain.splitlines() if line and not line[0].isspace()]
    return " ".join(lines).partition(" Some common causes")[0][:_MAX_ERROR_LENGTH]
