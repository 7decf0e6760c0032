"""Resumable file download over HTTP; see `profdeck.engine.server.routes`."""

from __future__ import annotations

from http import HTTPStatus
from typing import BinaryIO

import aiohttp
import attrs

from profdeck.base.blocking import run_in_thread
from profdeck_traces.base.files import write_all

_WRITE_BYTES = 1 << 20

FILE_TYPE = "application/octet-stream"
"""Content type of responses that contain a file."""


class BadResponseError(Exception):
    """The response is not valid for the request."""


@attrs.define
class Transfer:
    """The download of one file, in one or several attempts."""

    _file: BinaryIO
    _limit: int
    received: int = 0
    """Maximum number of bytes of the file received so far. It shows whether an attempt made progress."""
    exceeded: bool = False
    """True if the server sent more bytes than the limit."""
    _written: int = 0
    _buffer: bytearray = attrs.field(factory=bytearray)
    _tag: str = ""
    """``ETag`` of the file version being downloaded."""

    @property
    def headers(self) -> dict[str, str]:
        """Request headers that resume the download. Empty if nothing was received or the server sent no ``ETag``."""
        can_resume = self._tag and self._written
        return {"Range": f"bytes={self._written}-", "If-Range": self._tag} if can_resume else {}

    def begin(self, head: aiohttp.ClientResponse) -> None:
        """Process the headers of a response that contains the file or its remainder.

        Raises:
            BadResponseError: the response starts at another offset than requested.
        """
        if head.status != HTTPStatus.PARTIAL_CONTENT:
            if self._written:
                self._file.seek(0)
                self._file.truncate()
            self._written = 0
        elif not head.headers.get("Content-Range", "").startswith(f"bytes {self._written}-"):
            raise BadResponseError("the response starts at another offset of the file than requested")
        self._tag = head.headers.get("ETag", "")

    async def add(self, chunk: bytes) -> None:
        """Buffer the next chunk, and write the buffer if it is full.

        Raises:
            BadResponseError: the file is larger than the limit.
            OSError: the file cannot be written.
        """
        self.exceeded = self._written + len(self._buffer) + len(chunk) > self._limit
        if self.exceeded:
            raise BadResponseError(f"the file has more than {self._limit:,} bytes")
        self._buffer += chunk
        self.received = max(self.received, self._written + len(self._buffer))
        if len(self._buffer) >= _WRITE_BYTES:
            await self.flush()

    async def flush(self) -> None:
        """Write the buffered bytes."""
        if self._buffer:
            data, self._buffer = self._buffer, bytearray()
            await run_in_thread(write_all, self._file, data)
            self._written += len(data)


def is_file(response: aiohttp.ClientResponse) -> bool:
    """Return whether a response contains a file or the remainder of a file."""
    is_success = response.status in {HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT}
    return is_success and response.headers.get("Content-Type") == FILE_TYPE
