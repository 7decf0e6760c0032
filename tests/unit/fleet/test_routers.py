"""Tests of the search for a router."""

from __future__ import annotations

import asyncio
import http.server
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from profdeck.base.errors import CaptureError
from profdeck.replicas import routers
from profdeck.replicas.routers import AUTO, find_router, is_search_location
from profdeck_ray.cluster import RayCluster


class _Handler(http.server.BaseHTTPRequestHandler):
    body = b""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/workers" else 404)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(document: object, family: socket.AddressFamily = socket.AF_INET) -> Iterator[int]:
    """Serve a document at /workers. Yields the port."""
    handler = type("Handler", (_Handler,), {"body": json.dumps(document).encode()})
    kind = type("Server", (http.server.ThreadingHTTPServer,), {"address_family": family})
    with kind(("::1" if family is socket.AF_INET6 else "127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def filter_table(table: Path, ports: set[int], directory: Path) -> str:
    """Copy a socket table of the kernel without the ports of other tests. Return the path of the copy."""
    header, *lines = table.read_text().splitlines()
    selected = [line for line in lines if int(line.split()[1].split(":")[1], 16) in ports]
    copy = directory / table.name
    copy.write_text("\n".join([header, *selected]))
    return str(copy)


WORKERS = {"workers": [{"url": "http://127.0.0.1:1"}]}


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_router_on_this_host_is_found(
    family: socket.AddressFamily, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(RayCluster, "log_directory", tmp_path)
    with serving(WORKERS, family) as port, serving({"models": []}) as other:
        tables = [filter_table(Path(table), {port, other}, tmp_path) for table in routers._SOCKET_TABLES]
        monkeypatch.setattr(routers, "_SOCKET_TABLES", tables)
        url = asyncio.run(find_router(AUTO))
    assert url == (f"http://127.0.0.1:{port}" if family is socket.AF_INET else f"http://[::1]:{port}")


@pytest.mark.parametrize(
    "line", ["Router is up at 127.0.0.1:{}", "(pid=3) [router] http://localhost:{}/ serves", "ROUTER 0.0.0.0:{}."]
)
def test_router_in_a_log_is_found(line: str, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    with serving(WORKERS) as port, serving(WORKERS) as other:
        log.write_text(f"worker 127.0.0.1:{other}\nno router at 127.0.0.1:1\n{line.format(port)}\n")
        assert is_search_location(str(log))
        assert asyncio.run(find_router(str(log))).endswith(f":{port}")


def test_several_routers_or_none_are_rejected(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    with serving(WORKERS) as first, serving(WORKERS) as second:
        log.write_text(f"router 127.0.0.1:{first}\nrouter 127.0.0.1:{second}\n")
        with pytest.raises(
            CaptureError, match=f"Several routers respond: http://127.0.0.1:{second}, http://127.0.0.1:{first}. "
        ):
            asyncio.run(find_router(str(log)))
    with pytest.raises(CaptureError, match=r"None of 2 URLs is a router\. Searched the lines of .*train.log"):
        asyncio.run(find_router(str(log)))


def test_url_is_not_a_search_location() -> None:
    assert not is_search_location("http://127.0.0.1:8000")
