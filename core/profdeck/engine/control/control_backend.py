"""The backend that is the same for all engines: it asks their processes to record."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import attrs
from typing_extensions import TypeVar

from profdeck.backends.api import Backend, EngineBackend, TargetState
from profdeck.backends.backend_setup import structure_options
from profdeck.backends.hookspecs import hookimpl
from profdeck.backends.plugins import BACKENDS, load_backend
from profdeck.base.blocking import run_without_loop
from profdeck.base.errors import CaptureError, TargetError, target_error
from profdeck.base.outcome import Outcome
from profdeck.config.model import RoleConfig
from profdeck.config.options import COMMON_OPTIONS
from profdeck.config.structuring import unstructure
from profdeck.engine.clusters import Actor, as_cluster_target
from profdeck.engine.control.abandoned import end_abandoned
from profdeck.engine.control.merging import merge_ranks
from profdeck.engine.control.outcomes import AT_REST, check_started, judge, rank_and_host
from profdeck.engine.control.rank_files import RankFiles
from profdeck.engine.engine import Engine, T
from profdeck.engine.options import EngineOptions
from profdeck.records.artifact import Artifact
from profdeck.records.capture import EngineCapture
from profdeck.records.request import Answer, CaptureRequest, RequestState
from profdeck_traces.base.entry_points import installed
from profdeck_traces.base.errors import ConfigError, PluginError, did_you_mean

_LATE = "After flush_timeout_s=", " are not whole."
_SILENT = "It did not answer at its stop: "
_FIRST_POLL_S = 0.02
_LAST_POLL_S = 1.0
_CALL_EVERY_S = 10.0
"""How often processes are asked at least that write files, where manifests tell how far they are."""
_STARTS = 3
"""How often a start is tried in an engine in which something was active that has ended."""
_ROLL_BACK_S = 3.0
"""How long a start or a stop that is given up waits for the stop that it sends then: what did not answer the one may
not answer the other. A fleet's start and stop take so much longer than their limits at most."""


class EngineProfiler(Protocol):
    """Protocol for captures with the engine's own profiler."""

    manifests: list[Path]
    """Of the ranks, once it has been stopped."""
    outcome: Outcome
    """How the stop came out."""
    fix: str | None
    """What to do about that, where more is known than `Outcome.fix` says."""

    async def start(self) -> None:
        """Start it.

        Raises:
            CaptureError: it cannot do what is asked for, or does not start.
        """

    async def stop(self) -> None:
        """Stop it, wait for the files and bring them into the run, with a manifest for each rank."""


EngineOptionsT_co = TypeVar("EngineOptionsT_co", bound=EngineOptions, default=EngineOptions, covariant=True)


@attrs.define
class ControlBackend(EngineBackend[EngineOptionsT_co]):
    """Asks the processes of an engine to record: an engine object of this process, or a server."""

    Options: ClassVar[type[EngineOptions]] = EngineOptions
    common_options: ClassVar[Collection[str]] = COMMON_OPTIONS

    _engine: Engine | None = attrs.field(default=None, init=False)
    _native: EngineProfiler | None = attrs.field(default=None, init=False)
    _asked: CaptureRequest | None = attrs.field(default=None, init=False)
    _enabled: bool | None = attrs.field(default=None, init=False)
    """Whether the processes have loaded profdeck, as far as that was asked before a start."""
    _said: TargetState | None = attrs.field(default=None, init=False)

    def connect(self, target: object) -> Engine:
        """Return the engine that an object or a URL stands for.

        Raises:
            ConfigError: this backend does not control such a target.
        """
        raise NotImplementedError

    def check_role(self, role: RoleConfig) -> None:
        """Refuse options of devices that no installed backend of one has, or takes so."""
        del role  # its keys are those of every engine
        given = dict(self.options.device_options)
        if not given:
            return
        problems = []
        for cls in _device_backends():
            try:
                structure_options(cls, given, where="options.device_options")
            except ConfigError as error:
                unknown = [key for key in given if key not in attrs.fields_dict(cls.Options)]
                meant = any(did_you_mean(key, attrs.fields_dict(cls.Options)) for key in unknown)
                problems.append((len(unknown), not meant, str(error)))
            else:
                return
        if problems:  # of the backend that is meant most likely
            raise ConfigError(min(problems)[-1])

    def native(self, engine: Engine, capture: EngineCapture, request: CaptureRequest) -> EngineProfiler:
        """Return a capture by the own profiler of an engine whose processes have not loaded profdeck."""
        raise NotImplementedError

    @property
    def engine(self) -> Engine:
        """The bound target."""
        assert self._engine is not None  # noqa: S101  # core binds before it starts
        return self._engine

    @property
    def blocking(self) -> bool:
        """Whether the engine has only blocking calls."""
        return self.engine.blocking

    @property
    def late_fix(self) -> str:
        """What to do when the engine does not answer in time."""
        return self.engine.late_fix

    def bind(self, target: object) -> str:
        """Bind the target; see `connect`. An actor's engine is connected in the actor's process."""
        actor = as_cluster_target(target)
        if isinstance(actor, Actor):
            self._engine = actor.engine(backend=self.name, options=self.options)
        else:
            self._engine = self.connect(target)
        return self._engine.name

    @hookimpl
    def profile_start(self, capture: EngineCapture) -> Any:
        """Ask all processes to record."""
        return self._run(self._start(capture))

    @hookimpl
    def profile_stop(self, capture: EngineCapture) -> Any:
        """End the recording, and wait until the files of all ranks are whole."""
        return self._run(self._stop(capture))

    async def reach(self) -> None:
        """Ask whether the processes have loaded profdeck."""
        try:
            self._enabled = await self.engine.has_profdeck()
        except BaseException:
            await self.engine.close()
            raise

    async def release(self) -> None:
        """Close the connection that is kept open for the start."""
        self._enabled = None
        await self.engine.close()

    def wait_for(self, gate: Callable[[], Awaitable[None]]) -> bool:
        """Let the engine await the gate; one whose coroutines never suspend cannot."""
        if not self.blocking:
            self.engine.gate = gate
        return not self.blocking

    async def output(self) -> Path | None:
        """Return the server's output directory, if the server is on this host and has profdeck."""
        from profdeck.engine.transport.http_engine import HttpEngine

        if isinstance(self.engine, HttpEngine) and await self.engine.has_profdeck():
            about = await self.engine.about()
            return Path(about.output) if await self.engine.is_here() else None
        return None

    async def state(self, capture: EngineCapture) -> TargetState:  # noqa: ARG002  # an engine runs one capture at a time
        """Ask the processes how far they are."""
        if self._native is not None:
            return TargetState(ended=False, iterations=0)  # engines' own profilers do not tell
        return self._told(await self.engine.command("status", {}), self._asked)

    @property
    def states(self) -> Mapping[str, TargetState]:
        """How far the engine said that it was when it was last asked."""
        return {} if self._engine is None or self._said is None else {self._engine.name: self._said}

    def _told(self, answer: Answer, asked: CaptureRequest | None) -> TargetState:
        """Keep how far the processes say that they are."""
        ranks = [rank for rank in answer.ranks if asked and asked.selects(rank.rank)]
        self._said = TargetState(
            ended=all(rank.state in {RequestState.WRITING, RequestState.ENDED} for rank in ranks),
            iterations=min((rank.iterations for rank in ranks), default=0),
            waits_for=next((rank.waits_for for rank in ranks if rank.waits_for), None),
            writing=any(reply.state is RequestState.WRITING for reply in answer.all),
        )
        return self._said

    def _run(self, work: Coroutine[Any, Any, T]) -> T | Coroutine[Any, Any, T]:
        # A blocking engine needs no event loop, and works inside of a running one.
        return run_without_loop(work) if self.engine.blocking else work

    async def _start(self, capture: EngineCapture) -> None:
        assert capture.request is not None  # noqa: S101  # core makes it for targets
        request = self.options.complete(capture.request)
        self.engine.clock = None  # clocks drift: what they were in an earlier capture does not count
        enabled, self._enabled, self._said, self.outcome, self.fix = self._enabled, None, None, None, None
        try:
            if enabled if enabled is not None else await self.engine.has_profdeck():
                await self._start_processes(capture, request)
            else:
                native = self.native(self.engine, capture, request)
                await self.engine.arrive()
                await native.start()
                self._native = native
        except BaseException:
            await self.engine.close()
            raise
        finally:
            self.engine.gate = None
            self._keep_clock(capture)
        self.outcome = Outcome.STARTED

    async def _start_processes(self, capture: EngineCapture, request: CaptureRequest) -> None:
        capture.notes += self._without_effect()
        await self.engine.arrive()
        for left in reversed(range(_STARTS)):
            try:
                answer = await self._asked_to_start(request)
                break
            except TargetError as error:
                if error.outcome is not Outcome.ALREADY_ACTIVE or not left:
                    raise
                capture.notes.append(await end_abandoned(self.engine, error))
        capture.notes += [
            f"At the start, rank {reply.rank} on {reply.host} waited for {reply.waits_for}."
            for reply in answer.ranks
            if reply.waits_for
        ]
        request = answer.request(request)
        world = max(reply.world_size for reply in answer.ranks)
        capture.expected_ranks = tuple(rank for rank in range(world) if request.selects(rank))
        self._asked = request

    def _without_effect(self) -> list[str]:
        """Say which options mean nothing where profdeck is in the engine's processes."""
        notes = []
        if self.options.native_directory is not None:
            notes.append("native_directory has no effect: this engine has loaded profdeck, and not its own profiler.")
        if not self.engine.gives_up and self.options.rpc_timeout_s != attrs.fields(EngineOptions).rpc_timeout_s.default:
            notes.append(f"rpc_timeout_s has no effect: calls of {self.engine.name} cannot be given up.")
        return notes

    async def _asked_to_start(self, request: CaptureRequest) -> Answer:
        try:
            answer = await self.engine.command("start", unstructure(request))
            check_started(answer.request(request), answer)
        except BaseException:  # what has started is stopped, also when the host gave up waiting
            await self._roll_back(request)
            raise
        return answer

    async def _roll_back(self, request: CaptureRequest, reason: str = "the capture was given up at its start") -> None:
        stop = self.engine.command("stop", {"request": request.id, "token": request.token, "reason": reason})
        if self.engine.blocking:
            with contextlib.suppress(CaptureError):
                await stop
        else:
            await asyncio.shield(_tried(stop, _ROLL_BACK_S))

    async def _stop(self, capture: EngineCapture) -> Sequence[Artifact]:
        try:
            return await self._end(capture)
        finally:
            self._keep_clock(capture)
            await self.engine.close()

    def _keep_clock(self, capture: EngineCapture) -> None:
        clock = self.engine.clock
        capture.clock = None if clock is None or clock.host == capture.identity.host else clock

    async def _end(self, capture: EngineCapture) -> Sequence[Artifact]:
        native, self._native = self._native, None
        if native is not None:
            await native.stop()
            self.outcome, self.fix = native.outcome, native.fix
            return await self._merged(capture, native.manifests) if self.options.merges_ranks else ()
        asked, self._asked = self._asked, None
        if asked is None:
            return ()
        limit_s, files = self.options.flush_timeout_s, RankFiles(capture, asked)
        try:
            answer = await self._asked_to_stop(asked, " ".join(capture.problems) or None)
            until = time.monotonic() + limit_s
            answer = await self._flushed(files, answer, until)
        except CaptureError as error:
            found = target_error(error)
            is_silent = found.outcome in {Outcome.UNREACHABLE, Outcome.TIMED_OUT}
            capture.problems.append(f"{_SILENT if is_silent else ''}{error}")
            self.outcome, self.fix = found.outcome, found.fix
            return ()
        self.outcome = judge(capture, asked, answer)
        late = f"The time was over, flush_timeout_s={limit_s:g} seconds"
        await files.collect(self.engine, answer, fetch=self.options.collect, until=until, late=late)
        if self.outcome.ends_well and not files.complete:
            self.outcome = Outcome.FILES_MISSING
        return await self._merged(capture, files.manifests) if self.options.merges_ranks else ()

    async def _asked_to_stop(self, asked: CaptureRequest, reason: str | None) -> Answer:
        try:
            return await self.engine.command("stop", {"request": asked.id, "token": asked.token, "reason": reason})
        except CaptureError:
            raise
        except BaseException:  # the host gives up waiting, and the stop may not have left
            await self._roll_back(asked, "the host gave up waiting for its end")
            raise

    async def _flushed(self, files: RankFiles, answer: Answer, until: float) -> Answer:
        """Wait until no process is writing any more, or the time is over.

        Where manifests are here, they tell; the engine is asked when they say that it is over, and now and then: a
        process that has died changes no file. Each call takes workers from their work.
        """
        pause_s, called_s = _FIRST_POLL_S, time.monotonic()
        self._told(answer, files.asked)
        while any(reply.state not in AT_REST for reply in answer.all):
            if time.monotonic() >= until:
                named = [(rank_and_host(reply), reply) for reply in answer.ranks]
                named += [(f"the {name}", reply) for name, reply in answer.frontends.items()]
                writing = [(who, reply) for who, reply in named if reply.state not in AT_REST]
                late = ", ".join(f"{who} ({reply.state})" for who, reply in writing)
                after = f"{_LATE[0]}{self.options.flush_timeout_s:g} seconds"
                files.capture.problems.append(f"{after} the files of {late}{_LATE[1]}")
                break
            await self.engine.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_POLL_S)
            is_due = time.monotonic() >= min(called_s + _CALL_EVERY_S, until)
            if not is_due and await self.engine.call(files.show_writing, answer):
                continue
            answer, called_s = await self.engine.command("status", {}), time.monotonic()
            self._told(answer, files.asked)
        return answer

    async def _merged(self, capture: EngineCapture, manifests: Sequence[Path]) -> Sequence[Artifact]:
        """Merge the traces of all ranks, as far as they are here."""
        if not manifests:
            capture.problems.append("The ranks are not merged: no trace of theirs is on this host.")
            return ()
        return await self.engine.call(merge_ranks, capture, manifests)


def is_settled_by_files(problem: str) -> bool:
    """Tell whether a problem of a capture is over when the files of all ranks are here and whole: they were late, or
    the engine could not say that they were there.
    """
    return problem.startswith(_SILENT) or (problem.startswith(_LATE[0]) and problem.endswith(_LATE[1]))


async def _tried(work: Coroutine[Any, Any, object], limit_s: float) -> None:
    """Do what may fail: max_capture_s ends what an engine has begun that does not answer."""
    with contextlib.suppress(CaptureError, TimeoutError):
        async with asyncio.timeout(limit_s):
            await work


def _device_backends() -> Iterator[type[Backend]]:
    """Yield the installed backends that record a device."""
    for name in installed(BACKENDS):
        with contextlib.suppress(PluginError):  # it is not asked for
            cls = load_backend(name)
            if cls.device_types:
                yield cls
