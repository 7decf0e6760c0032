"""Engines of ours that actors of Ray hold, and the backend `held`: their ranks record with the backend `tally`.

One is awaited in the event loop that it was made in, and breaks in any other, as those of real engines do; the other
blocks.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import attrs

from profdeck.base.identity import Identity
from profdeck.engine.control.control_backend import ControlBackend
from profdeck.engine.engine import Engine
from profdeck.engine.worker.recorder import EngineRecorder, handle_command
from profdeck.records.request import Answer, BatchKind
from profdeck_traces.base.errors import ConfigError


class Blocking:
    """An engine whose calls block."""

    loop: asyncio.AbstractEventLoop | None = None

    def __init__(self) -> None:
        self.recorder = EngineRecorder(Identity(), "tally-device", {})

    def iterate(self, count: int) -> None:
        for _ in range(count):
            self.recorder.begin(BatchKind.DECODE, "execute")
            self.recorder.end()


class Awaited(Blocking):
    """An engine whose calls are awaited in its event loop."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.get_running_loop()


class HeldEngine(Engine):
    """Calls one of them."""

    def __init__(self, held: Blocking) -> None:
        self.name = type(held).__qualname__
        self.blocking = held.loop is None
        self._held = held

    async def has_profdeck(self) -> bool:
        return True

    async def command(self, command: str, payload: Mapping[str, Any]) -> Answer:
        if self._held.loop is not None:
            assert self._held.loop is asyncio.get_running_loop()
            await asyncio.sleep(0)
        recorder = self._held.recorder
        return Answer(ranks=(handle_command(command, payload, recorder, recorder.start, recorder.stop),))


@attrs.define
class HeldBackend(ControlBackend):
    """The backend `held`."""

    name: ClassVar[str] = "held"

    def connect(self, target: object) -> Engine:
        if isinstance(target, Blocking):
            return HeldEngine(target)
        raise ConfigError(f"target: {type(target).__qualname__} is no engine that is held.")


class Common:
    """What all actors have."""

    engine: Blocking

    def pid(self) -> int:
        return os.getpid()

    def iterate(self, count: int) -> None:
        self.engine.iterate(count)

    def about(self) -> dict[str, Any]:
        """Tell what came of the engine."""
        return {"state": str(self.engine.recorder.reply().state)}


class AsyncActor(Common):
    """Has an event loop."""

    async def make(self) -> None:
        self.number, self.words = 3, "http://127.0.0.1:9"
        self.engine = Awaited()


class SyncActor(Common):
    """Has none."""

    def make(self) -> None:
        self.engine = Blocking()

    def wait(self, fifo: str) -> None:
        """Block until somebody writes."""
        Path(fifo).read_text()


class Restarting(SyncActor):
    """Makes its engine whenever its process starts."""

    def __init__(self) -> None:
        self.make()


class Deep(SyncActor):
    """Holds its engine in something that it holds."""

    def make(self) -> None:
        self.worker = type("Worker", (), {})()
        self.worker.engine = Blocking()

    @property
    def engine(self) -> Blocking:  # type: ignore[override]  # for the tests only
        return self.worker.engine  # type: ignore[no-any-return]


class Itself(Blocking):
    """Is an engine."""
