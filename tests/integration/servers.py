"""Helpers for tests with engine servers: requests, the command line, load and shutdown."""

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
    """Send a request to one of profdeck's routes."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    url = f"{server.url}/profdeck/{command}"
    return plain_http.request(method, url, json=body, headers=headers)


def states(server: Any) -> set[str]:
    """Return the capture states of all processes of a server."""
    answer = call(server, "GET", "status").json()["answer"]
    return {reply["state"] for reply in (*answer["ranks"], *answer["frontends"].values())}


def _rank_states(server: Any) -> list[str]:
    return [reply["state"] for reply in call(server, "GET", "status").json()["answer"]["ranks"]]


def wait_until_idle(*servers: Any, timeout_s: float = 30) -> bool:
    """Wait until no process of the servers writes a trace. Return True if none of them records."""
    deadline = time.monotonic() + timeout_s
    current = set().union(*map(states, servers))
    while "writing" in current and time.monotonic() < deadline:
        time.sleep(0.05)  # another process cannot wait for an event of the server
        current = set().union(*map(states, servers))
    return current <= {"idle", "ended"}


def router_workers(router: Any) -> dict[str, dict[str, Any]]:
    """Return the workers in a router's reply, keyed by URL."""
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


def wait_for_command(process: subprocess.Popen[str], server: Any, timeout_s: float = 240) -> tuple[str, str]:
    """Wait for a command and return stdout and stderr. On a timeout, show its stack and the server's log."""
    try:
        return process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise _timeout_error(process, server, f"The command did not exit within {timeout_s:g} seconds.") from None


def wait_for_start(process: subprocess.Popen[str], *servers: Any, timeout_s: float = 120) -> None:
    """Wait until a running command has armed all ranks of the servers."""
    deadline = time.monotonic() + timeout_s
    while (current := {state for server in servers for state in _rank_states(server)}) - {"armed", "recording"}:
        if process.poll() is not None or time.monotonic() > deadline:
            reason = f"The ranks are not armed: {current}. Exit status of the command: {process.poll()}."
            raise _timeout_error(process, servers[0], reason)
        time.sleep(0.05)  # another process cannot wait for an event of the server


def _timeout_error(process: subprocess.Popen[str], server: Any, reason: str) -> AssertionError:
    process.send_signal(signal.SIGABRT)  # PYTHONFAULTHANDLER prints the stack
    out, err = process.communicate()
    return AssertionError(f"{reason}\n{out}\n{err}\nServer log:\n{server.log.read_text(errors='replace')[-6000:]}")


def wait_for_group(process: subprocess.Popen[bytes]) -> None:
    """Wait for a server and its child processes, which may outlive it."""
    process.wait(60)
    wait_for_others(process, 60)


@contextlib.contextmanager
def busy(server: Any, clients: int = 1) -> Iterator[None]:
    """Keep a server generating."""
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
