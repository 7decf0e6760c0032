"""Tests of file collection from a simulated second host through the real routes."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import plain_http
import pytest
from engine_servers import Server, Servers, wait_until_ready
from servers import TOKEN, call, command_line, command_line_of_many, wait_for_command

import processes
import simulated_servers
from namespaces import OTHER_HOST
from profdeck.base.errors import TargetError
from profdeck.base.outcome import Outcome
from profdeck.engine.transport.http_engine import HttpEngine
from profdeck.records.manifest import read_manifest
from profdeck.records.status import Status
from profdeck.verification.run_report import read_run

SERVER = Path(__file__).parent / "jobs" / "rank_server.py"
SPARSE_BYTES = 300 << 20
HEADERS = {"Authorization": f"Bearer {TOKEN['PROFDECK_TOKEN']}"}


@pytest.fixture(scope="module")
def other_host() -> Callable[[Path], list[str | Path]]:
    """Function that returns a command prefix for another host. The given directory is not shared with that host."""
    tried = subprocess.run([*OTHER_HOST, "/mnt", "true"], check=False, capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no other host can be made here: {tried.stderr.strip()}")
    return lambda directory: [*OTHER_HOST, directory]


@pytest.fixture(scope="module")
def python_path(tally_path: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PYTHONPATH with the backends of the server and of its ranks."""
    return processes.python_path(tally_path, simulated_servers.install_backends(tmp_path_factory.mktemp("site")))


@pytest.fixture(scope="module")
def start(
    tmp_path_factory: pytest.TempPathFactory, python_path: str
) -> Iterator[Callable[[Path, list[str | Path]], Server]]:
    """Function that starts servers without an engine. The prefix precedes the command."""
    with Servers(tmp_path_factory.mktemp) as servers:

        def run(output: Path, prefix: list[str | Path], *arguments: str | Path) -> Server:
            environ = os.environ | TOKEN | {"PYTHONPATH": python_path, "PROFDECK__OUTPUT": str(output)}
            return wait_until_ready(servers.start(Server, [*prefix, sys.executable, SERVER, *arguments], environ))

        yield run


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output directory of the server on this host."""
    return tmp_path_factory.mktemp("output")


@pytest.fixture(scope="module")
def server(start: Callable[[Path, list[str | Path]], Server], output: Path) -> Server:
    """A server on this host."""
    return start(output, [])


def captured(server: Server, output: Path) -> Path:
    """Capture the ranks of a server. Return the trace path of rank 0."""
    body = {"id": "probe", "run": "run", "ranks": "all", "options": {"thread_bound": False}}
    for command, content in (("start", body), ("stop", {"request": "probe"})):
        assert call(server, "POST", command, content).is_success
        plain_http.post(f"{server.url}/iterate")
    return output / "run" / "step_000000" / "server" / "rank_0000.probe.trace.json"


@pytest.fixture(scope="module")
def trace(server: Server, output: Path) -> Path:
    """Trace of the server's rank 0."""
    return captured(server, output)


def get(server: Server, place: str, **headers: str) -> httpx.Response:
    """Request a file."""
    return plain_http.get(f"{server.url}/profdeck/files/{place}", headers=HEADERS | headers, timeout=30)


def open_files(server: Server) -> list[str]:
    """Return the names of files in run directories that a server has open."""
    found = []
    for link in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(link.readlink()))
    return [name for name in found if "/step_" in name]


@contextlib.contextmanager
def iterating(server: Server) -> Iterator[None]:
    """Run iterations on the ranks of a server until the context exits."""
    code = "import sys, httpx\nclient = httpx.Client(trust_env=False)\nwhile True: client.post(sys.argv[1])"
    command = [sys.executable, "-c", code, f"{server.url}/iterate"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def collect(run: Path) -> None:
    """Download the missing files of a run with `profdeck collect`."""
    command = [sys.executable, "-m", "profdeck", "collect", str(run)]
    done = subprocess.run(command, env=os.environ | TOKEN, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 engine captures are complete." in done.stdout


# Two hosts.


def test_capture_command_downloads_files_from_another_host(
    start: Callable[[Path, list[str | Path]], Server],
    other_host: Callable[[Path], list[str | Path]],
    python_path: str,
    tmp_path: Path,
) -> None:
    (directory := tmp_path / "profiles").mkdir()
    server = start(directory, other_host(directory))
    with iterating(server):
        process = command_line(
            server, "--iterations", "3", "--ranks", "all", "--set", "run=run", "--output", str(directory),
            "--set", "server.options.merge=true", PYTHONPATH=python_path,
        )  # fmt: skip
        out, err = wait_for_command(process, server)
    assert process.returncode == 0, out + err
    report = read_run(directory / "run")
    assert (report.status, report.problems) == (Status.COMPLETE, ())
    (capture,) = report.captures
    assert [(rank.rank, rank.host, bool(rank.events)) for rank in capture.ranks] == [
        (0, "elsewhere", True),
        (1, "elsewhere", True),
    ]
    for rank in capture.ranks:
        assert rank.manifest is not None
        assert read_manifest(rank.manifest).collected_from == f"elsewhere:{rank.manifest}"
    (target,) = report.targets
    assert target.notes[-1].startswith("Fetched 2 artifacts (")
    assert [artifact.kind for artifact in target.artifacts] == ["merged_trace"]


def test_files_in_another_container_are_downloaded_over_a_unix_socket(
    start: Callable[..., Server], other_host: Callable[[Path], list[str | Path]], python_path: str, tmp_path: Path
) -> None:
    (directory := tmp_path / "profiles").mkdir()
    at = tmp_path / "engine.sock"
    server = start(directory, other_host(directory), "--uds", at)
    own = ["--iterations", "3", "--ranks", "all", "--set", "run=run", "--output", str(directory)]
    with iterating(server):
        process = command_line_of_many("--url", f"unix:{at}", *own, PYTHONPATH=python_path)
        out, err = wait_for_command(process, server)
    assert process.returncode == 0, out + err
    report = read_run(directory / "run")
    assert (report.status, report.problems) == (Status.COMPLETE, ())
    (target,) = report.targets
    assert target.target == f"unix:{at}"
    assert any(note.startswith("Fetched 2 artifacts (") for note in target.notes)


def test_files_that_are_not_downloaded_are_listed_with_their_host(
    start: Callable[[Path, list[str | Path]], Server],
    other_host: Callable[[Path], list[str | Path]],
    python_path: str,
    tmp_path: Path,
) -> None:
    (directory := tmp_path / "profiles").mkdir()
    server = start(directory, other_host(directory))
    arguments = ["--iterations", "3", "--set", "run=run", "--output", str(directory), "--json"]
    with iterating(server):
        process = command_line(server, *arguments, "--set", "server.options.collect=false", PYTHONPATH=python_path)
        out, err = wait_for_command(process, server)
    assert process.returncode == 1, out + err
    (target,) = json.loads(out)["ls"]["targets"]
    place = directory / "run" / "step_000000" / "server"
    assert f"Files of rank 0 are on elsewhere, in {place}, not accessible from this host" in target["problems"][0]
    assert "Rank 0 was expected to record, but wrote no files." in target["problems"]
    collect(directory / "run")
    report = read_run(directory / "run")
    assert (report.status, report.problems) == (Status.COMPLETE, ())


# The real routes.


def test_route_serves_files_and_ranges(server: Server, trace: Path, output: Path) -> None:
    place = str(trace.relative_to(output))
    whole = get(server, place)
    assert (whole.status_code, whole.content) == (200, trace.read_bytes())
    assert whole.headers["content-type"] == "application/octet-stream"
    assert int(whole.headers["content-length"]) == len(whole.content)
    rest = get(server, place, Range="bytes=10-")
    assert (rest.status_code, rest.content) == (206, whole.content[10:])
    assert rest.headers["content-range"] == f"bytes 10-{len(whole.content) - 1}/{len(whole.content)}"
    same = get(server, place, Range="bytes=10-", **{"If-Range": whole.headers["etag"]})
    assert (same.status_code, same.content) == (206, whole.content[10:])
    for headers in (
        {"Range": "bytes=10-", "If-Range": '"another"'},
        {"Range": "bytes=10-20"},
        {"Range": f"bytes={len(whole.content)}-"},
        {"Range": "lines=1-"},
    ):
        other = get(server, place, **headers)
        assert (other.status_code, other.content) == (200, whole.content)
    listing = get(server, str(trace.parent.relative_to(output))).json()
    assert {file["name"] for file in listing["files"]} == {"rank_0000.probe.json", "rank_0001.probe.json"}
    assert listing["server"]["host"] == socket.gethostname()


@pytest.mark.parametrize(
    "place",
    ["", "..", "%2e%2e/%2e%2e/etc/hostname", "run/..%2f..%2fsecret", "run/run.json"],
)
def test_route_serves_only_files_of_captures(server: Server, trace: Path, place: str) -> None:
    """Use a raw socket, because HTTP clients normalize the path."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"GET /profdeck/files/{place} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        connection.sendall(f"{head}Authorization: {HEADERS['Authorization']}\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert answer.startswith(b"HTTP/1.1 404 "), answer
    assert b"No capture file" in answer


def test_route_requires_the_token(server: Server, trace: Path, output: Path) -> None:
    url = f"{server.url}/profdeck/files/{trace.relative_to(output)}"
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN["PROFDECK_TOKEN"]}):
        answer = plain_http.get(url, headers=headers)
        assert (answer.status_code, "PROFDECK_TOKEN" in answer.json()["error"]) == (401, True)


@pytest.fixture
def sparse(trace: Path) -> Iterator[Path]:
    """Trace replaced by a large sparse file, which uses no disk space."""
    before = trace.read_bytes()
    with trace.open("r+b") as file:
        file.truncate(SPARSE_BYTES)
    yield trace
    trace.write_bytes(before)


def test_server_replies_to_other_requests_during_downloads(server: Server, sparse: Path, output: Path) -> None:
    """The clients read everything, stop reading, or disconnect."""
    url = f"{server.url}/profdeck/files/{sparse.relative_to(output)}"
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(plain_http.stream("GET", url, headers=HEADERS)).iter_raw() for _ in range(4)]
        assert all(len(next(stream)) for stream in streams)
        assert len(open_files(server)) == 4
        for _ in range(20):
            assert plain_http.get(f"{server.url}/health", timeout=10).is_success
        assert sum(map(len, streams[0])) > SPARSE_BYTES - (1 << 20)
    deadline = time.monotonic() + 30
    while open_files(server) and time.monotonic() < deadline:
        time.sleep(0.05)  # no event outside of the server signals this
    assert open_files(server) == []


class Watched(io.FileIO):
    """New file that sets an event at its first write."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "xb")
        self.begun = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def write(self, data: Any) -> int:
        self._loop.call_soon_threadsafe(self.begun.set)
        return super().write(data)


def test_file_truncated_during_a_download(
    server: Server, sparse: Path, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in TOKEN.items():
        monkeypatch.setenv(name, value)
    place = str(sparse.relative_to(output))

    async def main() -> None:
        engine = HttpEngine(server.url, timeout_s=30)
        with Watched(tmp_path / "copy") as file:
            transfer = asyncio.create_task(engine.files(Path()).fetch(place, file, SPARSE_BYTES))
            await file.begun.wait()
            os.truncate(sparse, 1000)
            with contextlib.suppress(TargetError):  # unless the download restarts and fetches the truncated file
                await transfer
        await engine.close()

    asyncio.run(main())
    assert (tmp_path / "copy").stat().st_size < SPARSE_BYTES


MEMORY = """
import asyncio, resource, sys
from pathlib import Path
from profdeck.engine.transport.http_engine import HttpEngine

async def main(url, place, path):
    engine = HttpEngine(url, timeout_s=60)
    await engine.files(Path()).read(place.replace(".trace.json", ".json"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Path(path).open("xb", buffering=0) as file:
        await engine.files(Path()).fetch(place, file, 1 << 40)
    await engine.close()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)

asyncio.run(main(*sys.argv[1:]))
"""


def test_download_uses_little_memory_on_both_sides(server: Server, sparse: Path, output: Path, tmp_path: Path) -> None:
    def peak_kb() -> int:
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])

    place, copy = str(sparse.relative_to(output)), tmp_path / "copy"
    before = peak_kb()
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, server.url, place, copy],
        env=os.environ | TOKEN,
        capture_output=True,
        text=True,
        check=True,
    )
    assert copy.stat().st_size == SPARSE_BYTES
    copy.unlink()
    assert int(done.stdout) < 32 << 10
    assert peak_kb() - before < 32 << 10


def test_server_killed_during_a_download(
    start: Callable[[Path, list[str | Path]], Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in TOKEN.items():
        monkeypatch.setenv(name, value)
    server = start(tmp_path / "there", [])
    trace = captured(server, tmp_path / "there")
    os.truncate(trace, SPARSE_BYTES)
    place = str(trace.relative_to(tmp_path / "there"))

    async def main() -> None:
        engine = HttpEngine(server.url, timeout_s=30)
        with Watched(tmp_path / "copy") as file:
            transfer = asyncio.create_task(engine.files(Path()).fetch(place, file, SPARSE_BYTES))
            await file.begun.wait()
            server.process.kill()
            with pytest.raises(TargetError) as caught:
                await transfer
            assert caught.value.outcome is Outcome.UNREACHABLE
        await engine.close()

    asyncio.run(main())
