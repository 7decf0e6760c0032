"""HTTP client for engine servers and routers, based on aiohttp, with error messages for users.

It supports no proxies, redirects, cookies or compression.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import json
import os
import re
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Any, BinaryIO
from urllib.parse import quote
from weakref import WeakSet

import aiohttp
import attrs
import yarl

from profdeck.base.errors import TargetError
from profdeck.base.outcome import Outcome
from profdeck.config.targets import SOCKET
from profdeck.engine.transport.file_transfer import BadResponseError, Transfer, is_file
from profdeck.engine.transport.tls import AUTHORITY_VARIABLE, CERTIFICATE_VARIABLE, tls_context
from profdeck_traces.base.credentials import MASK, redact
from profdeck_traces.base.errors import ConfigError

_CONNECT_S = 10.0
"""Maximum time to connect, in seconds. The kernel resends lost packets after 1, 3 and 7 seconds."""
_CLOSE_ITERATIONS = 3
"""Number of event loop iterations that remove a connection from the pool after the server has closed it."""
_MAX_BODY_BYTES = 8 << 20
_SHORTEST_SECRET = 8
"""Minimum length of a credential to mask in responses. A shorter credential could match an ordinary key or value."""
_UNIX = SOCKET.rstrip(":")
_SOCKET_BASE_URL = yarl.URL("http://localhost")
"""Base URL of requests over a Unix socket; determines the ``Host`` header."""

Gate = Callable[[], Awaitable[None]]


@attrs.frozen
class HttpResponse:
    """Response from an HTTP server."""

    status_code: int
    content: bytes
    path: str
    """Path of the request."""
    sent_ns: int
    """Unix time at which the request was sent, in nanoseconds."""
    received_ns: int = attrs.field(factory=time.time_ns)
    """Unix time at which the complete response was received, in nanoseconds."""

    @property
    def is_success(self) -> bool:
        """True if the status code is 2xx."""
        return HTTPStatus.OK <= self.status_code < HTTPStatus.MULTIPLE_CHOICES

    @property
    def text(self) -> str:
        """The content as text. Invalid UTF-8 is replaced."""
        return self.content.decode(errors="replace")

    @property
    def reason_phrase(self) -> str:
        """The name of the status code, or an empty string for non-standard codes."""
        with contextlib.suppress(ValueError):
            return HTTPStatus(self.status_code).phrase
        return ""

    def json(self) -> Any:
        """Parse the content as JSON.

        Raises:
            ValueError: the content is not valid JSON.
        """
        try:
            return json.loads(self.content)
        except RecursionError:
            raise ValueError("nested too deeply") from None


class HttpClient:
    """Sends requests to one server. Connections stay open until `close` is called or the event loop ends."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        """Args:
        url: URL of the server. A user and password in the URL are sent as credentials.
        timeout_s: maximum time for one response, in seconds. Connecting may take half of it, but at most 10 seconds.

        Raises:
            ConfigError: the URL is invalid, or a file for TLS cannot be used.
        """
        try:
            parsed_url = _parse_url(url)
        except ValueError:
            raise ConfigError(
                f"target: {url!r} is not a valid server URL. Expected a URL such as http://127.0.0.1:8000 or "
                "unix:/run/engine.sock."
            ) from None
        self.socket = parsed_url.path if parsed_url.scheme == _UNIX else None
        """The path of the server's Unix socket, or None for TCP."""
        self.url = parsed_url if self.socket else parsed_url.with_user(None)
        """The URL without user and password."""
        base = _SOCKET_BASE_URL if self.socket else parsed_url
        self._has_password = base.user is not None or base.password is not None
        self._secrets = {base.password or ""} if self._has_password else set[str]()
        """Passwords and tokens that were sent. Servers and proxies may repeat them in their responses."""
        if self._has_password:
            self._secrets.add(base64.b64encode(f"{base.user or ''}:{base.password or ''}".encode()).decode())
        self._base = str(base).rstrip("/")
        self._path = base.raw_path.rstrip("/")
        self._tls = tls_context() if base.scheme == "https" else None
        self._timeout_s = timeout_s
        self._connect_s = min(timeout_s / 2, _CONNECT_S)

    async def request(  # noqa: PLR0913  # fields of a request
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        token: str | None = None,
        gate: Gate | None = None,
        idempotent: bool = False,
    ) -> HttpResponse:
        """Send a request and read the response.

        Args:
            method: HTTP method, such as ``GET``.
            path: path relative to the server's URL, including any query string.
            body: data to send as JSON.
            token: bearer token. Ignored if the URL contains a user and password.
            gate: awaited immediately before the request is sent.
            idempotent: resend the request if the server closes the open connection.

        Raises:
            TargetError: the server cannot be reached, the response takes too long, or the token is malformed.
        """
        headers = self._headers(token)
        route = path.partition("?")[0]  # for messages
        content = None
        if body is not None:
            content = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
            headers["Content-Type"] = "application/json"
        if gate is not None:
            await gate()
        if not idempotent:  # the request cannot be resent, so drop connections that the server has closed first
            for _ in range(_CLOSE_ITERATIONS):
                await asyncio.sleep(0)

        may_resend = idempotent and method != "GET"  # aiohttp resends GET automatically
        with self._translated_errors(route):
            async with asyncio.timeout(self._timeout_s):
                while True:
                    sent_ns = time.time_ns()
                    try:
                        async with await self._send(method, path, headers, content) as response:
                            reply = self._mask_secrets(await _read_content(response))
                            return HttpResponse(response.status, reply, self._path + route, sent_ns)
                    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                        if not may_resend:
                            raise
                        may_resend = False

    async def download(self, path: str, file: BinaryIO, *, most_bytes: int, token: str | None = None) -> HttpResponse:
        """Download a file in bounded memory. A response of another content type is returned as by `request`.

        An interrupted download is resumed while each attempt makes progress. It restarts from the beginning if the file
        has changed on the server.

        Args:
            path: path relative to the server's URL.
            file: destination; an empty, unbuffered file.
            most_bytes: maximum size of the file.
            token: as in `request`.

        Returns:
            The response, without the content written to the file.

        Raises:
            TargetError: as in `request`. The timeout applies to each chunk.
            OSError: the file cannot be written.
        """
        transfer = Transfer(file, most_bytes)
        while True:
            received_before, sent_ns = transfer.received, time.time_ns()
            try:
                with self._translated_errors(path):
                    async with await self._send(
                        "GET", path, self._headers(token) | transfer.headers, read_s=self._timeout_s
                    ) as response:
                        if not is_file(response):
                            reply = self._mask_secrets(await _read_content(response))
                            return HttpResponse(response.status, reply, self._path + path, sent_ns)
                        transfer.begin(response)
                        async for chunk in response.content.iter_any():
                            await transfer.add(chunk)
            except TargetError:
                await transfer.flush()
                if transfer.received == received_before or transfer.exceeded:
                    raise
            else:
                await transfer.flush()
                return HttpResponse(response.status, b"", self._path + path, sent_ns)

    async def close(self) -> None:
        """Release the connections of the event loop. They are closed when all clients have released them."""
        pool = _pools.get(asyncio.get_running_loop())
        if pool is not None:
            pool.users.discard(self)
            if not pool.users:
                await pool.closing.aclose()

    async def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        pool = _pools.get(loop)
        if pool is None:
            closing = _open_pool(loop)
            pool = await anext(closing)
            pool.closing = closing
        pool.users.add(self)
        return await pool.session(self.socket)

    async def _send(
        self, method: str, path: str, headers: Mapping[str, str], content: bytes | None = None, read_s: float = 0
    ) -> aiohttp.ClientResponse:
        session = await self._session()
        url = yarl.URL(f"{self._base}{path}", encoded=True)
        limits = aiohttp.ClientTimeout(total=None, connect=self._connect_s, sock_read=read_s)
        if self._tls is not None:
            with contextlib.suppress(ConfigError):  # keep the old context while a file is being replaced
                self._tls = tls_context()
        return await session.request(
            method, url, data=content, headers=headers, allow_redirects=False, ssl=self._tls or True, timeout=limits
        )

    def _headers(self, token: str | None) -> dict[str, str]:
        if token and not (token.isascii() and token.isprintable()):
            text = f"{self.url}: the token contains a line break or another character that cannot be sent."
            raise TargetError(text, Outcome.REFUSED, "Set the token's environment variable to the server's token.")
        headers = {"Accept-Encoding": "identity"}
        if token and not self._has_password:
            self._secrets.add(token)
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def redact(self, text: str) -> str:
        """Redact from a message any credentials that were sent to this server."""
        return redact(text, *self._secrets)

    def _mask_secrets(self, content: bytes) -> bytes:
        """Mask credentials in a response.

        A match within a longer word or path is kept, because a short credential can occur there by chance.
        """
        for secret in self._secrets:
            if len(secret) < _SHORTEST_SECRET:
                continue
            forms = {secret, quote(secret, safe=""), json.dumps(secret)[1:-1], secret.replace("/", "\\/")}
            pattern = "|".join(map(re.escape, sorted(forms, key=len, reverse=True)))
            content = re.sub(rf"(?<![\w/-])(?:{pattern})(?![\w/-])".encode(), MASK.encode(), content)
        return content

    @contextlib.contextmanager
    def _translated_errors(self, path: str) -> Iterator[None]:
        """Convert errors of a request to TargetError."""
        try:
            yield
        except aiohttp.ConnectionTimeoutError as error:
            raise self._unreachable(f"no connection within {self._connect_s:g} seconds", None) from error
        except TimeoutError:
            text = f"{self.url}: no response to {path} within {self._timeout_s:g} seconds. Does the server hang?"
            raise TargetError(text, Outcome.TIMED_OUT) from None
        except (aiohttp.ClientError, BadResponseError) as error:
            reason, fix = _describe_client_error(error)
            reason = self.redact(reason)
            is_connected = not isinstance(error, aiohttp.ClientConnectorError)
            if self._tls is not None and is_connected and fix is None and CERTIFICATE_VARIABLE not in os.environ:
                # With TLS 1.3, a server can reject a missing client certificate after the client has connected.
                fix = f"If the server requires a client certificate, set {CERTIFICATE_VARIABLE} to its file."
            raise self._unreachable(reason, fix) from None

    def _unreachable(self, reason: str, fix: str | None) -> TargetError:
        return TargetError(
            f"{self.url} cannot be reached: {reason}. {fix or 'Is the server running?'}", Outcome.UNREACHABLE, fix
        )


@attrs.define
class _Pool:
    """The connections of one event loop."""

    exit_stack: contextlib.AsyncExitStack
    users: WeakSet[HttpClient] = attrs.field(factory=WeakSet)
    closing: AsyncGenerator[_Pool] = attrs.field(init=False)
    _sessions: dict[str | None, aiohttp.ClientSession] = attrs.field(factory=dict, init=False)
    """Sessions by path of the Unix socket. All TCP servers share the session with the key None."""

    async def session(self, unix_socket: str | None) -> aiohttp.ClientSession:
        """Return the session for a Unix socket, or for TCP if the path is None."""
        if unix_socket not in self._sessions:
            connector = (
                aiohttp.UnixConnector(unix_socket, limit=0)
                if unix_socket
                else aiohttp.TCPConnector(limit=0, resolver=aiohttp.ThreadedResolver())
            )
            # trust_env=False: ignore proxies in the environment and .netrc.
            session = aiohttp.ClientSession(
                connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False, trust_env=False
            )
            self._sessions[unix_socket] = session
            await self.exit_stack.enter_async_context(session)
        return self._sessions[unix_socket]


_pools: dict[asyncio.AbstractEventLoop, _Pool] = {}
"""Pools by event loop. With one pool per client, starting and stopping many servers takes a third longer."""


async def _open_pool(loop: asyncio.AbstractEventLoop) -> AsyncGenerator[_Pool]:
    """Yield a new pool. When the event loop shuts down, asyncio closes this generator and so the pool."""
    async with contextlib.AsyncExitStack() as sessions:
        pool = _pools[loop] = _Pool(sessions)
        try:
            yield pool
        finally:
            del _pools[loop]


def _parse_url(text: str) -> yarl.URL:
    """Parse and validate a server URL.

    Raises:
        ValueError: the URL is invalid or has a query, a fragment or an unsupported scheme.
    """
    url = yarl.URL(text)
    if url.scheme == _UNIX:
        if url.host or not url.path.startswith("/") or "\0" in url.path or url.raw_query_string or url.raw_fragment:
            raise ValueError(text)
        return url
    if url.scheme not in {"http", "https"} or not url.host or not url.port or url.raw_query_string or url.raw_fragment:
        raise ValueError(text)
    url.raw_host.encode("idna")  # type: ignore[union-attr]  # checked above
    return url.with_path(url.raw_path.rstrip("/"), encoded=True)


def _describe_client_error(error: Exception) -> tuple[str, str | None]:
    """Return the reason for an error of a request, and a suggested fix if there is one."""
    fix: str | None = None
    match error:
        case aiohttp.ClientConnectorCertificateError(certificate_error=ssl.SSLCertVerificationError() as problem):
            reason = f"its certificate is not trusted: {problem.verify_message}"
            fix = f"Set {AUTHORITY_VARIABLE} to the file of the authority that signed it."
        case aiohttp.ClientConnectorSSLError():
            reason = f"TLS failed: {_describe_os_error(error.os_error)}"
            fix = "Does the server use https or http on this port?"
        case aiohttp.ClientConnectorError():
            reason = _describe_os_error(error.os_error)
            if error.os_error.errno in {errno.EMFILE, errno.ENFILE}:
                fix = "Raise this process's limit of open files (ulimit -n). Each target needs one."
        case aiohttp.ServerDisconnectedError():
            reason = "it closed the connection without a response"
        case aiohttp.ClientOSError():
            reason = f"the connection broke ({_describe_os_error(error)})"
        case aiohttp.ClientError():
            detail = error.message if isinstance(error, aiohttp.ClientResponseError) else str(error)
            reason = f"its response is incomplete or not HTTP ({' '.join(detail.split())[:200]})"
        case _:
            reason = str(error)
    return reason, fix


def _describe_os_error(error: OSError) -> str:
    """Return an OS error's message without the error number and the addresses that asyncio adds."""
    if isinstance(error, ssl.SSLError):
        return error.reason or str(error)
    if isinstance(error, socket.gaierror) or error.errno is None:
        return error.strerror or str(error) or type(error).__name__
    return os.strerror(error.errno)


async def _read_content(response: aiohttp.ClientResponse) -> bytes:
    if (response.content_length or _MAX_BODY_BYTES) < _MAX_BODY_BYTES:
        return await response.read()
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > _MAX_BODY_BYTES:
            raise BadResponseError(f"its response is larger than {_MAX_BODY_BYTES >> 20} MiB")
    return bytes(content)
