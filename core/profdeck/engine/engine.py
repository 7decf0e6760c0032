"""One engine, as the process that controls it sees it."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Protocol, TypeVar

import attrs

from profdeck.base.blocking import run_in_thread
from profdeck.records.host_clock import HostClock
from profdeck.records.request import Answer, RequestState

T = TypeVar("T")
_WRITING_POLL_S = 0.1


class Engine(ABC):
    """Base class for objects that send commands to the processes of an engine."""

    name: str
    """What manifests call it."""
    blocking: bool = False
    """Whether its coroutines never suspend, as it has only blocking calls."""
    gives_up: bool = True
    """Whether it gives up an answer that takes longer than ``rpc_timeout_s``."""
    late_fix: str = ""
    """What to do when it does not answer in time, where more is known than of any."""
    clock: HostClock | None = None
    """How the clock of its host stands to that of this one, as well as its answers have told since this was None."""
    gate: Callable[[], Awaitable[None]] | None = None
    """Awaited by every start as late as possible, so that many engines start at the same moment."""

    @abstractmethod
    async def has_profdeck(self) -> bool:
        """Tell whether its processes have loaded profdeck.

        Raises:
            CaptureError: it cannot be reached, or does not let us in.
        """

    @abstractmethod
    async def command(self, command: str, payload: Mapping[str, Any]) -> Answer:
        """Send ``start``, ``stop`` or ``status`` to all processes of the engine.

        Each process executes the command with `profdeck.engines.handle_command`.

        Raises:
            CaptureError: the engine does not reply.
        """

    async def arrive(self) -> None:
        """Wait for the gate, before a start is sent to an engine that does not wait for it by itself."""
        if self.gate is not None:
            await self.gate()

    def files(self, output: Path) -> RemoteFiles | None:  # noqa: ARG002  # where a server does not say another one
        """Return what fetches files of its ranks from their host; None where nothing can.

        Args:
            output: the output directory that its ranks were asked to write below.
        """
        return None

    async def close(self) -> None:  # noqa: B027  # most keep nothing
        """Give back what is kept open between commands; the next one opens it again."""

    async def end(self, payload: Mapping[str, Any], wait_s: float) -> Answer:
        """Stop a capture. Wait until all processes have written their files, but at most ``wait_s`` seconds.

        Raises:
            CaptureError: the engine does not reply.
        """
        answer = await self.command("stop", payload)
        deadline = time.monotonic() + wait_s
        while any(reply.state is RequestState.WRITING for reply in answer.all) and time.monotonic() < deadline:
            await self.sleep(_WRITING_POLL_S)
            answer = await self.command("status", {})
        return answer

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call what takes long, such as reading files, without blocking an event loop."""
        return function(*arguments) if self.blocking else await run_in_thread(function, *arguments)

    async def sleep(self, duration_s: float) -> None:
        """Wait."""
        if self.blocking:
            time.sleep(duration_s)  # noqa: ASYNC251  # its coroutines are driven without an event loop
        else:
            await asyncio.sleep(duration_s)


@attrs.frozen
class FileHost:
    """Host and directory from which files are fetched."""

    host: str
    output: str
    """The directory that places are relative to."""


class RemoteFiles(Protocol):
    """Fetches the files of an engine's ranks. Paths are relative to `FileHost.output` and use slashes.

    If the host does not send the requested data, all methods raise TargetError.
    """

    async def source(self) -> FileHost:
        """Return where they are."""

    async def listed(self, place: str) -> Mapping[str, int] | None:
        """Return the sizes in bytes of the files in a directory by their names.

        Returns:
            All files of an artifact, None while it is being written; of other directories, the manifests.
        """

    async def read(self, place: str) -> bytes:
        """Return the content of a manifest."""

    async def fetch(self, place: str, file: BinaryIO, size_bytes: int) -> None:
        """Write the content of a file to another one, which is empty and unbuffered.

        Args:
            place: where it is.
            file: the other one.
            size_bytes: as much of it is taken at most.

        Raises:
            OSError: it cannot be written.
        """


class Connects(Protocol):
    """Protocol for backends that connect to engine objects."""

    name: ClassVar[str]

    def connect(self, target: object) -> Engine:
        """Return the engine that an object stands for.

        Raises:
            ConfigError: this is no such object.
        """
