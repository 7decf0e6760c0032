"""What tests do with the server of any engine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx

TOKEN = {"PROFDECK_TOKEN": "a secret"}


def call(
    server: Any, method: str, command: str, body: Any = None, token: str | None = TOKEN["PROFDECK_TOKEN"]
) -> httpx.Response:
    """Use one of our routes."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    url = f"{server.url}/profdeck/{command}"
    return httpx.request(method, url, json=body, headers=headers, timeout=60, trust_env=False)


def command_line(server: Any, *arguments: str, **environ: str) -> subprocess.Popen[str]:
    """Start `profdeck capture`, without the config of whoever runs the tests."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PROFDECK")}
    command = [sys.executable, "-m", "profdeck", "capture", "--url", server.url, *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=inherited | TOKEN | environ
    )


def wait_for_group(process: subprocess.Popen[bytes]) -> None:
    """Wait for a server and all of its processes, which may outlive it."""
    process.wait(60)
    deadline = time.monotonic() + 60
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.05)  # they are no children of this process, so there is nothing to wait on


@contextlib.contextmanager
def busy(server: Any, clients: int = 1) -> Iterator[None]:
    """Let a server generate all the while."""
    stop = threading.Event()

    def generate() -> None:
        while not stop.is_set():
            server.complete(tokens=30)

    threads = [threading.Thread(target=generate) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
