"""Tests of local copies of remote runs, including interrupted copies and malicious file names."""

from __future__ import annotations

import contextlib
import functools
import http.server
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from profdeck.cli import app
from profdeck_traces.base.errors import ProfdeckError
from profdeck_traces.inputs import remote_limits, url_copies
from profdeck_traces.inputs.url_copies import fetch
from profdeck_traces.inputs.urls import RemoteError, RemotePath
from remote_stores import RecordingStore

URL = "recording://profiles/job"
SECRET = "sesame-0123456789"  # noqa: S105 - not a real password


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PROFDECK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def store() -> RecordingStore:
    """A store that contains a run with 40 files."""
    store = RecordingStore.empty()
    store.pipe("/profiles/job/run.json", b"{}")
    for number in range(39):
        store.pipe(f"/profiles/job/step_000001/trainer/{number}.trace.json", b"[%d]" % number)
    return store


def read_contents(path: Path) -> dict[str, bytes]:
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_only_changed_files_are_copied_again(store: RecordingStore) -> None:
    copy = fetch(URL)
    assert len(read_contents(copy)) == len(store.transfers) == 40
    store.transfers.clear()
    assert fetch(URL) == copy
    assert store.transfers == []
    store.pipe("/profiles/job/step_000001/trainer/7.trace.json", b"[8]")  # the same size
    store.rm("/profiles/job/step_000001/trainer/8.trace.json")
    store.rm("/profiles/job/run.json")
    store.pipe("/profiles/job/run.json/inside", b"")
    fetch(URL)
    assert store.transfers == ["/profiles/job/run.json/inside", "/profiles/job/step_000001/trainer/7.trace.json"]
    assert len(contents := read_contents(copy)) == 39
    assert contents["step_000001/trainer/7.trace.json"] == b"[8]"


def test_progress_is_reported_per_file(store: RecordingStore) -> None:
    reports = list[tuple[int, int]]()
    fetch(URL, on_progress=lambda bytes_read, total: reports.append((bytes_read, total)))
    assert reports[-1] == (40, 40)
    assert reports == sorted(reports)


def test_interrupted_copy_is_continued(store: RecordingStore) -> None:
    type(store).transfers_left = 35
    with pytest.raises(ProfdeckError, match=r"recording://profiles/job cannot be copied: ConnectionResetError.*Repeat"):
        fetch(URL)
    type(store).transfers_left = float("inf")
    store.transfers.clear()
    assert len(read_contents(fetch(URL))) == 40
    assert len(store.transfers) < 40


def test_corrupt_index_or_file_is_repaired(store: RecordingStore) -> None:
    copy = fetch(URL)
    (copy / "run.json").write_bytes(b"{")
    (copy / "extra.json").write_bytes(b"{}")
    fetch(URL)
    assert (copy / "run.json").read_bytes() == b"{}"
    assert len(read_contents(copy)) == 40
    (copy.parents[1] / "index.json").write_bytes(b'{"a": 1}')
    store.transfers.clear()
    fetch(URL)
    assert len(store.transfers) == 40


def test_file_that_changes_during_the_copy_is_reported(store: RecordingStore) -> None:
    type(store).extra_files = {"/profiles/job/run.json": {"name": "/profiles/job/run.json", "size": 3, "type": "file"}}
    with pytest.raises(ProfdeckError, match=r"job/run.json changed during the copy\. .*Repeat the command"):
        fetch(URL)


@pytest.mark.parametrize(
    "name",
    ["../out", "step/../../out", "../job-2/out", "/../out", "..", "a/./b", "a//out", "../../../../../../../../tmp/out"],
)
def test_paths_outside_the_copy_are_rejected(store: RecordingStore, tmp_path: Path, name: str) -> None:
    path = f"/profiles/job/{name}"
    store.pipe("/profiles/job/ok", b"")
    store.store[path] = store.store["/profiles/job/ok"]
    type(store).extra_files = {path: {"name": path, "size": 0, "type": "file"}}
    with pytest.raises(ProfdeckError, match="contains the invalid path .*Nothing was copied"):
        fetch(URL)
    assert not [*tmp_path.rglob("out"), *tmp_path.rglob("run.json")]


@pytest.mark.parametrize("name", ["nul\0", "surrogate\ud800", "n" * 300, "run.json/below-a-file"])
def test_invalid_local_file_names_are_reported(store: RecordingStore, name: str) -> None:
    path = f"/profiles/job/{name}"
    store.store[path] = store.store["/profiles/job/run.json"]
    type(store).extra_files = {path: {"name": path, "size": 2, "type": "file"}}
    with pytest.raises(ProfdeckError, match="recording://profiles/job cannot be copied"):
        fetch(URL)


def test_latest_is_the_run_with_the_newest_creation_time(store: RecordingStore) -> None:
    for name, content in {"a": b'{"created_ns": 9}', "b": b'{"created_ns": 8}', "c": b"no JSON", "d": b"[]"}.items():
        store.pipe(f"/profiles/{name}/run.json", content)
    store.pipe("/profiles/file.json", b"{}")
    store.pipe("/profiles/empty/file.json", b"{}")
    assert fetch("recording://profiles/latest").name == "a"
    with pytest.raises(
        ProfdeckError,
        match="profiles contains 5 runs: a, b, c, d, job. Pass the URL of a run, such as recording://profiles/a",
    ):
        fetch("recording://profiles")
    with pytest.raises(
        ProfdeckError, match="There is no run in recording://profiles/job, so 'latest' cannot be resolved"
    ):
        fetch(f"{URL}/latest")
    store.pipe("/profiles/latest/x.json", b"{}")
    assert fetch("recording://profiles/latest").name == "latest"


def test_newest_run_with_an_invalid_name_is_rejected(store: RecordingStore, tmp_path: Path) -> None:
    store.store["/profiles/../run.json"] = store.store["/profiles/job/run.json"]
    store.pipe("/profiles/job/run.json", b'{"created_ns": -1}')
    with pytest.raises(ProfdeckError):
        fetch("recording://profiles/latest")
    assert not list(tmp_path.rglob("run.json"))


def test_url_without_files_is_reported() -> None:
    RecordingStore.empty()
    with pytest.raises(ProfdeckError, match="recording://profiles/job does not exist or contains no files"):
        fetch(URL)
    with pytest.raises(ProfdeckError, match=r"wrong://\*\*\*@x is not a URL that fsspec supports"):
        fetch(f"wrong://user:{SECRET}@x")


def test_concurrent_commands_copy_each_file_once(store: RecordingStore) -> None:
    with ThreadPoolExecutor() as pool:
        copies = set(pool.map(lambda _: fetch(URL), range(4)))
    assert len(store.transfers) == 40
    assert len(read_contents(copies.pop())) == 40


@pytest.mark.parametrize("obstacle", [".", "copies"])
def test_run_is_copied_without_a_writable_cache(store: RecordingStore, cache: Path, obstacle: str) -> None:
    (cache / obstacle).parent.mkdir(exist_ok=True)
    (cache / obstacle).write_text("a file instead of a directory")
    copy = fetch(URL)
    assert not copy.is_relative_to(cache)
    assert len(read_contents(copy)) == 40


def test_least_recently_used_copies_are_deleted(store: RecordingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    old_copy = fetch(URL)
    monkeypatch.setattr(url_copies, "MAX_BYTES", 10)
    recent_copy = fetch(f"{URL}/step_000001")
    assert old_copy.exists()
    os.utime(old_copy.parents[1], (time.time() - 2 * 86_400,) * 2)
    fetch(f"{URL}/run.json")
    assert not old_copy.exists()
    assert recent_copy.exists()


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """URL of an HTTP server's ``runs`` directory, which contains one run."""
    directory = tmp_path / "web"
    (directory / "runs" / "jöb" / "step_000001").mkdir(parents=True)
    (directory / "runs" / "jöb" / "run.json").write_text('{"created_ns": 5}')
    (directory / "runs" / "jöb" / "step_000001" / "a [1].json").write_text("[]")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(directory)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/runs"
    server.shutdown()
    thread.join()
    server.server_close()


def test_files_and_directories_are_copied_over_http(web: str) -> None:
    copy = fetch(f"{web}/j%C3%B6b/run.json?signature={SECRET}")
    assert copy.name == "run.json"
    assert json.loads(copy.read_text()) == {"created_ns": 5}
    assert read_contents(fetch(f"{web}/latest")).keys() == {"run.json", "step_000001/a [1].json"}
    assert read_contents(fetch(f"{web}/j%C3%B6b/")).keys() == {"run.json", "step_000001/a [1].json"}


def test_secrets_are_neither_printed_nor_stored(web: str, cache: Path) -> None:
    url = web.replace("//", f"//user:{SECRET}@")
    for invalid_url in (f"{url}/none.json?key={SECRET}", f"https://user:{SECRET}@127.0.0.1:1/run.json?key={SECRET}"):
        with pytest.raises(ProfdeckError) as caught:
            fetch(invalid_url)
        assert SECRET not in str(caught.value)
    with pytest.raises(ProfdeckError, match=r"https://\*\*\*@127.0.0.1:1/run.json cannot be read: "):
        fetch(invalid_url)
    fetch(f"{web}/j%C3%B6b/run.json?signature={SECRET}")
    for path in cache.rglob("*"):
        assert SECRET not in str(path)
        assert path.is_dir() or SECRET.encode() not in path.read_bytes()


def test_file_url_is_copied_only_after_a_change(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (file := tmp_path / "runs" / "trace.json").write_text("[1]")
    copy = fetch(f"file://{file}")
    inode = copy.stat().st_ino
    assert fetch(f"file://{file}").stat().st_ino == inode
    file.write_text("[2]")
    assert fetch(f"file://{file}").read_text() == "[2]"


class ScriptedServer:
    """A loopback HTTP server with one file. Tests set the headers and the body of its response."""

    def __init__(self) -> None:
        self.body: Callable[[], Iterator[bytes]] = lambda: iter([b"[1]"])
        self.headers: dict[str, str] = {}
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.send_response(200)
                for name, value in ({"Content-Type": "application/json"} | outer.headers).items():
                    self.send_header(name, value)
                self.end_headers()

            def do_GET(self) -> None:
                self.do_HEAD()
                with contextlib.suppress(OSError):
                    for chunk in outer.body():
                        self.wfile.write(chunk)

            def log_message(self, *arguments: object) -> None: ...

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.block_on_close = False
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    scripted = ScriptedServer()
    thread = threading.Thread(target=scripted.server.serve_forever)
    thread.start()
    yield scripted
    scripted.server.shutdown()
    thread.join()
    scripted.server.server_close()


MODIFIED = "Sat, 01 Jan 2022 00:00:00 GMT"


@pytest.mark.parametrize(
    ("headers", "is_copied_again"),
    [
        ({"Last-Modified": MODIFIED, "Content-Length": "3"}, True),
        ({"Content-Length": "3"}, True),
        ({"Last-Modified": MODIFIED}, True),
        ({"ETag": 'W/"1"', "Content-Length": "3"}, True),
        ({"ETag": '"1"', "Content-Length": "3"}, False),
    ],
)
def test_http_file_is_copied_again_unless_its_server_sends_a_version(
    scripted: ScriptedServer, headers: dict[str, str], is_copied_again: bool
) -> None:
    scripted.headers = headers
    assert fetch(f"{scripted.url}/a.json").read_bytes() == b"[1]"
    scripted.body = lambda: iter([b"[2]"])
    assert fetch(f"{scripted.url}/a.json").read_bytes() == (b"[2]" if is_copied_again else b"[1]")
    assert fetch(f"{scripted.url}/a.json", cache=False).read_bytes() == b"[2]"


def test_option_no_cache_copies_all_files_again(scripted: ScriptedServer) -> None:
    scripted.headers = {"ETag": '"1"', "Content-Length": "3"}
    fetch(f"{scripted.url}/a.trace.json")
    scripted.body = lambda: iter([b"{1}"])
    for arguments in (["--no-cache", f"{scripted.url}/a.trace.json"], [f"{scripted.url}/a.trace.json", "--no-cache"]):
        result = CliRunner().invoke(app, ["summary", *arguments])
        assert result.exit_code
        assert "Malformed JSON at offset 1" in result.output


@pytest.mark.parametrize(
    ("name", "message"),
    [("a.json", "the server sent more than 1,048,576 bytes"), ("index.html", "than 1,048,576 bytes|than 1 MiB")],
)
def test_endless_body_is_an_error(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch, cache: Path, name: str, message: str
) -> None:
    monkeypatch.setattr(remote_limits, "MAX_UNKNOWN_BYTES", 1 << 20)
    monkeypatch.setattr(remote_limits, "MAX_RESPONSE_BYTES", 1 << 20)
    scripted.headers = {"Content-Type": "text/html"} if name.endswith("html") else {}
    sent = itertools.count()
    scripted.body = lambda: (b" " * 65536 for _ in sent)
    with pytest.raises(ProfdeckError, match=message):
        fetch(f"{scripted.url}/{name}")
    scripted.headers = {"Content-Type": "text/html"}
    for method in ("cat_file", "ls"):
        with pytest.raises(RemoteError, match="ClientPayloadError: more than 1 MiB"):
            RemotePath.from_url(scripted.url).read(method, f"{scripted.url}/{name}")
    assert next(sent) < 2000
    assert not [path for path in cache.rglob("*") if path.is_file() and path.stat().st_size > 1 << 20]


@pytest.mark.parametrize("name", ["a.json", "directory"])
def test_slow_body_is_an_error(scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(remote_limits, "RESPONSE_S", 0.2)
    ended = threading.Event()

    def drip() -> Iterator[bytes]:
        while not ended.wait(0.05):
            yield b" "

    scripted.body = drip
    if name == "directory":
        scripted.headers = {"Content-Type": "text/html"}
    started_s = time.monotonic()
    try:
        with pytest.raises(ProfdeckError):
            fetch(f"{scripted.url}/{name}")
    finally:
        ended.set()
    assert time.monotonic() - started_s < 30


@pytest.mark.parametrize("name", ["index.json", "files", "partial-1", "run.json"])
def test_remote_file_can_have_the_name_of_a_file_of_the_cache(store: RecordingStore, name: str) -> None:
    store.pipe(f"/profiles/job/{name}x", b"{}")
    store.pipe(f"/profiles/single/{name}", b"[1, 2]")
    for url in (f"recording://profiles/single/{name}", "recording://profiles/single"):
        for _ in range(2):
            copy = fetch(url)
            assert (copy / name if copy.is_dir() else copy).read_bytes() == b"[1, 2]"
