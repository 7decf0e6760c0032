"""Helpers that start real Ray clusters, reachable only from this machine."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs

# Ray's servers listen on all interfaces regardless of --node-ip-address, and any client can execute code through them.
# With this setting, which Ray uses for laptops, they listen only on loopback.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


@attrs.frozen
class Cluster:
    """A running cluster."""

    address: str
    session: int
    """Session ID of the cluster's processes."""


def ray_environment(*paths: str | Path, nodes: int = 1) -> dict[str, str]:
    """Return the environment of a cluster's processes and of its drivers.

    Args:
        paths: import paths.
        nodes: number of nodes. Several nodes need their own network namespace: Ray does not join clusters that listen
            only on loopback.
    """
    return os.environ | {
        **(LOOPBACK if nodes == 1 else {}),
        # By default, Ray requires a token only if the home directory contains one.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *sys.path]),
    }


@contextmanager
def ray_cluster(directory: Path, environ: Mapping[str, str], *, cpus: int = 2) -> Iterator[Cluster]:
    """Start a cluster, and stop its processes on exit.

    Args:
        directory: directory of the cluster's files. The path must be short, because it contains sockets.
        environ: environment of all processes, from `ray_environment`.
        cpus: number of CPUs that the head node reports.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--port", str(port)]
    command += ["--node-ip-address", "127.0.0.1", "--include-dashboard=false", "--disable-usage-stats"]
    command += ["--object-store-memory", "80000000", "--temp-dir", str(directory), "--num-cpus", str(cpus)]
    with _up(command, environ) as process:
        yield Cluster(f"127.0.0.1:{port}", process.pid)


@contextmanager
def ray_node(cluster: Cluster, environ: Mapping[str, str], ip: str, enter: Sequence[str] = ()) -> Iterator[int]:
    """Add a node with one CPU to a cluster, and stop its processes on exit. Yield their session ID.

    Args:
        cluster: the cluster.
        environ: environment of all processes.
        ip: address of the node, in the network namespace of the cluster.
        enter: command prefix that runs a command on the node's host, if that is a simulated host.
    """
    command = [*enter, str(Path(sys.executable).parent / "ray"), "start", "--address", cluster.address, "--block"]
    command += ["--node-ip-address", ip, "--disable-usage-stats", "--object-store-memory", "80000000"]
    with _up([*command, "--num-cpus", "1"], environ) as process:
        yield process.pid


@contextmanager
def _up(command: list[str], environ: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        said = ""
        while "Ray runtime started" not in said:
            line = process.stdout.readline()
            assert line, said
            said += line
        yield process
    finally:
        process.terminate()
        process.communicate()
        for pid in session_of(process.pid):
            os.kill(pid, signal.SIGKILL)


def session_of(leader: int) -> list[int]:
    """Return the IDs of a session's processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session, *_ = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # the process has just exited
            continue
        if int(session) == leader and state != "Z":
            found.append(int(path.name))
    return found
