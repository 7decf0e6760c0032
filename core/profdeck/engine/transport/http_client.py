"""A small HTTP/1.1 client for servers of engines: requests leave at once over a connection that is kept open.

It is not for the web: no proxies, redirects, cookies or compression.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import ssl
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Any, BinaryIO

import attrs

from profdeck.base.blocking import in_thread
from profdeck.base.errors import ConfigError, TargetError
from profdeck.base.files import write_all
from profdeck.base.outcome import Outcome
from profdeck.engine.transport.connection import ClosedError, Connection, Head, NoAnswerError, Url, why

_CONNECT_S = 10.0
"""For a connection, in which the kernel repeats a lost packet after 1, 3 and 7 seconds."""
_WRITE_BYTES = 1 << 20

FILE_TYPE = "application/octet-stream"
"""The type of an answer whose content is a file."""

Gate = Callable[[], Awaitable[None]]


@attrs.frozen
class HttpResponse:
    """What a server answered."""

    status_code: int
    content: bytes
    path: str
    """Of the request."""

    @property
    def is_success(self) -> bool:
        """Whether the server carried out the request."""
        return HTTPStatus.OK <= self.status_code < HTTPStatus.MULTIPLE_CHOICES

    @property
    def text(self) -> str:
        """The content."""
        return self.content.decode(errors="replace")

    @property
    def reason_phrase(self) -> str:
        """What the status is called; empty for those that HTTP does not know."""
        with contextlib.suppress(ValueError):
            return HTTPStatus(self.status_code).phrase
        return ""

    def json(self) -> Any:
        """Parse the content.

        Raises:
            ValueError: it is not JSON.
        """
        try:
            return json.loads(self.content)
        except RecursionError:
            raise ValueError("nested too deeply") from None


class HttpClient:
    """Sends requests to one server. Requests at the same time have connections of their own; one is kept open."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        """Args:
        url: the server; a user and password in it are sent.
        timeout_s: how long one answer may take after its request was sent, in seconds.

        Raises:
            ConfigError: it is no URL of HTTP.
        """
        try:
            self.url = Url.parse(url)
        except ValueError:
            raise ConfigError(
                f"target: {url!r} is no URL of a server; expected a form such as http://127.0.0.1:8000."
            ) from None
        own = self.url.authorization
        self._fixed = f"Host: {self.url.authority}\r\nAccept-Encoding: identity\r\n"
        self._fixed += f"Authorization: {own}\r\n" if own else ""
        self._timeout_s = timeout_s
        self._idle: list[Connection] = []
        weakref.finalize(self, _close, self._idle)

    async def request(  # noqa: PLR0913  # what a request is made of
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        token: str | None = None,
        gate: Gate | None = None,
        idempotent: bool = False,
    ) -> HttpResponse:
        """Send a request and read the answer.

        Args:
            method: such as ``GET``.
            path: what is appended to the URL.
            body: sent as JSON.
            token: sent as the bearer's; user and password of the URL win.
            gate: awaited when everything is ready to be sent, which is then done at once.
            idempotent: whether the request may be sent again if the server closes the open connection meanwhile.

        Raises:
            TargetError: the server cannot be reached, or does not answer in time; the token cannot be sent.
        """
        data = self._encoded(method, path, body, token)

        async def talk(connection: Connection) -> HttpResponse:
            async with asyncio.timeout(self._timeout_s):
                status, content = await connection.exchange(data)
            return HttpResponse(status, content, self.url.path + path)

        with self._explained(path):
            return await self._carried(talk, gate, idempotent=idempotent)

    async def download(self, path: str, file: BinaryIO, *, most_bytes: int, token: str | None = None) -> HttpResponse:
        """Get a file and write it, in bounded memory. An answer of another type is returned as by `request`.

        A transfer that breaks is resumed as long as every attempt brings something. It begins again if the file has
        changed there meanwhile.

        Args:
            path: what is appended to the URL.
            file: empty and unbuffered.
            most_bytes: more is not taken.
            token: as in `request`.

        Returns:
            The answer, without the content that was written.

        Raises:
            TargetError: as `request`. The time that an answer may take counts for each of its parts.
            OSError: the file cannot be written.
        """
        transfer = _Transfer(file, most_bytes)

        async def talk(connection: Connection) -> HttpResponse:
            data = self._encoded("GET", path, None, token, transfer.headers)
            async with asyncio.timeout(self._timeout_s):
                head = await connection.ask(data)
                content = b"" if _is_file(head) else await connection.rest()
            if _is_file(head):
                transfer.begin(head)
                more = True
                while more:
                    async with asyncio.timeout(self._timeout_s):
                        part = await connection.part()
                    more = await transfer.take(part)
            return HttpResponse(head.status_code, content, self.url.path + path)

        while True:
            before = transfer.most
            try:
                with self._explained(path):
                    return await self._carried(talk, None, idempotent=True)
            except TargetError:
                if transfer.most == before:
                    raise
                await transfer.flush()

    def close(self) -> None:
        """Close the connection that is kept open; the next request opens another one."""
        _close(self._idle)

    def _encoded(
        self, method: str, path: str, body: Mapping[str, Any] | None, token: str | None, headers: str = ""
    ) -> bytes:
        if token and not (token.isascii() and token.isprintable()):
            text = f"{self.url}: the token has a line break or another character that cannot be sent."
            raise TargetError(text, Outcome.REFUSED, "Set the variable that it comes from to what the server has.")
        content = b"" if body is None else json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
        head = f"{method} {self.url.path}{path} HTTP/1.1\r\n{self._fixed}{headers}"
        if token and not self.url.authorization:
            head += f"Authorization: Bearer {token}\r\n"
        if body is not None:
            head += "Content-Type: application/json\r\n"
        if method != "GET":
            head += f"Content-Length: {len(content)}\r\n"
        return f"{head}\r\n".encode() + content

    @contextlib.contextmanager
    def _explained(self, path: str) -> Iterator[None]:
        """Say what keeps a request from its answer."""
        try:
            yield
        except TimeoutError as error:
            text = f"{self.url}: {path} gave no answer within {self._timeout_s:g} seconds. Does the server hang?"
            raise TargetError(text, Outcome.TIMED_OUT) from error
        except NoAnswerError as error:
            text = f"{self.url} cannot be reached: {error}. {error.fix or 'Is the server up?'}"
            raise TargetError(text, Outcome.UNREACHABLE, error.fix) from error

    async def _carried(
        self, talk: Callable[[Connection], Awaitable[HttpResponse]], gate: Gate | None, *, idempotent: bool
    ) -> HttpResponse:
        connection = self._take() or await self._open()
        try:
            if gate is not None:
                await gate()
                if not connection.is_open():
                    connection = await self._open()
            try:
                answer = await talk(connection)
            except ClosedError:
                if not (idempotent and connection.used):
                    raise
                connection.close()
                connection = await self._open()
                answer = await talk(connection)
        except BaseException:
            connection.close()
            raise
        if not self._idle and connection.reusable():
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    def _take(self) -> Connection | None:
        """Return the connection that is kept open, if the server has not closed it."""
        while True:
            try:
                connection = self._idle.pop()  # atomic: other threads may ask as well
            except IndexError:
                return None
            if connection.is_open():
                return connection

    async def _open(self) -> Connection:
        limit_s = min(self._timeout_s, _CONNECT_S)
        try:
            async with asyncio.timeout(limit_s):
                return await Connection.to(self.url)
        except TimeoutError:
            error = NoAnswerError(f"no connection within {limit_s:g} seconds")
        except ssl.SSLCertVerificationError as problem:
            error = NoAnswerError(f"its certificate is not trusted: {problem.verify_message}")
            error.fix = "Name the file of the authority that signed it in the environment variable SSL_CERT_FILE."
        except ssl.SSLError as problem:
            error = NoAnswerError(f"TLS failed: {why(problem)}")
            error.fix = "Does the server speak https at this port, or http?"
        except OSError as problem:
            error = NoAnswerError(why(problem))
            if problem.errno in {errno.EMFILE, errno.ENFILE}:
                error.fix = "Raise the limit of open files of this process (ulimit -n): each target takes one."
        raise error


@attrs.define
class _Transfer:
    """A file that is on its way, in one attempt or several."""

    _file: BinaryIO
    _limit: int
    most: int = 0
    """As many bytes have come in an attempt and those that it has resumed."""
    _written: int = 0
    _buffer: bytearray = attrs.field(factory=bytearray)
    _tag: str = ""
    """Names the version of the file that comes; see `profdeck.engine.server.routes`."""

    @property
    def headers(self) -> str:
        """What asks for the rest of what has come, if the server can tell that it is the same file."""
        return f"Range: bytes={self._written}-\r\nIf-Range: {self._tag}\r\n" if self._tag and self._written else ""

    def begin(self, head: Head) -> None:
        """Take the head of an answer that is the file, or the rest of it.

        Raises:
            NoAnswerError: it is another part.
        """
        if head.status_code != HTTPStatus.PARTIAL_CONTENT:
            if self._written:
                self._file.seek(0)
                self._file.truncate()
            self._written = 0
        elif not head.headers.get("content-range", "").startswith(f"bytes {self._written}-"):
            raise NoAnswerError("what it answered is another part of the file than it was asked for")
        self._tag = head.headers.get("etag", "")

    async def take(self, part: bytes | bytearray) -> bool:
        """Take what comes next, nothing at the end; returns whether there is more.

        Raises:
            NoAnswerError: it is too much.
            OSError: it cannot be written.
        """
        if self._written + len(self._buffer) + len(part) > self._limit:
            raise NoAnswerError(f"the file has more than {self._limit:,} bytes")
        self._buffer += part
        self.most = max(self.most, self._written + len(self._buffer))
        if not part or len(self._buffer) >= _WRITE_BYTES:
            await self.flush()
        return bool(part)

    async def flush(self) -> None:
        """Write what has come."""
        data, self._buffer = self._buffer, bytearray()
        await in_thread(write_all, self._file, data)
        self._written += len(data)


def _is_file(head: Head) -> bool:
    wanted = {HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT}
    return head.status_code in wanted and head.headers.get("content-type") == FILE_TYPE


def _close(connections: list[Connection]) -> None:
    while connections:
        connections.pop().close()
