"""File transfer in parts, one per reply, for transports without streaming, such as actor calls."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO

import attrs

from profdeck.base.blocking import run_in_thread
from profdeck.base.errors import TargetError
from profdeck.base.outcome import Outcome
from profdeck.engine.transport.served_files import NotServedError, ServedFile, open_path
from profdeck_traces.base.files import write_all

PART_BYTES = 1 << 22
"""Maximum number of bytes of a file in one reply."""


@attrs.frozen(kw_only=True)
class FilePart:
    """A directory listing, or a part of a file."""

    sizes: dict[str, int] | None = None
    """For a directory, the file sizes in bytes, by file name."""
    content: bytes = b""
    size_bytes: int = 0
    """Size of the complete file."""
    tag: str = ""
    """Identifies the version of the file, like an ``ETag``."""
    error: str = ""
    pending: bool = False
    """True if the file is still being written. The client should retry later."""


def part_of(output: Path, path: str, offset: int) -> FilePart:
    """List a directory, or read a part of a file, below an output directory. Only capture files are accessible.

    Args:
        output: The output directory.
        path: A path relative to it, with slashes.
        offset: For a file, the position of the first byte to read.
    """
    try:
        served = open_path(output, path)
    except NotServedError as error:
        return FilePart(error=str(error), pending=error.status is HTTPStatus.CONFLICT)
    if not isinstance(served, ServedFile):
        return FilePart(sizes=dict(served))
    with contextlib.closing(served):
        content = served.read(max(offset, 0), PART_BYTES)
        return FilePart(content=content, size_bytes=served.size_bytes, tag=served.tag)


class PartedFiles(ABC):
    """Base class for fetching files in parts; see `profdeck.engines.RemoteFiles`."""

    @abstractmethod
    async def request_part(self, path: str, offset: int) -> FilePart:
        """Request a part of a file, or a directory listing.

        Raises:
            TargetError: The host does not reply.
        """

    async def list_files(self, path: str) -> Mapping[str, int] | None:
        """List the files in a directory; see `profdeck.engines.RemoteFiles`."""
        part = await self.request_part(path, 0)
        if part.pending:
            return None
        if part.error or part.sizes is None:
            raise _refusal(part.error or f"{path} is not a directory")
        return part.sizes

    async def read(self, path: str) -> bytes:
        """Return the contents of a file that fits into one part."""
        return (await self._request_file_part(path, 0)).content

    async def fetch(self, path: str, file: BinaryIO, size_bytes: int) -> None:
        """Download a file, part by part."""
        written, tag = 0, None
        while True:
            part = await self._request_file_part(path, written)
            length = len(part.content)
            if tag not in (None, part.tag) or part.size_bytes > size_bytes or written + length > size_bytes:
                raise _refusal(f"{path} has changed, or is larger than stated in its manifest")
            tag = part.tag
            await run_in_thread(write_all, file, part.content)
            written += length
            if written >= part.size_bytes or not length:
                return

    async def _request_file_part(self, path: str, offset: int) -> FilePart:
        part = await self.request_part(path, offset)
        if part.error or part.sizes is not None:
            raise _refusal(part.error or f"{path} is not a file")
        return part


def _refusal(text: str) -> TargetError:
    return TargetError(text, Outcome.REFUSED)
