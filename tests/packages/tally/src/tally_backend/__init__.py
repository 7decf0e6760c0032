"""A whole backend and a listener, as somebody else would write them: no part of profdeck is replaced."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Sequence
from contextlib import contextmanager
from typing import ClassVar

import attrs

from profdeck import Artifact, Backend, Capture, CommonOptions, Step, hookimpl


@attrs.frozen(kw_only=True)
class TallyOptions(CommonOptions):
    """Options of the backend `tally`."""

    fail_at: str | None = None
    """The hook that raises: start, step or stop. Default: none."""

    device: str | None = None
    """The device to lease. Default: none."""

    wait_s: float | None = None
    """Make every hook a coroutine that waits as long. Default: hooks are plain functions."""

    thread_bound: bool = True
    """Whether only the thread that started may stop. Default: yes."""


@attrs.define
class TallyBackend(Backend):
    """Writes a Chrome trace with an event per boundary and stage."""

    name: ClassVar[str] = "tally"
    Options: ClassVar[type[TallyOptions]] = TallyOptions

    options: TallyOptions
    calls: list[str] = attrs.field(factory=list, init=False)
    events: list[dict[str, object]] = attrs.field(factory=list, init=False)

    @property
    def thread_bound(self) -> bool:  # type: ignore[override]  # chosen by an option, for the tests
        return self.options.thread_bound

    def devices(self) -> tuple[str, ...]:
        return (self.options.device,) if self.options.device else ()

    @hookimpl
    def profile_start(self, capture: Capture) -> Awaitable[None] | None:
        self.events = [self._event("start")]
        capture.annotate = self._stage
        return self._hook("start", f"start {capture.id}")

    @hookimpl
    def profile_step(self, capture: Capture, step: Step) -> Awaitable[None] | None:
        self.events.append(self._event(f"{step.unit} {step.index}"))
        return self._hook("step", f"step {capture.id} {step.unit} {step.index}")

    @hookimpl
    def profile_stop(self, capture: Capture) -> Awaitable[Sequence[Artifact]] | Sequence[Artifact]:
        path = capture.artifact_path(".trace.json")
        waiting = self._hook("stop", f"stop {capture.id}")

        def write() -> Sequence[Artifact]:
            text = json.dumps({"traceEvents": self.events})
            path.write_text(text, encoding="utf-8")
            return [Artifact(path=path, size_bytes=len(text), events=len(self.events))]

        async def later() -> Sequence[Artifact]:
            await waiting
            return write()

        return write() if waiting is None else later()

    def _hook(self, name: str, call: str) -> Awaitable[None] | None:
        if self.options.wait_s is not None:
            return self._later(name, call)
        self._do(name, call)
        return None

    async def _later(self, name: str, call: str) -> None:
        await asyncio.sleep(self.options.wait_s or 0)
        self._do(name, call)

    def _do(self, name: str, call: str) -> None:
        self.calls.append(call)
        if self.options.fail_at == name:
            raise RuntimeError(f"{name} does not work")

    @contextmanager
    def _stage(self, name: str):  # a context manager
        self.events.append(self._event(name))
        yield

    def _event(self, name: str) -> dict[str, object]:
        return {"ph": "X", "name": name, "cat": "cpu_op", "ts": time.monotonic_ns() / 1e3, "dur": 1, "pid": 1, "tid": 1}


class Diary:
    """A listener that remembers what it was told; ``fail_at`` names a hook of it that raises."""

    fail_at: str | None = None
    wait_s: float | None = None

    def __init__(self) -> None:
        self.lines: list[str] = []

    @hookimpl
    def profile_start(self, capture: Capture) -> Awaitable[None] | None:
        self._told("start", f"start {capture.id}")
        return asyncio.sleep(self.wait_s) if self.wait_s else None

    @hookimpl
    def profile_step(self, step: Step) -> None:
        self._told("step", f"step {step.index}")

    @hookimpl
    def profile_stop(self, capture: Capture) -> None:
        self._told("stop", f"stop {capture.id} {capture.status} {len(capture.artifacts)}")

    def _told(self, hook: str, line: str) -> None:
        self.lines.append(line)
        if self.fail_at == hook:
            raise RuntimeError(f"{hook} is not heard")
