"""Simulated ranks that run work and collectives, with a brute-force computation of the owners of their time.

Each rank launches all work of a step at the start, and then waits for the device. The device runs the work without
gaps. A collective ends at the same time on all ranks in its group, after the last rank has arrived.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

NOISE_NS = 1_000
"""Waits up to this duration cannot be distinguished from clock noise."""
EPOCH_NS = 1_700_000_000 * 10**9
LAUNCH_NS = 100
_FIRST_NS = 10_000_000


class Work(NamedTuple):
    """Work on a rank's device. For a collective, `arrived` is the time at which the last rank arrived."""

    name: str
    group: tuple[int, ...]
    begin: int
    end: int
    arrived: int
    last: int


class Job(NamedTuple):
    """A simulated job."""

    steps: list[list[tuple[int, int]]]
    """Start and end of each step of each rank, on a common clock."""
    work: list[list[Work]]
    clock_ns: list[int]
    """Offset of each rank's clock from the common clock."""


def simulate(seed: int, *, ranks: int = 4, steps: int = 3, collectives: int = 12) -> Job:
    """Simulate a random program. Collectives run on all ranks or on a pair of ranks."""
    choice = random.Random(seed)  # noqa: S311 - reproducible programs
    pairs = [(rank, rank + 1) for rank in range(0, ranks - 1, 2)]
    groups = [tuple(range(ranks)), *pairs] if ranks > 2 else [tuple(range(ranks))]
    clock = [_FIRST_NS] * ranks
    job = Job([[] for _ in range(ranks)], [[] for _ in range(ranks)], [0, *_offsets(choice, ranks - 1)])
    for _ in range(steps):
        begins = list(clock)
        clock = [begin + LAUNCH_NS * 400 for begin in begins]
        for number in range(collectives):
            group = groups[number % len(groups)]
            for rank in group:
                for _ in range(choice.randint(0, 3)):
                    name, duration = (
                        choice.choice("abcd"),
                        choice.choice((500, 20_000, 300_000)) + choice.randint(1, 999),
                    )
                    job.work[rank].append(Work(name, (), clock[rank], clock[rank] + duration, 0, rank))
                    clock[rank] += duration
            arrivals = {rank: clock[rank] for rank in group}
            last = max(group, key=arrivals.__getitem__)
            end = arrivals[last] + choice.randint(2_000, 50_000)
            for rank in group:
                job.work[rank].append(Work("all_reduce", group, clock[rank], end, arrivals[last], last))
                clock[rank] = end
        for rank in range(ranks):
            job.steps[rank].append((begins[rank], clock[rank]))
    return job


def _offsets(choice: random.Random, count: int) -> list[int]:
    return [choice.randint(-3_000_000, 3_000_000) for _ in range(count)]


def write(job: Job, directory: Path) -> Path:
    """Write a trace for each rank."""
    directory.mkdir(parents=True, exist_ok=True)
    for rank, (steps, work) in enumerate(zip(job.steps, job.work, strict=True)):
        offset = job.clock_ns[rank]
        events: list[dict[str, Any]] = []
        for number, (begin, end) in enumerate(steps):
            events.append(_event("user_annotation", f"ProfilerStep#{number}", 1, begin + offset, end + offset))
            launched = begin + offset
            for index, item in enumerate(item for item in work if begin <= item.begin < end):
                correlation = {"correlation": 1000 * number + index}
                events.append(
                    _event("cuda_runtime", "cudaLaunchKernel", 1, launched, launched + LAUNCH_NS // 2, correlation)
                )
                launched += LAUNCH_NS
                name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL()" if item.group else item.name
                about: dict[str, Any] = {"stream": 7, "device": 0, **correlation}
                if item.group:
                    ranks = str(list(item.group))
                    about |= {
                        "Collective name": "allreduce",
                        "Process Group Name": ranks,
                        "Process Group Ranks": ranks,
                        "Group size": len(item.group),
                    }
                events.append(_event("kernel", name, 7, item.begin + offset, item.end + offset, about, pid=0))
            events.append(_event("cuda_runtime", "cudaDeviceSynchronize", 1, launched, end + offset))
        document = {
            "distributedInfo": {"rank": rank, "world_size": len(job.work)},
            "baseTimeNanoseconds": EPOCH_NS,
            "traceEvents": events,
        }
        (directory / f"rank{rank}.trace.json").write_text(json.dumps(document))
    return directory


def _event(
    category: str, name: str, tid: int, begin: int, end: int, args: dict[str, Any] | None = None, pid: int = 1
) -> dict[str, Any]:
    times = {"ts": begin / 1000, "dur": (end - begin) / 1000}
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, **times, "args": args or {}}


Owner = tuple[int | None, str | None]
"""Awaited rank (``None`` if not waiting) and name of the work (``None`` if there is none)."""


def owners(job: Job, rank: int) -> Counter[Owner]:
    """Return the time of each owner within a rank's steps, in nanoseconds."""
    times: Counter[Owner] = Counter()
    for begin, end in job.steps[rank]:
        for owner, first, last in _owners(job, rank, begin, end):
            times[owner] += last - first
    return times


def _owners(job: Job, rank: int, begin: int, end: int) -> list[tuple[Owner, int, int]]:
    """Return the owners in an interval on one rank, with their start and end times."""
    found: list[tuple[Owner, int, int]] = []
    time = begin
    for item in job.work[rank]:
        if item.end <= time or item.begin >= end:
            continue
        if item.begin > time:
            found.append(((None, None), time, item.begin))
        time, until = max(time, item.begin), min(item.end, end)
        # All ranks of a group record its collectives, so only the length of this rank's wait matters.
        if item.group and item.arrived - item.begin > NOISE_NS and item.arrived > time:
            waited = min(item.arrived, until)
            for (root, name), first, last in _owners(job, item.last, time, waited):
                found.append(((item.last if root is None else root, name), first, last))
            time = waited
        if until > time:
            found.append(((None, item.name), time, until))
        time = until
    if time < end:
        found.append(((None, None), time, end))
    return found
