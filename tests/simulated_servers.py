"""Simulated servers of engines, for tests and benchmarks: they have our routes, and no engine behind them.

Many run on one event loop. Each keeps what arrived and when, and can be told what to do with its next requests: be
slow, refuse, hang, close the connection, or send any bytes. Requests that our routes would not take are refused here as
well.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self
from urllib.parse import unquote

import attrs

import profdeck
from distributions import install
from profdeck.base.errors import CaptureError, TargetError
from profdeck.base.identity import Identity
from profdeck.base.outcome import Outcome
from profdeck.config.structuring import structure, unstructure
from profdeck.engine.control.control_backend import ControlBackend, EngineProfiler
from profdeck.engine.engine import Engine
from profdeck.engine.options import EngineOptions
from profdeck.engine.transport.file_transfer import FILE_TYPE
from profdeck.engine.transport.http_client import HttpClient
from profdeck.engine.transport.http_engine import HttpEngine, ServerInfo
from profdeck.engine.transport.served_files import NotServedError, ServedFile, open_path
from profdeck.engine.worker.recorder import EngineRecorder, handle_command, reply_data
from profdeck.records.capture import CaptureRecord
from profdeck.records.request import BatchKind, CaptureRequest, Recorded, Reply, RequestState
from profdeck.records.status import Status
from profdeck_traces.base.errors import ProfdeckError

FILES = "/profdeck/files/"
ROUTES = {"/profdeck/status": "GET", "/profdeck/start": "POST", "/profdeck/stop": "POST", FILES: "GET"}
ABOUT = "/simulated"
"""The route by which a backend recognises a simulated server: it answers with the name of that backend."""


@attrs.frozen(kw_only=True)
class Act:
    """What a simulated server does with one request."""

    delay_s: float = 0.0
    """How long it waits before it answers."""
    status: int = 200
    """Any other one is answered instead of asking the engine."""
    error: str = "simulated"
    """What it then says is wrong."""
    content: bytes | None = None
    """What it answers instead of JSON."""
    raw: bytes | None = None
    """What it sends instead of an answer, byte by byte."""
    piece_bytes: int = 0
    """How much it sends at once; 0 for all."""
    pause_s: float = 0.0
    """How long it waits between pieces."""
    chunked: bool = False
    """Whether its content comes in chunks, without a length."""
    hang: bool = False
    """Whether it says nothing more on this connection, and leaves it open."""
    close: bool = False
    """Whether it closes the connection afterwards, without having announced it."""


class CommandedEngine(Protocol):
    """What a server asks: the replies of all ranks, as plain data."""

    async def command(self, command: str, payload: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Carry out start, stop or status."""

    def iterate(self, count: int) -> None:
        """Run some iterations, as an engine that is asked for as many tokens does."""


class SimulatedEngine:
    """Ranks that take requests as those of an engine do, and record nothing."""

    def __init__(self, ranks: int = 1) -> None:
        self.ranks = ranks
        self.asked: CaptureRequest | None = None
        self.state = RequestState.IDLE
        self.iterations = 0
        self.writes = True
        """Whether a stop leaves files."""
        self.flushed = asyncio.Event()
        """Cleared, files stay unfinished."""
        self.flushed.set()

    async def command(self, command: str, payload: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Carry out start, stop or status."""
        refusal = error = None
        if command == "start":
            try:
                request = structure(dict(payload), CaptureRequest, where="")
                if self._now() in {RequestState.RECORDING, RequestState.WRITING}:
                    refusal, error = Outcome.ALREADY_ACTIVE, f"Capture {self._name} is {self._now()} in this engine."
                else:
                    self.asked, self.state, self.iterations = request, RequestState.RECORDING, 0
            except ProfdeckError as problem:
                refusal, error = Outcome.REFUSED, str(problem)
        elif command == "stop" and self.asked is not None:
            ours = payload["request"] == self.asked.id and payload.get("token") in {None, self.asked.token}
            self.state = RequestState.WRITING if ours and self.state is RequestState.RECORDING else self.state
        return [unstructure(self._reply(rank, error, refusal)) for rank in range(self.ranks)]

    def iterate(self, count: int) -> None:
        """Record some iterations, until the window is full."""
        if self.asked is not None and self.state is RequestState.RECORDING:
            window = self.asked.iterations
            self.iterations += count
            if window is not None and window.count is not None and self.iterations >= window.count:
                self.end_by_itself(window.count)

    def end_by_itself(self, iterations: int) -> None:
        """Let the window be full."""
        self.state, self.iterations = RequestState.WRITING, iterations

    @property
    def _name(self) -> str:
        return self.asked.id if self.asked else ""

    def _now(self) -> RequestState:
        return RequestState.ENDED if self.state is RequestState.WRITING and self.flushed.is_set() else self.state

    def _reply(self, rank: int, error: str | None, refusal: Outcome | None) -> Reply:
        selected = self.asked is not None and self.asked.selects(rank)
        return Reply(
            rank=rank,
            world_size=self.ranks,
            host=socket.gethostname(),
            pid=0,
            state=self._now() if selected else RequestState.IDLE,
            request=self.asked.id if self.asked else None,
            token=self.asked.token if self.asked else None,
            owner=self.asked.owner if self.asked else None,
            iterations=self.iterations if selected else 0,
            captures=(self._recorded(rank),) if selected and self.writes and self._now() is RequestState.ENDED else (),
            error=error,
            refusal=refusal,
        )

    def _recorded(self, rank: int) -> Recorded:
        return Recorded(
            id=self._name,
            status=Status.COMPLETE,
            manifest="",
            files=(f"rank_{rank:04}.trace.json.gz",),
            size_bytes=1,
            events=1,
            problems=(),
        )


class RecordingEngine:
    """An engine whose ranks record iterations using a device backend that the test installs.

    Args:
        device: the device type of the backend.
        ranks: the number of ranks.
        output: the output directory on the engine's host, if it differs from the driver's output directory.
    """

    def __init__(self, device: str, ranks: int = 1, output: Path | None = None) -> None:
        self.ranks = [EngineRecorder(Identity(rank=rank, world_size=ranks), device, {}) for rank in range(ranks)]
        self._output = output

    @property
    def active(self) -> bool:
        return any(recorder.active for recorder in self.ranks)

    async def command(self, command: str, payload: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Carry out start, stop or status."""
        if command == "start" and self._output:
            payload = {**payload, "output": str(self._output)}
        return [reply_data(handle_command(command, payload, one, one.start, one.stop)) for one in self.ranks]

    def iterate(self, count: int = 1) -> None:
        """Run some iterations."""
        for recorder in self.ranks:
            for _ in range(count):
                recorder.begin(BatchKind.DECODE, "execute")
                recorder.end()


@attrs.define(kw_only=True)
class Arrival:
    """A request that has come."""

    command: str
    """The last part of the path."""
    path: str
    at_ns: int
    """By `time.monotonic_ns`, before anything was done with it."""
    connection: int
    """Of the server's connections, counted from 0."""
    headers: Mapping[str, str]
    body: Mapping[str, Any]
    answered_ns: int | None = None
    """When its answer was sent, all of it."""


class SimulatedServer:
    """One server. What it is told to do with a command goes for the next requests, one act each."""

    def __init__(
        self,
        engine: CommandedEngine | None = None,
        *,
        token: str | None = None,
        host: str = "",
        output: str = "/profiles",
        version: str = profdeck.__version__,
        backend: str = "simulated",
    ) -> None:
        """Args:
        engine: what it asks; a `SimulatedEngine` if None.
        token: what clients must have.
        host: where it says it is; here by default.
        output: where it says it writes.
        version: what it says of its profdeck.
        backend: the backend that recognises it.
        """
        self.engine = engine or SimulatedEngine()
        self.arrivals: list[Arrival] = []
        self.acts: dict[str, list[Act]] = {}
        """By command; ``""`` for those that have none of their own. The last act stays."""
        self.arrived = asyncio.Event()
        """Set by each request."""
        self.opened = 0
        """Connections so far."""
        self.connections: set[_Connection] = set()
        """Those that are open."""
        self.tasks: set[asyncio.Task[None]] = set()
        """Requests that are being served."""
        self.gone = asyncio.Event()
        """Set when a connection has been closed, by either side."""
        self.token = token
        self.host, self.output, self.version = host or socket.gethostname(), output, version
        self.backend = backend
        self.traffic = 0
        """Iterations that the engine runs after each start."""
        self.gives: Path | None = None
        """The output directory whose files it sends, as our routes do; None if it has no such route."""
        self._server: asyncio.Server | None = None
        self.url = ""

    async def start(self, *, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        """Listen on loopback."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", port, ssl=tls, backlog=1024)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{port}"

    async def stop(self) -> None:
        """End it as a process that is killed."""
        assert self._server is not None
        self._server.close()
        for connection in list(self.connections):
            connection.abort()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def drop_idle(self) -> None:
        """Close all connections as a server does that has waited long enough for a next request."""
        for connection in list(self.connections):
            connection.close()

    def in_its_loop(self, call: Callable[[], object]) -> None:
        """Make a call in the loop that the server runs in, from another thread, and wait until it has been made."""
        assert self._server is not None
        done = threading.Event()

        def make() -> None:
            call()
            done.set()

        self._server.get_loop().call_soon_threadsafe(make)
        done.wait()

    def commands(self) -> list[str]:
        """Return what has been asked for."""
        return [arrival.command for arrival in self.arrivals]

    async def heard(self, command: str, count: int = 1) -> None:
        """Wait until it has been asked for something as often."""
        while self.commands().count(command) < count:
            self.arrived.clear()
            await self.arrived.wait()

    def act(self, command: str) -> Act:
        """Take the next act for a command."""
        acts = self.acts.get(command) or self.acts.get("") or [Act()]
        return acts.pop(0) if len(acts) > 1 else acts[0]

    async def answer(self, method: str, path: str, arrival: Arrival, act: Act) -> tuple[int, bytes]:
        """Return status and content of an answer; of a file, no status and the whole message."""
        if act.content is not None:
            return act.status, act.content
        status, error = act.status, act.error
        if path == ABOUT and status == HTTPStatus.OK:
            return status, json.dumps({"backend": self.backend}).encode()
        if status == HTTPStatus.OK:
            status, error = self._admitted(method, path, arrival)
        if status != HTTPStatus.OK:
            return status, json.dumps({"error": error}).encode()
        if self.gives is not None and path.startswith(FILES):
            return self._given(self.gives, unquote(path.removeprefix(FILES)), arrival)
        return await self._commanded(arrival)

    async def _commanded(self, arrival: Arrival) -> tuple[int, bytes]:
        replies = await self.engine.command(arrival.command, arrival.body)
        refused = " ".join(dict.fromkeys(str(reply["error"]) for reply in replies if reply["error"]))
        about = attrs.asdict(ServerInfo(host=self.host, output=self.output, profdeck=self.version))
        now_ns = time.time_ns()
        times = {"received_ns": now_ns, "sent_ns": now_ns}
        content = {"server": about, "answer": {"ranks": replies, "frontends": {}}, "times": times}
        if refused:
            return 409, json.dumps({**content, "error": refused}).encode()
        if arrival.command == "start" and self.traffic:
            self.engine.iterate(self.traffic)
        return 200, json.dumps(content).encode()

    def _given(self, directory: Path, place: str, arrival: Arrival) -> tuple[int, bytes]:
        try:
            found = open_path(directory, place)
        except NotServedError as error:
            return error.status, json.dumps({"error": str(error)}).encode()
        if not isinstance(found, ServedFile):
            files = [{"name": name, "size_bytes": size} for name, size in found.items()]
            return 200, json.dumps({"files": files}).encode()
        size, first, status = found.size_bytes, 0, "200 OK"
        content = found.read(0, size)
        found.close()
        if "range" in arrival.headers and arrival.headers["if-range"] == found.tag:
            first = int(arrival.headers["range"].removeprefix("bytes=").removesuffix("-"))
            status = f"206 Partial Content\r\nContent-Range: bytes {first}-{size - 1}/{size}"
        head = f"HTTP/1.1 {status}\r\nContent-Type: {FILE_TYPE}\r\nContent-Length: {size - first}\r\n"
        return 0, f"{head}ETag: {found.tag}\r\n\r\n".encode() + content[first:]

    def _admitted(self, method: str, path: str, arrival: Arrival) -> tuple[int, str]:
        route = FILES if self.gives is not None and path.startswith(FILES) else path
        if route not in ROUTES:
            return 404, "Not Found"
        if ROUTES[route] != method:
            return 405, "Method Not Allowed"
        if self.token is not None and arrival.headers.get("authorization") != f"Bearer {self.token}":
            return 401, "The token is missing or wrong. Set PROFDECK_TOKEN to the server's token."
        known = {"start": set(attrs.fields_dict(CaptureRequest)), "stop": {"request", "token", "reason", "wait_s"}}
        if unknown := set(arrival.body) - known.get(arrival.command, set()):
            return 400, f"unknown keys: {', '.join(sorted(unknown))}"
        return 200, ""


class _Connection(asyncio.Protocol):
    """One connection of a server: HTTP/1.1, one request after the other."""

    def __init__(self, server: SimulatedServer) -> None:
        self._server = server
        self._number = server.opened
        self._data = b""
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        server.opened += 1

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # asyncio's signature
        # What a request has begun goes on, as in servers of engines.
        self._server.connections.discard(self)
        self._server.gone.set()

    def data_received(self, data: bytes) -> None:
        at_ns = time.monotonic_ns()
        self._data += data
        if not self._data[:1].isalpha():  # such as TLS
            self._write(_message(400, b"", chunked=False))
            self.close()
            return
        head, end, rest = self._data.partition(b"\r\n\r\n")
        if not end or self._task is not None:
            return
        first, *lines = head.decode("ascii").split("\r\n")
        method, path, version = first.split(" ")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        size = int(headers.get("content-length", 0))
        if len(rest) < size:
            return
        assert version == "HTTP/1.1", version
        assert headers["host"] in self._server.url, headers
        self._data = rest[size:]
        arrival = Arrival(
            command=path.rpartition("/")[2],
            path=path,
            at_ns=at_ns,
            connection=self._number,
            headers=headers,
            body=json.loads(rest[:size] or b"{}"),
        )
        self._server.arrivals.append(arrival)
        self._server.arrived.set()
        self._task = asyncio.get_running_loop().create_task(self._serve(method, path, arrival))
        self._server.tasks.add(self._task)
        self._task.add_done_callback(self._server.tasks.discard)

    async def _serve(self, method: str, path: str, arrival: Arrival) -> None:
        act = self._server.act(arrival.command)
        if act.delay_s:
            await asyncio.sleep(act.delay_s)
        if act.raw is None:
            status, content = await self._server.answer(method, path, arrival, act)
            data = _message(status, content, chunked=act.chunked) if status else content
        else:
            data = act.raw
        for start in range(0, len(data), act.piece_bytes or max(len(data), 1)):
            if start and act.pause_s:
                await asyncio.sleep(act.pause_s)
            self._write(data[start : start + act.piece_bytes] if act.piece_bytes else data)
        arrival.answered_ns = time.monotonic_ns()
        if act.close:
            self.close()
        if not act.hang:
            self._task = None

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Close it when all has been sent."""
        assert self._transport is not None
        self._transport.close()

    def abort(self) -> None:
        """Close it at once."""
        assert self._transport is not None
        self._transport.abort()


def _message(status: int, content: bytes, *, chunked: bool) -> bytes:
    phrase = HTTPStatus(status).phrase
    head = f"HTTP/1.1 {status} {phrase}\r\nContent-Type: application/json\r\n"
    if not chunked:
        return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
    pieces = [content[start : start + 10] for start in range(0, len(content), 10)]
    body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in [*pieces, b""])
    return f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + body


@attrs.frozen(kw_only=True)
class SimulatedOptions(EngineOptions):
    """Options of simulated servers."""

    merge: bool = False
    """Merge the traces of all ranks. Default: off."""

    @property
    def merges_ranks(self) -> bool:
        return self.merge


@attrs.define
class SimulatedBackend(ControlBackend[SimulatedOptions]):
    """The backend of simulated servers, which have no profiler of their own."""

    name: ClassVar[str] = "simulated"
    Options: ClassVar[type[SimulatedOptions]] = SimulatedOptions

    def connect(self, target: object) -> Engine:
        return HttpEngine(str(target), timeout_s=self.options.rpc_timeout_s)

    @classmethod
    async def recognises(cls, url: str) -> bool:
        """Ask whose it is."""
        client = HttpClient(url, timeout_s=10)
        try:
            return bool((await client.request("GET", ABOUT, idempotent=True)).json() == {"backend": cls.name})
        except (CaptureError, ValueError):
            return False
        finally:
            await client.close()

    def native(self, engine: Engine, capture: CaptureRecord, request: CaptureRequest) -> EngineProfiler:  # noqa: ARG002  # base class signature
        raise TargetError(f"{engine.name} has no routes of profdeck.", Outcome.NOT_ENABLED)


@attrs.define
class OtherBackend(SimulatedBackend):
    """The backend of simulated servers of another kind."""

    name: ClassVar[str] = "other"


def offer(site: Path) -> str:
    """Return a PYTHONPATH that offers both backends as an installed distribution would.

    Args:
        site: an empty directory for what says so.
    """
    module = Path(__file__).stem
    backends = f"[profdeck.backends]\nsimulated = {module}:SimulatedBackend\nother = {module}:OtherBackend\n"
    install(site, "simulated", backends)
    return f"{site}{os.pathsep}{Path(__file__).parent}"


@contextlib.asynccontextmanager
async def simulated_servers(count: int) -> AsyncIterator[list[SimulatedServer]]:
    """Run servers on the present event loop."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(SimulatedServer()) for _ in range(count)]


class ServersInThread:
    """Servers on an event loop of their own, for tests that use several loops, or none."""

    def __init__(self, count: int = 1) -> None:
        self.servers: list[SimulatedServer] = []
        self._count = count
        self._ready = threading.Event()
        self._end: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> list[SimulatedServer]:
        self._thread.start()
        self._ready.wait()
        return self.servers

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._end is not None
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with simulated_servers(self._count) as self.servers:
                self._ready.set()
                await self._end.wait()
        finally:
            self._ready.set()
