"""A backend that counts calls, a listener with options, a wrapper and a listener that precedes the backend."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
from attrs import validators

from profdeck import HOOKSPEC_VERSION, Artifact, Backend, Capture, CommonOptions, Step, hookimpl


@attrs.frozen(kw_only=True)
class MeterOptions(CommonOptions):
    """Options of the backend `meter`."""

    interval: int = attrs.field(default=1, validator=validators.ge(1))
    """Record every n-th boundary. Default: 1, every boundary."""


@attrs.define
class MeterBackend(Backend[MeterOptions]):
    """Backend that writes an event per step boundary."""

    name: ClassVar[str] = "meter"
    Options: ClassVar[type[MeterOptions]] = MeterOptions
    common_options: ClassVar[tuple[str, ...]] = ("with_stack",)
    hookspec_version: ClassVar[int] = HOOKSPEC_VERSION

    _events: list[dict[str, Any]] = attrs.field(factory=list, init=False)

    @hookimpl
    def profile_start(self) -> None:
        self._events = [self._event("start")]

    @hookimpl
    def profile_step(self, step: Step) -> None:
        if step.index % self.options.interval == 0:
            self._events.append(self._event(f"{step.unit} {step.index}"))

    @hookimpl
    def profile_stop(self, capture: Capture) -> Sequence[Artifact]:
        path = capture.artifact_path(".trace.json")
        size_bytes = path.write_text(json.dumps({"traceEvents": self._events}))
        return [Artifact(path=path, size_bytes=size_bytes, events=len(self._events))]

    def _event(self, name: str) -> dict[str, Any]:
        return {"ph": "X", "cat": "cpu_op", "name": name, "ts": time.monotonic_ns() / 1e3, "dur": 1, "pid": 1, "tid": 1}


@attrs.frozen(kw_only=True)
class MeterLogOptions:
    """Options of the listener `meter-log`."""

    path: Path
    """File to which the listener appends a line per capture. Required."""

    prefix: str = ""
    """Text before each line. Default: none."""


class MeterLog:
    """Listener that appends the status of each capture to a file."""

    Options = MeterLogOptions

    def __init__(self, options: MeterLogOptions) -> None:
        self.options = options

    @hookimpl
    def profile_stop(self, capture: Capture) -> None:
        self._append(f"{capture.id} {capture.status}")

    @hookimpl
    def capture_finished(self, manifest: Mapping[str, Any]) -> None:
        self._append(f"finished {manifest['capture']} {manifest['status']}")

    def _append(self, line: str) -> None:
        with self.options.path.open("a") as file:
            file.write(f"{self.options.prefix}{line}\n")


class StartTimer:
    """Wrapper that adds a note with the duration of each plugin's start."""

    @hookimpl(wrapper=True)
    def profile_start(self, capture: Capture, plugin_name: str) -> Generator[None, Any, Any]:
        begin = time.perf_counter()
        results = yield
        capture.notes.append(f"{plugin_name} started in {time.perf_counter() - begin:.3f} s.")
        return results


class MeterGate:
    """Listener that runs before the backend starts, for example to synchronize a device."""

    @hookimpl(tryfirst=True)
    def profile_start(self) -> None:
        time.monotonic_ns()
