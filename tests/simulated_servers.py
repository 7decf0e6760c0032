"""Simulated engine servers with profdeck's routes, but without an engine.

Many servers can share an event loop. Each server records its requests. Tests can script its next replies: delay,
reject, hang, close the connection, or send arbitrary bytes. The servers reject the requests that profdeck's routes
reject.
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
from urllib.parse import parse_qsl, unquote

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
"""Route by which a backend recognises a simulated server. It returns the name of the server's backend."""


@attrs.frozen(kw_only=True)
class Act:
    """Scripted reply to one request."""

    delay_s: float = 0.0
    """Delay before the reply."""
    status: int = 200
    """Status of the reply. If it is not 200, the request does not reach the engine."""
    error: str = "simulated"
    """Error message of a reply with another status than 200."""
    content: bytes | None = None
    """Body of the reply, which replaces the JSON document."""
    raw: bytes | None = None
    """Bytes that replace the complete reply, including the status line and headers."""
    chunk_bytes: int = 0
    """Number of bytes per write. 0 sends the reply in one write."""
    pause_s: float = 0.0
    """Delay between two writes."""
    chunked: bool = False
    """True to send the body with chunked encoding, without a length."""
    hang: bool = False
    """True to ignore later requests on this connection, which stays open."""
    close: bool = False
    """True to close the connection after the reply, without a ``Connection: close`` header."""


class CommandedEngine(Protocol):
    """The engine of a simulated server. It returns the replies of all ranks as plain data."""

    async def command(self, command: str, payload: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Run a start, stop or status command on all ranks."""

    def iterate(self, count: int) -> None:
        """Run `count` iterations."""


class SimulatedEngine:
    """Ranks that accept requests like those of an engine, but record nothing."""

    def __init__(self, ranks: int = 1) -> None:
        self.ranks = ranks
        self.request: CaptureRequest | None = None
        self.state = RequestState.IDLE
        self.iterations = 0
        self.has_files = True
        """True if a stopped capture has files."""
        self.flushed = asyncio.Event()
        """While this event is cleared, the files remain incomplete."""
        self.flushed.set()

    async def command(self, command: str, payload: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Run a start, stop or status command on all ranks."""
        refusal = error = None
        if command == "start":
            try:
                request = structure(dict(payload), CaptureRequest, where="")
                if self._now() in {RequestState.RECORDING, RequestState.WRITING}:
                    refusal, error = Outcome.ALREADY_ACTIVE, f"Capture {self._name} is {self._now()} in this engine."
                else:
                    self.request, self.state, self.iterations = request, RequestState.RECORDING, 0
            except ProfdeckError as problem:
                refusal, error = Outcome.REFUSED, str(problem)
        elif command == "stop" and self.request is not None:
            is_current = payload["request"] == self.request.id and payload.get("token") in {None, self.request.token}
            self.state = RequestState.WRITING if is_current and self.state is RequestState.RECORDING else self.state
        return [unstructure(self._reply(rank, error, refusal)) for rank in range(self.ranks)]

    def iterate(self, count: int) -> None:
        """Record `count` iterations, or fewer if the window ends first."""
        if self.request is not None and self.state is RequestState.RECORDING:
            window = self.request.iterations
            self.iterations += count
            if window is not None and window.count is not None and self.iterations >= window.count:
                self.end_window(window.count)

    def end_window(self, iterations: int) -> None:
        """End the window after this total number of iterations."""
        self.state, self.iterations = RequestState.WRITING, iterations

    @property
    def _name(self) -> str:
        return self.request.id if self.request else ""

    def _now(self) -> RequestState:
        return RequestState.ENDED if self.state is RequestState.WRITING and self.flushed.is_set() else self.state

    def _reply(self, rank: int, error: str | None, refusal: Outcome | None) -> Reply:
        selected = self.request is not None and self.request.selects(rank)
        return Reply(
            rank=rank,
            world_size=self.ranks,
            host=socket.gethostname(),
            pid=0,
            state=self._now() if selected else RequestState.IDLE,
            request=self.request.id if self.request else None,
            token=self.request.token if self.request else None,
            owner=self.request.owner if self.request else None,
            iterations=self.iterations if selected else 0,
            captures=(self._recorded(rank),)
            if selected and self.has_files and self._now() is RequestState.ENDED
            else (),
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
    """An engine whose ranks record iterations with a device backend that the test installs.

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
        """Run a start, stop or status command on all ranks."""
        if command == "start" and self._output:
            payload = {**payload, "output": str(self._output)}
        return [
            reply_data(handle_command(command, payload, recorder, recorder.start, recorder.stop))
            for recorder in self.ranks
        ]

    def iterate(self, count: int = 1) -> None:
        """Run `count` iterations on each rank."""
        for recorder in self.ranks:
            for _ in range(count):
                recorder.begin(BatchKind.DECODE, "execute")
                recorder.end()


@attrs.define(kw_only=True)
class Arrival:
    """A received request."""

    command: str
    """Last component of the path."""
    path: str
    received_ns: int
    """Time of receipt, from `time.monotonic_ns`."""
    connection: int
    """Index of the connection among all connections of the server."""
    headers: Mapping[str, str]
    body: Mapping[str, Any]
    replied_ns: int | None = None
    """Time at which the complete reply was written, from `time.monotonic_ns`."""


class SimulatedServer:
    """A server on loopback. `acts` scripts its replies, one act per request."""

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
        engine: the server's engine. None creates a `SimulatedEngine`.
        token: the token that clients must send, or None if no token is required.
        host: the host name that the server reports. The default is the name of this host.
        output: the output directory that the server reports.
        version: the version of profdeck that the server reports.
        backend: the name of the backend that recognises the server.
        """
        self.engine = engine or SimulatedEngine()
        self.arrivals: list[Arrival] = []
        self.acts: dict[str, list[Act]] = {}
        """Scripted replies by command. ``""`` applies to commands without acts. The last act of a list is repeated."""
        self.request_received = asyncio.Event()
        """Event that each request sets."""
        self.connection_count = 0
        """Number of connections opened so far."""
        self.connections: set[_Connection] = set()
        """Open connections."""
        self.tasks: set[asyncio.Task[None]] = set()
        """Tasks of the requests in progress."""
        self.disconnected = asyncio.Event()
        """Event that is set when either side closes a connection."""
        self.token = token
        self.host, self.output, self.version = host or socket.gethostname(), output, version
        self.backend = backend
        self.iterations_after_start = 0
        """Number of iterations that the engine runs after each start."""
        self.served_directory: Path | None = None
        """Directory from which the server serves files, or None if it has no file route."""
        self._server: asyncio.Server | None = None
        self.url = ""

    async def start(self, *, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        """Listen on loopback, at a free port if `port` is 0."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", port, ssl=tls, backlog=1024)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{port}"

    async def stop(self) -> None:
        """Abort all connections and tasks, as if the process was killed."""
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
        """Close all connections, as a server does after its keep-alive timeout."""
        for connection in list(self.connections):
            connection.close()

    def run_in_loop(self, call: Callable[[], object]) -> None:
        """Call a function in the server's event loop from another thread, and wait until it has returned."""
        assert self._server is not None
        finished = threading.Event()

        def run() -> None:
            call()
            finished.set()

        self._server.get_loop().call_soon_threadsafe(run)
        finished.wait()

    def commands(self) -> list[str]:
        """Return the commands of all received requests."""
        return [arrival.command for arrival in self.arrivals]

    async def wait_for_command(self, command: str, count: int = 1) -> None:
        """Wait until the server has received a command `count` times."""
        while self.commands().count(command) < count:
            self.request_received.clear()
            await self.request_received.wait()

    def act(self, command: str) -> Act:
        """Return the next act for a command. Remove it unless it is the last."""
        acts = self.acts.get(command) or self.acts.get("") or [Act()]
        return acts.pop(0) if len(acts) > 1 else acts[0]

    async def answer(self, method: str, path: str, arrival: Arrival, act: Act) -> tuple[int, bytes]:
        """Return the status and body of a reply. For a file, return status 0 and the complete message."""
        if act.content is not None:
            return act.status, act.content
        status, error = act.status, act.error
        if path == ABOUT and status == HTTPStatus.OK:
            return status, json.dumps({"backend": self.backend}).encode()
        if status == HTTPStatus.OK:
            status, error = self._validate(method, path, arrival)
        if status != HTTPStatus.OK:
            return status, json.dumps({"error": error}).encode()
        if self.served_directory is not None and path.startswith(FILES):
            return self._serve_path(self.served_directory, unquote(path.removeprefix(FILES)), arrival)
        return await self._run_command(arrival)

    async def _run_command(self, arrival: Arrival) -> tuple[int, bytes]:
        replies = await self.engine.command(arrival.command, arrival.body)
        error = " ".join(dict.fromkeys(str(reply["error"]) for reply in replies if reply["error"]))
        server_info = attrs.asdict(ServerInfo(host=self.host, output=self.output, profdeck=self.version))
        now_ns = time.time_ns()
        times = {"received_ns": now_ns, "sent_ns": now_ns}
        content = {"server": server_info, "answer": {"ranks": replies, "frontends": {}}, "times": times}
        if error:
            return 409, json.dumps({**content, "error": error}).encode()
        if arrival.command == "start" and self.iterations_after_start:
            self.engine.iterate(self.iterations_after_start)
        return 200, json.dumps(content).encode()

    def _serve_path(self, directory: Path, path: str, arrival: Arrival) -> tuple[int, bytes]:
        try:
            resource = open_path(directory, path)
        except NotServedError as error:
            return error.status, json.dumps({"error": str(error)}).encode()
        if not isinstance(resource, ServedFile):
            files = [{"name": name, "size_bytes": size} for name, size in resource.items()]
            return 200, json.dumps({"files": files}).encode()
        size, first_byte, status = resource.size_bytes, 0, "200 OK"
        content = resource.read(0, size)
        resource.close()
        if "range" in arrival.headers and arrival.headers["if-range"] == resource.tag:
            first_byte = int(arrival.headers["range"].removeprefix("bytes=").removesuffix("-"))
            status = f"206 Partial Content\r\nContent-Range: bytes {first_byte}-{size - 1}/{size}"
        head = f"HTTP/1.1 {status}\r\nContent-Type: {FILE_TYPE}\r\nContent-Length: {size - first_byte}\r\n"
        return 0, f"{head}ETag: {resource.tag}\r\n\r\n".encode() + content[first_byte:]

    def _validate(self, method: str, path: str, arrival: Arrival) -> tuple[int, str]:
        route = FILES if self.served_directory is not None and path.startswith(FILES) else path
        if route not in ROUTES:
            return 404, "Not Found"
        if ROUTES[route] != method:
            return 405, "Method Not Allowed"
        if self.token is not None and arrival.headers.get("authorization") != f"Bearer {self.token}":
            return 401, "The token is missing or wrong. Set PROFDECK_TOKEN to the server's token."
        valid_keys = {
            "start": set(attrs.fields_dict(CaptureRequest)),
            "stop": {"request", "token", "reason", "wait_s"},
            "status": {"request", "token"},
        }
        if unknown_keys := set(arrival.body) - valid_keys.get(arrival.command, set()):
            return 400, f"unknown keys: {', '.join(sorted(unknown_keys))}"
        return 200, ""


class _Connection(asyncio.Protocol):
    """A connection to a server. It handles HTTP/1.1 requests sequentially."""

    def __init__(self, server: SimulatedServer) -> None:
        self._server = server
        self._number = server.connection_count
        self._data = b""
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        server.connection_count += 1

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # asyncio's signature
        # As in engine servers, a request continues after its client has disconnected.
        self._server.connections.discard(self)
        self._server.disconnected.set()

    def data_received(self, data: bytes) -> None:
        received_ns = time.monotonic_ns()
        self._data += data
        if not self._data[:1].isalpha():  # such as TLS
            self._write(_message(400, b"", chunked=False))
            self.close()
            return
        head, separator, body = self._data.partition(b"\r\n\r\n")
        if not separator or self._task is not None:
            return
        request_line, *header_lines = head.decode("ascii").split("\r\n")
        method, target, version = request_line.split(" ")
        path, _, query = target.partition("?")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in header_lines)}
        size = int(headers.get("content-length", 0))
        if len(body) < size:
            return
        assert version == "HTTP/1.1", version
        assert headers["host"] in self._server.url, headers
        self._data = body[size:]
        arrival = Arrival(
            command=path.rpartition("/")[2],
            path=path,
            received_ns=received_ns,
            connection=self._number,
            headers=headers,
            body=json.loads(body[:size] or b"{}") | dict(parse_qsl(query)),
        )
        self._server.arrivals.append(arrival)
        self._server.request_received.set()
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
        for start in range(0, len(data), act.chunk_bytes or max(len(data), 1)):
            if start and act.pause_s:
                await asyncio.sleep(act.pause_s)
            self._write(data[start : start + act.chunk_bytes] if act.chunk_bytes else data)
        arrival.replied_ns = time.monotonic_ns()
        if act.close:
            self.close()
        if not act.hang:
            self._task = None

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Close the connection after all data has been sent."""
        assert self._transport is not None
        self._transport.close()

    def abort(self) -> None:
        """Close the connection immediately."""
        assert self._transport is not None
        self._transport.abort()


def _message(status: int, content: bytes, *, chunked: bool) -> bytes:
    phrase = HTTPStatus(status).phrase
    head = f"HTTP/1.1 {status} {phrase}\r\nContent-Type: application/json\r\n"
    if not chunked:
        return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
    chunks = [content[start : start + 10] for start in range(0, len(content), 10)]
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in [*chunks, b""])
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
    """The backend of simulated servers, which have no native profiler."""

    name: ClassVar[str] = "simulated"
    Options: ClassVar[type[SimulatedOptions]] = SimulatedOptions

    def connect(self, target: object) -> Engine:
        return HttpEngine(str(target), timeout_s=self.options.rpc_timeout_s)

    @classmethod
    async def recognises(cls, url: str) -> bool:
        """Query the server for the name of its backend."""
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
    """A second backend of simulated servers."""

    name: ClassVar[str] = "other"


def install_backends(site: Path) -> str:
    """Install a distribution with both backends, and return a PYTHONPATH that includes it.

    Args:
        site: an empty directory for the distribution's metadata.
    """
    module = Path(__file__).stem
    backends = f"[profdeck.backends]\nsimulated = {module}:SimulatedBackend\nother = {module}:OtherBackend\n"
    install(site, "simulated", backends)
    return f"{site}{os.pathsep}{Path(__file__).parent}"


@contextlib.asynccontextmanager
async def simulated_servers(count: int) -> AsyncIterator[list[SimulatedServer]]:
    """Run servers on the current event loop."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(SimulatedServer()) for _ in range(count)]


class ServersInThread:
    """Servers on an event loop in a separate thread, for tests without a loop or with several loops."""

    def __init__(self, count: int = 1) -> None:
        self.servers: list[SimulatedServer] = []
        self._count = count
        self._ready = threading.Event()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> list[SimulatedServer]:
        self._thread.start()
        self._ready.wait()
        return self.servers

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with simulated_servers(self._count) as self.servers:
                self._ready.set()
                await self._stop.wait()
        finally:
            self._ready.set()
