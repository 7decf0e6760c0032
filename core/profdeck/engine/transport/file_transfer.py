"""A file that comes over HTTP in one attempt or several; see `profdeck.engine.server.routes`."""

from __future__ import annotations

from http import HTTPStatus
from typing import BinaryIO

import aiohttp
import attrs

from profdeck.base.blocking import run_in_thread
from profdeck_traces.base.files import write_all

_WRITE_BYTES = 1 << 20

FILE_TYPE = "application/octet-stream"
"""The type of an answer whose content is a file."""


class NoAnswerError(Exception):
    """There is no answer, or not what was asked for."""


@attrs.define
class Transfer:
    """A file that is on its way, in one attempt or several."""

    _file: BinaryIO
    _limit: int
    most: int = 0
    """As many bytes have come in an attempt and those that it has resumed."""
    exceeded: bool = False
    """Whether more has come than is taken."""
    _written: int = 0
    _buffer: bytearray = attrs.field(factory=bytearray)
    _tag: str = ""
    """Names the version of the file that comes."""

    @property
    def headers(self) -> dict[str, str]:
        """What asks for the rest of what has come, if the server can tell that it is the same file."""
        same = self._tag and self._written
        return {"Range": f"bytes={self._written}-", "If-Range": self._tag} if same else {}

    def begin(self, head: aiohttp.ClientResponse) -> None:
        """Take the head of an answer that is the file, or the rest of it.

        Raises:
            NoAnswerError: it is another part.
        """
        if head.status != HTTPStatus.PARTIAL_CONTENT:
            if self._written:
                self._file.seek(0)
                self._file.truncate()
            self._written = 0
        elif not head.headers.get("Content-Range", "").startswith(f"bytes {self._written}-"):
            raise NoAnswerError("what it answered is another part of the file than it was asked for")
        self._tag = head.headers.get("ETag", "")

    async def take(self, part: bytes) -> None:
        """Take what comes next.

        Raises:
            NoAnswerError: it is too much.
            OSError: it cannot be written.
        """
        self.exceeded = self._written + len(self._buffer) + len(part) > self._limit
        if self.exceeded:
            raise NoAnswerError(f"the file has more than {self._limit:,} bytes")
        self._buffer += part
        self.most = max(self.most, self._written + len(self._buffer))
        if len(self._buffer) >= _WRITE_BYTES:
            await self.flush()

    async def flush(self) -> None:
        """Write what has come."""
        if self._buffer:
            data, self._buffer = self._buffer, bytearray()
            await run_in_thread(write_all, self._file, data)
            self._written += len(data)


def is_file(response: aiohttp.ClientResponse) -> bool:
    """Tell whether an answer is a file, or a part of one."""
    wanted = {HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT}
    return response.status in wanted and response.headers.get("Content-Type") == FILE_TYPE
