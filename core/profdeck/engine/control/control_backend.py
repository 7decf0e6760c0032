"""Base class of engine backends, which request captures from an engine's processes."""

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
from profdeck.engine.control.abandoned_captures import end_abandoned
from profdeck.engine.control.merging import merge_ranks
from profdeck.engine.control.outcomes import check_started, evaluate_stop, is_active, rank_and_host
from profdeck.engine.control.rank_files import RankFiles
from profdeck.engine.engine import Engine, T
from profdeck.engine.options import EngineOptions
from profdeck.records.artifact import Artifact
from profdeck.records.capture import EngineCapture
from profdeck.records.request import Answer, CaptureRequest, RequestState
from profdeck_traces.base.entry_points import installed
from profdeck_traces.base.errors import ConfigError, PluginError, did_you_mean

_LATE_FILES_MESSAGE = "After flush_timeout_s=", " are not complete."
"""Start and end of the message about late files, also used to recognise the message."""
_NO_STOP_REPLY = "The engine did not reply to the stop: "
# Wording in manifests of earlier versions.
_OLD_LATE_FILES_END = " are not whole."
_OLD_NO_STOP_REPLY = "It did not answer at its stop: "
_MIN_POLL_S = 0.02
_MAX_POLL_S = 1.0
_STATUS_INTERVAL_S = 10.0
"""Maximum interval between status commands while the local manifests already show that files are being written."""
_MAX_START_ATTEMPTS = 3
"""Attempts to start an engine that had another capture, which has ended."""
_ROLL_BACK_S = 3.0
"""Time limit for the stop command after a failed or cancelled start or stop, in seconds. The engine may not reply to
this command either. It delays the end of a fleet's start or stop beyond its own time limit."""


class EngineProfiler(Protocol):
    """Protocol for captures with the engine's own profiler."""

    manifests: list[Path]
    """Manifests of the ranks. Set by `stop`."""
    outcome: Outcome
    """Result of the stop."""
    fix: str | None
    """Suggested fix for the outcome, if it is more specific than `Outcome.fix`."""

    async def start(self) -> None:
        """Start the engine's profiler.

        Raises:
            CaptureError: the profiler does not support the request, or does not start.
        """

    async def stop(self) -> None:
        """Stop the engine's profiler, wait for its traces and add them to the run, with a manifest for each rank."""


EngineOptionsT_co = TypeVar("EngineOptionsT_co", bound=EngineOptions, default=EngineOptions, covariant=True)


@attrs.define
class ControlBackend(EngineBackend[EngineOptionsT_co]):
    """Requests captures from an engine, which is an object in this process or a server."""

    Options: ClassVar[type[EngineOptions]] = EngineOptions
    common_options: ClassVar[Collection[str]] = COMMON_OPTIONS

    _engine: Engine | None = attrs.field(default=None, init=False)
    _native: EngineProfiler | None = attrs.field(default=None, init=False)
    _request: CaptureRequest | None = attrs.field(default=None, init=False)
    """The request of the running capture, unless it uses the engine's own profiler."""
    _enabled: bool | None = attrs.field(default=None, init=False)
    """True if the processes have loaded profdeck, ``None`` if unknown. `reach` sets it."""
    _last_state: TargetState | None = attrs.field(default=None, init=False)

    def connect(self, target: object) -> Engine:
        """Return the engine for a target object or URL.

        Raises:
            ConfigError: this backend does not support the target.
        """
        raise NotImplementedError

    def check_role(self, role: RoleConfig) -> None:
        """Raise ConfigError if no installed device backend accepts the role's ``device_options``."""
        del role  # engine backends have no other role-specific checks
        device_options = dict(self.options.device_options)
        if not device_options:
            return
        problems = []
        for cls in _device_backends():
            try:
                structure_options(cls, device_options, where="options.device_options")
            except ConfigError as error:
                unknown = [key for key in device_options if key not in attrs.fields_dict(cls.Options)]
                has_suggestion = any(did_you_mean(key, attrs.fields_dict(cls.Options)) for key in unknown)
                problems.append((len(unknown), not has_suggestion, str(error)))
            else:
                return
        if problems:  # report the error of the backend that accepts most of the options
            raise ConfigError(min(problems)[-1])

    def native(self, engine: Engine, capture: EngineCapture, request: CaptureRequest) -> EngineProfiler:
        """Create a capture with the engine's own profiler, for engines that have not loaded profdeck."""
        raise NotImplementedError

    @property
    def engine(self) -> Engine:
        """The bound target."""
        assert self._engine is not None  # noqa: S101  # core calls `bind` first
        return self._engine

    @property
    def blocking(self) -> bool:
        """True if the engine has only blocking calls."""
        return self.engine.blocking

    @property
    def late_fix(self) -> str:
        """Engine-specific advice for a command that timed out."""
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
        """Start a capture in all processes of the engine."""
        return self._run(self._start(capture))

    @hookimpl
    def profile_stop(self, capture: EngineCapture) -> Any:
        """Stop the capture, and wait until all ranks have written their files."""
        return self._run(self._stop(capture))

    async def reach(self) -> None:
        """Connect to the engine, and determine whether its processes have loaded profdeck."""
        try:
            self._enabled = await self.engine.has_profdeck()
        except BaseException:
            await self.engine.close()
            raise

    async def release(self) -> None:
        """Close the connection opened by `reach`."""
        self._enabled = None
        await self.engine.close()

    def wait_for(self, gate: Callable[[], Awaitable[None]]) -> bool:
        """Make the next start wait for the gate. Return False for blocking engines, which cannot wait."""
        if not self.blocking:
            self.engine.gate = gate
        return not self.blocking

    async def output(self) -> Path | None:
        """Return the server's output directory, if the server is on this host and has profdeck."""
        from profdeck.engine.transport.http_engine import HttpEngine

        if isinstance(self.engine, HttpEngine) and await self.engine.has_profdeck():
            info = await self.engine.about()
            return Path(info.output) if await self.engine.is_here() else None
        return None

    async def state(self, capture: EngineCapture) -> TargetState:  # noqa: ARG002  # an engine runs one capture at a time
        """Query the progress of the running capture."""
        if self._native is not None:
            return TargetState(ended=False, iterations=0)  # engines' own profilers do not report progress
        request = self._request
        return self._update_state(await self.engine.command("status", request.key if request else {}), request)

    @property
    def states(self) -> Mapping[str, TargetState]:
        """The last reported state, by the engine's name."""
        return {} if self._engine is None or self._last_state is None else {self._engine.name: self._last_state}

    def _update_state(self, answer: Answer, request: CaptureRequest | None) -> TargetState:
        """Combine the replies of the selected ranks, and store the result."""
        # A rank that answers a different request has no record of this request; `evaluate_stop` reports such ranks.
        replies = [reply for reply in answer.all if request and reply.token == request.token]
        ranks = [reply for reply in answer.ranks if reply in replies and request and request.selects(reply.rank)]
        self._last_state = TargetState(
            ended=all(reply.state in {RequestState.WRITING, RequestState.ENDED} for reply in ranks),
            iterations=min((reply.iterations for reply in ranks), default=0),
            waits_for=next((reply.waits_for for reply in ranks if reply.waits_for), None),
            writing=any(reply.state is RequestState.WRITING for reply in replies),
        )
        return self._last_state

    def _run(self, operation: Coroutine[Any, Any, T]) -> T | Coroutine[Any, Any, T]:
        # Operations of a blocking engine need no event loop, and must also work while one is running.
        return run_without_loop(operation) if self.engine.blocking else operation

    async def _start(self, capture: EngineCapture) -> None:
        assert capture.request is not None  # noqa: S101  # core creates the request for targets
        request = self.options.complete(capture.request)
        self.engine.clock = None  # clocks drift, so discard measurements of earlier captures
        enabled, self._enabled, self._last_state, self.outcome, self.fix = self._enabled, None, None, None, None
        try:
            if enabled if enabled is not None else await self.engine.has_profdeck():
                await self._start_processes(capture, request)
            else:
                native = self.native(self.engine, capture, request)
                await self.engine.wait_for_gate()
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
        capture.notes += self._notes_on_unused_options()
        await self.engine.wait_for_gate()
        for remaining_attempts in reversed(range(_MAX_START_ATTEMPTS)):
            try:
                answer = await self._send_start(request)
                break
            except TargetError as error:
                if error.outcome is not Outcome.ALREADY_ACTIVE or not remaining_attempts:
                    raise
                capture.notes.append(await end_abandoned(self.engine, error))
        capture.notes += [
            f"At the start, rank {reply.rank} on {reply.host} waited for {reply.waits_for}."
            for reply in answer.ranks
            if reply.waits_for
        ]
        request = answer.request(request)
        world_size = max(reply.world_size for reply in answer.ranks)
        capture.expected_ranks = tuple(rank for rank in range(world_size) if request.selects(rank))
        self._request = request

    def _notes_on_unused_options(self) -> list[str]:
        notes = []
        if self.options.native_directory is not None:
            notes.append("native_directory has no effect: this engine has loaded profdeck instead of its own profiler.")
        if (
            not self.engine.cancels_late_calls
            and self.options.rpc_timeout_s != attrs.fields(EngineOptions).rpc_timeout_s.default
        ):
            notes.append(f"rpc_timeout_s has no effect: calls of {self.engine.name} cannot be cancelled.")
        return notes

    async def _send_start(self, request: CaptureRequest) -> Answer:
        try:
            answer = await self.engine.command("start", unstructure(request))
            check_started(answer.request(request), answer)
        except BaseException:  # including cancellation: processes may have started
            await self._roll_back(request, "the start failed or was cancelled")
            raise
        return answer

    async def _roll_back(self, request: CaptureRequest, reason: str) -> None:
        """Send a stop command, ignoring errors."""
        stop = self.engine.command("stop", {**request.key, "reason": reason})
        if self.engine.blocking:
            with contextlib.suppress(CaptureError):
                await stop
        else:
            await asyncio.shield(_suppress_errors(stop, _ROLL_BACK_S))

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
            return await self._merge(capture, native.manifests) if self.options.merges_ranks else ()
        request, self._request = self._request, None
        if request is None:
            return ()
        limit_s, files = self.options.flush_timeout_s, RankFiles(capture, request)
        try:
            answer = await self._send_stop(request, " ".join(capture.problems) or None)
            deadline_s = time.monotonic() + limit_s
            answer = await self._wait_for_files(files, answer, deadline_s)
        except CaptureError as error:
            failure = target_error(error)
            has_no_reply = failure.outcome in {Outcome.UNREACHABLE, Outcome.TIMED_OUT}
            capture.problems.append(f"{_NO_STOP_REPLY if has_no_reply else ''}{error}")
            self.outcome, self.fix = failure.outcome, failure.fix
            return ()
        self.outcome = evaluate_stop(capture, request, answer)
        timeout_message = f"The time limit has expired (flush_timeout_s={limit_s:g} seconds)"
        await files.collect(
            self.engine,
            answer,
            fetch=self.options.collect,
            deadline_s=deadline_s,
            timeout_message=timeout_message,
        )
        if self.outcome.ends_well and not files.complete:
            self.outcome = Outcome.FILES_MISSING
        return await self._merge(capture, files.manifests) if self.options.merges_ranks else ()

    async def _send_stop(self, request: CaptureRequest, reason: str | None) -> Answer:
        try:
            return await self.engine.command("stop", {**request.key, "reason": reason})
        except CaptureError:
            raise
        except BaseException:  # cancelled, possibly before the command was sent
            await self._roll_back(request, "the stop was cancelled")
            raise

    async def _wait_for_files(self, files: RankFiles, answer: Answer, deadline_s: float) -> Answer:
        """Wait until no process is writing any more, or until the deadline. Return the last answer.

        Status commands interrupt the workers, so the local manifests are polled instead while they show that a process
        is writing. The status is still queried at intervals, because the manifest of a crashed process never changes.
        """
        pause_s, queried_s = _MIN_POLL_S, time.monotonic()
        self._update_state(answer, files.request)
        while any(is_active(reply, files.request) for reply in answer.all):
            if time.monotonic() >= deadline_s:
                labelled = [(rank_and_host(reply), reply) for reply in answer.ranks]
                labelled += [(f"the {name}", reply) for name, reply in answer.frontends.items()]
                active = [(label, reply) for label, reply in labelled if is_active(reply, files.request)]
                processes = ", ".join(f"{label} ({reply.state})" for label, reply in active)
                start, end = _LATE_FILES_MESSAGE
                limit_s = self.options.flush_timeout_s
                files.capture.problems.append(f"{start}{limit_s:g} seconds, the files of {processes}{end}")
                break
            await self.engine.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_POLL_S)
            is_due = time.monotonic() >= min(queried_s + _STATUS_INTERVAL_S, deadline_s)
            if not is_due and await self.engine.call(files.show_writing, answer):
                continue
            answer, queried_s = await self.engine.command("status", files.request.key), time.monotonic()
            self._update_state(answer, files.request)
        return answer

    async def _merge(self, capture: EngineCapture, manifests: Sequence[Path]) -> Sequence[Artifact]:
        """Merge the traces on this host."""
        if not manifests:
            capture.problems.append("The traces of the ranks were not merged: none of them is on this host.")
            return ()
        return await self.engine.call(merge_ranks, capture, manifests)


def is_settled_by_files(problem: str) -> bool:
    """Return whether a capture's problem is solved once the files of all ranks are on this host and complete.

    Such problems are late files, and a missing reply to the stop.
    """
    start, end = _LATE_FILES_MESSAGE
    return problem.startswith((_NO_STOP_REPLY, _OLD_NO_STOP_REPLY)) or (
        problem.startswith(start) and problem.endswith((end, _OLD_LATE_FILES_END))
    )


async def _suppress_errors(command: Coroutine[Any, Any, object], limit_s: float) -> None:
    """Await a command for a limited time, ignoring errors. Without it, the engine stops after ``max_capture_s``."""
    with contextlib.suppress(CaptureError, TimeoutError):
        async with asyncio.timeout(limit_s):
            await command


def _device_backends() -> Iterator[type[Backend]]:
    """Yield the installed backends that record a device."""
    for name in installed(BACKENDS):
        with contextlib.suppress(PluginError):  # ignore broken backends
            cls = load_backend(name)
            if cls.device_types:
                yield cls
