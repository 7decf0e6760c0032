"""What tests do with the server of any engine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import plain_http
from engine_servers import wait_for_others

TOKEN = {"PROFDECK_TOKEN": "a secret"}


def call(
    server: Any, method: str, command: str, body: Any = None, token: str | None = TOKEN["PROFDECK_TOKEN"]
) -> httpx.Response:
    """Use one of our routes."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    url = f"{server.url}/profdeck/{command}"
    return plain_http.request(method, url, json=body, headers=headers)


def states(server: Any) -> set[str]:
    """Return where all processes of a server are with what they were asked for."""
    answer = call(server, "GET", "status").json()["answer"]
    return {reply["state"] for reply in (*answer["ranks"], *answer["frontends"].values())}


def _ranks(server: Any) -> list[str]:
    return [reply["state"] for reply in call(server, "GET", "status").json()["answer"]["ranks"]]


def at_rest(*servers: Any, timeout_s: float = 30) -> bool:
    """Tell whether no process of some servers records; what is being written is waited for."""
    deadline = time.monotonic() + timeout_s
    found = set().union(*map(states, servers))
    while "writing" in found and time.monotonic() < deadline:
        time.sleep(0.05)  # there is no event to await outside of the server
        found = set().union(*map(states, servers))
    return found <= {"idle", "ended"}


def listed(router: Any) -> dict[str, dict[str, Any]]:
    """Return what a router says of its workers, by URL."""
    response = plain_http.get(f"{router.url}/workers", timeout=5)
    response.raise_for_status()
    return {worker["url"]: worker for worker in response.json()["workers"]}


def command_line(server: Any, *arguments: str, **environ: str) -> subprocess.Popen[str]:
    """Start `profdeck capture servers` for one server. See `command_line_of_many`."""
    return command_line_of_many("--url", server.url, *arguments, **environ)


def command_line_of_many(*arguments: str, **environ: str) -> subprocess.Popen[str]:
    """Start `profdeck capture servers` without the test process's ``PROFDECK*`` environment variables."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PROFDECK")}
    command = [sys.executable, "-m", "profdeck", "capture", "servers", *arguments]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=inherited | {"PYTHONFAULTHANDLER": "1"} | TOKEN | environ,
    )


def finished(process: subprocess.Popen[str], server: Any, timeout_s: float = 240) -> tuple[str, str]:
    """Wait for a command line and return its two outputs; of one that hangs, show where, and what its server says."""
    try:
        return process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise _late(process, server, f"It did not end within {timeout_s:g} seconds.") from None


def wait_for_start(process: subprocess.Popen[str], *servers: Any, timeout_s: float = 120) -> None:
    """Wait until all ranks of some servers do what a command line asks for, which goes on meanwhile."""
    deadline = time.monotonic() + timeout_s
    while (found := {state for server in servers for state in _ranks(server)}) - {"armed", "recording"}:
        if process.poll() is not None or time.monotonic() > deadline:
            raise _late(process, servers[0], f"After {timeout_s:g} seconds or its end ({process.poll()}): {found}.")
        time.sleep(0.05)  # there is no event to await outside of the server


def _late(process: subprocess.Popen[str], server: Any, what: str) -> AssertionError:
    process.send_signal(signal.SIGABRT)  # it prints where it is
    out, err = process.communicate()
    return AssertionError(f"{what}\n{out}\n{err}\nThe server:\n{server.log.read_text(errors='replace')[-6000:]}")


def wait_for_group(process: subprocess.Popen[bytes]) -> None:
    """Wait for a server and all of its processes, which may outlive it."""
    process.wait(60)
    wait_for_others(process, 60)


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
