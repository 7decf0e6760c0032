"""Real Ray clusters, which are reached from this machine only."""

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

# Ray's servers listen on all interfaces, whatever --node-ip-address says, and who reaches them can run code here. With
# the setting that Ray itself uses for laptops they listen on loopback only.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


@attrs.frozen
class Cluster:
    """A cluster that is up."""

    address: str
    session: int
    """The session of its processes."""


def ray_environment(*paths: str | Path, nodes: int = 1) -> dict[str, str]:
    """Return the environment of a cluster and of those who join it.

    Args:
        paths: to import from.
        nodes: of the cluster. Several need a network namespace of their own: Ray joins none that is on loopback only.
    """
    return os.environ | {
        **(LOOPBACK if nodes == 1 else {}),
        # Left to itself, Ray asks for a token or not by whether the user has one in the home directory.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *sys.path]),
    }


@contextmanager
def ray_cluster(directory: Path, environ: Mapping[str, str], *, cpus: int = 2) -> Iterator[Cluster]:
    """Start a cluster, and end its processes.

    Args:
        directory: for its files; its sockets need a short path.
        environ: the environment of all of its processes, from `ray_environment`.
        cpus: how many it believes to have.
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
    """Let a node with one CPU join a cluster, and end its processes; returns their session.

    Args:
        cluster: the cluster.
        environ: the environment of all processes.
        ip: its address, in the network namespace of the cluster.
        enter: what a command begins with that is to run there, if that is a host of its own.
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
    """Return the processes of a session, by id."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session, *_ = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(session) == leader and state != "Z":
            found.append(int(path.name))
    return found
