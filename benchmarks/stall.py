"""Measure how long running requests wait around the start and stop of a capture. Shared by all engines."""

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
"""Maximum length of a request."""
PASSED = 10
RECORDED = 200
"""Recorded iterations before a stop."""
AFTER = 10
"""Number of tokens after a call that are checked for a stall."""
EVERY = 10
MAX_STALL = 1 / 3
PATIENCE_S = 300.0
FLOOR = Path(__file__).parent / "floor"
TORCH_TIMES = "BENCHMARK_TORCH_TIMES"
"""Environment variable with the path of the file to which `FLOOR` writes torch's times."""
clock = time.perf_counter

Call = Callable[[], Awaitable[object]]
Generate = Callable[[int, int], AsyncIterator[object]]
"""Runs a request, given the numbers of the stream and the request. Yields once per token."""


class Child:
    """Child process that runs a function with a connection to the parent."""

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
        """Send a message to the child."""
        self._connection.send(message)

    def answer(self) -> Any:
        """Return the child's next message. If the child has exited, exit with its output."""
        try:
            return self._connection.recv()
        except EOFError:
            sys.exit(f"The process of an engine failed:\n{self._log.read_text(encoding='utf-8', errors='replace')}")


def torch_ms(since_s: float) -> float:
    """Return the total time in milliseconds that torch needed to stop and save recordings since `since_s`."""
    lines = Path(os.environ[TORCH_TIMES]).read_text(encoding="utf-8").splitlines()
    took_s: list[float] = [call["took_s"] for call in map(json.loads, lines) if call["began_s"] >= since_s]
    return sum(took_s) * 1e3


def in_child(
    connection: Connection, log: Path, environment: dict[str, str], function: Callable[..., None], *arguments: Any
) -> None:
    """Prepare the environment of the child before the engine is imported, and call the function."""
    for name in [name for name in os.environ if name.startswith(("PROFDECK", "VLLM_", "SGLANG_"))]:
        del os.environ[name]
    os.environ.update(environment)
    # For this process, which may run the engine, and for its children.
    os.environ[TORCH_TIMES] = f"{log}.torch"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(FLOOR), *filter(None, [os.environ.get("PYTHONPATH")])])
    runpy.run_path(str(FLOOR / "sitecustomize.py"))
    with log.open("ab") as file:  # vLLM's profiler prints a table at every stop
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    with contextlib.suppress(EOFError):  # the parent has closed the connection
        function(connection, *arguments)


def own_profiler(output: Path, backend: str, target: Any, *, with_stack: bool) -> Profiler:
    """Return a profiler that captures every `EVERY`-th step."""
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
    """Raise an error if a capture is not complete."""
    assert capture is not None
    assert capture.status is Status.COMPLETE, capture.problems


@attrs.frozen
class Stop:
    """Times of running requests around one capture."""

    start_ms: float
    stop_ms: float
    lost_ms: float
    """Delay of the tokens during the stop, relative to the pace before the capture."""
    flush_ms: float
    """Duration of the stop call."""
    plain_ms: float
    """Longest wait for a token before the capture."""
    torch_ms: float
    """Time that torch needed to stop and save the recording."""


class Streams:
    """Streams of requests that keep an engine busy, and the arrival times of their tokens."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self._times: list[list[float]] = [[] for _ in range(STREAMS)]
        self._arrived = asyncio.Event()

    async def run(self, stream: int) -> None:
        """Send requests of a stream one after another."""
        for number in itertools.count():
            async for _ in self._generate(stream, number):
                self._times[stream].append(clock())
                self._arrived.set()

    async def wait_for_tokens(self, count: int) -> None:
        """Wait for `count` more tokens in the first stream."""
        end = len(self._times[0]) + count
        while len(self._times[0]) < end:
            self._arrived.clear()
            await self._arrived.wait()

    def longest_ms(self, since_s: float) -> float:
        """Return the longest wait for a token in any stream since `since_s`."""
        return max(late - early for times in self._times for early, late in pairs(times, since_s)) * 1e3

    def pace_ms(self, since_s: float) -> float:
        """Return the mean wait for a token in the first stream."""
        return statistics.fmean(late - early for early, late in pairs(self._times[0], since_s)) * 1e3

    def lost_ms(self, since_s: float, pace_ms: float) -> float:
        """Return the delay of the first stream's tokens relative to a pace."""
        return sum((late - early) * 1e3 - pace_ms for early, late in pairs(self._times[0], since_s))


def pairs(times: Sequence[float], since_s: float) -> Iterator[tuple[float, float]]:
    """Return pairs of successive times whose second time is not before `since_s`."""
    return ((early, late) for early, late in itertools.pairwise(times) if late >= since_s)


async def observe(streams: Streams, start: Call, stop: Call) -> Stop:
    """Capture once and return the times of the streams."""
    await streams.wait_for_tokens(PASSED)
    since_s = clock()
    await streams.wait_for_tokens(TOKENS)
    pace_ms, plain_ms = streams.pace_ms(since_s), streams.longest_ms(since_s)
    since_s = clock()
    await start()
    await streams.wait_for_tokens(AFTER)
    start_ms = streams.longest_ms(since_s)
    await streams.wait_for_tokens(RECORDED - AFTER)
    since_s = clock()
    await stop()
    flush_ms = (clock() - since_s) * 1e3
    await streams.wait_for_tokens(AFTER)
    stop_ms, lost_ms = streams.longest_ms(since_s), streams.lost_ms(since_s, pace_ms)
    return Stop(start_ms, stop_ms, lost_ms, flush_ms, plain_ms, torch_ms(since_s))


async def observe_all(
    generate: Generate, profiler: Profiler, native: tuple[Call, Call], stops: int
) -> dict[str, list[Stop]]:
    """Capture alternately with profdeck and with the engine's own profiler, in a random order per round.

    Returns:
        Figures by profiler. The first round, which includes one-time costs, is omitted.
    """
    captures: list[Capture | None] = []

    async def start() -> None:
        captures.append(await profiler.astart(EVERY * (len(captures) + 1)))

    kinds: Mapping[str, tuple[Call, Call]] = {"profdeck": (start, profiler.astop), "native": native}
    results: dict[str, list[Stop]] = {name: [] for name in kinds}
    streams, order, generator = Streams(generate), list(kinds), random.Random(0)
    running = asyncio.gather(*map(streams.run, range(STREAMS)))
    try:
        for _ in range(stops + 1):
            generator.shuffle(order)
            for name in order:
                observation = asyncio.create_task(observe(streams, *kinds[name]))
                either: set[asyncio.Future[Any]] = {observation, running}  # streams end only if the engine fails
                await asyncio.wait(either, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
                assert observation.done(), running.exception() if running.done() else "The engine does not respond."
                results[name].append(observation.result())
    finally:
        running.cancel()
        await asyncio.wait({running})
    for capture in captures:
        check(capture)
    return {name: stops[1:] for name, stops in results.items()}


def stall_rows(results: dict[str, list[Stop]], name: str) -> list[Row]:
    """Return the result rows of all rounds."""
    plain_ms = statistics.median(stop.plain_ms for stops in results.values() for stop in stops)

    def compare(what: str, figure: str, max_ratio: float | None = None) -> Row:
        times = {kind: [getattr(stop, figure) for stop in stops] for kind, stops in results.items()}
        return row(f"{what}, {name}", "ms", times, ("profdeck", "native"), max_ratio)

    ours = results["profdeck"]
    floor = {"profdeck": [stop.stop_ms for stop in ours], "torch's stop and save": [stop.torch_ms for stop in ours]}
    stall = compare("stall of a stop", "stop_ms", MAX_STALL)
    return [
        attrs.evolve(stall, detail=f"{stall.detail}; without a capture {plain_ms:.3g} ms"),
        row(
            f"stall of a stop, divided by torch's stop and save, {name}",
            "ms",
            floor,
            ("profdeck", "torch's stop and save"),
        ),
        compare("delay of all requests by a stop", "lost_ms"),
        compare("stop until the files are complete", "flush_ms"),
        compare("stall of a start", "start_ms"),
    ]


def row(
    what: str, unit: str, times: dict[str, list[float]], names: tuple[str, str], max_ratio: float | None = None
) -> Row:
    """Compare the times of two profilers, paired by round."""
    measured, peer = (times[name] for name in names)
    ratio, interval = ratio_interval(measured, peer)
    return Row(
        what=what,
        unit=unit,
        measured=statistics.median(measured),
        peer=statistics.median(peer),
        peer_name=names[1],
        ratio=ratio,
        interval=interval,
        goal=f"ratio <= {max_ratio:.4g}" if max_ratio else "",
        met=ratio <= max_ratio if max_ratio else None,
        detail=f"{min(measured):.4g}..{max(measured):.4g} {unit}; {names[1]} {min(peer):.4g}..{max(peer):.4g} {unit}; "
        f"{len(measured)} pairs",
    )
