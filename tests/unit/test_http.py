"""HTTP connections to engine servers: reuse, retries, downloads, TLS and error codes."""

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
def collect_sockets() -> Iterator[None]:
    """Collect unclosed sockets, so that the test that created them reports their warnings."""
    yield
    gc.collect(1)


def run_with_server(check: Callable[[SimulatedServer, HttpEngine], Awaitable[None]], timeout_s: float = 30) -> None:
    """Run a check with a simulated server and an engine that is connected to it."""

    async def main() -> None:
        async with SimulatedServer() as server:
            engine = HttpEngine(server.url, timeout_s=timeout_s)
            await check(server, engine)
            await engine.close()

    asyncio.run(main())


async def catch_target_error(awaitable: Awaitable[object]) -> TargetError:
    with pytest.raises(TargetError) as excinfo:
        await awaitable
    return excinfo.value


# Local and remote servers.


def test_server_is_local_if_its_url_and_its_host_name_are_local() -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        assert await engine.is_here()
        remote_status = {
            "server": {"host": "elsewhere", "output": "/profiles", "profdeck": "0.1.0"},
            "answer": {"ranks": []},
        }
        server.acts["status"] = [Act(content=json.dumps(remote_status).encode())]
        await engine.about()
        assert not await engine.is_here()  # for example, a port forwarded by ssh

    run_with_server(check)


def test_server_with_the_url_of_another_host_is_not_local(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, a server could choose the directory to which this process writes.

    The stub resolver first returns the local address, to connect, and then the address of another host.
    """
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


# Connection reuse.


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

    run_with_server(check)


def test_post_without_a_body_has_content_length_zero() -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        response = await engine.request("POST", "/stop_profile")
        assert (response.status_code, response.is_success, response.path) == (404, False, "/stop_profile")
        assert server.arrivals[0].headers["content-length"] == "0"

    run_with_server(check)


def test_hanging_request_does_not_delay_other_requests() -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        server.acts["start"] = [Act(raw=b"", hang=True)]
        await engine.about()
        start = asyncio.create_task(engine.command("start", START))
        await server.wait_for_command("start")
        assert (await engine.command("status", {})).ranks
        assert server.connection_count == 2
        start.cancel()
        await asyncio.wait([start])

    run_with_server(check)


def test_engine_can_be_used_by_concurrent_event_loops() -> None:
    with ServersInThread() as (server,):
        engine = HttpEngine(server.url, timeout_s=30)
        results: list[bool] = []
        barrier = threading.Barrier(4)

        def query() -> None:
            barrier.wait()
            results.extend(asyncio.run(engine.has_profdeck()) for _ in range(20))

        threads = [threading.Thread(target=query) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [True] * 80


def test_event_loop_can_end_during_a_request() -> None:
    with ServersInThread() as (server,):
        server.acts["status"] = [Act(raw=b"", hang=True), Act()]
        engine = HttpEngine(server.url, timeout_s=30)

        async def abandon_request() -> None:
            task = asyncio.create_task(engine.has_profdeck())
            while not server.arrivals:  # noqa: ASYNC110  # the server runs in another loop
                await asyncio.sleep(0)
            assert not task.done()

        asyncio.run(abandon_request())
        assert asyncio.run(engine.has_profdeck())
        assert [arrival.connection for arrival in server.arrivals] == [0, 1]


# Connections that the server closes.


@pytest.mark.parametrize("reset", [False, True])
def test_closed_idle_connection_is_replaced(*, reset: bool) -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        await engine.has_profdeck()
        (connection,) = server.connections
        if reset:
            linger = struct.pack("ii", 1, 0)
            connection._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        server.drop_idle()
        await server.disconnected.wait()
        await engine.command("start", START)
        assert [arrival.connection for arrival in server.arrivals] == [0, 1]

    run_with_server(check)


@pytest.mark.parametrize(("command", "payload"), [("status", {}), ("stop", STOP)])
def test_request_is_retried_if_the_idle_connection_closes(command: str, payload: Any) -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        await engine.has_profdeck()
        server.acts[command] = [Act(raw=b"", close=True), Act()]
        assert (await engine.command(command, payload)).ranks
        assert server.commands() == ["status", command, command]
        assert server.connection_count == 2

    run_with_server(check)


def test_start_is_never_retried() -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        await engine.has_profdeck()
        server.acts["start"] = [Act(raw=b"", close=True), Act()]
        error = await catch_target_error(engine.command("start", START))
        assert error.outcome is Outcome.UNREACHABLE
        assert str(error) == (
            f"{server.url} cannot be reached: it closed the connection without a response. Is the server running?"
        )
        assert server.commands() == ["status", "start"]

    run_with_server(check)


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
    ],
)
def test_connection_that_cannot_be_reused_is_closed(raw: bytes) -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        server.acts[""] = [Act(raw=raw)]
        for _ in range(2):
            assert (await engine.request("GET", "/version")).json() == {}
        assert server.connection_count == 2

    run_with_server(check)


# Missing and invalid responses.


def test_refused_connection_is_unreachable() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    error = asyncio.run(catch_target_error(HttpEngine(url, timeout_s=5).has_profdeck()))
    assert error.outcome is Outcome.UNREACHABLE
    assert str(error) == f"{url} cannot be reached: Connection refused. Is the server running?"
    assert error.fix == Outcome.UNREACHABLE.fix


def test_unknown_host_is_unreachable() -> None:
    error = asyncio.run(catch_target_error(HttpEngine("http://no-such-host.invalid:1", timeout_s=60).has_profdeck()))
    assert error.outcome is Outcome.UNREACHABLE
    assert str(error).startswith("http://no-such-host.invalid:1 cannot be reached: ")


@pytest.mark.parametrize(
    ("name", "reason"),
    [("none.sock", "No such file or directory"), ("file", "Connection refused"), ("a" * 120, "AF_UNIX path too long")],
)
def test_unusable_unix_socket_is_unreachable(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "file").touch()
    url = f"unix:{tmp_path / name}"
    error = asyncio.run(catch_target_error(HttpEngine(url, timeout_s=5).has_profdeck()))
    assert (error.outcome, str(error)) == (
        Outcome.UNREACHABLE,
        f"{url} cannot be reached: {reason}. Is the server running?",
    )


def test_limit_of_open_files_is_reported_with_its_fix() -> None:
    async def main() -> TargetError:
        engine = HttpEngine(f"http://127.0.0.1:{free_port()}", timeout_s=5)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        os.close(next_file := os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_file, hard))
        try:
            return await catch_target_error(engine.has_profdeck())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    error = asyncio.run(main())
    assert "Too many open files. Raise this process's limit of open files (ulimit -n)" in str(error)
    assert "ulimit" in error.fix


@contextlib.contextmanager
def open_full_listener() -> Iterator[tuple[str, int]]:
    """Yield the address of a listener with a full queue. Connection attempts to it hang."""
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(2):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)  # noqa: FBT003  # the library's signature
            waiting.connect_ex(listener.getsockname())
        yield listener.getsockname()


def test_connection_timeout_is_unreachable() -> None:
    with open_full_listener() as (host, port):
        error = asyncio.run(catch_target_error(HttpEngine(f"http://{host}:{port}", timeout_s=0.1).has_profdeck()))
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
def test_hanging_server_times_out(raw: bytes) -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        server.acts["status"] = [Act(raw=raw, hang=True)]
        error = await catch_target_error(engine.has_profdeck())
        assert error.outcome is Outcome.TIMED_OUT
        assert str(error) == f"{server.url}: no response to {STATUS} within 0.1 seconds. Does the server hang?"
        await server.disconnected.wait()

    run_with_server(check, timeout_s=0.1)


def test_endless_response_times_out() -> None:
    async def main() -> None:
        ended = asyncio.Event()

        async def send_endlessly(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 100)
                    await writer.drain()
            writer.close()
            ended.set()

        server = await asyncio.start_server(send_endlessly, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        error = await catch_target_error(HttpEngine(f"http://127.0.0.1:{port}", timeout_s=0.2).has_profdeck())
        assert error.outcome is Outcome.TIMED_OUT
        await ended.wait()
        server.close()
        await server.wait_closed()

    asyncio.run(main())


def test_chunked_response_is_read() -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        server.acts["status"] = [Act(chunked=True), Act(chunked=True, chunk_bytes=3)]
        assert (await engine.about()).host == socket.gethostname()
        assert (await engine.about()).host == socket.gethostname()
        assert server.connection_count == 1

    run_with_server(check)


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.0 200 OK\r\n\r\n{}",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\n{}",
    ],
)
def test_unusual_valid_responses_are_read(raw: bytes) -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        server.acts[""] = [Act(raw=raw, close=True)]
        assert (await engine.request("GET", "/version")).json() == {}

    run_with_server(check)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n123", "its response is incomplete or not HTTP"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n12", "its response is incomplete or not HTTP"),
        (b"220 mail.example ESMTP\r\n\r\n", "its response is incomplete or not HTTP"),
        (b"HTTP/1.1 200 OK\r\nX: " + bytes(200_000), "its response is incomplete or not HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 300000\r\n\r\n" + bytes(300_000), "response is larger than"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 140_000, "response is larger than"),
    ],
)
def test_invalid_response_is_unreachable(monkeypatch: pytest.MonkeyPatch, raw: bytes, reason: str) -> None:
    monkeypatch.setattr(http_client, "_MAX_BODY_BYTES", 1 << 17)

    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        server.acts["status"] = [Act(raw=raw, close=True), Act()]
        error = await catch_target_error(engine.has_profdeck())
        assert error.outcome is Outcome.UNREACHABLE
        assert reason in str(error)
        assert await engine.has_profdeck()  # the next request succeeds

    run_with_server(check)


def test_cancellation_closes_the_connection() -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        server.acts["status"] = [Act(raw=b"HTTP/1.1 200 OK\r\n", hang=True), Act()]
        task = asyncio.create_task(engine.has_profdeck())
        await server.request_received.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await server.disconnected.wait()
        assert not server.connections
        assert await engine.has_profdeck()

    run_with_server(check)


def test_connection_attempt_can_be_cancelled() -> None:
    async def main() -> None:
        with open_full_listener() as (host, port):
            task = asyncio.create_task(HttpEngine(f"http://{host}:{port}", timeout_s=30).has_profdeck())
            for _ in range(3):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())


# Error responses.


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
def test_status_codes_are_converted_to_outcomes(status: int, outcome: Outcome) -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        server.acts["stop"] = [Act(status=status, error="It does not.")]
        error = await catch_target_error(engine.command("stop", STOP))
        assert str(error) == f"{server.url}: /profdeck/stop returned status {status}: It does not."
        assert (error.outcome, error.fix) == (outcome, outcome.fix)

    run_with_server(check)


@pytest.mark.parametrize("status", [404, 405])
def test_server_without_profdeck_routes_is_recognised(status: int) -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        server.acts["status"] = [Act(status=status)]
        assert not await engine.has_profdeck()

    run_with_server(check)


def test_error_of_another_program_is_quoted() -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        server.acts["status"] = [Act(status=503, content=b"<html>" + b"x" * 1000), Act(status=503, content=b"")]
        assert str(await catch_target_error(engine.has_profdeck())).endswith("returned status 503: <html>" + "x" * 494)
        assert str(await catch_target_error(engine.has_profdeck())).endswith("returned status 503: Service Unavailable")

    run_with_server(check)


@pytest.mark.parametrize("content", [b"<html>", b"", b"\xff\xfe", b"[" * 100_000, b"12"])
def test_response_that_is_not_json_is_rejected(content: bytes) -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        server.acts["status"] = [Act(content=content)]
        error = await catch_target_error(engine.has_profdeck())
        assert str(error) == f"{server.url}: the response of {STATUS} is not JSON."
        assert error.outcome is Outcome.NOT_ENABLED

    run_with_server(check)


@pytest.mark.parametrize(
    "content", [b"{}", b'{"server": {"name": 1}}', b'{"server": 3}', b'{"server": {"host": "", "output": ""}}']
)
def test_response_of_an_incompatible_version_is_rejected(content: bytes) -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        server.acts["status"] = [Act(content=content)]
        for request in (engine.has_profdeck(), engine.command("status", {}), engine.command("start", START)):
            error = await catch_target_error(request)
            assert f"{server.url} has an incompatible version of profdeck: " in str(error)
            assert "same version" in error.fix

    run_with_server(check)


def test_start_during_another_capture_is_already_active() -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        await engine.command("start", START)
        error = await catch_target_error(engine.command("start", START | {"id": "step2", "token": "4567"}))
        assert error.outcome is Outcome.ALREADY_ACTIVE
        assert str(error).endswith("returned status 409: Capture step1 is recording in this engine.")
        error = await catch_target_error(engine.command("start", START | {"first_step": -1}))
        assert error.outcome is Outcome.REFUSED

    run_with_server(check)


@pytest.mark.parametrize(
    "answer", [b"null", b"3", b'{"ranks": 3, "frontends": []}', b'{"ranks": ["x", {"refusal": 1}]}']
)
def test_malformed_refusal_is_refused(answer: bytes) -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        server.acts["stop"] = [Act(status=409, content=b'{"error": "no", "answer": %s}' % answer)]
        assert (await catch_target_error(engine.command("stop", STOP))).outcome is Outcome.REFUSED

    run_with_server(check)


def test_refusal_of_a_frontend_is_reported() -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        content = b'{"error": "no", "answer": {"ranks": [], "frontends": {"tokenizer": {"refusal": "already_active"}}}}'
        server.acts["stop"] = [Act(status=409, content=content)]
        assert (await catch_target_error(engine.command("stop", STOP))).outcome is Outcome.ALREADY_ACTIVE

    run_with_server(check)


def test_timeout_of_a_rank_takes_precedence_over_refusals() -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        content = b'{"error": "no", "answer": {"ranks": [{"refusal": "refused"}, {"refusal": "timed_out"}]}}'
        server.acts["start"] = [Act(status=409, content=content)]
        assert (await catch_target_error(engine.command("start", START))).outcome is Outcome.TIMED_OUT

    run_with_server(check)


@pytest.mark.parametrize(
    ("fields", "writable"),
    [({}, None), ({"writable": None}, None), ({"writable": True}, True), ({"writable": False}, False)],
)
def test_writable_is_read_from_the_status_reply(fields: dict[str, Any], writable: bool | None) -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        server_fields = {"host": "far", "output": "/profiles", "profdeck": "0.1.0", **fields}
        server.acts["status"] = [Act(content=json.dumps({"server": server_fields}).encode())]
        assert (await engine.about()).writable is writable

    run_with_server(check)


# Starts.


def test_start_connects_before_the_gate_opens() -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        arrived, opened = asyncio.Event(), asyncio.Event()

        async def gate() -> None:
            arrived.set()
            await opened.wait()

        engine.gate = gate
        start = asyncio.create_task(engine.command("start", START))
        await arrived.wait()
        assert server.commands() == ["status"]  # the start waits on the same connection
        before_ns = time.monotonic_ns()
        opened.set()
        await start
        assert server.commands() == ["status", "start"]
        assert server.arrivals[1].received_ns > before_ns
        assert server.connection_count == 1
        await engine.command("stop", STOP)  # stops have no gate

    run_with_server(check)


def test_connection_closed_before_the_gate_opens_is_replaced() -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        async def gate() -> None:
            server.drop_idle()
            await server.disconnected.wait()

        engine.gate = gate
        assert (await engine.command("start", START)).ranks
        assert [arrival.connection for arrival in server.arrivals] == [0, 1]

    run_with_server(check)


def test_cancelled_gate_sends_no_start() -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        async def gate() -> None:
            raise asyncio.CancelledError

        engine.gate = gate
        with pytest.raises(asyncio.CancelledError):
            await engine.command("start", START)
        await engine.close()
        await server.disconnected.wait()
        assert server.commands() == ["status"]

    run_with_server(check)


@pytest.mark.parametrize("host", ["", "elsewhere"])
def test_local_output_path_is_sent_only_to_local_servers(host: str) -> None:
    async def main() -> None:
        async with SimulatedServer(host=host) as server:
            engine = HttpEngine(server.url, timeout_s=30)
            assert await engine.has_profdeck()
            server.acts["start"] = [Act(status=409)]
            await catch_target_error(engine.command("start", START))
            assert server.commands() == ["status", "start"]  # the client queries the server's host first
            assert ("output" in server.arrivals[1].body) == (not host)
            await engine.close()

    asyncio.run(main())


# Files.


class FileServer(SimulatedServer):
    """Server that calls one function per request. The function creates the response from the request's headers."""

    def __init__(self, *responses: Callable[[dict[str, str]], bytes], closes: bool = False) -> None:
        super().__init__()
        self.responses = list(responses)
        self.acts[""] = [Act(close=closes)]

    async def answer(self, *request: Any) -> tuple[int, bytes]:
        (arrival,) = (argument for argument in request if isinstance(argument, Arrival))
        return 0, self.responses.pop(0)(arrival.headers)


CONTENT = bytes(range(256)) * 20_000


def make_file_response(
    tag: str = "a", *, truncate_at: int | None = None, content: bytes = CONTENT
) -> Callable[..., bytes]:
    """Return a function that creates responses with a file or the requested range.

    Args:
        tag: the ETag of the file.
        truncate_at: size at which the content is truncated. None: the content is complete.
        content: the content of the file.
    """

    def make(headers: dict[str, str]) -> bytes:
        offset = int(headers["range"][6:-1]) if headers.get("if-range") == tag else 0
        status = f"206 Partial Content\r\nContent-Range: bytes {offset}-{len(content) - 1}/{len(content)}"
        head = f"HTTP/1.1 {status if offset else '200 OK'}\r\nContent-Length: {len(content) - offset}\r\n"
        head += f"Content-Type: {FILE_TYPE}\r\nETag: {tag}\r\n\r\n"
        return head.encode() + content[offset : truncate_at or len(content)]

    return make


def download(path: Path, *responses: Callable[..., bytes], closes: bool = True) -> tuple[HttpResponse, list[Any]]:
    """Download a file. Return the response and the requested ranges."""

    async def main() -> tuple[HttpResponse, list[Any]]:
        async with FileServer(*responses, closes=closes) as server:
            client = HttpClient(server.url, timeout_s=5)
            try:
                with path.open("xb", buffering=0) as file:
                    return await client.download("/file", file, most_bytes=len(CONTENT)), [
                        arrival.headers.get("range") for arrival in server.arrivals
                    ]
            finally:
                await client.close()

    return asyncio.run(main())


def test_download_writes_the_file(tmp_path: Path) -> None:
    response, ranges = download(tmp_path / "file", make_file_response(), closes=False)
    assert (response.status_code, response.content, ranges) == (200, b"", [None])
    assert (tmp_path / "file").read_bytes() == CONTENT
    download(tmp_path / "empty", make_file_response(content=b""))
    assert (tmp_path / "empty").read_bytes() == b""


def test_download_resumes_while_it_makes_progress(tmp_path: Path) -> None:
    truncated_responses = [make_file_response(truncate_at=size) for size in (1_500_000, 3_000_000, 4_000_000)]
    response, ranges = download(tmp_path / "file", *truncated_responses, make_file_response())
    assert response.status_code == 206
    offsets = [int(byte_range.removeprefix("bytes=").rstrip("-")) for byte_range in ranges[1:]]
    assert 0 < offsets[0] < offsets[1] < offsets[2] <= 4_000_000, ranges
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_download_restarts_if_the_file_changes(tmp_path: Path) -> None:
    changed_content = CONTENT[::-1]
    response, ranges = download(
        tmp_path / "file",
        make_file_response("a", truncate_at=3_000_000),
        make_file_response("b", content=changed_content),
    )
    assert (response.status_code, ranges[0], len(ranges)) == (200, None, 2)
    assert (tmp_path / "file").read_bytes() == changed_content


def test_download_restarts_if_the_server_cannot_resume(tmp_path: Path) -> None:
    def respond_without_etag(_: dict[str, str]) -> bytes:
        return make_file_response()({}).replace(b"ETag: a\r\n", b"")

    response, ranges = download(tmp_path / "file", lambda _: respond_without_etag({})[:3_000_000], respond_without_etag)
    assert (response.status_code, ranges) == (200, [None, None])
    assert (tmp_path / "file").read_bytes() == CONTENT


@pytest.mark.parametrize(
    "responses",
    [
        (make_file_response(truncate_at=1_000_000), make_file_response(truncate_at=1_000_000)),
        (make_file_response("a", truncate_at=2_000_000), make_file_response("b", truncate_at=1_000_000)),
        (make_file_response(truncate_at=1_000_000), lambda _: b"", lambda _: b""),  # aiohttp retries once
        (make_file_response(truncate_at=1_000_000), lambda _: b"nonsense\r\n\r\n"),
        (
            make_file_response(truncate_at=1_000_000),
            lambda _: make_file_response()({}).replace(b"200 OK", b"206 Partial Content"),
        ),
        (make_file_response(content=CONTENT + b"x"),),
    ],
)
def test_download_fails_after_an_attempt_without_progress(tmp_path: Path, responses: Any) -> None:
    with pytest.raises(TargetError) as excinfo:
        download(tmp_path / "file", *responses)
    assert excinfo.value.outcome is Outcome.UNREACHABLE


def test_responses_that_are_not_files_are_returned(tmp_path: Path) -> None:
    for status in (200, 404):
        head = f"HTTP/1.1 {status} So\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n".encode()
        response, _ = download(tmp_path / str(status), lambda _, head=head: head + b"{}")
        assert (response.status_code, response.content) == (status, b"{}")
        assert (tmp_path / str(status)).read_bytes() == b""
    error_response = make_file_response()({}).replace(b"200 OK", b"500 No")
    response, _ = download(tmp_path / "500", lambda _: error_response)
    assert response.content == CONTENT


def test_stalled_download_times_out(tmp_path: Path) -> None:
    async def main() -> None:
        async with SimulatedServer() as server:
            server.acts[""] = [
                Act(raw=make_file_response(truncate_at=1_000_000)({}), hang=True),
                Act(raw=b"", hang=True),
            ]
            client = HttpClient(server.url, timeout_s=0.2)
            with (tmp_path / "file").open("xb", buffering=0) as file:
                assert (
                    await catch_target_error(client.download("/file", file, most_bytes=len(CONTENT)))
                ).outcome is Outcome.TIMED_OUT
            assert server.arrivals[1].headers["range"] == "bytes=1000000-"

    asyncio.run(main())


def test_slow_download_does_not_time_out(tmp_path: Path) -> None:
    async def main() -> None:
        async with SimulatedServer() as server:
            content = CONTENT[:100_000]
            server.acts[""] = [Act(raw=make_file_response(content=content)({}), chunk_bytes=10_000, pause_s=0.05)]
            client = HttpClient(server.url, timeout_s=0.4)
            with (tmp_path / "file").open("xb", buffering=0) as file:
                await client.download("/file", file, most_bytes=len(CONTENT))
            await client.close()
            assert (tmp_path / "file").read_bytes() == content

    asyncio.run(main())


def test_local_write_error_is_raised_unchanged() -> None:
    async def main(file: Any) -> None:
        async with FileServer(make_file_response()) as server:
            client = HttpClient(server.url, timeout_s=5)
            with pytest.raises(OSError, match="No space left"):
                await client.download("/file", file, most_bytes=len(CONTENT))
            await server.disconnected.wait()

    with Path("/dev/full").open("r+b", buffering=0) as full_device:
        asyncio.run(main(full_device))


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
def test_url_is_normalised(url: str, name: str) -> None:
    assert HttpEngine(url, timeout_s=1).name == name


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:8000", "localhost:8000", "ftp://host", "http://", "http://:8000", "http://host:port", "http://[::1",
     "http://host:70000", "http://host/?x=1", "http://host/#x", f"http://{'a' * 64}.example", "unix:",
     "unix:engine.sock", "unix://host/engine.sock", "unix:/engine.sock?x=1", "unix:/a\0b"],
)  # fmt: skip
def test_invalid_server_url_is_rejected(url: str) -> None:
    with pytest.raises(ConfigError, match="is not a valid server URL. Expected a URL such as http://127.0.0.1:8000"):
        HttpClient(url, timeout_s=1)


def test_credentials_are_sent_but_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROFDECK_TOKEN", "a secret")

    async def check(server: SimulatedServer, _: HttpEngine) -> None:
        engine = HttpEngine(server.url.replace("://", "://user:p%40ss@"), timeout_s=30)
        await engine.has_profdeck()
        expected = base64.b64encode(b"user:p@ss").decode()
        assert server.arrivals[0].headers["authorization"] == f"Basic {expected}"
        server.acts["status"] = [Act(status=500)]
        assert "p@ss" not in str(await catch_target_error(engine.has_profdeck())) + str(engine.url)
        await engine.close()

    run_with_server(check)


def test_path_prefix_of_the_url_is_sent() -> None:
    async def check(server: SimulatedServer, _: HttpEngine) -> None:
        engine = HttpEngine(f"{server.url}/engine/1/", timeout_s=30)
        error = await catch_target_error(engine.command("status", {}))
        assert str(error) == f"{server.url}/engine/1: /engine/1{STATUS} returned status 404: Not Found"
        await engine.close()

    run_with_server(check)


@pytest.mark.parametrize("token", ["a\n", "ü", "a\x00"])
def test_token_with_invalid_characters_is_rejected(monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        monkeypatch.setattr("os.environ", {"PROFDECK_TOKEN": token})
        error = await catch_target_error(engine.has_profdeck())
        assert "the token contains a line break or another character" in str(error)
        assert token not in str(error)
        assert error.outcome is Outcome.REFUSED
        assert server.arrivals == []

    run_with_server(check)


# TLS.


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File with a self-signed certificate of 127.0.0.1 and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
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
    """TLS context of a server with the certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


def run_with_tls_server(tls: ssl.SSLContext, check: Callable[[SimulatedServer, HttpEngine], Awaitable[None]]) -> None:
    async def main() -> None:
        server = SimulatedServer()
        await server.start(tls=tls)
        engine = HttpEngine(server.url, timeout_s=30)
        await check(server, engine)
        await engine.close()
        await server.stop()

    asyncio.run(main())


def test_untrusted_certificate_is_rejected(tls: ssl.SSLContext) -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        error = await catch_target_error(engine.has_profdeck())
        assert error.outcome is Outcome.UNREACHABLE
        assert "its certificate is not trusted: self-signed certificate. Set PROFDECK_TLS_AUTHORITY to" in str(error)
        assert "PROFDECK_TLS_AUTHORITY" in error.fix
        assert server.arrivals == []

    run_with_tls_server(tls, check)


def test_trusted_certificate_is_accepted(
    tls: ssl.SSLContext, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROFDECK_TLS_AUTHORITY", str(certificate))

    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        server.acts["status"] = [Act(), Act(chunk_bytes=50, pause_s=0.001), Act(content=b'"%s"' % bytes(100_000))]
        assert (await engine.about()).host == socket.gethostname()
        assert (await engine.command("start", START)).ranks
        assert (await engine.about()).host == socket.gethostname()
        assert {arrival.connection for arrival in server.arrivals} == {0}
        assert len((await engine.request("GET", STATUS)).content) == 100_002
        server.acts["status"] = [Act()]
        server.drop_idle()  # sends close_notify and waits for the client's
        server.acts["stop"] = [Act(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n123", close=True)]
        assert (await catch_target_error(engine.request("POST", "/stop"))).outcome is Outcome.UNREACHABLE
        await server.disconnected.wait()
        assert server.connection_count == 2
        server.acts["stop"] = [Act(raw=b"", hang=True)]
        stop = asyncio.create_task(catch_target_error(engine.request("POST", "/stop")))
        await server.wait_for_command("stop", 2)
        for connection in list(server.connections):
            connection.abort()  # without close_notify
        assert "closed the connection without a response" in str(await stop)

    run_with_tls_server(tls, check)


def test_client_certificate_is_sent_if_it_is_configured(
    tls: ssl.SSLContext, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls.verify_mode = ssl.CERT_REQUIRED
    tls.load_verify_locations(certificate)  # the server accepts this client certificate
    monkeypatch.setenv("PROFDECK_TLS_AUTHORITY", str(certificate))

    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        error = await catch_target_error(engine.has_profdeck())
        assert error.outcome is Outcome.UNREACHABLE
        assert "PROFDECK_TLS_CERTIFICATE" in error.fix
        assert server.arrivals == []
        monkeypatch.setenv("PROFDECK_TLS_CERTIFICATE", str(certificate))  # used by the existing client, too
        assert await engine.has_profdeck()

    run_with_tls_server(tls, check)


@pytest.mark.parametrize(
    ("variable", "content", "reason"),
    [
        ("PROFDECK_TLS_AUTHORITY", None, "cannot be read: No such file or directory."),
        ("PROFDECK_TLS_AUTHORITY", "no certificate", "does not contain certificates in a usable PEM format: "),
        ("PROFDECK_TLS_CERTIFICATE", "", "does not contain a certificate and its key in a usable PEM format: "),
        ("PROFDECK_TLS_KEY", "a key", "is set without its certificate. Set PROFDECK_TLS_CERTIFICATE, too."),
    ],
)
def test_invalid_tls_file_is_rejected(
    variable: str, content: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file.pem"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv(variable, str(file))
    with pytest.raises(ConfigError, match=variable) as excinfo:
        HttpEngine("https://127.0.0.1:1", timeout_s=30)
    assert reason in str(excinfo.value)


def test_https_url_of_an_http_server_is_unreachable() -> None:
    async def check(server: SimulatedServer, _: HttpEngine) -> None:
        error = await catch_target_error(HttpEngine(server.url.replace("http", "https"), timeout_s=30).has_profdeck())
        assert error.outcome is Outcome.UNREACHABLE
        assert "Does the server use https or http on this port?" in str(error)

    run_with_server(check)


def test_http_url_of_an_https_server_is_unreachable(tls: ssl.SSLContext) -> None:
    async def check(server: SimulatedServer, _: HttpEngine) -> None:
        error = await catch_target_error(HttpEngine(server.url.replace("https", "http"), timeout_s=30).has_profdeck())
        assert error.outcome is Outcome.UNREACHABLE

    run_with_tls_server(tls, check)


# Replies with invalid values.


@pytest.mark.parametrize(
    "fields", [{"world_size": 10**9}, {"world_size": 10**30}, {"rank": 10**30}, {"rank": -1}, {"pid": 10**400}]
)
def test_out_of_range_numbers_in_a_reply_are_rejected(fields: dict[str, int]) -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        reply = {"rank": 0, "world_size": 1, "host": "", "pid": 1, "state": "idle", **fields}
        server_fields = {"host": "", "output": "", "profdeck": "0"}
        content = json.dumps({"server": server_fields, "answer": {"ranks": [reply], "frontends": {}}})
        server.acts["status"] = [Act(content=content.encode())]
        started_s = time.monotonic()
        with pytest.raises(TargetError):
            await engine.command("status", {})
        assert time.monotonic() - started_s < 5

    run_with_server(check)


def test_response_of_many_or_nested_lists_is_rejected() -> None:
    async def check(server: SimulatedServer, engine: HttpEngine) -> None:
        server.acts["status"] = [Act(content=b"[" + b"[]," * (3 << 20) + b"[]]"), Act(content=b"[" * 100_000)]
        for _ in range(2):
            with pytest.raises(TargetError):
                await engine.about()

    run_with_server(check)
