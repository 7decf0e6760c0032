"""Engines as whoever controls them sees them, and the backend that is the same for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, cast

import attrs

from profdeck.backend import EngineBackend, TargetState
from profdeck.capture import Artifact, Capture
from profdeck.engine.options import EngineOptions
from profdeck.engine.request import Answer, CaptureRequest, Reply, State
from profdeck.errors import CaptureError, ProfdeckError, describe
from profdeck.hookspecs import hookimpl
from profdeck.run import read_manifest
from profdeck.settle import drive
from profdeck.strict import unstructure
from profdeck.traces.merge import Source, merge_traces

T = TypeVar("T")

_FIRST_POLL_S = 0.02
_LAST_POLL_S = 1.0
_WRITING_POLL_S = 0.1


class Engine(ABC):
    """One engine."""

    name: str
    """What manifests call it."""
    blocking: bool = False
    """Whether its coroutines never suspend, as it has only blocking calls."""

    @abstractmethod
    async def has_profdeck(self) -> bool:
        """Tell whether its processes have loaded profdeck.

        Raises:
            CaptureError: it cannot be reached, or does not let us in.
        """

    @abstractmethod
    async def command(self, command: str, payload: Mapping[str, Any]) -> Answer:
        """Send ``start``, ``stop`` or ``status`` to all of its processes; see `profdeck.engine.recorder.handle`.

        Raises:
            CaptureError: it does not answer.
        """

    async def end(self, payload: Mapping[str, Any], wait_s: float) -> Answer:
        """Stop a capture and wait until no process is writing any more, or the time is over.

        Raises:
            CaptureError: the engine does not answer.
        """
        answer = await self.command("stop", payload)
        deadline = time.monotonic() + wait_s
        while any(reply.state is State.WRITING for reply in answer.all) and time.monotonic() < deadline:
            await self.sleep(_WRITING_POLL_S)
            answer = await self.command("status", {})
        return answer

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call what takes long, such as reading files, without blocking an event loop."""
        return function(*arguments) if self.blocking else await asyncio.to_thread(function, *arguments)

    async def sleep(self, duration_s: float) -> None:
        """Wait."""
        if self.blocking:
            time.sleep(duration_s)  # noqa: ASYNC251  # its coroutines are driven without an event loop
        else:
            await asyncio.sleep(duration_s)


class Native(Protocol):
    """One capture by an engine's own profiler."""

    manifests: list[Path]
    """Of the ranks, once it has been stopped."""

    async def start(self) -> None:
        """Start it.

        Raises:
            CaptureError: it cannot do what is asked for, or does not start.
        """

    async def stop(self) -> None:
        """Stop it, wait for the files and bring them into the run, with a manifest for each rank."""


@attrs.define
class ControlBackend(EngineBackend):
    """Asks the processes of an engine to record: an engine object of this process, or a server."""

    Options: ClassVar[type[EngineOptions]] = EngineOptions

    _engine: Engine | None = attrs.field(default=None, init=False)
    _native: Native | None = attrs.field(default=None, init=False)
    _asked: CaptureRequest | None = attrs.field(default=None, init=False)

    def connect(self, target: object) -> Engine:
        """Return the engine that an object or a URL stands for.

        Raises:
            ConfigError: this backend does not control such a target.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Refuse options that mean nothing for an engine whose processes have loaded profdeck.

        Raises:
            CaptureError: there is such an option.
        """

    def native(self, engine: Engine, capture: Capture, request: CaptureRequest) -> Native:
        """Return a capture by the own profiler of an engine whose processes have not loaded profdeck."""
        raise NotImplementedError

    @property
    def _own(self) -> EngineOptions:
        return cast("EngineOptions", self.options)

    @property
    def _target(self) -> Engine:
        assert self._engine is not None  # noqa: S101  # core binds before it starts
        return self._engine

    @property
    def blocking(self) -> bool:
        """Whether the engine has only blocking calls."""
        return self._target.blocking

    def bind(self, target: object) -> str:
        """Take the target; see `connect`."""
        self._engine = self.connect(target)
        return self._engine.name

    @hookimpl
    def profile_start(self, capture: Capture) -> Any:
        """Ask all processes to record."""
        return self._run(self._start(capture))

    @hookimpl
    def profile_stop(self, capture: Capture) -> Any:
        """End the recording, and wait until the files of all ranks are whole."""
        return self._run(self._stop(capture))

    async def output(self) -> Path | None:
        """Return the server's output directory, if the server is on this host and has profdeck."""
        from profdeck.engine.remote import RemoteEngine

        if isinstance(self._target, RemoteEngine) and await self._target.has_profdeck():
            about = await self._target.about()
            return Path(about.output) if about.here else None
        return None

    async def state(self, capture: Capture) -> TargetState:  # noqa: ARG002  # one at a time
        """Ask the processes how far they are."""
        if self._native is not None:
            return TargetState(ended=False, iterations=0)  # engines' own profilers do not tell
        asked, answer = self._asked, await self._target.command("status", {})
        ranks = [rank for rank in answer.ranks if asked and asked.selects(rank.rank)]
        return TargetState(
            ended=all(rank.state in {State.WRITING, State.ENDED} for rank in ranks),
            iterations=min((rank.iterations for rank in ranks), default=0),
        )

    def _run(self, work: Coroutine[Any, Any, T]) -> T | Coroutine[Any, Any, T]:
        # A blocking engine needs no event loop, and works inside of a running one.
        return drive(work) if self._target.blocking else work

    async def _start(self, capture: Capture) -> None:
        assert capture.request is not None  # noqa: S101  # core makes it for targets
        request = self._own.complete(capture.request)
        if await self._target.has_profdeck():
            await self._start_processes(capture, request)
        else:
            native = self.native(self._target, capture, request)
            await native.start()
            self._native = native

    async def _start_processes(self, capture: Capture, request: CaptureRequest) -> None:
        self.check()
        try:
            answer = await self._target.command("start", unstructure(request))
            _check_started(request, answer)
        except BaseException:  # what has started is stopped, also when the host gave up waiting
            await self._roll_back(request)
            raise
        world = max(reply.world_size for reply in answer.ranks)
        capture.expected_ranks = tuple(rank for rank in range(world) if request.selects(rank))
        self._asked = request

    async def _roll_back(self, request: CaptureRequest) -> None:
        reason = "the capture was given up at its start"
        stop = self._target.command("stop", {"request": request.id, "token": request.token, "reason": reason})
        with contextlib.suppress(CaptureError):  # it does not answer: max_capture_s ends what it may have begun
            await (stop if self._target.blocking else asyncio.shield(stop))

    async def _stop(self, capture: Capture) -> Sequence[Artifact]:
        native, self._native = self._native, None
        if native is not None:
            await native.stop()
            return await self._merged(capture, native.manifests) if self._own.merge_profiles else ()
        asked, self._asked = self._asked, None
        if asked is None:
            return ()
        reason = " ".join(capture.problems) or None
        try:
            stop = {"request": asked.id, "token": asked.token, "reason": reason}
            answer = await self._target.command("stop", stop)
            answer = await self._flushed(capture, answer)
        except CaptureError as error:
            capture.problems.append(str(error))
            return ()
        _judge(capture, asked, answer)
        if not self._own.merge_profiles:
            return ()
        manifests = [Path(recorded.manifest) for reply in answer.all for recorded in reply.captures]
        return await self._merged(capture, manifests)

    async def _flushed(self, capture: Capture, answer: Answer) -> Answer:
        """Wait until no process is writing any more."""
        deadline, pause_s = time.monotonic() + self._own.flush_timeout_s, _FIRST_POLL_S
        while any(reply.state not in {State.IDLE, State.ENDED} for reply in answer.all):
            if time.monotonic() >= deadline:
                named = [(_who(reply), reply) for reply in answer.ranks]
                named += [(f"the {name}", reply) for name, reply in answer.frontends.items()]
                writing = [(who, reply) for who, reply in named if reply.state not in {State.IDLE, State.ENDED}]
                late = ", ".join(f"{who} ({reply.state})" for who, reply in writing)
                capture.problems.append(
                    f"After flush_timeout_s={self._own.flush_timeout_s:g} seconds the files of {late} are not whole."
                )
                break
            await self._target.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_POLL_S)
            answer = await self._target.command("status", {})
        return answer

    async def _merged(self, capture: Capture, manifests: Sequence[Path]) -> Sequence[Artifact]:
        """Merge the traces of all ranks, as far as they are on this host."""
        here = [manifest for manifest in manifests if manifest.is_file()]
        if not here:
            capture.problems.append("merge_profiles: there are no traces that can be seen from this host.")
            return ()
        return await self._target.call(merge_ranks, capture, here)


def merge_ranks(capture: Capture, manifests: Sequence[Path]) -> Sequence[Artifact]:
    """Merge the traces that manifests name into one file of the capture; what fails is the file's problem."""
    sources: list[Source] = []
    for path in manifests:
        manifest = read_manifest(path)
        place = "-".join(f"{name}{index}" for name, index in manifest.parallel.items())
        replica = "" if manifest.replica is None else f"/{manifest.replica}"
        label = " ".join(filter(None, [f"{manifest.role}{replica}", f"rank {manifest.rank}", place, manifest.stage]))
        for record in manifest.artifacts:
            if record.kind == "trace" and record.size_bytes:
                sources.append(Source(path.parent / record.name, label, len(sources)))
    destination = capture.artifact_path(".merged.json.gz")
    try:
        check = merge_traces(sources, destination)
    except (OSError, ProfdeckError) as error:
        problem = f"merge_profiles: {describe(error)}"
        return [Artifact(path=destination, kind="merged_trace", whole=False, problem=problem)]
    return [
        Artifact(
            path=destination,
            kind="merged_trace",
            size_bytes=check.size_bytes,
            events=check.events,
            whole=check.whole,
            problem=check.problem,
        )
    ]


def _check_started(request: CaptureRequest, answer: Answer) -> None:
    """Raise CaptureError unless every process that is to record does."""
    refused = [f"{_who(reply)}: {reply.error}" for reply in answer.ranks if reply.error]
    refused += [f"The {name}: {reply.error}" for name, reply in answer.frontends.items() if reply.error]
    if refused:
        raise CaptureError(" ".join(dict.fromkeys(refused)))
    world = max((reply.world_size for reply in answer.ranks), default=0)
    if absent := [rank for rank in request.ranks if request.ranks != "all" and int(rank) >= world]:
        raise CaptureError(f"The ranks {absent} are not in this engine, whose ranks are 0 to {world - 1}.")


def _judge(capture: Capture, asked: CaptureRequest, answer: Answer) -> None:
    """Say in the capture what is missing of what was asked for."""
    answered = {reply.rank: reply for reply in answer.ranks}
    for rank in capture.expected_ranks or ():
        reply = answered.get(rank)
        if reply is None:  # its answers do not come to this process: its manifest tells
            continue
        if reply.token != asked.token:
            capture.problems.append(f"Rank {rank} knows nothing of the capture; was its process restarted?")
            continue
        if not any(recorded.files for recorded in reply.captures):
            capture.problems.append(f"Rank {rank} left no file.")
        capture.problems += [f"Rank {rank}: {problem}" for problem in _problems(reply)]
    for name, reply in answer.frontends.items():
        if reply.token == asked.token:
            capture.problems += [f"The {name}: {problem}" for problem in _problems(reply)]


def _problems(reply: Reply) -> list[str]:
    own = [problem for recorded in reply.captures for problem in recorded.problems]
    return list(dict.fromkeys([*own, *reply.problems]))


def _who(reply: Reply) -> str:
    return f"rank {reply.rank} on {reply.host}"
