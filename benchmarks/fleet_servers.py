"""Simulated servers for `benchmarks.fan_out`. They provide profdeck's routes with minimal overhead.

All servers of a host run on one thread without asyncio. A server reads a request, records its arrival time, and sends a
prepared reply when it is due. Between a stop and its reply, it writes a rank's manifest as engines do, but no trace.
The measured time is therefore the client's, even if client and servers share two cores. These servers accept every
request; `tests.simulated_servers` simulates the behaviour of engines.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
import re
import select
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import attrs
import msgspec

import profdeck
from profdeck.base import processes
from profdeck.base.identity import Identity
from profdeck.config.structuring import unstructure
from profdeck.engine.transport.http_engine import About
from profdeck.records.manifest import SCHEMA, Manifest
from profdeck.records.request import Answer, Recorded, Reply, RequestState
from profdeck.records.run_directory import RunDirectory
from profdeck.records.status import Status

_TOKEN = b"0123456789abcdef"
"""Placeholder for the token in prepared replies. It has the length of a real token."""
_TOKEN_KEY = re.compile(rb'"token": ?"([0-9a-f]{16})"')
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)
_CHUNK_BYTES = 64 << 10
_BACKLOG = 16
_NAME = "rank_0000.step1.json"


@attrs.frozen
class ServerLog:
    """Requests that the servers received since the last report."""

    requests: list[list[tuple[str, int, int]]]
    """For each server: command, arrival time and reply time, by `time.monotonic_ns`."""
    cpu_s: float
    """Total CPU time of the servers' process."""


def serve(connection: Connection, address: str, count: int, delay_s: float, spread: float) -> None:
    """Run the servers of one host.

    Args:
        connection: Receives the server URLs, then a `ServerLog` for each true message. A false message ends the
            servers.
        address: Loopback address of the host.
        count: Number of servers.
        delay_s: Reply delay of the slowest server, in seconds.
        spread: Fraction by which the fastest server is faster. Other delays are distributed evenly in random order.
    """
    raise_open_file_limit(count)
    shares = [1 - spread * number / count for number in range(count)]
    random.Random(0).shuffle(shares)
    _Servers(connection, address, [int(delay_s * share * 1e9) for share in shares]).run()


def raise_open_file_limit(count: int) -> None:
    """Raise the limit of open files for `count` connections, as far as the system allows."""
    processes.raise_open_file_limit(2 * count + 256)  # each server also has a listening socket


@attrs.define
class _Client:
    """A client's connection."""

    socket: socket.socket
    server: int
    data: bytes = b""


class _Servers:
    def __init__(self, connection: Connection, address: str, delays_ns: Sequence[int]) -> None:
        count = len(delays_ns)
        self._parent = connection
        self._delays_ns = delays_ns
        self._listening = [socket.create_server((address, 0), backlog=_BACKLOG) for _ in range(count)]
        self._server_of = {listening.fileno(): number for number, listening in enumerate(self._listening)}
        self._clients: dict[int, _Client] = {}
        self._due: list[tuple[int, int, int, str, bytes, _Client]] = []
        """Heap of pending replies, by due time."""
        self._number = itertools.count()
        self._requests: list[list[tuple[str, int, int]]] = [[] for _ in range(count)]
        self._responses = {command: _prepared_response(command) for command in ("status", "start", "stop")}
        self._manifest = _manifest()
        self._start_bodies: list[bytes] = [b""] * count
        """For each server, the body of the last start request."""
        self._stopped: set[int] = set()
        """Servers that have not yet written their manifest."""
        self._poll = select.epoll()
        for listening in self._listening:
            listening.setblocking(False)  # noqa: FBT003  # the library's signature
            self._poll.register(listening.fileno(), select.EPOLLIN)
        self._poll.register(connection.fileno(), select.EPOLLIN)

    def run(self) -> None:
        self._parent.send(["http://{}:{}".format(*listening.getsockname()) for listening in self._listening])
        while True:
            remaining_ns = max(self._due[0][0] - time.monotonic_ns(), 0) if self._due else None
            ready = self._poll.poll(0 if self._stopped else None if remaining_ns is None else remaining_ns / 1e9)
            if self._stopped and not ready:
                self._write(next(iter(self._stopped)))
            for descriptor, _ in ready:
                if descriptor in self._clients:
                    self._read(descriptor)
                elif descriptor in self._server_of:
                    self._accept(self._server_of[descriptor])
                elif not self._parent.recv():
                    return
                else:
                    self._parent.send(ServerLog(self._requests, time.process_time()))
                    self._requests = [[] for _ in self._requests]
            self._send_due()

    def _accept(self, server: int) -> None:
        accepted, _ = self._listening[server].accept()
        accepted.setblocking(False)  # noqa: FBT003  # the library's signature
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._clients[accepted.fileno()] = _Client(accepted, server)
        self._poll.register(accepted.fileno(), select.EPOLLIN)

    def _read(self, descriptor: int) -> None:
        arrival_ns, client = time.monotonic_ns(), self._clients[descriptor]
        try:
            data = client.socket.recv(_CHUNK_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            del self._clients[descriptor]
            client.socket.close()
            return
        client.data += data
        head, end, body = client.data.partition(b"\r\n\r\n")
        length = _LENGTH.search(head + b"\r\n")
        if end and len(body) >= int(length[1] if length else 0):
            client.data = b""
            command = head.partition(b" HTTP/")[0].rpartition(b"/")[2].decode()
            token = _TOKEN_KEY.search(body)
            content = self._responses[command].replace(_TOKEN, token[1] if token else _TOKEN)
            due_ns = arrival_ns + self._delays_ns[client.server]
            heapq.heappush(self._due, (due_ns, next(self._number), arrival_ns, command, content, client))
            if command == "start":
                self._start_bodies[client.server] = body
            elif command == "stop" and token:
                self._stopped.add(client.server)

    def _write(self, server: int) -> None:
        self._stopped.discard(server)
        request = json.loads(self._start_bodies[server])
        identity = Identity(role=request["role"], replica=request["replica"])
        directory = RunDirectory(Path(request["output"]), request["run"], {}).directory(request["first_step"], identity)
        Path(directory, _NAME).write_bytes(self._manifest.replace(_TOKEN, request["token"].encode()))

    def _send_due(self) -> None:
        now_ns = time.monotonic_ns()
        while self._due and self._due[0][0] <= now_ns:
            _, _, arrival_ns, command, content, client = heapq.heappop(self._due)
            if client.server in self._stopped:
                self._write(client.server)
            with suppress(OSError):  # the client has disconnected
                client.socket.sendall(content)
            self._requests[client.server].append((command, arrival_ns, time.monotonic_ns()))


def _prepared_response(command: str) -> bytes:
    """Return the prepared HTTP response of a server with one rank."""
    has_request = command != "status"
    recorded = Recorded(
        id="step1",
        status=Status.COMPLETE,
        manifest=f"/profiles/{_NAME}",
        files=("/profiles/rank_0000.step1.trace.json.gz",),
        size_bytes=1,
        events=1,
        problems=(),
    )
    reply = Reply(
        rank=0,
        world_size=1,
        host=socket.gethostname(),
        pid=1,
        state={"status": RequestState.IDLE, "start": RequestState.RECORDING, "stop": RequestState.ENDED}[command],
        request="step1" if has_request else None,
        token=_TOKEN.decode() if has_request else None,
        iterations=1 if command == "stop" else 0,
        captures=(recorded,) if command == "stop" else (),
    )
    about = About(host=socket.gethostname(), output=str(Path("/profiles")), profdeck=profdeck.__version__)
    content = msgspec.json.encode({"server": unstructure(about), "answer": unstructure(Answer(ranks=(reply,)))})
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


def _manifest() -> bytes:
    """Return the prepared manifest of a rank."""
    now_ns = time.time_ns()
    manifest = Manifest(
        schema=SCHEMA,
        profdeck=profdeck.__version__,
        capture="step1",
        role="rollout",
        rank=0,
        world_size=1,
        replica=0,
        parallel={},
        host=socket.gethostname(),
        pid=1,
        process_started=None,
        first_step=1,
        last_step=1,
        stage=None,
        window=None,
        request="step1",
        request_token=_TOKEN.decode(),
        backend="torch",
        versions={},
        options={},
        expected_ranks=(0,),
        status=Status.COMPLETE,
        started_ns=now_ns,
        ended_ns=now_ns,
    )
    return msgspec.json.encode(manifest)
