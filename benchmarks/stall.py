"""How long running requests wait around the start and the stop of a capture: what is the same for every engine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import runpy
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import attrs
from benchmarks.measure import Row, ratio_interval

from profdeck import Capture, Profiler, Status

STREAMS = 4
TOKENS = 200
"""Of a request."""
PASSED = 10
RECORDED = 200
"""Iterations before a stop."""
AFTER = 10
"""Tokens after a call has returned in which its stall is looked for."""
EVERY = 10
MAX_STALL = 1 / 3
PATIENCE_S = 300.0
FLOOR = Path(__file__).parent / "floor"
TORCH_TIMES = "BENCHMARK_TORCH_TIMES"
"""Names the file in which `FLOOR` writes down the times of torch."""
clock = time.perf_counter

Call = Callable[[], Awaitable[object]]
Generate = Callable[[int, int], AsyncIterator[object]]
"""Runs a request of a stream, by its number, and yields once per token."""


class Child:
    """A process that runs a function with a connection to this one."""

    def __init__(self, log: Path, environment: dict[str, str], function: Callable[..., None], *arguments: Any) -> None:
        self._log = log
        context = get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=in_child, args=(other, log, environment, function, *arguments))
        self._process.start()
        other.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.join(30)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()

    def send(self, message: object) -> None:
        """Send it a message."""
        self._connection.send(message)

    def answer(self) -> Any:
        """Wait for its next message; end this program with the child's output if it has ended."""
        try:
            return self._connection.recv()
        except EOFError:
            sys.exit(f"An engine's process failed:\n{self._log.read_text(encoding='utf-8', errors='replace')}")


def torch_ms(since_s: float) -> float:
    """Return how long torch itself has taken to end and save recordings since then, in any process."""
    lines = Path(os.environ[TORCH_TIMES]).read_text(encoding="utf-8").splitlines()
    took_s: list[float] = [call["took_s"] for call in map(json.loads, lines) if call["began_s"] >= since_s]
    return sum(took_s) * 1e3


def in_child(
    connection: Connection, log: Path, environment: dict[str, str], function: Callable[..., None], *arguments: Any
) -> None:
    """Set up this process, before anything imports the engine, and call the function."""
    for name in [name for name in os.environ if name.startswith(("PROFDECK", "VLLM_", "SGLANG_"))]:
        del os.environ[name]
    os.environ.update(environment)
    # Of this process, where the engine may be, and of those that it starts.
    os.environ[TORCH_TIMES] = f"{log}.torch"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(FLOOR), *filter(None, [os.environ.get("PYTHONPATH")])])
    runpy.run_path(str(FLOOR / "sitecustomize.py"))
    with log.open("ab") as file:  # vLLM's profiler prints a table at every stop
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    with contextlib.suppress(EOFError):  # the parent has what it wants, or has failed
        function(connection, *arguments)


def own_profiler(output: Path, backend: str, target: Any, *, with_stack: bool) -> Profiler:
    """Return a profiler for all steps that divide by `EVERY`."""
    return Profiler.from_config(
        settings={
            "output": str(output),
            "on_error": "raise",
            "steps": [f"every {EVERY}"],
            "rollout.backend": backend,
            "rollout.options.with_stack": with_stack,
        },
        role="rollout",
        target=target,
    )


def check(capture: Capture | None) -> None:
    """Make sure that a capture is what was asked for."""
    assert capture is not None
    assert capture.status is Status.COMPLETE, capture.problems


@attrs.frozen
class Stop:
    """What running requests saw of one capture."""

    start_ms: float
    stop_ms: float
    lost_ms: float
    """How much later tokens came than at the pace of before, over the whole stop."""
    whole_ms: float
    """From the call of the stop to its return."""
    plain_ms: float
    """The longest wait before the capture."""
    torch_ms: float
    """What torch itself took to end and save the recording."""


class Streams:
    """Requests that keep an engine busy, and when their tokens came."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self._times: list[list[float]] = [[] for _ in range(STREAMS)]
        self._came = asyncio.Event()

    async def run(self, stream: int) -> None:
        """Send one request after another."""
        for number in itertools.count():
            async for _ in self._generate(stream, number):
                self._times[stream].append(clock())
                self._came.set()

    async def tokens(self, count: int) -> None:
        """Wait until this many more have come in the first stream."""
        end = len(self._times[0]) + count
        while len(self._times[0]) < end:
            self._came.clear()
            await self._came.wait()

    def longest_ms(self, since_s: float) -> float:
        """Return the longest that a stream waited for a token, of those waits that ended since then."""
        return max(late - early for times in self._times for early, late in pairs(times, since_s)) * 1e3

    def pace_ms(self, since_s: float) -> float:
        """Return the mean wait of the first stream."""
        return statistics.fmean(late - early for early, late in pairs(self._times[0], since_s)) * 1e3

    def lost_ms(self, since_s: float, pace_ms: float) -> float:
        """Return how much later the tokens came than at a pace."""
        return sum((late - early) * 1e3 - pace_ms for early, late in pairs(self._times[0], since_s))


def pairs(times: Sequence[float], since_s: float) -> Iterator[tuple[float, float]]:
    """Return successive times of which the later one is not before the given time."""
    return ((early, late) for early, late in itertools.pairwise(times) if late >= since_s)


async def observe(streams: Streams, start: Call, stop: Call) -> Stop:
    """Capture once, and see how the streams fare."""
    await streams.tokens(PASSED)
    since_s = clock()
    await streams.tokens(TOKENS)
    pace_ms, plain_ms = streams.pace_ms(since_s), streams.longest_ms(since_s)
    since_s = clock()
    await start()
    await streams.tokens(AFTER)
    start_ms = streams.longest_ms(since_s)
    await streams.tokens(RECORDED - AFTER)
    since_s = clock()
    await stop()
    whole_ms = (clock() - since_s) * 1e3
    await streams.tokens(AFTER)
    stop_ms, lost_ms = streams.longest_ms(since_s), streams.lost_ms(since_s, pace_ms)
    return Stop(start_ms, stop_ms, lost_ms, whole_ms, plain_ms, torch_ms(since_s))


async def observe_all(
    generate: Generate, profiler: Profiler, native: tuple[Call, Call], stops: int
) -> dict[str, list[Stop]]:
    """Capture with profdeck and with the engine's own profiler, in an order that is drawn anew for every round.

    Returns:
        What was seen in every round but the first, which pays for what a process does once.
    """
    captures: list[Capture | None] = []

    async def start() -> None:
        captures.append(await profiler.astart(EVERY * (len(captures) + 1)))

    kinds: Mapping[str, tuple[Call, Call]] = {"profdeck": (start, profiler.astop), "native": native}
    found: dict[str, list[Stop]] = {name: [] for name in kinds}
    streams, order, chance = Streams(generate), list(kinds), random.Random(0)
    running = asyncio.gather(*map(streams.run, range(STREAMS)))
    try:
        for _ in range(stops + 1):
            chance.shuffle(order)
            for name in order:
                one = asyncio.create_task(observe(streams, *kinds[name]))
                either: set[asyncio.Future[Any]] = {one, running}  # a stream never ends, unless the engine fails
                await asyncio.wait(either, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
                assert one.done(), running.exception() if running.done() else "the engine hangs"
                found[name].append(one.result())
    finally:
        running.cancel()
        await asyncio.wait({running})
    for capture in captures:
        check(capture)
    return {name: stops[1:] for name, stops in found.items()}


def stall_rows(found: dict[str, list[Stop]], name: str) -> list[Row]:
    """Compare the rounds."""
    plain_ms = statistics.median(stop.plain_ms for stops in found.values() for stop in stops)

    def compare(what: str, figure: str, max_ratio: float | None = None) -> Row:
        times = {kind: [getattr(stop, figure) for stop in stops] for kind, stops in found.items()}
        return row(f"{what}, {name}", "ms", times, ("profdeck", "native"), max_ratio)

    own = found["profdeck"]
    floor = {"profdeck": [stop.stop_ms for stop in own], "torch's stop and save": [stop.torch_ms for stop in own]}
    stall = compare("stall of a stop", "stop_ms", MAX_STALL)
    return [
        attrs.evolve(stall, detail=f"{stall.detail}; without a capture {plain_ms:.3g} ms"),
        row(f"the same over torch's own part, {name}", "ms", floor, ("profdeck", "torch's stop and save")),
        compare("time that a stop takes from all requests", "lost_ms"),
        compare("stop until the files are whole", "whole_ms"),
        compare("stall of a start", "start_ms"),
    ]


def row(
    what: str, unit: str, times: dict[str, list[float]], names: tuple[str, str], max_ratio: float | None = None
) -> Row:
    """Compare the times of two kinds, pair by pair."""
    one, other = (times[name] for name in names)
    ratio, interval = ratio_interval(one, other)
    return Row(
        what=what,
        unit=unit,
        measured=statistics.median(one),
        peer=statistics.median(other),
        peer_name=names[1],
        ratio=ratio,
        interval=interval,
        goal=f"ratio <= {max_ratio:.4g}" if max_ratio else "",
        met=ratio <= max_ratio if max_ratio else None,
        detail=f"{min(one):.4g}..{max(one):.4g} {unit}; {names[1]} {min(other):.4g}..{max(other):.4g} {unit}; "
        f"{len(one)} pairs",
    )
