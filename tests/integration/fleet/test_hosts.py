"""Tests of a job on hosts that share only a network. The clock of one host is ahead of the others.

Hosts are namespaces on this machine. The head, ``host-0``, runs trainer rank 0 and the router, ``host-1`` runs trainer
rank 1, and ``host-2`` runs a vLLM server.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from engine_servers import router_command, stop_servers, vllm_command
from servers import TOKEN

from namespaces import Host, clock_that_is_ahead, linked_hosts
from processes import ending, until
from profdeck.records.manifest import Manifest, decode_manifest

JOB = Path(__file__).parent / "jobs" / "job_on_hosts.py"
AHEAD_NS = 2_345_678_901
"""Offset of the clock on the server's host."""
MOST_ERROR_NS = 20_000_000
"""Limit of the clock error on a busy machine. See docs/benchmarks.md for an idle machine."""
READY = """
import sys, urllib.request
url, token = sys.argv[1:]
with urllib.request.urlopen(urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"}), timeout=5): pass
"""
AWAIT_START = """
import json, sys, time, urllib.request
url, token = sys.argv[1:]
request = urllib.request.Request(f"{url}/profdeck/status", headers={"Authorization": f"Bearer {token}"})
while True:
    with urllib.request.urlopen(request, timeout=60) as response:
        if json.load(response)["answer"]["ranks"][0]["state"] in {"armed", "recording"}:
            break
    time.sleep(0.05)  # no event outside of the server signals this
"""
GENERATE = "import sys; from engine_servers import Server; Server(sys.argv[1], None, None).complete(tokens=32)"


@attrs.frozen
class Cluster:
    """The hosts, and the URLs of the router and the server."""

    hosts: list[Host]
    output: Path
    """Output path. On each host, it is a different directory."""
    router: str
    server: str
    environment: dict[str, str]
    logs: Path
    """The directory of the servers' logs."""

    def profdeck(self, *arguments: object, host: int = 0) -> subprocess.Popen[str]:
        """Start a profdeck command on a host."""
        command = [*self.hosts[host].enter, sys.executable, "-m", "profdeck", *map(str, arguments)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=self.environment | {"COLUMNS": "400"})

    def await_start(self, host: Host, url: str) -> None:
        """Wait until a server is recording. The query runs on the server's host, so link faults do not affect it."""
        command = [*host.enter, sys.executable, "-c", AWAIT_START, url, TOKEN["PROFDECK_TOKEN"]]
        subprocess.run(command, check=True, timeout=240)

    def generate(self, host: Host, url: str) -> None:
        """Send a generation request to a server from its own host."""
        environment = self.environment | {"PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([*host.enter, sys.executable, "-c", GENERATE, url], check=True, env=environment)

    def done(self, *arguments: object) -> str:
        """Run a profdeck command on the head. Return its output."""
        process = self.profdeck(*arguments)
        out, error = process.communicate(timeout=240)
        assert TOKEN["PROFDECK_TOKEN"] not in out + error
        assert process.returncode == 0, out + error
        return out

    def manifests(self, run: str) -> Iterator[Manifest]:
        """Yield the manifests of a run on the head."""
        listed = [*self.hosts[0].enter, "find", self.output / run, "-name", "*.json", "-path", "*/step_*"]
        for path in subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split():
            if ".trace." not in path:
                content = subprocess.run([*self.hosts[0].enter, "cat", path], check=True, capture_output=True).stdout
                yield decode_manifest(content)


@pytest.fixture(scope="module")
def cluster(
    model: Path, engine_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Hosts with a running router and server."""
    output, shared = tmp_path_factory.mktemp("own"), tmp_path_factory.mktemp("shared")
    ours = TOKEN | {"PROFDECK__OUTPUT": str(output)}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PROFDECK")}
    with linked_hosts(3, output) as hosts, contextlib.ExitStack() as stack:
        started, logs = list[subprocess.Popen[bytes]](), dict[str, Path]()
        stack.callback(stop_servers, started)

        def begin(host: Host, what: str, command: list[str | Path], environment: dict[str, str]) -> None:
            logs[what] = shared / f"{what}.log"
            log = stack.enter_context(logs[what].open("wb"))
            process = subprocess.Popen(
                [*host.enter, *command], env=environment, cwd=shared, stdout=log, stderr=log, process_group=0
            )
            started.append(process)

        def answers(url: str) -> None:
            command = [*hosts[0].enter, sys.executable, "-c", READY, url, TOKEN["PROFDECK_TOKEN"]]

            def ready() -> bool:
                ended = any(process.poll() is not None for process in started)
                assert not ended, "\n".join(log.read_text(errors="replace")[-3000:] for log in logs.values())
                return not subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode

            until(ready, every_s=1, timeout_s=400)

        vllm = hosts[2]
        environment = engine_environment | {"VLLM_PLUGINS": "profdeck", "VLLM_HOST_IP": vllm.address} | ours
        apart = clock_that_is_ahead(shared, AHEAD_NS)
        server = f"http://{vllm.address}:8000"
        begin(vllm, "vllm", [*vllm_command(model), "--host", vllm.address, "--port", "8000"], environment | apart)
        answers(f"{server}/profdeck/status")
        router = f"http://{hosts[0].address}:9000"
        urls = ["--worker-urls", server]
        where = ["--host", hosts[0].address, "--port", "9000"]
        begin(hosts[0], "router", router_command("vllm-router", *urls, *where), inherited)
        answers(f"{router}/readiness")
        environment = inherited | ours | {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6"}
        yield Cluster(hosts, output, router, server, environment, shared)


@pytest.fixture
def job(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[subprocess.Popen[str]]]:
    """Launchers of a training job on the first two hosts. Its run is named ``live``."""
    directory = tmp_path_factory.mktemp("job")
    targets = {"router": cluster.router, "worker_hosts": ["10.77.0.0/24"], "policy": "all"}
    roles = {
        "trainer": {"backend": "torch", "ranks": "all"},
        "rollout": {"backend": "vllm", "targets": targets, "iterations": {"count": 5}},
    }
    config = {"output": str(cluster.output), "run": "live", "on_demand": "tcpstore", "roles": roles}
    (directory / "profdeck.yaml").write_text(json.dumps(config))
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    launch += ["--master-addr", cluster.hosts[0].address, "--master-port", "29500"]
    arguments = [JOB, directory / "profdeck.yaml", cluster.router, directory / "stop"]
    with ending() as nodes:
        for node, host in enumerate(cluster.hosts[:2]):
            command = [*host.enter, *launch, "--node-rank", str(node), *map(str, arguments)]
            environment = cluster.environment | {"GLOO_SOCKET_IFNAME": "eth0"}
            nodes.append(subprocess.Popen(command, env=environment, text=True))
        yield nodes
        (directory / "stop").touch()
        assert [process.wait(120) for process in nodes] == [0, 0]


def recorded(document: dict[str, Any]) -> set[tuple[str, str, str]]:
    """Return the role, host and status of each rank. The status is ``elsewhere`` if its files are on another host."""
    here = {
        (capture["role"], rank["host"], rank["status"])
        for capture in document["ls"]["captures"]
        for rank in capture["ranks"]
    }
    return here | {
        (process["role"], process["host"], "elsewhere")
        for process in document.get("processes", ())  # captures of servers have no processes
        if process["files_here"] is False
    }


def test_one_capture_of_all_hosts(cluster: Cluster, job: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    run = cluster.output / "live"
    everybody = {("trainer", "host-0", "complete"), ("trainer", "host-1", "elsewhere")}
    everybody.add(("rollout", "host-2", "complete"))

    def captured() -> dict[str, Any] | None:
        assert all(process.poll() is None for process in job)
        process = cluster.profdeck("capture", "job", run, "--steps", "2", "--json")
        out, error = process.communicate(timeout=240)
        print(out, error)  # noqa: T201  # shown if the test fails
        return json.loads(out) if out and process.returncode == 0 else None

    found = dict[str, Any]()

    def all_took_part() -> bool:
        found.update(captured() or {})
        return bool(found) and recorded(found) == everybody

    until(all_took_part, every_s=1)  # a capture without all ranks is repeated
    assert found["complete"]

    # The manifests record the server's clock offset, measured during the capture requests.
    clocks = [one.clock for one in cluster.manifests("live") if one.clock]
    assert {(clock.host, clock.reference) for clock in clocks} == {("host-2", "host-0")}
    assert all(abs(clock.offset_ns + AHEAD_NS) <= clock.error_ns <= MOST_ERROR_NS for clock in clocks)

    # In the merged trace, the server's events are within the trainer's time range. Without alignment, they would be
    # outside it, because the clocks differ.
    merged = json.loads(cluster.done("merge", run, "-o", tmp_path / "merged.json", "--rank", "0", "--json"))
    assert merged["align"] == "anchors"
    assert 0 < merged["clock_error_us"] <= MOST_ERROR_NS / 1e3
    document = json.loads((tmp_path / "merged.json").read_text())
    of_process = {
        event["pid"]: event["args"]["name"] for event in document["traceEvents"] if event["name"] == "process_name"
    }
    times = dict[str, list[float]]()
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            times.setdefault(of_process[event["pid"]].split()[0].split("/")[0], []).append(float(event["ts"]))
    trainer, of_server = times["trainer"], times["rollout"]
    assert min(trainer) - 1e6 < min(of_server) <= max(of_server) < max(trainer) + 1e6


Fault = Callable[[Host], object]


def away_for_a_while(host: Host) -> None:
    """Interrupt the link during a download."""
    host.limit("200kbit")
    host.link("down")
    host.link("up")


@pytest.mark.parametrize("fault", [lambda host: host.limit("800kbit"), away_for_a_while], ids=["slow", "cut"])
def test_slow_or_interrupted_link_only_delays_a_capture(cluster: Cluster, fault: Fault) -> None:
    host, url = cluster.hosts[2], cluster.server
    process = cluster.profdeck("capture", "servers", "--url", url, "--iterations", "5", "--json")
    fault(host)
    try:
        cluster.await_start(host, url)
        cluster.generate(host, url)
        out, error = process.communicate(timeout=240)
    finally:
        host.limit(None)
    assert process.returncode == 0, out + error
    assert recorded(json.loads(out)) == {("server", "host-2", "complete")}


def test_host_that_is_unreachable_at_the_stop(cluster: Cluster) -> None:
    host, url = cluster.hosts[2], cluster.server
    own = ("--url", url, "--iterations", "5", "--set", "run=cut", "--output", cluster.output)
    log, client = cluster.logs / "vllm.log", re.escape(cluster.hosts[0].address)
    requests = re.compile(
        rf'{client}:\d+ - "POST /profdeck/start .*{client}:\d+ - "GET /profdeck/status'.encode(), re.DOTALL
    )
    offset = log.stat().st_size
    process = cluster.profdeck("capture", "servers", *own, "--set", "server.options.rpc_timeout_s=10")

    # A signal sent before the start request is answered, or after a poll fails, would cancel the command.
    until(lambda: requests.search(log.read_bytes()[offset:]) or process.poll() is not None)
    host.link("down")
    process.send_signal(signal.SIGTERM)
    cluster.generate(host, url)
    out, error = process.communicate(timeout=120)
    host.link("up")
    assert process.returncode == 1, out + error
    assert "The engine did not reply to the stop: " in out + error
    assert "1 of 1 engine captures are complete." in cluster.done("collect", cluster.output / "cut")
    found = json.loads(cluster.done("ls", cluster.output / "cut", "--json"))
    assert [(rank["host"], rank["status"]) for capture in found["captures"] for rank in capture["ranks"]] == [
        ("host-2", "complete")
    ]


SEARCH = """
import gzip, sys
from pathlib import Path
token, output = sys.argv[1].encode(), Path(sys.argv[2])
(output / "planted").write_bytes(gzip.compress(b"the " + token))
for path in output.rglob("*"):
    if path.is_file():
        content = path.read_bytes()
        content = gzip.decompress(content) if content.startswith(b"\\x1f\\x8b") else content
        if token in content + bytes(path):
            print(path)
"""


def test_token_is_not_in_files_or_command_lines(cluster: Cluster) -> None:
    """Search the traces, manifests and logs of the tests above, and all command lines."""
    token = TOKEN["PROFDECK_TOKEN"]
    for host in cluster.hosts:
        command = [*host.enter, sys.executable, "-c", SEARCH, token, cluster.output]
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        assert found == [str(cluster.output / "planted")]
    assert [log.name for log in cluster.logs.glob("*.log") if token in log.read_text(errors="replace")] == []
    lists = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(token.encode() in words for words in lists)
