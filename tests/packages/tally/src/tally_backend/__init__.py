"""Third-party plugins for tests: a device backend, an engine backend and a listener.

They use only the public API and replace no part of profdeck.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar, cast

import attrs

from profdeck import Artifact, Backend, Capture, CommonOptions, Identity, ProfdeckError, Step, Unit, hookimpl
from profdeck.engines import (
    BatchKind,
    CaptureRequest,
    EngineBackend,
    EngineRecorder,
    Reply,
    RequestState,
    TargetState,
    reply_data,
    run_without_loop,
)
from profdeck.plugin import CaptureError, ConfigError, Output, describe_error, structure, unstructure

T = TypeVar("T")


@attrs.frozen(kw_only=True)
class TallyOptions(CommonOptions):
    """Options of the backend `tally`."""

    fail_at: str | None = None
    """Operation that raises an error: start, step, stop or write. Default: none."""

    device: str | None = None
    """Device to lease. Default: none."""

    wait_s: float | None = None
    """Seconds that each hook waits as a coroutine. Default: hooks are plain functions."""

    thread_bound: bool = True
    """Allow only the starting thread to stop the capture. Default: true."""

    write_later: bool = False
    """Return a function that writes the trace after `TallyBackend.may_write` is set. Default: false."""


@attrs.define
class TallyBackend(Backend):
    """Backend that writes a Chrome trace with an event per step boundary and stage."""

    name: ClassVar[str] = "tally"
    Options: ClassVar[type[TallyOptions]] = TallyOptions
    device_types: ClassVar[tuple[str, ...]] = ("tally-device",)
    common_options: ClassVar[tuple[str, ...]] = tuple(attrs.fields_dict(CommonOptions))
    may_write: ClassVar[threading.Event] = threading.Event()
    may_write.set()

    options: TallyOptions
    calls: list[str] = attrs.field(factory=list, init=False)
    events: list[dict[str, object]] = attrs.field(factory=list, init=False)
    iterations: int = attrs.field(default=0, init=False)

    @property
    def thread_bound(self) -> bool:  # type: ignore[override]  # a property, because it depends on an option
        return self.options.thread_bound

    def devices(self) -> tuple[str, ...]:
        return (self.options.device,) if self.options.device else ()

    @hookimpl
    def profile_start(self, capture: Capture) -> Awaitable[None] | None:
        self.events, self.iterations = [self._event("start")], 1
        capture.annotate = self.mark_stage
        return self._hook("start", f"start {capture.id}")

    @hookimpl
    def profile_step(self, capture: Capture, step: Step) -> Awaitable[None] | None:
        self.events.append(self._event(f"{step.unit} {step.index}"))
        self.iterations += step.unit is Unit.ENGINE_ITERATION
        return self._hook("step", f"step {capture.id} {step.unit} {step.index}")

    @hookimpl
    def profile_stop(self, capture: Capture) -> Awaitable[Sequence[Output]] | Sequence[Output]:
        path, events, first = capture.artifact_path(".trace.json"), self.events, capture.first_iteration
        iterations = None if first is None else (first, first + self.iterations - 1)
        stopping = self._hook("stop", f"stop {capture.id}")

        def write() -> Artifact:
            if self.options.write_later:
                self.may_write.wait()
            if self.options.fail_at == "write":
                raise RuntimeError("write does not work")
            text = json.dumps({"traceEvents": events})
            path.write_text(text, encoding="utf-8")
            return Artifact(path=path, size_bytes=len(text), events=len(events), iterations=iterations)

        async def write_after_stop() -> Sequence[Output]:
            await stopping
            return [write()]

        if stopping is None and capture.current_step < capture.first_step:
            return []  # the capture ended during the warm-up
        if stopping is not None:
            return write_after_stop()
        return [write if self.options.write_later else write()]

    def _hook(self, name: str, call: str) -> Awaitable[None] | None:
        if self.options.wait_s is not None:
            return self._later(name, call)
        self.perform(name, call)
        return None

    async def _later(self, name: str, call: str) -> None:
        await asyncio.sleep(self.options.wait_s or 0)
        self.perform(name, call)

    def perform(self, name: str, call: str) -> None:
        """Record a hook call, and raise an error if the hook is ``fail_at``. Some tests replace this method."""
        self.calls.append(call)
        if self.options.fail_at == name:
            raise RuntimeError(f"{name} does not work")

    @contextmanager
    def mark_stage(self, name: str):  # a context manager
        self.events.append(self._event(name))
        yield

    def _event(self, name: str) -> dict[str, object]:
        return {"ph": "X", "name": name, "cat": "cpu_op", "ts": time.monotonic_ns() / 1e3, "dur": 1, "pid": 1, "tid": 1}


class Diary:
    """Listener that appends a line per hook call. The hook ``fail_at`` raises an error."""

    fail_at: str | None = None
    wait_s: float | None = None
    instances: ClassVar[list[Diary]] = []

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.instances.append(self)

    @hookimpl
    def profile_start(self, capture: Capture) -> Awaitable[None] | None:
        self._append("start", f"start {capture.id}")
        return asyncio.sleep(self.wait_s) if self.wait_s else None

    @hookimpl
    def profile_step(self, step: Step) -> None:
        self._append("step", f"step {step.index}")

    @hookimpl
    def profile_stop(self, capture: Capture) -> None:
        self._append("stop", f"stop {capture.id} {capture.status} {len(capture.artifacts)}")

    def _append(self, hook: str, line: str) -> None:
        self.lines.append(line)
        if self.fail_at == hook:
            raise RuntimeError(f"{hook} is not heard")


class ToyEngine:
    """Engine with all ranks in this process. Each iteration runs on all ranks."""

    def __init__(self, ranks: int = 2, *, blocking: bool = False) -> None:
        self.blocking = blocking
        self.ranks = [
            EngineRecorder(
                Identity(rank=rank, world_size=ranks, parallel={"tp": rank}), "tally-device", {"toy-engine": "1.0"}
            )
            for rank in range(ranks)
        ]
        self.commands: list[tuple[str, str]] = []
        """Start and stop commands with their request IDs."""
        self.may_reply = asyncio.Event()
        """While cleared, the engine handles commands but does not reply."""
        self.may_reply.set()
        self.command_received = asyncio.Event()
        """Set by each command."""

    def iterate(self, *batches: str) -> None:
        for number, batch in enumerate(batches):
            for recorder in self.ranks:
                recorder.begin(BatchKind(batch), f"execute {number} {batch}")
                recorder.end()

    async def command(self, command: str, payload: Mapping[str, Any]) -> list[dict[str, Any]]:
        if command != "status":
            self.commands.append((command, payload.get("id") or payload.get("request", "")))
        replies = [self._command(recorder, command, payload) for recorder in self.ranks]
        self.command_received.set()
        if not self.blocking:
            await self.may_reply.wait()
        return replies

    def _command(self, recorder: EngineRecorder, command: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        error = None
        try:
            if command == "start":
                recorder.start(structure(payload, CaptureRequest, where=""))
            if command == "stop" and recorder.reply().request == payload["request"]:
                recorder.stop(payload.get("reason"))
        except ProfdeckError as refusal:
            error = describe_error(refusal)
        return reply_data(recorder.reply(error))


def _raise_rejections(replies: Sequence[Reply]) -> None:
    if errors := [f"Rank {reply.rank}: {reply.error}" for reply in replies if reply.error]:
        raise CaptureError(" ".join(errors))


@attrs.frozen(kw_only=True)
class TallyEngineOptions(CommonOptions):
    """Options of the backend `tally-engine`."""

    device_options: Mapping[str, Any] = attrs.field(factory=dict)
    """Options of the backend `tally` in each rank. Default: none."""

    merge: str | None = None
    """Text of a merged file to write next to the files of the ranks. Default: none."""


@attrs.define
class TallyEngineBackend(EngineBackend):
    """Backend that controls captures of a `ToyEngine`."""

    name: ClassVar[str] = "tally-engine"
    Options: ClassVar[type[TallyEngineOptions]] = TallyEngineOptions

    _engine: ToyEngine | None = attrs.field(default=None, init=False)

    @property
    def _engine_options(self) -> TallyEngineOptions:
        return cast("TallyEngineOptions", self.options)

    def bind(self, target: object) -> str:
        if not isinstance(target, ToyEngine):
            raise ConfigError(f"target: {target!r} is not a ToyEngine.")
        self._engine = target
        return "toy"

    @classmethod
    async def recognises(cls, url: str) -> bool:
        return url.startswith("toy://")

    @hookimpl
    def profile_start(self, capture: Capture) -> Any:
        return self._run(self._start(capture))

    @hookimpl
    def profile_stop(self, capture: Capture) -> Any:
        return self._run(self._stop(capture))

    async def state(self, capture: Capture) -> TargetState:
        ranks = await self._command_selected_ranks("status", {"request": capture.id}, capture)
        return TargetState(
            ended=all(reply.state in {RequestState.WRITING, RequestState.ENDED} for reply in ranks),
            iterations=min(reply.iterations for reply in ranks),
        )

    async def _start(self, capture: Capture) -> None:
        assert capture.request is not None
        request = attrs.evolve(capture.request, options=self._engine_options.device_options)
        try:
            replies = await self._command("start", unstructure(request))
            _raise_rejections(replies)
        except BaseException:
            await self._command("stop", {"request": request.id, "reason": "the start was aborted"}, wait=False)
            raise
        capture.expected_ranks = tuple(reply.rank for reply in replies if request.selects(reply.rank))

    async def _stop(self, capture: Capture) -> Sequence[Output]:
        reason = " ".join(capture.problems) or None
        replies = await self._command_selected_ranks("stop", {"request": capture.id, "reason": reason}, capture)
        while any(reply.state is RequestState.WRITING for reply in replies):
            await self._sleep(0.001)
            replies = await self._command_selected_ranks("status", {"request": capture.id}, capture)
        for reply in replies:
            problems = [*reply.problems, *(problem for recorded in reply.captures for problem in recorded.problems)]
            capture.problems += [f"Rank {reply.rank}: {problem}" for problem in dict.fromkeys(problems)]
        if self._engine_options.merge is None:
            return ()
        path = capture.artifact_path(".merged.txt")
        path.write_text(self._engine_options.merge, encoding="utf-8")
        return [Artifact(path=path, kind="merged_trace", size_bytes=len(self._engine_options.merge))]

    async def _command_selected_ranks(self, command: str, payload: Mapping[str, Any], capture: Capture) -> list[Reply]:
        replies = await self._command(command, payload)
        return [reply for reply in replies if reply.rank in (capture.expected_ranks or ())]

    async def _command(self, command: str, payload: Mapping[str, Any], *, wait: bool = True) -> list[Reply]:
        assert self._engine is not None
        if not wait:
            self._engine.may_reply.set()
        return [structure(data, Reply, where="reply") for data in await self._engine.command(command, payload)]

    async def _sleep(self, duration_s: float) -> None:
        assert self._engine is not None
        if self._engine.blocking:
            time.sleep(duration_s)  # noqa: ASYNC251  # the engine is used without an event loop
        else:
            await asyncio.sleep(duration_s)

    @property
    def blocking(self) -> bool:
        return bool(self._engine and self._engine.blocking)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T | Coroutine[Any, Any, T]:
        assert self._engine is not None
        return run_without_loop(coroutine) if self._engine.blocking else coroutine
