"""Servers for `benchmarks.fan_out`: they have profdeck's routes, and cost as little as they can.

Those of a host run on one thread of one process, without asyncio: a request is read, its time of arrival is kept, and
a prepared answer is sent when its time has come. Between a stop and its answer a rank's manifest is written, as engines
do, but no trace. So what a client is seen to take is its own, even where both share two cores. Engines that behave are
in `tests.simulated_servers`; these here answer whatever they are asked.
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
from profdeck.base.identity import Identity
from profdeck.base.processes import allow_files
from profdeck.config.structuring import unstructure
from profdeck.engine.transport.http_engine import ServerInfo
from profdeck.records.manifest import SCHEMA, Manifest
from profdeck.records.request import Answer, Recorded, Reply, RequestState
from profdeck.records.run_directory import RunDirectory
from profdeck.records.status import Status

_TOKEN = b"0123456789abcdef"
"""Stands in the prepared answers for that of the request, which has as many characters."""
_FOUND = re.compile(rb'"token": ?"([0-9a-f]{16})"')
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)
_CHUNK_BYTES = 64 << 10
_BACKLOG = 16
_NAME = "rank_0000.step1.json"


@attrs.frozen
class Seen:
    """What the servers have seen since they were last asked."""

    requests: list[list[tuple[str, int, int]]]
    """By server: the command, when it arrived and when it was answered, by `time.monotonic_ns`."""
    cpu_s: float
    """What the process of all servers has used."""


def serve(connection: Connection, address: str, count: int, delay_s: float, spread: float) -> None:
    """Run the servers of one host.

    Args:
        connection: gets their URLs, then what they have seen whenever it sends anything, until that is False.
        address: of the host, one of loopback.
        count: how many.
        delay_s: how long the slowest takes to answer, in seconds.
        spread: by which share of that the fastest is faster; those between are in no order.
    """
    raise_limit_of_files(count)
    shares = [1 - spread * number / count for number in range(count)]
    random.Random(0).shuffle(shares)
    _Servers(connection, address, [int(delay_s * share * 1e9) for share in shares]).run()


def raise_limit_of_files(count: int) -> None:
    """Let this process have so many connections, as far as it may."""
    allow_files(2 * count + 256)  # a server has a socket to listen, too


@attrs.define
class _Client:
    """A connection of a client."""

    socket: socket.socket
    server: int
    data: bytes = b""


class _Servers:
    def __init__(self, connection: Connection, address: str, delays_ns: Sequence[int]) -> None:
        count = len(delays_ns)
        self._parent = connection
        self._delays_ns = delays_ns
        self._listening = [socket.create_server((address, 0), backlog=_BACKLOG) for _ in range(count)]
        self._server_of = {one.fileno(): number for number, one in enumerate(self._listening)}
        self._clients: dict[int, _Client] = {}
        self._due: list[tuple[int, int, int, str, bytes, _Client]] = []
        """A heap: when to answer, and what."""
        self._number = itertools.count()
        self._seen: list[list[tuple[str, int, int]]] = [[] for _ in range(count)]
        self._answers = {command: _answer(command) for command in ("status", "start", "stop")}
        self._manifest = _manifest()
        self._asked: list[bytes] = [b""] * count
        """By server, the body of the last start."""
        self._stopped: set[int] = set()
        """Servers whose manifest is still to be written."""
        self._poll = select.epoll()
        for listening in self._listening:
            listening.setblocking(False)  # noqa: FBT003  # the library's signature
            self._poll.register(listening.fileno(), select.EPOLLIN)
        self._poll.register(connection.fileno(), select.EPOLLIN)

    def run(self) -> None:
        self._parent.send(["http://{}:{}".format(*one.getsockname()) for one in self._listening])
        while True:
            left_ns = max(self._due[0][0] - time.monotonic_ns(), 0) if self._due else None
            found = self._poll.poll(0 if self._stopped else None if left_ns is None else left_ns / 1e9)
            if self._stopped and not found:
                self._write(next(iter(self._stopped)))
            for descriptor, _ in found:
                if descriptor in self._clients:
                    self._read(descriptor)
                elif descriptor in self._server_of:
                    self._accept(self._server_of[descriptor])
                elif not self._parent.recv():
                    return
                else:
                    self._parent.send(Seen(self._seen, time.process_time()))
                    self._seen = [[] for _ in self._seen]
            self._answer()

    def _accept(self, server: int) -> None:
        accepted, _ = self._listening[server].accept()
        accepted.setblocking(False)  # noqa: FBT003  # as above
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._clients[accepted.fileno()] = _Client(accepted, server)
        self._poll.register(accepted.fileno(), select.EPOLLIN)

    def _read(self, descriptor: int) -> None:
        at_ns, client = time.monotonic_ns(), self._clients[descriptor]
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
            token = _FOUND.search(body)
            content = self._answers[command].replace(_TOKEN, token[1] if token else _TOKEN)
            due_ns = at_ns + self._delays_ns[client.server]
            heapq.heappush(self._due, (due_ns, next(self._number), at_ns, command, content, client))
            if command == "start":
                self._asked[client.server] = body
            elif command == "stop" and token:
                self._stopped.add(client.server)

    def _write(self, server: int) -> None:
        self._stopped.discard(server)
        asked = json.loads(self._asked[server])
        identity = Identity(role=asked["role"], replica=asked["replica"])
        directory = RunDirectory(Path(asked["output"]), asked["run"], {}).directory(asked["first_step"], identity)
        Path(directory, _NAME).write_bytes(self._manifest.replace(_TOKEN, asked["token"].encode()))

    def _answer(self) -> None:
        now_ns = time.monotonic_ns()
        while self._due and self._due[0][0] <= now_ns:
            _, _, at_ns, command, content, client = heapq.heappop(self._due)
            if client.server in self._stopped:
                self._write(client.server)
            with suppress(OSError):  # the client has ended, and says why
                client.socket.sendall(content)
            self._seen[client.server].append((command, at_ns, time.monotonic_ns()))


def _answer(command: str) -> bytes:
    """Prepare what a server of one rank answers to a command of a request that it carries out."""
    asked = command != "status"
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
        request="step1" if asked else None,
        token=_TOKEN.decode() if asked else None,
        iterations=1 if command == "stop" else 0,
        captures=(recorded,) if command == "stop" else (),
    )
    about = ServerInfo(host=socket.gethostname(), output=str(Path("/profiles")), profdeck=profdeck.__version__)
    content = msgspec.json.encode({"server": unstructure(about), "answer": unstructure(Answer(ranks=(reply,)))})
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


def _manifest() -> bytes:
    """Prepare the manifest of a rank."""
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
