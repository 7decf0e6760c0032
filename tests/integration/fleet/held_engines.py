"""Simulated engines in Ray actors, and their backend `held`. Their ranks record with the backend `tally`.

Like the async engines of vLLM and SGLang, `Awaited` must be called in the event loop in which it was created. Calls of
`Blocking` block.
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
    """Connection to a simulated engine."""

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
    """Methods of all actors."""

    engine: Blocking

    def pid(self) -> int:
        return os.getpid()

    def iterate(self, count: int) -> None:
        self.engine.iterate(count)

    def about(self) -> dict[str, Any]:
        """Return the state of the engine's recorder."""
        return {"state": str(self.engine.recorder.reply().state)}


class AsyncActor(Common):
    """Actor with an event loop."""

    async def make(self) -> None:
        self.number, self.words = 3, "http://127.0.0.1:9"
        self.engine = Awaited()


class SyncActor(Common):
    """Actor without an event loop."""

    def make(self) -> None:
        self.engine = Blocking()

    def wait(self, fifo: str) -> None:
        """Block until another process writes to the FIFO."""
        Path(fifo).read_text()


class Restarting(SyncActor):
    """Actor that creates its engine when its process starts."""

    def __init__(self) -> None:
        self.make()


class Deep(SyncActor):
    """Actor whose engine is an attribute of its attribute `worker`."""

    def make(self) -> None:
        self.worker = type("Worker", (), {})()
        self.worker.engine = Blocking()

    @property
    def engine(self) -> Blocking:  # type: ignore[override]  # read-only, used by `iterate`
        return self.worker.engine  # type: ignore[no-any-return]


class Itself(Blocking):
    """Actor that is an engine itself."""
