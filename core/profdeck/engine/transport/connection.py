"""Connections to servers over HTTP/1.1: one exchange after the other, each of a request and its answer.

Messages are those of RFC 9112; h11 reads the answers. Sockets are used without asyncio's transports, so a connection
belongs to no event loop: one loop may open it and the next one use it, and it can be closed without any.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import ipaddress
import os
import re
import resource
import socket
import ssl
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self
from urllib.parse import quote, unquote, urlsplit

import attrs
import h11

from profdeck.base.blocking import in_thread

_CHUNK_BYTES = 64 << 10
_MAX_HEAD_BYTES = 64 << 10
_MAX_BODY_BYTES = 64 << 20
_NEXT_ADDRESS_S = 0.25
_PORTS = {"http": 80, "https": 443}

_OTHERS = rb"(?:\r\n(?!(?:connection|content-length|transfer-encoding):)[a-z-]+:[\t -~]*)*"
_SIMPLE = re.compile(
    rb"HTTP/1\.1 (?!204|304)([2-5]\d\d) [\t -~]*" + _OTHERS + rb"\r\ncontent-length: *(\d{1,8})" + _OTHERS,
    re.IGNORECASE,
)
"""The head of an answer that needs no parser: it has a body (not 204 or 304), and the connection stays open."""

_SENT = h11.Request(method="GET", target="/", headers=[("Host", "any")])
"""What h11 is told of a request, as it reads answers to requests only. They are alike but for HEAD and CONNECT."""


class NoAnswerError(Exception):
    """There is no answer, or it is not whole."""

    fix: str | None = None
    """What to do, if this is known."""


class ClosedError(NoAnswerError):
    """The server closed the connection before any byte of an answer came."""


@attrs.frozen
class Url:
    """The URL of a server, without the user and password that it may have had."""

    scheme: str
    host: str
    port: int
    path: str
    """What the paths of requests are appended to."""
    authorization: str | None = attrs.field(default=None, repr=False)
    """The header made of user and password."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Take a URL apart.

        Raises:
            ValueError: it is no URL of a server.
        """
        parts = urlsplit(text)
        if parts.scheme not in _PORTS or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(text)
        authorization = None
        if parts.username or parts.password:
            pair = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
            authorization = f"Basic {base64.b64encode(pair.encode()).decode()}"
        return cls(
            scheme=parts.scheme,
            host=parts.hostname.encode("idna").decode(),
            port=_PORTS[parts.scheme] if parts.port is None else parts.port,
            path=quote(parts.path.rstrip("/"), safe="/%:@!$&'()*+,;=~"),
            authorization=authorization,
        )

    @property
    def authority(self) -> str:
        """Host and port, as URLs and the header ``Host`` write them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"


@attrs.frozen
class Head:
    """The head of an answer."""

    status_code: int
    headers: Mapping[str, str]
    """By names in lower case."""


class Connection:
    """A connection for one exchange after the other."""

    def __init__(self, sock: socket.socket, tls: _Tls | None) -> None:
        self.used = False
        """Whether it has carried an exchange."""
        self._socket = sock
        self._tls = tls
        self._pid = os.getpid()
        self._received = 0
        self._parser: h11.Connection | None = None
        """Reads the answer, unless that needs no parser."""

    @classmethod
    async def to(cls, url: Url) -> Self:
        """Connect.

        Raises:
            OSError: there is no such host or server, or TLS fails.
        """
        sock = await _connect(await _addresses(url))
        try:
            connection = cls(sock, _Tls(url.host) if url.scheme == "https" else None)
            await connection._shake_hands()
        except BaseException:
            sock.close()
            raise
        return connection

    async def _shake_hands(self) -> None:
        tls = self._tls
        while tls is not None and not tls.shake_hands():
            await self._flush(tls)
            tls.feed(await self._receive())
        if tls is not None:
            await self._flush(tls)

    async def exchange(self, data: bytes) -> tuple[int, bytes]:
        """Send the bytes of a request, before anything else runs in this thread, and read the answer.

        Returns:
            The status and the body.

        Raises:
            NoAnswerError: the connection broke, or what came is no answer, or too long.
        """
        first = await self._first(data)
        if (answer := _simple(first)) is not None:
            return answer
        head = await self._head(first)
        return head.status_code, await self.rest()

    async def ask(self, data: bytes) -> Head:
        """Send the bytes of a request, before anything else runs in this thread, and read the head of the answer.

        Raises:
            NoAnswerError: as `exchange`.
        """
        return await self._head(await self._first(data))

    async def _first(self, data: bytes) -> bytes:
        """Send the bytes of a request, and read the first ones of the answer."""
        self._parser, self._received = None, 0
        with self._explained():
            await self._send(data)
            await asyncio.sleep(0)  # nothing is there yet: let others send first
            first = await self._read()
        if not first:
            raise ClosedError("it closed the connection without an answer")
        self._received = len(first)
        return first

    async def _head(self, first: bytes) -> Head:
        self._parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
        self._parser.send(_SENT)
        self._parser.send(h11.EndOfMessage())
        self._parser.receive_data(first)
        with self._explained():
            while not isinstance(event := await self._event(self._parser), h11.Response):
                self._limit()
        headers = {name.decode("ascii"): value.decode("latin-1") for name, value in event.headers}
        return Head(event.status_code, headers)

    async def rest(self) -> bytes:
        """Read the body of the answer.

        Raises:
            NoAnswerError: as `exchange`.
        """
        body = bytearray()
        while part := await self.part():
            body += part
            self._limit()
        return bytes(body)

    async def part(self) -> bytes | bytearray:
        """Read what comes next of the body, which may have any length; nothing at its end.

        Raises:
            NoAnswerError: the connection broke, or what came is not all.
        """
        assert self._parser is not None  # noqa: S101  # a head has been read
        with self._explained():
            while not isinstance(event := await self._event(self._parser), h11.EndOfMessage):
                if isinstance(event, h11.Data) and event.data:
                    return event.data
        return b""

    def _limit(self) -> None:
        if self._received > _MAX_HEAD_BYTES + _MAX_BODY_BYTES:
            raise NoAnswerError(f"its answer has more than {_MAX_BODY_BYTES >> 20} MiB")

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Say what breaks an exchange."""
        try:
            yield
        except h11.RemoteProtocolError as error:
            raise NoAnswerError(f"what it answered is not whole, or not HTTP ({error})") from None
        except TimeoutError:
            raise
        except OSError as error:
            cls = NoAnswerError if self._received else ClosedError
            raise cls(f"the connection broke ({why(error)})") from None

    async def _event(self, parser: h11.Connection) -> object:
        while (event := parser.next_event()) is h11.NEED_DATA:
            data = await self._read()
            await asyncio.sleep(0)  # a server that sends and sends must not have the loop for itself
            self._received += len(data)
            parser.receive_data(data)
        return event

    def reusable(self) -> bool:
        """Tell whether another exchange may follow the one that has ended."""
        self.used = True
        if self._parser is None:
            return True
        return self._parser.their_state is h11.DONE and self._parser.trailing_data == (b"", False)

    def is_open(self) -> bool:
        """Tell whether the next exchange may use it; closes it if not."""
        if self._pid == os.getpid():  # a fork shares it with its parent
            try:
                self._socket.recv(1)  # the end, or what was not asked for
            except BlockingIOError:
                return True
            except OSError:
                pass
        self.close()
        return False

    def close(self) -> None:
        """Close it. Harmless when it is closed."""
        self._socket.close()

    async def _send(self, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._socket, data if self._tls is None else self._tls.encrypt(data))

    async def _read(self) -> bytes:
        """Return what comes next, nothing at the end."""
        if self._tls is None:
            return await self._receive()
        while (plain := self._tls.decrypt()) is None:
            await self._flush(self._tls)
            self._tls.feed(await self._receive())
        return plain

    async def _receive(self) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self._socket, _CHUNK_BYTES)

    async def _flush(self, tls: _Tls) -> None:
        if records := tls.pending():
            await asyncio.get_running_loop().sock_sendall(self._socket, records)


def _simple(data: bytes) -> tuple[int, bytes] | None:
    """Read an answer that is there as a whole, with its length and nothing else that concerns the connection.

    So answer servers of ours; h11, which reads all others, takes as long for that as everything else does together.

    Returns:
        The status and the body; None for other answers, and for what is none.
    """
    head, end, body = data.partition(b"\r\n\r\n")
    found = _SIMPLE.fullmatch(head) if end else None
    return (int(found[1]), body) if found is not None and int(found[2]) == len(body) else None


class _Tls:
    """One side of TLS: records go in and out as bytes."""

    def __init__(self, host: str) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl = _tls_context().wrap_bio(self._incoming, self._outgoing, server_hostname=host)

    def shake_hands(self) -> bool:
        """Go on with the handshake; True when it is done."""
        try:
            self._ssl.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def encrypt(self, data: bytes) -> bytes:
        """Return records with the data."""
        while data:
            data = data[self._ssl.write(data) :]
        return self.pending()

    def decrypt(self) -> bytes | None:
        """Return what has come, nothing at the end, and None if more records are needed."""
        try:
            return self._ssl.read(_CHUNK_BYTES)
        except ssl.SSLWantReadError:
            return None
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return b""

    def feed(self, records: bytes) -> None:
        """Take records from the other side; nothing is their end."""
        if records:
            self._incoming.write(records)
        else:
            self._incoming.write_eof()

    def pending(self) -> bytes:
        """Return records for the other side."""
        return self._outgoing.read()


@functools.cache
def _tls_context() -> ssl.SSLContext:
    return ssl.create_default_context()  # reads all authorities: tens of milliseconds


Address = tuple[socket.AddressFamily, tuple[Any, ...]]


async def _addresses(url: Url) -> Sequence[Address]:
    """Return the addresses of the server, the preferred one first."""
    try:
        ipaddress.ip_address(url.host)
    except ValueError:
        find = functools.partial(socket.getaddrinfo, type=socket.SOCK_STREAM)
        found = await in_thread(find, url.host, url.port)
    else:  # needs no thread
        found = socket.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    return [(family, address) for family, _, _, _, address in found]


async def _connect(addresses: Sequence[Address]) -> socket.socket:
    """Connect to the address that answers first; each is tried a little after the one before (RFC 8305).

    Raises:
        OSError: none of them answers; says why the first one does not.
    """
    if len(addresses) == 1:
        return await _connect_to(*addresses[0])
    left, running, problems = list(addresses), set[asyncio.Task[socket.socket]](), list[BaseException]()
    try:
        while left or running:
            if left:
                running.add(asyncio.create_task(_connect_to(*left.pop(0))))
            pause_s = _NEXT_ADDRESS_S if left else None
            done, _ = await asyncio.wait(running, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                running.remove(task)
                if (problem := task.exception()) is None:
                    return task.result()
                problems.append(problem)
        raise problems[0]
    finally:
        for task in running:
            task.add_done_callback(_close_result)
            task.cancel()


def _close_result(task: asyncio.Task[socket.socket]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()


async def _connect_to(family: socket.AddressFamily, address: tuple[Any, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)  # noqa: FBT003  # the library's signature
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


def allow_files(wanted: int) -> None:
    """Raise the soft limit of open files to so many, as far as that is allowed: each connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < wanted:
        wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def why(error: OSError) -> str:
    """Say an error of the system without the number and the addresses that asyncio adds."""
    if isinstance(error, ssl.SSLError):
        return error.reason or str(error)
    if isinstance(error, socket.gaierror) or error.errno is None:
        return error.strerror or str(error) or type(error).__name__
    return os.strerror(error.errno)
