"""The connection to an engine's server: one is kept open, and whatever the server does is an error with a code."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import json
import os
import resource
import shutil
import socket
import ssl
import struct
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from processes import free_port
from profdeck.base.errors import TargetError
from profdeck.base.outcome import Outcome
from profdeck.engine.transport import http_client
from profdeck.engine.transport.file_transfer import FILE_TYPE
from profdeck.engine.transport.http_client import HttpClient, HttpResponse
from profdeck.engine.transport.http_engine import HttpEngine
from profdeck_traces.base.errors import ConfigError
from simulated_servers import Act, Arrival, ServersInThread, SimulatedServer

STATUS = "/profdeck/status"
START = {"id": "step1", "output": "/profiles", "run": "run", "role": "rollout", "token": "0123"}
STOP = {"request": "step1", "token": "0123"}


@pytest.fixture(autouse=True)
def sockets_are_closed() -> Iterator[None]:
    """Let a socket that a test forgot warn within that test."""
    yield
    gc.collect(1)


def with_server(check: Callable[[SimulatedServer, HttpEngine], Awaitable[None]], timeout_s: float = 30) -> None:
    """Run a check with a server and an engine that asks it."""

    async def main() -> None:
        async with SimulatedServer() as server:
            engine = HttpEngine(server.url, timeout_s=timeout_s)
            await check(server, engine)
            await engine.close()

    asyncio.run(main())


async def failure(awaitable: Awaitable[object]) -> TargetError:
    with pytest.raises(TargetError) as caught:
        await awaitable
    return caught.value


# Which host it is on.


def test_a_server_is_here_if_its_url_is_of_this_host() -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        assert await engine.is_here()
        elsewhere = {
            "server": {"host": "elsewhere", "output": "/profiles", "profdeck": "0.1.0"},
            "answer": {"ranks": []},
        }
        server.acts["status"] = [Act(content=json.dumps(elsewhere).encode())]
        await engine.about()
        assert not await engine.is_here()  # such as through a port that ssh forwards

    with_server(check)


def test_a_server_that_names_our_host_is_not_here_if_its_url_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it cannot choose where this process writes. The connection is made here, its name is of another host."""
    lookups = ["127.0.0.1", "203.0.113.9"]

    def stub_resolver(host: str, port: int | None, *_: object, **__: object) -> list[object]:
        assert host == "gpu7.test"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (lookups.pop(0), port or 0))]

    monkeypatch.setattr(socket, "getaddrinfo", stub_resolver)

    async def main() -> None:
        async with SimulatedServer() as server:
            server.url = server.url.replace("127.0.0.1", "gpu7.test")
            engine = HttpEngine(server.url, timeout_s=30)
            assert (await engine.about()).host == socket.gethostname()
            assert not await engine.is_here()
            server.acts["start"] = [Act(content=b'{"answer": {"ranks": []}}')]
            await engine.command("start", START)
            assert "output" not in server.arrivals[-1].body
            await engine.close()

    asyncio.run(main())
    assert not lookups


# One connection.


def test_all_requests_share_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROFDECK_TOKEN", "a secret")

    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        server.token = os.environ["PROFDECK_TOKEN"]
        assert await engine.has_profdeck()
        (rank,) = (await engine.command("start", START)).ranks
        assert (rank.state, rank.request, rank.token) == ("recording", "step1", "0123")
        (rank,) = (await engine.command("stop", STOP)).ranks
        assert rank.state == "ended"
        assert server.commands() == ["status", "start", "stop"]
        assert {arrival.connection for arrival in server.arrivals} == {0}
        status, start, stop = server.arrivals
        host = server.url.removeprefix("http://")
        common = {"host": host, "accept-encoding": "identity", "authorization": "Bearer a secret"}
        assert common.items() <= status.headers.items()
        assert (common | {"content-type": "application/json"}).items() <= start.headers.items()
        assert (start.body, stop.body) == (START, STOP | {"wait_s": 0})

    with_server(check)


def test_a_post_without_a_body_says_so() -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        response = await engine.request("POST", "/stop_profile")
        assert (response.status_code, response.is_success, response.path) == (404, False, "/stop_profile")
        assert server.arrivals[0].headers["content-length"] == "0"

    with_server(check)


def test_a_hung_request_does_not_keep_others_waiting() -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        server.acts["start"] = [Act(raw=b"", hang=True)]
        await engine.about()
        start = asyncio.create_task(engine.command("start", START))
        await server.heard("start")
        assert (await engine.command("status", {})).ranks
        assert server.opened == 2
        start.cancel()
        await asyncio.wait([start])

    with_server(check)


def test_event_loops_of_many_threads_at_once() -> None:
    with ServersInThread() as (server,):
        engine = HttpEngine(server.url, timeout_s=30)
        found: list[bool] = []
        together = threading.Barrier(4)

        def ask() -> None:
            together.wait()
            found.extend(asyncio.run(engine.has_profdeck()) for _ in range(20))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [True] * 80


def test_a_loop_that_ends_in_the_middle_of_a_request_leaves_nothing() -> None:
    with ServersInThread() as (server,):
        server.acts["status"] = [Act(raw=b"", hang=True), Act()]
        engine = HttpEngine(server.url, timeout_s=30)

        async def give_up() -> None:
            task = asyncio.create_task(engine.has_profdeck())
            while not server.arrivals:  # noqa: ASYNC110  # the server has a loop of its own
                await asyncio.sleep(0)
            assert not task.done()

        asyncio.run(give_up())
        assert asyncio.run(engine.has_profdeck())
        assert [arrival.connection for arrival in server.arrivals] == [0, 1]


# Connections that the server closes.


@pytest.mark.parametrize("reset", [False, True])
def test_a_connection_that_was_closed_while_idle_is_replaced(*, reset: bool) -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        await engine.has_profdeck()
        (connection,) = server.connections
        if reset:
            linger = struct.pack("ii", 1, 0)
            connection._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        server.drop_idle()
        await server.gone.wait()
        await engine.command("start", START)
        assert [arrival.connection for arrival in server.arrivals] == [0, 1]

    with_server(check)


@pytest.mark.parametrize(("command", "payload"), [("status", {}), ("stop", STOP)])
def test_a_request_is_repeated_if_the_idle_connection_closes_under_it(command: str, payload: Any) -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        await engine.has_profdeck()
        server.acts[command] = [Act(raw=b"", close=True), Act()]
        assert (await engine.command(command, payload)).ranks
        assert server.commands() == ["status", command, command]
        assert server.opened == 2

    with_server(check)


def test_a_start_is_never_repeated() -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        await engine.has_profdeck()
        server.acts["start"] = [Act(raw=b"", close=True), Act()]
        error = await failure(engine.command("start", START))
        assert error.outcome is Outcome.UNREACHABLE
        assert str(error) == (
            f"{server.url} cannot be reached: it closed the connection without a response. Is the server running?"
        )
        assert server.commands() == ["status", "start"]

    with_server(check)


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
    ],
)
def test_a_connection_that_cannot_go_on_is_not_kept(raw: bytes) -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        server.acts[""] = [Act(raw=raw)]
        for _ in range(2):
            assert (await engine.request("GET", "/version")).json() == {}
        assert server.opened == 2

    with_server(check)


# No answer.


def test_a_refused_connection() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    error = asyncio.run(failure(HttpEngine(url, timeout_s=5).has_profdeck()))
    assert error.outcome is Outcome.UNREACHABLE
    assert str(error) == f"{url} cannot be reached: Connection refused. Is the server running?"
    assert error.fix == Outcome.UNREACHABLE.fix


def test_a_name_that_nobody_knows() -> None:
    error = asyncio.run(failure(HttpEngine("http://no-such-host.invalid:1", timeout_s=60).has_profdeck()))
    assert error.outcome is Outcome.UNREACHABLE
    assert str(error).startswith("http://no-such-host.invalid:1 cannot be reached: ")


@pytest.mark.parametrize(
    ("place", "why"),
    [("none.sock", "No such file or directory"), ("file", "Connection refused"), ("a" * 120, "AF_UNIX path too long")],
)
def test_a_socket_that_nobody_listens_at(tmp_path: Path, place: str, why: str) -> None:
    (tmp_path / "file").touch()
    url = f"unix:{tmp_path / place}"
    error = asyncio.run(failure(HttpEngine(url, timeout_s=5).has_profdeck()))
    assert (error.outcome, str(error)) == (
        Outcome.UNREACHABLE,
        f"{url} cannot be reached: {why}. Is the server running?",
    )


def test_too_many_open_files() -> None:
    async def main() -> TargetError:
        engine = HttpEngine(f"http://127.0.0.1:{free_port()}", timeout_s=5)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        os.close(next_file := os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_file, hard))
        try:
            return await failure(engine.has_profdeck())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    error = asyncio.run(main())
    assert "Too many open files. Raise this process's limit of open files (ulimit -n)" in str(error)
    assert "ulimit" in error.fix


@contextlib.contextmanager
def full_listener() -> Iterator[tuple[str, int]]:
    """A port whose queue is full, so that connections to it neither come to be nor fail."""
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(2):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)  # noqa: FBT003  # the library's signature
            waiting.connect_ex(listener.getsockname())
        yield listener.getsockname()


def test_a_host_that_does_not_answer_at_all() -> None:
    with full_listener() as (host, port):
        error = asyncio.run(failure(HttpEngine(f"http://{host}:{port}", timeout_s=0.1).has_profdeck()))
    assert error.outcome is Outcome.UNREACHABLE
    assert "no connection within 0.05 seconds" in str(error)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n123",
        b"HTTP/1.1 100 Continue\r\n\r\n",
    ],
)
def test_a_server_that_hangs(raw: bytes) -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        server.acts["status"] = [Act(raw=raw, hang=True)]
        error = await failure(engine.has_profdeck())
        assert error.outcome is Outcome.TIMED_OUT
        assert str(error) == f"{server.url}: no response to {STATUS} within 0.1 seconds. Does the server hang?"
        await server.gone.wait()

    with_server(check, timeout_s=0.1)


def test_a_server_that_sends_for_ever_is_given_up() -> None:
    async def main() -> None:
        ended = asyncio.Event()

        async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 100)
                    await writer.drain()
            writer.close()
            ended.set()

        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        error = await failure(HttpEngine(f"http://127.0.0.1:{port}", timeout_s=0.2).has_profdeck())
        assert error.outcome is Outcome.TIMED_OUT
        await ended.wait()
        server.close()
        await server.wait_closed()

    asyncio.run(main())


def test_an_answer_in_chunks() -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        server.acts["status"] = [Act(chunked=True), Act(chunked=True, piece_bytes=3)]
        assert (await engine.about()).host == socket.gethostname()
        assert (await engine.about()).host == socket.gethostname()
        assert server.opened == 1

    with_server(check)


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.0 200 OK\r\n\r\n{}",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\n{}",
    ],
)
def test_unusual_answers(raw: bytes) -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        server.acts[""] = [Act(raw=raw, close=True)]
        assert (await engine.request("GET", "/version")).json() == {}

    with_server(check)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n123", "its response is incomplete or not HTTP"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n12", "its response is incomplete or not HTTP"),
        (b"220 mail.example ESMTP\r\n\r\n", "its response is incomplete or not HTTP"),
        (b"HTTP/1.1 200 OK\r\nX: " + bytes(200_000), "its response is incomplete or not HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 300000\r\n\r\n" + bytes(300_000), "response is larger than"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 140_000, "response is larger than"),
    ],
)
def test_what_is_no_answer(monkeypatch: pytest.MonkeyPatch, raw: bytes, why: str) -> None:
    monkeypatch.setattr(http_client, "_MAX_BODY_BYTES", 1 << 17)

    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        server.acts["status"] = [Act(raw=raw, close=True), Act()]
        error = await failure(engine.has_profdeck())
        assert error.outcome is Outcome.UNREACHABLE
        assert why in str(error)
        assert await engine.has_profdeck()  # the next one is not disturbed

    with_server(check)


def test_cancelling_drops_the_connection() -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        server.acts["status"] = [Act(raw=b"HTTP/1.1 200 OK\r\n", hang=True), Act()]
        task = asyncio.create_task(engine.has_profdeck())
        await server.arrived.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await server.gone.wait()
        assert not server.connections
        assert await engine.has_profdeck()

    with_server(check)


def test_cancelling_while_connecting() -> None:
    async def main() -> None:
        with full_listener() as (host, port):
            task = asyncio.create_task(HttpEngine(f"http://{host}:{port}", timeout_s=30).has_profdeck())
            for _ in range(3):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())


# Answers that are errors.


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (400, Outcome.REFUSED),
        (401, Outcome.REFUSED),
        (403, Outcome.REFUSED),
        (404, Outcome.NOT_ENABLED),
        (405, Outcome.NOT_ENABLED),
        (409, Outcome.REFUSED),
        (500, Outcome.REFUSED),
        (503, Outcome.REFUSED),
        (504, Outcome.TIMED_OUT),
    ],
)
def test_errors_have_a_code(status: int, outcome: Outcome) -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        server.acts["stop"] = [Act(status=status, error="It does not.")]
        error = await failure(engine.command("stop", STOP))
        assert str(error) == f"{server.url}: /profdeck/stop returned status {status}: It does not."
        assert (error.outcome, error.fix) == (outcome, outcome.fix)

    with_server(check)


@pytest.mark.parametrize("status", [404, 405])
def test_a_server_without_our_routes(status: int) -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        server.acts["status"] = [Act(status=status)]
        assert not await engine.has_profdeck()

    with_server(check)


def test_an_error_that_is_not_ours_is_quoted() -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        server.acts["status"] = [Act(status=503, content=b"<html>" + b"x" * 1000), Act(status=503, content=b"")]
        assert str(await failure(engine.has_profdeck())).endswith("returned status 503: <html>" + "x" * 494)
        assert str(await failure(engine.has_profdeck())).endswith("returned status 503: Service Unavailable")

    with_server(check)


@pytest.mark.parametrize("content", [b"<html>", b"", b"\xff\xfe", b"[" * 100_000, b"12"])
def test_an_answer_that_is_not_json(content: bytes) -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        server.acts["status"] = [Act(content=content)]
        error = await failure(engine.has_profdeck())
        assert str(error) == f"{server.url}: the response of {STATUS} is not JSON."
        assert error.outcome is Outcome.NOT_ENABLED

    with_server(check)


@pytest.mark.parametrize(
    "content", [b"{}", b'{"server": {"name": 1}}', b'{"server": 3}', b'{"server": {"host": "", "output": ""}}']
)
def test_routes_of_another_version(content: bytes) -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        server.acts["status"] = [Act(content=content)]
        for ask in (engine.has_profdeck(), engine.command("status", {}), engine.command("start", START)):
            error = await failure(ask)
            assert f"{server.url} has an incompatible version of profdeck: " in str(error)
            assert "same version" in error.fix

    with_server(check)


def test_a_start_beside_another_capture_has_a_code_of_its_own() -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        await engine.command("start", START)
        error = await failure(engine.command("start", START | {"id": "step2", "token": "4567"}))
        assert error.outcome is Outcome.ALREADY_ACTIVE
        assert str(error).endswith("returned status 409: Capture step1 is recording in this engine.")
        error = await failure(engine.command("start", START | {"first_step": -1}))
        assert error.outcome is Outcome.REFUSED

    with_server(check)


@pytest.mark.parametrize(
    "answer", [b"null", b"3", b'{"ranks": 3, "frontends": []}', b'{"ranks": ["x", {"refusal": 1}]}']
)
def test_a_strange_refusal_is_a_refusal(answer: bytes) -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        server.acts["stop"] = [Act(status=409, content=b'{"error": "no", "answer": %s}' % answer)]
        assert (await failure(engine.command("stop", STOP))).outcome is Outcome.REFUSED

    with_server(check)


def test_a_frontend_may_refuse_as_well() -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        content = b'{"error": "no", "answer": {"ranks": [], "frontends": {"tokenizer": {"refusal": "already_active"}}}}'
        server.acts["stop"] = [Act(status=409, content=content)]
        assert (await failure(engine.command("stop", STOP))).outcome is Outcome.ALREADY_ACTIVE

    with_server(check)


def test_a_rank_that_was_late_is_no_refusal() -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        content = b'{"error": "no", "answer": {"ranks": [{"refusal": "refused"}, {"refusal": "timed_out"}]}}'
        server.acts["start"] = [Act(status=409, content=content)]
        assert (await failure(engine.command("start", START))).outcome is Outcome.TIMED_OUT

    with_server(check)


@pytest.mark.parametrize(
    ("told", "writable"),
    [({}, None), ({"writable": None}, None), ({"writable": True}, True), ({"writable": False}, False)],
)
def test_a_server_may_say_whether_it_can_write(told: dict[str, Any], writable: bool | None) -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        said = {"host": "far", "output": "/profiles", "profdeck": "0.1.0", **told}
        server.acts["status"] = [Act(content=json.dumps({"server": said}).encode())]
        assert (await engine.about()).writable is writable

    with_server(check)


# Starts.


def test_a_start_is_ready_before_the_gate_opens() -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        arrived, opened = asyncio.Event(), asyncio.Event()

        async def gate() -> None:
            arrived.set()
            await opened.wait()

        engine.gate = gate
        start = asyncio.create_task(engine.command("start", START))
        await arrived.wait()
        assert server.commands() == ["status"]  # and the start waits on the same connection
        before_ns = time.monotonic_ns()
        opened.set()
        await start
        assert server.commands() == ["status", "start"]
        assert server.arrivals[1].at_ns > before_ns
        assert server.opened == 1
        await engine.command("stop", STOP)  # has no gate

    with_server(check)


def test_a_connection_that_closes_before_the_gate_opens_is_replaced() -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        async def gate() -> None:
            server.drop_idle()
            await server.gone.wait()

        engine.gate = gate
        assert (await engine.command("start", START)).ranks
        assert [arrival.connection for arrival in server.arrivals] == [0, 1]

    with_server(check)


def test_a_gate_that_gives_up_sends_nothing() -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        async def gate() -> None:
            raise asyncio.CancelledError

        engine.gate = gate
        with pytest.raises(asyncio.CancelledError):
            await engine.command("start", START)
        await engine.close()
        await server.gone.wait()
        assert server.commands() == ["status"]

    with_server(check)


@pytest.mark.parametrize("host", ["", "elsewhere"])
def test_paths_of_this_host_are_sent_to_it_only(host: str) -> None:
    async def main() -> None:
        async with SimulatedServer(host=host) as server:
            engine = HttpEngine(server.url, timeout_s=30)
            assert await engine.has_profdeck()
            server.acts["start"] = [Act(status=409)]
            await failure(engine.command("start", START))
            assert server.commands() == ["status", "start"]  # it has been asked where it is
            assert ("output" in server.arrivals[1].body) == (not host)
            await engine.close()

    asyncio.run(main())


# Files.


class FileServer(SimulatedServer):
    """Answers each GET with the next of some messages, made of the request's headers."""

    def __init__(self, *answers: Callable[[dict[str, str]], bytes], closes: bool = False) -> None:
        super().__init__()
        self.answers = list(answers)
        self.acts[""] = [Act(close=closes)]

    async def answer(self, *request: Any) -> tuple[int, bytes]:
        (arrival,) = (part for part in request if isinstance(part, Arrival))
        return 0, self.answers.pop(0)(arrival.headers)


CONTENT = bytes(range(256)) * 20_000


def file_answer(tag: str = "a", *, cut: int | None = None, content: bytes = CONTENT) -> Callable[..., bytes]:
    """Make answers with a file, or with the rest that was asked for; cut off, if wanted."""

    def make(headers: dict[str, str]) -> bytes:
        first = int(headers["range"][6:-1]) if headers.get("if-range") == tag else 0
        about = f"206 Partial Content\r\nContent-Range: bytes {first}-{len(content) - 1}/{len(content)}"
        head = f"HTTP/1.1 {about if first else '200 OK'}\r\nContent-Length: {len(content) - first}\r\n"
        head += f"Content-Type: {FILE_TYPE}\r\nETag: {tag}\r\n\r\n"
        return head.encode() + content[first : cut or len(content)]

    return make


def download(path: Path, *answers: Callable[..., bytes], closes: bool = True) -> tuple[HttpResponse, list[Any]]:
    """Get a file; returns the answer and the ranges that were asked for."""

    async def main() -> tuple[HttpResponse, list[Any]]:
        async with FileServer(*answers, closes=closes) as server:
            client = HttpClient(server.url, timeout_s=5)
            try:
                with path.open("xb", buffering=0) as file:
                    return await client.download("/file", file, most_bytes=len(CONTENT)), [
                        one.headers.get("range") for one in server.arrivals
                    ]
            finally:
                await client.close()

    return asyncio.run(main())


def test_a_file(tmp_path: Path) -> None:
    response, ranges = download(tmp_path / "file", file_answer(), closes=False)
    assert (response.status_code, response.content, ranges) == (200, b"", [None])
    assert (tmp_path / "file").read_bytes() == CONTENT
    download(tmp_path / "empty", file_answer(content=b""))
    assert (tmp_path / "empty").read_bytes() == b""


def test_a_file_is_resumed_as_long_as_something_comes(tmp_path: Path) -> None:
    cuts = [file_answer(cut=cut) for cut in (1_500_000, 3_000_000, 4_000_000)]
    response, ranges = download(tmp_path / "file", *cuts, file_answer())
    assert response.status_code == 206
    first = [int(one.removeprefix("bytes=").rstrip("-")) for one in ranges[1:]]
    assert 0 < first[0] < first[1] < first[2] <= 4_000_000, ranges
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_file_that_changes_meanwhile_begins_anew(tmp_path: Path) -> None:
    other = CONTENT[::-1]
    response, ranges = download(tmp_path / "file", file_answer("a", cut=3_000_000), file_answer("b", content=other))
    assert (response.status_code, ranges[0], len(ranges)) == (200, None, 2)
    assert (tmp_path / "file").read_bytes() == other


def test_a_server_that_cannot_resume_begins_anew(tmp_path: Path) -> None:
    def plain(_: dict[str, str]) -> bytes:
        return file_answer()({}).replace(b"ETag: a\r\n", b"")

    response, ranges = download(tmp_path / "file", lambda _: plain({})[:3_000_000], plain)
    assert (response.status_code, ranges) == (200, [None, None])
    assert (tmp_path / "file").read_bytes() == CONTENT


@pytest.mark.parametrize(
    "answers",
    [
        (file_answer(cut=1_000_000), file_answer(cut=1_000_000)),
        (file_answer("a", cut=2_000_000), file_answer("b", cut=1_000_000)),
        (file_answer(cut=1_000_000), lambda _: b"", lambda _: b""),  # aiohttp asks twice
        (file_answer(cut=1_000_000), lambda _: b"nonsense\r\n\r\n"),
        (file_answer(cut=1_000_000), lambda _: file_answer()({}).replace(b"200 OK", b"206 Partial Content")),
        (file_answer(content=CONTENT + b"x"),),
    ],
)
def test_an_attempt_that_brings_nothing_is_the_last(tmp_path: Path, answers: Any) -> None:
    with pytest.raises(TargetError) as caught:
        download(tmp_path / "file", *answers)
    assert caught.value.outcome is Outcome.UNREACHABLE


def test_what_is_no_file_is_returned(tmp_path: Path) -> None:
    for status in (200, 404):
        head = f"HTTP/1.1 {status} So\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n".encode()
        response, _ = download(tmp_path / str(status), lambda _, head=head: head + b"{}")
        assert (response.status_code, response.content) == (status, b"{}")
        assert (tmp_path / str(status)).read_bytes() == b""
    wrong = file_answer()({}).replace(b"200 OK", b"500 No")
    response, _ = download(tmp_path / "500", lambda _: wrong)
    assert response.content == CONTENT


def test_a_file_that_stops_coming(tmp_path: Path) -> None:
    async def main() -> None:
        async with SimulatedServer() as server:
            server.acts[""] = [Act(raw=file_answer(cut=1_000_000)({}), hang=True), Act(raw=b"", hang=True)]
            client = HttpClient(server.url, timeout_s=0.2)
            with (tmp_path / "file").open("xb", buffering=0) as file:
                assert (
                    await failure(client.download("/file", file, most_bytes=len(CONTENT)))
                ).outcome is Outcome.TIMED_OUT
            assert server.arrivals[1].headers["range"] == "bytes=1000000-"

    asyncio.run(main())


def test_a_slow_file_takes_as_long_as_it_takes(tmp_path: Path) -> None:
    async def main() -> None:
        async with SimulatedServer() as server:
            content = CONTENT[:100_000]
            server.acts[""] = [Act(raw=file_answer(content=content)({}), piece_bytes=10_000, pause_s=0.05)]
            client = HttpClient(server.url, timeout_s=0.4)
            with (tmp_path / "file").open("xb", buffering=0) as file:
                await client.download("/file", file, most_bytes=len(CONTENT))
            await client.close()
            assert (tmp_path / "file").read_bytes() == content

    asyncio.run(main())


def test_a_file_that_cannot_be_written_is_no_fault_of_the_server() -> None:
    async def main(file: Any) -> None:
        async with FileServer(file_answer()) as server:
            client = HttpClient(server.url, timeout_s=5)
            with pytest.raises(OSError, match="No space left"):
                await client.download("/file", file, most_bytes=len(CONTENT))
            await server.gone.wait()

    with Path("/dev/full").open("r+b", buffering=0) as full:
        asyncio.run(main(full))


# URLs.


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
        ("HTTP://Host.Example:80", "http://host.example"),
        ("https://host/", "https://host"),
        ("http://host/a b/ü/", "http://host/a%20b/%C3%BC"),
        ("http://host/a%20b", "http://host/a%20b"),
        ("http://[::1]:30000", "http://[::1]:30000"),
        ("http://bücher.example", "http://xn--bcher-kva.example"),
        ("http://user:p%40ss@host:1/x", "http://host:1/x"),
        ("unix:/run/engine.sock", "unix:/run/engine.sock"),
        ("unix:///run/engine.sock", "unix:/run/engine.sock"),
    ],
)
def test_urls(url: str, name: str) -> None:
    assert HttpEngine(url, timeout_s=1).name == name


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:8000", "localhost:8000", "ftp://host", "http://", "http://:8000", "http://host:port", "http://[::1",
     "http://host:70000", "http://host/?x=1", "http://host/#x", f"http://{'a' * 64}.example", "unix:",
     "unix:engine.sock", "unix://host/engine.sock", "unix:/engine.sock?x=1", "unix:/a\0b"],
)  # fmt: skip
def test_what_is_no_url_of_a_server(url: str) -> None:
    with pytest.raises(ConfigError, match="is not a valid server URL. Expected a URL such as http://127.0.0.1:8000"):
        HttpClient(url, timeout_s=1)


def test_user_and_password_are_sent_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROFDECK_TOKEN", "a secret")

    async def check(server: SimulatedServer, _: HttpEngine) -> None:
        engine = HttpEngine(server.url.replace("://", "://user:p%40ss@"), timeout_s=30)
        await engine.has_profdeck()
        expected = base64.b64encode(b"user:p@ss").decode()
        assert server.arrivals[0].headers["authorization"] == f"Basic {expected}"
        server.acts["status"] = [Act(status=500)]
        assert "p@ss" not in str(await failure(engine.has_profdeck())) + str(engine.url)
        await engine.close()

    with_server(check)


def test_a_prefix_of_the_path() -> None:
    async def check(server: SimulatedServer, _: HttpEngine) -> None:
        engine = HttpEngine(f"{server.url}/engine/1/", timeout_s=30)
        error = await failure(engine.command("status", {}))
        assert str(error) == f"{server.url}/engine/1: /engine/1{STATUS} returned status 404: Not Found"
        await engine.close()

    with_server(check)


@pytest.mark.parametrize("token", ["a\n", "ü", "a\x00"])
def test_a_token_that_cannot_be_sent(monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        monkeypatch.setattr("os.environ", {"PROFDECK_TOKEN": token})
        error = await failure(engine.has_profdeck())
        assert "the token contains a line break or another character" in str(error)
        assert token not in str(error)
        assert error.outcome is Outcome.REFUSED
        assert server.arrivals == []

    with_server(check)


# TLS.


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of 127.0.0.1 that nobody trusts, with its key."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl here to make a certificate with")
    directory = tmp_path_factory.mktemp("tls")
    key, path = directory / "key.pem", directory / "certificate.pem"
    names = ["-subj", "/CN=simulated", "-addext", "subjectAltName=IP:127.0.0.1"]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    command = ["openssl", "req", "-x509", *kind, *names, "-keyout", str(key), "-out", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    path.write_bytes(path.read_bytes() + key.read_bytes())
    return path


@pytest.fixture
def tls(certificate: Path) -> ssl.SSLContext:
    """The context of a server with that certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


def with_tls(tls: ssl.SSLContext, check: Callable[[SimulatedServer, HttpEngine], Awaitable[None]]) -> None:
    async def main() -> None:
        server = SimulatedServer()
        await server.start(tls=tls)
        engine = HttpEngine(server.url, timeout_s=30)
        await check(server, engine)
        await engine.close()
        await server.stop()

    asyncio.run(main())


def test_a_certificate_that_nobody_trusts(tls: ssl.SSLContext) -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        error = await failure(engine.has_profdeck())
        assert error.outcome is Outcome.UNREACHABLE
        assert "its certificate is not trusted: self-signed certificate. Set PROFDECK_TLS_AUTHORITY to" in str(error)
        assert "PROFDECK_TLS_AUTHORITY" in error.fix
        assert server.arrivals == []

    with_tls(tls, check)


def test_a_certificate_that_is_trusted(tls: ssl.SSLContext, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROFDECK_TLS_AUTHORITY", str(certificate))

    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        server.acts["status"] = [Act(), Act(piece_bytes=50, pause_s=0.001), Act(content=b'"%s"' % bytes(100_000))]
        assert (await engine.about()).host == socket.gethostname()
        assert (await engine.command("start", START)).ranks
        assert (await engine.about()).host == socket.gethostname()
        assert {arrival.connection for arrival in server.arrivals} == {0}
        assert len((await engine.request("GET", STATUS)).content) == 100_002
        server.acts["status"] = [Act()]
        server.drop_idle()  # it says so and waits for the client to say so, too
        server.acts["stop"] = [Act(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n123", close=True)]
        assert (await failure(engine.request("POST", "/stop"))).outcome is Outcome.UNREACHABLE
        await server.gone.wait()
        assert server.opened == 2
        server.acts["stop"] = [Act(raw=b"", hang=True)]
        stop = asyncio.create_task(failure(engine.request("POST", "/stop")))
        await server.heard("stop", 2)
        for connection in list(server.connections):
            connection.abort()  # without a word of TLS
        assert "closed the connection without a response" in str(await stop)

    with_tls(tls, check)


def test_a_server_that_asks_for_a_certificate(
    tls: ssl.SSLContext, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls.verify_mode = ssl.CERT_REQUIRED
    tls.load_verify_locations(certificate)  # whoever has this one is let in
    monkeypatch.setenv("PROFDECK_TLS_AUTHORITY", str(certificate))

    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        error = await failure(engine.has_profdeck())
        assert error.outcome is Outcome.UNREACHABLE
        assert "PROFDECK_TLS_CERTIFICATE" in error.fix
        assert server.arrivals == []
        monkeypatch.setenv("PROFDECK_TLS_CERTIFICATE", str(certificate))  # from now on, without a new client
        assert await engine.has_profdeck()

    with_tls(tls, check)


@pytest.mark.parametrize(
    ("variable", "content", "why"),
    [
        ("PROFDECK_TLS_AUTHORITY", None, "cannot be read: No such file or directory."),
        ("PROFDECK_TLS_AUTHORITY", "no certificate", "does not contain certificates in a usable PEM format: "),
        ("PROFDECK_TLS_CERTIFICATE", "", "does not contain a certificate and its key in a usable PEM format: "),
        ("PROFDECK_TLS_KEY", "a key", "is set without its certificate. Set PROFDECK_TLS_CERTIFICATE, too."),
    ],
)
def test_a_file_for_tls_that_is_wrong(
    variable: str, content: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file.pem"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv(variable, str(file))
    with pytest.raises(ConfigError, match=variable) as caught:
        HttpEngine("https://127.0.0.1:1", timeout_s=30)
    assert why in str(caught.value)


def test_https_at_a_port_of_http() -> None:
    async def check(server: SimulatedServer, _: HttpEngine) -> None:
        error = await failure(HttpEngine(server.url.replace("http", "https"), timeout_s=30).has_profdeck())
        assert error.outcome is Outcome.UNREACHABLE
        assert "Does the server use https or http on this port?" in str(error)

    with_server(check)


def test_http_at_a_port_of_https(tls: ssl.SSLContext) -> None:
    async def check(server: SimulatedServer, _: HttpEngine) -> None:
        error = await failure(HttpEngine(server.url.replace("https", "http"), timeout_s=30).has_profdeck())
        assert error.outcome is Outcome.UNREACHABLE

    with_tls(tls, check)


# Answers that lie.


@pytest.mark.parametrize(
    "changed", [{"world_size": 10**9}, {"world_size": 10**30}, {"rank": 10**30}, {"rank": -1}, {"pid": 10**400}]
)
def test_numbers_that_no_engine_has_are_another_version(changed: dict[str, int]) -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        reply = {"rank": 0, "world_size": 1, "host": "", "pid": 1, "state": "idle", **changed}
        about = {"host": "", "output": "", "profdeck": "0"}
        content = json.dumps({"server": about, "answer": {"ranks": [reply], "frontends": {}}})
        server.acts["status"] = [Act(content=content.encode())]
        before_s = time.monotonic()
        with pytest.raises(TargetError):
            await engine.command("status", {})
        assert time.monotonic() - before_s < 5

    with_server(check)


def test_an_answer_of_nested_lists_is_bounded() -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        server.acts["status"] = [Act(content=b"[" + b"[]," * (3 << 20) + b"[]]"), Act(content=b"[" * 100_000)]
        for _ in range(2):
            with pytest.raises(TargetError):
                await engine.about()

    with_server(check)
