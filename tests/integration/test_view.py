"""Tests of `profdeck view` with browsers, through a tunnel, and with malicious requests."""

from __future__ import annotations

import asyncio
import gzip
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from browsers import browse
from gpu_job import GpuJob
from profdeck_traces.cli.viewer.server import serve
from profdeck_traces.cli.viewer.ui import find_ui

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return GpuJob(ranks=2).write(tmp_path_factory.mktemp("view") / "run <b>")


@asynccontextmanager
async def view(*arguments: object) -> AsyncIterator[str]:
    """Run the command and yield its URL. Then interrupt the command and check its exit status."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "profdeck", "view", *map(str, arguments), "--no-browser",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        url = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().strip()
        if url:
            yield url
            process.send_signal(signal.SIGINT)
        _, stderr = await asyncio.wait_for(process.communicate(), 30)
        assert url, stderr.decode()
        assert process.returncode == 0, stderr.decode()
        assert b"ssh -L" in stderr
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def fetch(url: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers, allow_redirects=False) as answer:
        return answer.status, await answer.read(), dict(answer.headers)


def test_trace_requires_the_token_and_an_allowed_host(job: Path, tmp_path: Path) -> None:
    (tmp_path / "ui").mkdir()
    (tmp_path / "ui" / "index.html").write_text("<script>let own = 1;</script><script src='x.js'></script>")
    (tmp_path / "ui" / "x.js").write_text("1")
    (tmp_path / "secret").write_text("secret")

    async def body() -> None:
        async with view(job, "--ui", tmp_path / "ui") as url:
            origin, token = re.fullmatch(r"(http://127\.0\.0\.1:\d+)/([\w-]{22})/", url).groups()  # type: ignore[union-attr]
            status, trace, headers = await fetch(f"{url}trace")
            assert (status, headers["Content-Type"]) == (200, "application/octet-stream")
            assert b"ampere_bf16" in trace
            assert "Access-Control-Allow-Origin" not in headers
            assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
            assert headers["Referrer-Policy"] == "no-referrer"
            port = origin.rpartition(":")[2]
            for host, expected in (
                (f"127.0.0.1:{port}", 200),
                (f"localhost:{port}", 200),
                ("localhost:9999", 200),  # the local end of a tunnel
                ("evil.example", 421),
                (f"evil.example:{port}", 421),
                ("127.0.0.1.evil.example", 421),
                ("", 421),
            ):
                assert (await fetch(f"{url}trace", Host=host))[0] == expected, host
            for path in ("", "trace", f"{token[:-1]}/trace", f"{token}x/trace", f"{token}", f"{token}/ui"):
                assert (await fetch(f"{origin}/{path}"))[0] in {403, 404}, path
            for path in ("../secret", "..%2fsecret", "%2e%2e/secret", "ui/..%2f..%2fsecret", "x.js/../../../secret"):
                assert b"secret" not in (await fetch(f"{url}ui/{path}"))[1]
            assert (await fetch(f"{url}ui/service_worker.js"))[0] == 404
            _, _, headers = await fetch(f"{url}ui/")
            policy = headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "connect-src 'self' data: blob:;" in policy
            assert policy.count("'sha256-") == 1
            status, _, headers = await fetch(url, Host="localhost:9999")
            assert status == 302
            assert headers["Location"].startswith(
                f"/{token}/ui/#!/?url=http%3A%2F%2Flocalhost%3A9999%2F{token}%2Ftrace&"
            )

    asyncio.run(body())


def test_temporary_files_are_removed(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    async def body() -> None:
        async with view(job):
            assert len([*tmp_path.iterdir()]) == 1  # noqa: ASYNC240 - a small local directory

    asyncio.run(body())
    assert [*tmp_path.iterdir()] == []


def test_operators_are_shown_on_request_or_without_a_device(job: Path, tmp_path: Path) -> None:
    host = tmp_path / "host.json"
    host.write_text(
        '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 2, "pid": 1, "tid": 1}]}'
    )

    async def body() -> None:
        for path, options, expected in (
            (job, ("--no-critical-path",), False),
            (job, ("--operators",), True),
            (host, (), True),
        ):
            async with view(path, *options) as url:
                assert (b"aten::mm" in (await fetch(f"{url}trace"))[1]) is expected

    asyncio.run(body())


def test_perfetto_trace_is_served_unchanged(tmp_path: Path) -> None:
    (tmp_path / "own.pftrace.gz").write_bytes(gzip.compress(b"own"))

    async def body() -> None:
        async with view(tmp_path / "own.pftrace.gz") as url:
            assert gzip.decompress((await fetch(f"{url}trace"))[1]) == b"own"

    asyncio.run(body())


@pytest.mark.parametrize("browser", ["chromium", "firefox"])
def test_page_without_a_user_interface_requests_no_other_host(job: Path, browser: str) -> None:
    """The page only has a button that opens ui.perfetto.dev."""
    (trace, *_) = sorted(job.iterdir())

    async def body() -> None:
        async with serve(trace, "run <b>", None) as url, browse(browser) as page:
            await page.open(url)
            assert await page.evaluate("document.querySelector('h1').textContent") == "run <b>"
            assert await page.evaluate(
                "fetch('trace').then((answer) => answer.arrayBuffer()).then((it) => it.byteLength)"
            )
            assert await page.evaluate("fetch('https://ui.perfetto.dev').then(() => 1, () => 0)") == 0
            allowed = (url.rsplit("/", 2)[0], "https://ui.perfetto.dev", "about:", "chrome:", "resource:")
            assert [request for request in page.requests if not request.startswith(allowed)] == []

    asyncio.run(body())


@pytest.mark.torch  # its environment has the user interface
@pytest.mark.parametrize("browser", ["chromium", "firefox"])
def test_perfetto_shows_tracks_and_requests_no_other_host(job: Path, browser: str) -> None:
    if find_ui(None) is None:
        pytest.skip("the user interface is not installed: pip install 'profdeck[view]'")

    async def body() -> None:
        async with view(job) as url, browse(browser) as page:
            await page.open(url)
            # Tracks are drawn on canvases. Only their headers have text.
            text = "document.body.innerText"
            names = ("rank1.trace.json.gz", "stream 7", "critical path")
            await page.until(" && ".join(f"{text}.includes('{name}')" for name in names), 90)
            origin = url.rsplit("/", 2)[0]
            foreign = [
                request for request in page.requests if not request.startswith((origin, "data:", "blob:", "about:"))
            ]
            blocked = [error for error in page.errors if "Content Security Policy" in error]
            assert [url for url in foreign if not any(url.split("?")[0] in error for error in blocked)] == []

    asyncio.run(body())


def test_invalid_arguments_are_reported(job: Path, tmp_path: Path) -> None:
    async def error_output(*arguments: object) -> str:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "profdeck", "view", *map(str, arguments),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            stdout, stderr = await asyncio.wait_for(process.communicate(), 60)
        finally:
            if process.returncode is None:  # the server is running
                process.kill()
                await process.wait()
        assert process.returncode
        assert stdout == b""
        assert b"Traceback" not in stderr
        return " ".join(stderr.decode().split())

    async def body() -> None:
        assert "no index.html found" in await error_output(job, "--ui", tmp_path)
        with socket.create_server(("127.0.0.1", 0)) as occupied:
            port = occupied.getsockname()[1]
            assert f"--port {port} cannot be used: Address already in use" in await error_output(job, "--port", port)
        assert "A file in Perfetto's format cannot be merged" in await error_output(tmp_path / "a.pftrace", job)

    asyncio.run(body())
