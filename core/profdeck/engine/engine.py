"""Interface between the process that requests captures and one engine."""

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
    """Name of the engine in manifests."""
    blocking: bool = False
    """True if the engine has only blocking calls. Its coroutines then never suspend."""
    cancels_late_calls: bool = True
    """True if commands time out after ``rpc_timeout_s``."""
    late_fix: str = ""
    """Engine-specific advice for a command that timed out. Empty: use the general advice."""
    clock: HostClock | None = None
    """Clock offset of the engine's host. Each reply can refine it. Set it to None to discard earlier measurements."""
    gate: Callable[[], Awaitable[None]] | None = None
    """Awaited immediately before a start command is sent, to start several engines at the same time."""

    @abstractmethod
    async def has_profdeck(self) -> bool:
        """Return whether the engine's processes have loaded profdeck.

        Raises:
            CaptureError: the engine cannot be reached or denies access.
        """

    @abstractmethod
    async def command(self, command: str, payload: Mapping[str, Any]) -> Answer:
        """Send ``start``, ``stop`` or ``status`` to all processes of the engine.

        Each process executes the command with `profdeck.engines.handle_command`. If the payload of ``stop`` or
        ``status`` contains the key of a request, the replies describe that request, even if a later request exists.

        Raises:
            CaptureError: the engine does not reply.
        """

    async def wait_for_gate(self) -> None:
        """Wait for `gate`. Subclasses that wait for it in `command` override this method to do nothing."""
        if self.gate is not None:
            await self.gate()

    def files(self, output: Path) -> RemoteFiles | None:  # noqa: ARG002  # for subclasses
        """Return access to the files on the engine's host, or None if files cannot be fetched.

        Args:
            output: the output directory in the capture request.
        """
        return None

    async def close(self) -> None:  # noqa: B027  # optional
        """Close open connections. The next command opens a new connection."""

    async def end(self, payload: Mapping[str, Any], wait_s: float) -> Answer:
        """Stop a capture. Wait until all processes have written their files, but at most ``wait_s`` seconds.

        Raises:
            CaptureError: the engine does not reply.
        """
        answer = await self.command("stop", payload)
        deadline = time.monotonic() + wait_s
        while any(reply.state is RequestState.WRITING for reply in answer.all) and time.monotonic() < deadline:
            await self.sleep(_WRITING_POLL_S)
            answer = await self.command("status", {key: payload[key] for key in ("request", "token") if key in payload})
        return answer

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a slow function, such as one that reads files. Use a thread unless the engine is blocking."""
        return function(*arguments) if self.blocking else await run_in_thread(function, *arguments)

    async def sleep(self, duration_s: float) -> None:
        """Sleep, blocking the thread if the engine is blocking."""
        if self.blocking:
            time.sleep(duration_s)  # noqa: ASYNC251  # blocking engines run without an event loop
        else:
            await asyncio.sleep(duration_s)


@attrs.frozen
class FileHost:
    """Host and directory from which files are fetched."""

    host: str
    output: str
    """Base directory of the paths in `RemoteFiles`."""


class RemoteFiles(Protocol):
    """Fetches the files of an engine's ranks. Paths are relative to `FileHost.output` and use slashes.

    All methods raise TargetError if the host does not send the requested data.
    """

    async def source(self) -> FileHost:
        """Return the host and the base directory of the paths."""

    async def list_files(self, path: str) -> Mapping[str, int] | None:
        """List the files in a directory.

        Returns:
            File sizes in bytes, by file name. If the directory is an artifact, all files in it, or None if it is still
            being written. For other directories, only the manifests.
        """

    async def read(self, path: str) -> bytes:
        """Return the contents of a manifest."""

    async def fetch(self, path: str, file: BinaryIO, size_bytes: int) -> None:
        """Download a file.

        Args:
            path: path of the file on the host.
            file: destination; an empty, unbuffered file.
            size_bytes: maximum number of bytes to accept.

        Raises:
            OSError: the destination cannot be written.
        """


class Connects(Protocol):
    """Protocol for backends that connect to engine objects."""

    name: ClassVar[str]

    def connect(self, target: object) -> Engine:
        """Return an `Engine` that controls the given engine object.

        Raises:
            ConfigError: the object is not an engine that this backend supports.
        """
