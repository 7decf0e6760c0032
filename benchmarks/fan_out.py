"""Compare the time to start and stop many servers with the slowest server, and measure the start skew.

python -m benchmarks.fan_out [--quick] [--servers 8 64 512 1000] [--rounds 4] [--delay-ms 1000] [--directory DIRECTORY]
                             [--hosts 1] [--json FILE]

Simulated servers with profdeck's routes run in another process (`benchmarks.fleet_servers`). With `--hosts`, there is
one process per host, each with its own address (127.1.0.1 and so on). Servers reply to every request after a delay. The
default of one second is about the minimum that a real engine needs to write its files. In each round, a `Profiler` with
all servers as its target captures one step. It checks, starts and stops the servers over new connections, writes a
manifest per server and one of the fleet, and reads the manifest of one rank per server.

Equal delays are the worst case, because all replies arrive at the same time. With different delays, early replies are
processed while the client waits for late ones. The server count that has a goal is therefore measured again with
different delays, where the fastest server needs half the time of the slowest.

By default, the run directory is in memory if the system has a memory file system. On a shared disk, the stop time
depends on other users, and ext4 creates files ten times more slowly for minutes after thousands were deleted. Use
`--directory` to measure a disk.

The peer is a sequential script: two POST requests per server, one server at a time, each on its own connection. Its
time per server is constant, so it is measured with a few servers and multiplied.

The slowest server is the one with the longest time from a request to its reply, measured in the server. The start skew
is the time from the first start to each other start, measured in the servers. The manifest contains the skew of the
last start, measured in the client.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import resource
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import attrs
from benchmarks.fleet_servers import ServerLog, raise_open_file_limit, serve
from benchmarks.measure import Row, parser, ratio_interval, report
from benchmarks.stall import Child

from profdeck import Profiler
from profdeck.engine.transport.token import TOKEN_VARIABLE
from profdeck.engines import EngineCapture

SERVERS = (8, 64, 512, 1000)
ROUNDS = 4
DELAY_MS = 1000.0
QUICK = {"servers": (8, 64), "rounds": 2, "delay_ms": 100.0}
SPREAD = 0.5
IN_MEMORY = Path("/dev/shm")  # noqa: S108  # only used as the parent of a temporary directory
ONE_BY_ONE = 3
"""Number of servers for the sequential client."""
GOAL_AT = 512
MAX_RATIO = 1.2
MAX_SKEW_MS = 100.0
PATIENCE_S = 600.0
RUNS = itertools.count()
clock = time.perf_counter


@attrs.frozen
class Round:
    """Figures of one start and stop of all servers."""

    start_s: float
    """Includes the status requests before the start."""
    stop_s: float
    slowest_start_s: float
    slowest_stop_s: float
    skew_ms: list[float]
    """Skew of each start relative to the first one, sorted."""
    manifest_skew_ms: float
    """Skew of the last start in the manifest."""
    cpu_s: float
    server_cpu_s: float

    def skew_at_ms(self, share: float) -> float:
        """Return the quantile `share` of the start skew."""
        return self.skew_ms[min(int(share * len(self.skew_ms)), len(self.skew_ms) - 1)]


class Fleet:
    """Simulated servers, in one process per host, and the profiler that captures them."""

    def __init__(self, count: int, delay_s: float, directory: Path, *, hosts: int = 1, spread: float = 0.0) -> None:
        raise_open_file_limit(count)
        self._directory = directory
        servers_per_host = [len(range(host, count, hosts)) for host in range(min(hosts, count))]
        self._children = [
            Child(directory / f"servers{host}.log", {}, serve, f"127.1.0.{host + 1}", servers, delay_s, spread)
            for host, servers in enumerate(servers_per_host)
        ]
        self._urls: list[str] = [url for child in self._children for url in child.answer()]
        self._server_cpu_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.send(False)  # noqa: FBT003  # False ends the child
            child.__exit__()

    def take_log(self) -> ServerLog:
        """Return the requests since the last call, and the CPU time that the servers used for them."""
        for child in self._children:
            child.send(True)  # noqa: FBT003  # True requests the log
        logs: list[ServerLog] = [child.answer() for child in self._children]
        requests = [server_requests for log in logs for server_requests in log.requests]
        cpu_s = sum(log.cpu_s for log in logs)
        used_s, self._server_cpu_s = cpu_s - self._server_cpu_s, cpu_s
        return ServerLog(requests, used_s)

    def rounds(self, count: int) -> list[Round]:
        """Capture all servers `count` times, after one uncounted round for one-time costs."""
        return [self.round() for _ in range(count + 1)][1:]

    def round(self) -> Round:
        """Capture all servers once and return the figures."""
        gc.collect()  # exclude garbage of previous rounds
        self.take_log()
        cpu_s = time.process_time()
        start_s, stop_s, manifest_ms = asyncio.run(self._captured())
        cpu_s = time.process_time() - cpu_s
        log = self.take_log()
        commands = [[name for name, *_ in requests] for requests in log.requests]
        assert commands == [["status", "start", "stop"]] * len(self._urls), commands
        busy_s = [{name: (answered - at) / 1e9 for name, at, answered in requests} for requests in log.requests]
        starts = sorted(requests[1][1] for requests in log.requests)
        return Round(
            start_s=start_s,
            stop_s=stop_s,
            slowest_start_s=max(times["status"] + times["start"] for times in busy_s),
            slowest_stop_s=max(times["stop"] for times in busy_s),
            skew_ms=[(start - starts[0]) / 1e6 for start in starts],
            manifest_skew_ms=manifest_ms,
            cpu_s=cpu_s,
            server_cpu_s=log.cpu_s,
        )

    async def _captured(self) -> tuple[float, float, float]:
        settings = {
            "output": str(self._directory),
            "run": f"run{next(RUNS)}",
            "steps": [1],
            "on_demand": False,
            "on_error": "raise",
            "rollout.backend": "vllm",
            "rollout.options.rpc_timeout_s": PATIENCE_S,
        }
        profiler = Profiler.from_config(role="rollout", settings=settings, target=self._urls)
        began_s = clock()
        capture = await profiler.astart(1)
        started_s = clock()
        await profiler.astop()
        stopped_s = clock()
        assert isinstance(capture, EngineCapture)
        assert capture.fleet is not None
        return started_s - began_s, stopped_s - started_s, capture.fleet.start_skew_ms or 0.0

    def one_by_one(self) -> tuple[float, float]:
        """Start and stop all servers sequentially. Return the start and stop times in seconds."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

        def all_of(command: str) -> float:
            began_s = clock()
            for url in self._urls:
                request = urllib.request.Request(  # noqa: S310  # our own servers
                    f"{url}/profdeck/{command}", json.dumps({}).encode(), {"Content-Type": "application/json"}
                )
                opener.open(request, timeout=PATIENCE_S).read()
            return clock() - began_s

        return all_of("start"), all_of("stop")


def result_rows(rounds: Sequence[Round], one_by_one_s: tuple[float, float], which: str = "") -> list[Row]:
    """Return the result rows of all rounds with the same number of servers."""
    count, rows = len(rounds[0].skew_ms), []
    has_goal, servers = count == GOAL_AT, f"{count} servers{which}"
    for what, total, slowest, each_s in (
        ("prepare and start", "start_s", "slowest_start_s", one_by_one_s[0]),
        ("stop", "stop_s", "slowest_stop_s", one_by_one_s[1]),
    ):
        totals_s, slowest_s = ([getattr(figures, name) for figures in rounds] for name in (total, slowest))
        ratios = [total_s / peer_s for total_s, peer_s in zip(totals_s, slowest_s, strict=True)]
        ratio, interval = ratio_interval(totals_s, slowest_s)
        rows += [
            Row(
                what=f"{what}, {servers}",
                unit="s",
                measured=statistics.median(totals_s),
                peer=statistics.median(slowest_s),
                peer_name="slowest server",
                ratio=ratio,
                interval=interval,
                goal=f"ratio <= {MAX_RATIO}" if has_goal else "",
                met=ratio <= MAX_RATIO if has_goal else None,
                detail=f"best round {min(ratios):.3f}, worst {max(ratios):.3f}",
            ),
            Row(
                what=f"{what}, {servers}",
                unit="s",
                measured=statistics.median(totals_s),
                peer=each_s * count,
                peer_name="one by one",
                ratio=statistics.median(totals_s) / (each_s * count),
            ),
        ]
    shares = {"p50": 0.5, "p99": 0.99, "last": 1.0}
    skews_ms = {
        name: statistics.median(figures.skew_at_ms(share) for figures in rounds) for name, share in shares.items()
    }
    manifest_ms = statistics.median(figures.manifest_skew_ms for figures in rounds)
    rows.append(
        Row(
            what=f"start skew p99, {servers}",
            unit="ms",
            measured=skews_ms["p99"],
            goal=f"< {MAX_SKEW_MS:g} ms" if has_goal else "",
            met=skews_ms["p99"] < MAX_SKEW_MS if has_goal else None,
            detail=", ".join(f"{name} {value:.3g} ms" for name, value in skews_ms.items())
            + f" measured in the servers; last {manifest_ms:.3g} ms in the manifest",
        )
    )
    cpu_s = statistics.median(figures.cpu_s for figures in rounds)
    server_cpu_s = statistics.median(figures.server_cpu_s for figures in rounds)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rows.append(
        Row(
            what=f"CPU of a capture, {servers}",
            unit="s",
            measured=cpu_s,
            peer=server_cpu_s,
            peer_name="all servers",
            detail=f"{cpu_s / count * 1e3:.2f} ms per server; peak memory of the client {peak_mib:.0f} MiB",
        )
    )
    return rows


def main() -> None:
    """Run the benchmark from the command line."""
    options = parser(__doc__)
    options.add_argument("--servers", type=int, nargs="+", metavar="N", help="numbers of servers")
    options.add_argument("--rounds", type=int, help="rounds for each number of servers, after one uncounted round")
    options.add_argument("--delay-ms", type=float, help="time in which a server replies")
    options.add_argument("--hosts", type=int, default=1, help="number of simulated hosts (at most 254)")
    options.add_argument("--directory", type=Path, help="parent of the run directory")
    options.add_argument("--quick", action="store_true", help="quick test with few, fast servers")
    options.set_defaults(servers=SERVERS, rounds=ROUNDS, delay_ms=DELAY_MS)
    if options.parse_known_args()[0].quick:
        options.set_defaults(**QUICK)
    chosen = options.parse_args()
    os.environ.pop(TOKEN_VARIABLE, None)  # the servers accept requests without a token
    delay_s, rows = chosen.delay_ms / 1e3, list[Row]()
    parent = chosen.directory or (IN_MEMORY if IN_MEMORY.is_dir() else None)
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        with Fleet(ONE_BY_ONE, delay_s, Path(directory)) as few:
            each_s = [total_s / ONE_BY_ONE for total_s in few.one_by_one()]
        for count in sorted(chosen.servers):  # ascending, because peak memory never decreases
            with Fleet(count, delay_s, Path(directory), hosts=chosen.hosts) as fleet:
                rows += result_rows(fleet.rounds(chosen.rounds), (each_s[0], each_s[1]))
            if count == GOAL_AT:
                with Fleet(count, delay_s, Path(directory), hosts=chosen.hosts, spread=SPREAD) as fleet:
                    rows += result_rows(fleet.rounds(chosen.rounds), (each_s[0], each_s[1]), " with different delays")
    loads = " ".join(f"{load:.1f}" for load in os.getloadavg())
    about = {
        "hosts": str(chosen.hosts),
        "delay_ms": f"{chosen.delay_ms:g}",
        "rounds": str(chosen.rounds),
        "load_average": loads,
    }
    report(rows, chosen.json, **about, directory=str(parent or tempfile.gettempdir()))


if __name__ == "__main__":
    main()
