"""How long starting and stopping many servers takes beside the slowest of them, and how far apart the starts are.

python -m benchmarks.fan_out [--quick] [--servers 8 64 512 1000] [--rounds 4] [--delay-ms 1000] [--directory DIRECTORY]
                             [--hosts 1] [--json FILE]

Servers with profdeck's routes run in one other process (`benchmarks.fleet_servers`), or with `--hosts` in one for each
host, which has an address of its own (127.1.0.1 and so on). They answer every request after a delay: by default a
second, about what a real engine takes at the least until its files are whole. In each round a `Profiler` whose target
is the list of servers captures one step: on new connections it asks all whether they have profdeck, starts them, and
stops them; it writes a manifest per server and one of the fleet, and reads that of a rank per server.

All servers take the same time, which is the worst case: all answers come at once. Engines differ, and what is done for
the early ones costs nothing while the late ones are awaited; so the number that has a goal is measured once more with
servers of which the fastest takes half of the time of the slowest.

The run is in memory, where the system has a file system for that: on a disk that others use a stop takes as long as
that lets it, and for minutes after thousands of files were removed ext4 takes ten times as long to make one.
`--directory` measures a disk.

Beside it, as scripts for rollouts do it: two POSTs per server, one server after the other, each on a connection of its
own. That takes the same time for each, so it is measured with a few servers, and multiplied.

The slowest server is the one that took longest from the arrival of its requests to its answers, as the servers saw it.
The skew is the time from the first start that arrived to each other one, as they saw it; the manifest tells the last of
them, as the client saw it.
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
from benchmarks.fleet_servers import Seen, raise_limit_of_files, serve
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
IN_MEMORY = Path("/dev/shm")  # noqa: S108  # for a directory of our own
ONE_BY_ONE = 3
"""With so many servers the sequential client is measured."""
GOAL_AT = 512
MAX_RATIO = 1.2
MAX_SKEW_MS = 100.0
PATIENCE_S = 600.0
RUNS = itertools.count()
clock = time.perf_counter


@attrs.frozen
class Round:
    """One start and stop of all servers."""

    start_s: float
    """With what is asked before."""
    stop_s: float
    slowest_start_s: float
    slowest_stop_s: float
    skew_ms: list[float]
    """Of each start that arrived, after the first; in order."""
    told_skew_ms: float
    """What the manifest says."""
    cpu_s: float
    server_cpu_s: float

    def skew_at_ms(self, share: float) -> float:
        """Return the skew that this share of the starts does not exceed."""
        return self.skew_ms[min(int(share * len(self.skew_ms)), len(self.skew_ms) - 1)]


class Fleet:
    """Servers in a process for each host, and what captures them."""

    def __init__(self, count: int, delay_s: float, directory: Path, *, hosts: int = 1, spread: float = 0.0) -> None:
        raise_limit_of_files(count)
        self._directory = directory
        of_host = [len(range(host, count, hosts)) for host in range(min(hosts, count))]
        self._children = [
            Child(directory / f"servers{host}.log", {}, serve, f"127.1.0.{host + 1}", servers, delay_s, spread)
            for host, servers in enumerate(of_host)
        ]
        self._urls: list[str] = [url for child in self._children for url in child.answer()]
        self._server_cpu_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.send(False)  # noqa: FBT003  # nothing more
            child.__exit__()

    def seen(self) -> Seen:
        """Return what the servers have seen since the last call, with what they have used since then."""
        for child in self._children:
            child.send(True)  # noqa: FBT003  # any message asks
        of_host: list[Seen] = [child.answer() for child in self._children]
        requests = [of_server for seen in of_host for of_server in seen.requests]
        cpu_s = sum(seen.cpu_s for seen in of_host)
        used_s, self._server_cpu_s = cpu_s - self._server_cpu_s, cpu_s
        return Seen(requests, used_s)

    def rounds(self, count: int) -> list[Round]:
        """Capture all servers so often, after one time that pays for what a process does once."""
        return [self.round() for _ in range(count + 1)][1:]

    def round(self) -> Round:
        """Capture all servers once."""
        gc.collect()  # of what came before
        self.seen()
        cpu_s = time.process_time()
        start_s, stop_s, told_ms = asyncio.run(self._captured())
        cpu_s = time.process_time() - cpu_s
        seen = self.seen()
        commands = [[name for name, *_ in requests] for requests in seen.requests]
        assert commands == [["status", "start", "stop"]] * len(self._urls), commands
        busy_s = [{name: (answered - at) / 1e9 for name, at, answered in requests} for requests in seen.requests]
        starts = sorted(requests[1][1] for requests in seen.requests)
        return Round(
            start_s=start_s,
            stop_s=stop_s,
            slowest_start_s=max(times["status"] + times["start"] for times in busy_s),
            slowest_stop_s=max(times["stop"] for times in busy_s),
            skew_ms=[(start - starts[0]) / 1e6 for start in starts],
            told_skew_ms=told_ms,
            cpu_s=cpu_s,
            server_cpu_s=seen.cpu_s,
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
        """Start and stop all servers as a script does; returns the seconds of both."""
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


def rows_of(rounds: Sequence[Round], one_by_one_s: tuple[float, float], which: str = "") -> list[Row]:
    """Put the rounds of one number of servers into rows."""
    count, rows = len(rounds[0].skew_ms), []
    goal, who = count == GOAL_AT, f"{count} servers{which}"
    for what, total, slowest, each_s in (
        ("prepare and start", "start_s", "slowest_start_s", one_by_one_s[0]),
        ("stop", "stop_s", "slowest_stop_s", one_by_one_s[1]),
    ):
        mine, least = ([getattr(one, name) for one in rounds] for name in (total, slowest))
        ratios = [one / other for one, other in zip(mine, least, strict=True)]
        ratio, interval = ratio_interval(mine, least)
        rows += [
            Row(
                what=f"{what}, {who}",
                unit="s",
                measured=statistics.median(mine),
                peer=statistics.median(least),
                peer_name="slowest server",
                ratio=ratio,
                interval=interval,
                goal=f"ratio <= {MAX_RATIO}" if goal else "",
                met=ratio <= MAX_RATIO if goal else None,
                detail=f"best round {min(ratios):.3f}, worst {max(ratios):.3f}",
            ),
            Row(
                what=f"{what}, {who}",
                unit="s",
                measured=statistics.median(mine),
                peer=each_s * count,
                peer_name="one by one",
                ratio=statistics.median(mine) / (each_s * count),
            ),
        ]
    shares = {"p50": 0.5, "p99": 0.99, "last": 1.0}
    figures = {name: statistics.median(one.skew_at_ms(share) for one in rounds) for name, share in shares.items()}
    told_ms = statistics.median(one.told_skew_ms for one in rounds)
    rows.append(
        Row(
            what=f"start skew p99, {who}",
            unit="ms",
            measured=figures["p99"],
            goal=f"< {MAX_SKEW_MS:g} ms" if goal else "",
            met=figures["p99"] < MAX_SKEW_MS if goal else None,
            detail=", ".join(f"{name} {value:.3g} ms" for name, value in figures.items())
            + f" as the servers saw them; last {told_ms:.3g} ms in the manifest",
        )
    )
    cpu_s = statistics.median(one.cpu_s for one in rounds)
    server_cpu_s = statistics.median(one.server_cpu_s for one in rounds)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rows.append(
        Row(
            what=f"CPU of a capture, {who}",
            unit="s",
            measured=cpu_s,
            peer=server_cpu_s,
            peer_name="all servers",
            detail=f"{cpu_s / count * 1e3:.2f} ms per server; peak memory of the client {peak_mib:.0f} MiB",
        )
    )
    return rows


def main() -> None:
    """Measure and report."""
    options = parser(__doc__)
    options.add_argument("--servers", type=int, nargs="+", metavar="N", help="how many")
    options.add_argument("--rounds", type=int, help="with each number, after one that is not counted")
    options.add_argument("--delay-ms", type=float, help="what a server takes to answer")
    options.add_argument("--hosts", type=int, default=1, help="on how many hosts they are (254 at most)")
    options.add_argument("--directory", type=Path, help="where the run is written")
    options.add_argument("--quick", action="store_true", help="in some seconds, with few servers that are fast")
    options.set_defaults(servers=SERVERS, rounds=ROUNDS, delay_ms=DELAY_MS)
    if options.parse_known_args()[0].quick:
        options.set_defaults(**QUICK)
    chosen = options.parse_args()
    os.environ.pop(TOKEN_VARIABLE, None)  # the servers have none
    delay_s, rows = chosen.delay_ms / 1e3, list[Row]()
    where = chosen.directory or (IN_MEMORY if IN_MEMORY.is_dir() else None)
    with tempfile.TemporaryDirectory(dir=where) as directory:
        with Fleet(ONE_BY_ONE, delay_s, Path(directory)) as few:
            each_s = [total_s / ONE_BY_ONE for total_s in few.one_by_one()]
        for count in sorted(chosen.servers):  # so that the peak of memory is that of the largest so far
            with Fleet(count, delay_s, Path(directory), hosts=chosen.hosts) as fleet:
                rows += rows_of(fleet.rounds(chosen.rounds), (each_s[0], each_s[1]))
            if count == GOAL_AT:
                with Fleet(count, delay_s, Path(directory), hosts=chosen.hosts, spread=SPREAD) as fleet:
                    rows += rows_of(fleet.rounds(chosen.rounds), (each_s[0], each_s[1]), " that differ")
    loads = " ".join(f"{load:.1f}" for load in os.getloadavg())
    about = {
        "hosts": str(chosen.hosts),
        "delay_ms": f"{chosen.delay_ms:g}",
        "rounds": str(chosen.rounds),
        "load_average": loads,
    }
    report(rows, chosen.json, **about, directory=str(where or tempfile.gettempdir()))


if __name__ == "__main__":
    main()
