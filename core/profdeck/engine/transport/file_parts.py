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
from profdeck.engine.transport.served_files import NotServedError, ServedFile, find
from profdeck_traces.base.files import write_all

PART_BYTES = 1 << 22
"""Maximum number of bytes of a file in one reply."""


@attrs.frozen(kw_only=True)
class FilePart:
    """A directory listing, or a part of a file."""

    sizes: dict[str, int] | None = None
    """What is in a directory."""
    content: bytes = b""
    size_bytes: int = 0
    """Of the whole file."""
    tag: str = ""
    """Names the version of the file."""
    error: str = ""
    pending: bool = False
    """Whether to ask again later."""


def part_of(output: Path, place: str, offset: int) -> FilePart:
    """List a directory, or read a part of a file, below an output directory. Only capture files are accessible.

    Args:
        output: The output directory.
        place: A path below it, with slashes.
        offset: For a file, the position of the first byte to read.
    """
    try:
        found = find(output, place)
    except NotServedError as error:
        return FilePart(error=str(error), pending=error.status is HTTPStatus.CONFLICT)
    if not isinstance(found, ServedFile):
        return FilePart(sizes=dict(found))
    with contextlib.closing(found):
        content = found.read(max(offset, 0), PART_BYTES)
        return FilePart(content=content, size_bytes=found.size_bytes, tag=found.tag)


class PartedFiles(ABC):
    """Base class for fetching files in parts; see `profdeck.engines.RemoteFiles`."""

    @abstractmethod
    async def part(self, place: str, offset: int) -> FilePart:
        """Ask for a part of a file, or for what is in a directory.

        Raises:
            TargetError: There is no answer.
        """

    async def listed(self, place: str) -> Mapping[str, int] | None:
        """Ask for the files in a directory."""
        found = await self.part(place, 0)
        if found.pending:
            return None
        if found.error or found.sizes is None:
            raise _refused(found.error or f"{place} is no directory")
        return found.sizes

    async def read(self, place: str) -> bytes:
        """Ask for a small file."""
        return (await self._of_file(place, 0)).content

    async def fetch(self, place: str, file: BinaryIO, size_bytes: int) -> None:
        """Ask for a file, part by part."""
        written, tag = 0, None
        while True:
            part = await self._of_file(place, written)
            more = len(part.content)
            if tag not in (None, part.tag) or part.size_bytes > size_bytes or written + more > size_bytes:
                raise _refused(f"{place} has changed, or is larger than its manifest says")
            tag = part.tag
            await run_in_thread(write_all, file, part.content)
            written += more
            if written >= part.size_bytes or not more:
                return

    async def _of_file(self, place: str, offset: int) -> FilePart:
        found = await self.part(place, offset)
        if found.error or found.sizes is not None:
            raise _refused(found.error or f"{place} is no file")
        return found


def _refused(text: str) -> TargetError:
    return TargetError(text, Outcome.REFUSED)
