"""The HTTP client for servers of engines and their routers: aiohttp, with what its errors mean to a user.

It is not for the web: no proxies, redirects, cookies or compression.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Any, BinaryIO
from weakref import WeakSet

import aiohttp
import attrs
import yarl

from profdeck.base.errors import TargetError
from profdeck.base.outcome import Outcome
from profdeck.config.targets import SOCKET
from profdeck.engine.transport.file_transfer import NoAnswerError, Transfer, is_file
from profdeck.engine.transport.tls import AUTHORITY_VARIABLE, CERTIFICATE_VARIABLE, tls_context
from profdeck_traces.base.errors import ConfigError

_CONNECT_S = 10.0
"""For a connection, in which the kernel repeats a lost packet after 1, 3 and 7 seconds."""
_LOOKS = 3
"""Turns of the event loop from the end of a connection to the moment when nobody takes it any more."""
_MAX_BODY_BYTES = 8 << 20
_UNIX = SOCKET.rstrip(":")
_OF_SOCKETS = yarl.URL("http://localhost")
"""What such a server is told that it was asked for."""

Gate = Callable[[], Awaitable[None]]


@attrs.frozen
class HttpResponse:
    """Response from an HTTP server."""

    status_code: int
    content: bytes
    path: str
    """Of the request."""
    sent_ns: int
    """When the request left, in Unix nanoseconds."""
    received_ns: int = attrs.field(factory=time.time_ns)
    """When all of the answer was here."""

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
    """Sends requests to one server, over connections that stay open until it is closed or its event loop ends."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        """Args:
        url: the server; a user and password in it are sent.
        timeout_s: how long one answer may take, in seconds. Half of it, and 10 seconds at most, are for a connection.

        Raises:
            ConfigError: it is no URL of HTTP, or a file for TLS is wrong.
        """
        try:
            given = _parsed(url)
        except ValueError:
            raise ConfigError(
                f"target: {url!r} is no URL of a server; expected a form such as http://127.0.0.1:8000, or "
                "unix:/run/engine.sock."
            ) from None
        self.socket = given.path if given.scheme == _UNIX else None
        """The path of the server's Unix socket, if it listens at one."""
        self.url = given if self.socket else given.with_user(None)
        """The URL without user and password."""
        base = _OF_SOCKETS if self.socket else given
        self._has_password = base.user is not None or base.password is not None
        self._base = str(base).rstrip("/")
        self._path = base.raw_path.rstrip("/")
        self._tls = tls_context() if base.scheme == "https" else None
        self._timeout_s = timeout_s
        self._connect_s = min(timeout_s / 2, _CONNECT_S)

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
        headers = self._headers(token)
        content = None
        if body is not None:
            content = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
            headers["Content-Type"] = "application/json"
        if gate is not None:
            await gate()
        if not idempotent:  # cannot be repeated: the loop has to see first which connections the server has closed
            for _ in range(_LOOKS):
                await asyncio.sleep(0)

        again = idempotent and method != "GET"  # aiohttp repeats GET by itself
        with self._explained(path):
            async with asyncio.timeout(self._timeout_s):
                while True:
                    sent_ns = time.time_ns()
                    try:
                        async with await self._asked(method, path, headers, content) as response:
                            return HttpResponse(response.status, await _content(response), self._path + path, sent_ns)
                    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                        if not again:
                            raise
                        again = False

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
        transfer = Transfer(file, most_bytes)
        while True:
            before, sent_ns = transfer.most, time.time_ns()
            try:
                with self._explained(path):
                    async with await self._asked(
                        "GET", path, self._headers(token) | transfer.headers, read_s=self._timeout_s
                    ) as response:
                        if not is_file(response):
                            return HttpResponse(response.status, await _content(response), self._path + path, sent_ns)
                        transfer.begin(response)
                        async for part in response.content.iter_any():
                            await transfer.take(part)
            except TargetError:
                await transfer.flush()
                if transfer.most == before or transfer.exceeded:
                    raise
            else:
                await transfer.flush()
                return HttpResponse(response.status, b"", self._path + path, sent_ns)

    async def close(self) -> None:
        """Say that no request follows soon: the last client to say so closes the connections of all."""
        pool = _pools.get(asyncio.get_running_loop())
        if pool is not None:
            pool.users.discard(self)
            if not pool.users:
                await pool.closing.aclose()

    async def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        pool = _pools.get(loop)
        if pool is None:
            closing = _opened(loop)
            pool = await anext(closing)
            pool.closing = closing
        pool.users.add(self)
        return await pool.session(self.socket)

    async def _asked(
        self, method: str, path: str, headers: Mapping[str, str], content: bytes | None = None, read_s: float = 0
    ) -> aiohttp.ClientResponse:
        session = await self._session()
        url = yarl.URL(f"{self._base}{path}", encoded=True)
        limits = aiohttp.ClientTimeout(total=None, connect=self._connect_s, sock_read=read_s)
        if self._tls is not None:
            with contextlib.suppress(ConfigError):  # while a file is being replaced, what it was before counts
                self._tls = tls_context()
        return await session.request(
            method, url, data=content, headers=headers, allow_redirects=False, ssl=self._tls or True, timeout=limits
        )

    def _headers(self, token: str | None) -> dict[str, str]:
        if token and not (token.isascii() and token.isprintable()):
            text = f"{self.url}: the token has a line break or another character that cannot be sent."
            raise TargetError(text, Outcome.REFUSED, "Set the variable that it comes from to what the server has.")
        headers = {"Accept-Encoding": "identity"}
        if token and not self._has_password:
            headers["Authorization"] = f"Bearer {token}"
        return headers

    @contextlib.contextmanager
    def _explained(self, path: str) -> Iterator[None]:
        """Say what keeps a request from its answer."""
        try:
            yield
        except aiohttp.ConnectionTimeoutError as error:
            raise self._unreachable(f"no connection within {self._connect_s:g} seconds", None) from error
        except TimeoutError as error:
            text = f"{self.url}: {path} gave no answer within {self._timeout_s:g} seconds. Does the server hang?"
            raise TargetError(text, Outcome.TIMED_OUT) from error
        except (aiohttp.ClientError, NoAnswerError) as error:
            why, fix = _said(error)
            is_connected = not isinstance(error, aiohttp.ClientConnectorError)
            if self._tls is not None and is_connected and fix is None and CERTIFICATE_VARIABLE not in os.environ:
                # By TLS 1.3 a server may say so when the client believes that it is connected.
                fix = f"If the server wants a certificate of who asks, name one in {CERTIFICATE_VARIABLE}."
            raise self._unreachable(why, fix) from error

    def _unreachable(self, why: str, fix: str | None) -> TargetError:
        return TargetError(
            f"{self.url} cannot be reached: {why}. {fix or 'Is the server up?'}", Outcome.UNREACHABLE, fix
        )


@attrs.define
class _Pool:
    """The connections of an event loop."""

    opened: contextlib.AsyncExitStack
    users: WeakSet[HttpClient] = attrs.field(factory=WeakSet)
    closing: AsyncGenerator[_Pool] = attrs.field(init=False)
    _sessions: dict[str | None, aiohttp.ClientSession] = attrs.field(factory=dict, init=False)
    """By Unix socket; one for all servers of hosts."""

    async def session(self, unix_socket: str | None) -> aiohttp.ClientSession:
        """Return what sends requests to a Unix socket, or to hosts."""
        if unix_socket not in self._sessions:
            connector = (
                aiohttp.UnixConnector(unix_socket, limit=0)
                if unix_socket
                else aiohttp.TCPConnector(limit=0, resolver=aiohttp.ThreadedResolver())
            )
            # Nothing of the environment: no proxies, no .netrc.
            session = aiohttp.ClientSession(
                connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False, trust_env=False
            )
            self._sessions[unix_socket] = session
            await self.opened.enter_async_context(session)
        return self._sessions[unix_socket]


_pools: dict[asyncio.AbstractEventLoop, _Pool] = {}
"""By event loop; one of its own for each client takes a third more of the time to start and stop many servers."""


async def _opened(loop: asyncio.AbstractEventLoop) -> AsyncGenerator[_Pool]:
    """Yield a new pool. asyncio ends generators with their loop, and so closes it if nobody else does."""
    async with contextlib.AsyncExitStack() as sessions:
        pool = _pools[loop] = _Pool(sessions)
        try:
            yield pool
        finally:
            del _pools[loop]


def _parsed(text: str) -> yarl.URL:
    """Take a URL apart.

    Raises:
        ValueError: it is no URL of a server.
    """
    url = yarl.URL(text)
    if url.scheme == _UNIX:
        if url.host or not url.path.startswith("/") or "\0" in url.path or url.raw_query_string or url.raw_fragment:
            raise ValueError(text)
        return url
    if url.scheme not in {"http", "https"} or not url.host or not url.port or url.raw_query_string or url.raw_fragment:
        raise ValueError(text)
    url.raw_host.encode("idna")  # type: ignore[union-attr]  # it has a host
    return url.with_path(url.raw_path.rstrip("/"), encoded=True)


def _said(error: Exception) -> tuple[str, str | None]:
    """Say what an error of aiohttp means, and what to do if that is known."""
    fix: str | None = None
    match error:
        case aiohttp.ClientConnectorCertificateError(certificate_error=ssl.SSLCertVerificationError() as problem):
            why = f"its certificate is not trusted: {problem.verify_message}"
            fix = f"Name the file of the authority that signed it in {AUTHORITY_VARIABLE}."
        case aiohttp.ClientConnectorSSLError():
            why = f"TLS failed: {_why(error.os_error)}"
            fix = "Does the server speak https at this port, or http?"
        case aiohttp.ClientConnectorError():
            why = _why(error.os_error)
            if error.os_error.errno in {errno.EMFILE, errno.ENFILE}:
                fix = "Raise the limit of open files of this process (ulimit -n): each target takes one."
        case aiohttp.ServerDisconnectedError():
            why = "it closed the connection without an answer"
        case aiohttp.ClientOSError():
            why = f"the connection broke ({_why(error)})"
        case aiohttp.ClientError():
            detail = error.message if isinstance(error, aiohttp.ClientResponseError) else str(error)
            why = f"what it answered is not whole, or not HTTP ({' '.join(detail.split())[:200]})"
        case _:
            why = str(error)
    return why, fix


def _why(error: OSError) -> str:
    """Say an error of the system without the number and the addresses that asyncio adds."""
    if isinstance(error, ssl.SSLError):
        return error.reason or str(error)
    if isinstance(error, socket.gaierror) or error.errno is None:
        return error.strerror or str(error) or type(error).__name__
    return os.strerror(error.errno)


async def _content(response: aiohttp.ClientResponse) -> bytes:
    if (response.content_length or _MAX_BODY_BYTES) < _MAX_BODY_BYTES:
        return await response.read()
    content = bytearray()
    async for part in response.content.iter_any():
        content += part
        if len(content) > _MAX_BODY_BYTES:
            raise NoAnswerError(f"its answer has more than {_MAX_BODY_BYTES >> 20} MiB")
    return bytes(content)
