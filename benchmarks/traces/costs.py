"""What it costs to run a command: wall time from start to exit, CPU time and memory of all of its processes."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from benchmarks.measure import Row

ROOT = Path(__file__).resolve().parents[2]
MB = 1_000_000
SLOW_S = 20.0
TOLERANCE = 1e-9


class RunError(Exception):
    """A command failed, or its answer is wrong."""


@attrs.frozen(kw_only=True)
class Cost:
    """One run of a command."""

    wall_s: float
    cpu_s: float
    rss_mib: float
    """Peak of the largest of its processes."""
    answer: dict[str, Any]


def run(command: Sequence[str]) -> Cost:
    """Run a command to its end, and take its answer from the last lines that it prints.

    A process begins with the peak memory of the one that starts it, so this one has to stay small.

    Raises:
        RunError: It failed.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        begin_s = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=err)
        _, status, usage = os.wait4(process.pid, 0)  # of the process and of those that it has waited for
        wall_s = time.perf_counter() - begin_s
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if process.returncode:
            raise RunError(f"{' '.join(command)[:200]} exited with {process.returncode}:\n{err.read()[-2000:]}")
        lines = out.read().splitlines()
    return Cost(
        wall_s=wall_s,
        cpu_s=usage.ru_utime + usage.ru_stime,
        rss_mib=usage.ru_maxrss / 1024,
        answer=json.loads(lines[-1]) if lines[-1].startswith("{") else _csv(lines),
    )


def python(module: str, *arguments: object) -> list[str]:
    """Return the command that runs a module of this directory."""
    return [sys.executable, "-W", "ignore", "-m", f"benchmarks.traces.{module}", *map(str, arguments)]


@attrs.define(kw_only=True, eq=False)
class Entry:
    """A command beside others that do the same, and the costs of its runs."""

    name: str
    command: list[str]
    json_bytes: int
    """What there is to read."""
    truth: dict[str, Any]
    """What an answer has to say of what it says at all."""
    ours: bool = False
    destination: Path | None = None
    """The file that it writes, if any."""
    costs: list[Cost] = attrs.Factory(list)

    @property
    def wall_s(self) -> float:
        """The median."""
        return statistics.median(cost.wall_s for cost in self.costs)

    @property
    def cpu_s(self) -> float:
        """The median."""
        return statistics.median(cost.cpu_s for cost in self.costs)

    @property
    def rss_mib(self) -> float:
        """The largest."""
        return max(cost.rss_mib for cost in self.costs)

    @property
    def file_mb(self) -> float:
        """The size of what it wrote."""
        return float(self.costs[-1].answer["file_bytes"]) / MB

    def run(self) -> None:
        """Run it once more.

        Raises:
            RunError: It failed, or profdeck answers wrongly.
        """
        if self.destination:
            self.destination.unlink(missing_ok=True)
        cost = run(self.command)
        if self.ours and (wrong := differences(cost.answer, self.truth)):
            raise RunError(f"{self.name}: {wrong}")
        self.costs.append(cost)

    def row(self) -> Row:
        """Return what it costs."""
        figures = [
            f"{self.cpu_s:.3g} s CPU",
            f"{self.rss_mib:.0f} MiB",
            f"{self.json_bytes / MB / self.wall_s:.3g} MB/s",
            f"median of {len(self.costs)}" if len(self.costs) > 1 else "run once",
        ]
        if self.destination:
            figures.append(f"file of {self.file_mb:.3g} MB")
        if wrong := differences(self.costs[-1].answer, self.truth):
            figures.append(f"it says {wrong}")
        return Row(what=self.name, unit="s", measured=self.wall_s, detail=", ".join(figures))


def measure(ours: Sequence[Entry], others: Sequence[Entry], rounds: int) -> list[Entry]:
    """Run entries in turns, slow peers once, and return the peers that can run on these inputs.

    Raises:
        RunError: One of profdeck's failed, or answers wrongly.
    """
    left = [*ours, *others]
    for round_ in range(rounds):
        for entry in left[:: 1 if round_ % 2 == 0 else -1]:
            if not entry.ours and entry.costs and entry.wall_s > SLOW_S:
                continue
            try:
                entry.run()
            except RunError as error:
                if entry.ours:
                    raise
                print(f"{entry.name} is left out: {error}", file=sys.stderr)
                left.remove(entry)
            else:
                print(f"{entry.name}: {entry.costs[-1].wall_s:.3g} s", file=sys.stderr)
    return [entry for entry in others if entry in left]


def differences(answer: dict[str, Any], truth: dict[str, Any]) -> str:
    """Return where an answer is not the truth."""
    return ", ".join(
        f"{key} {answer[key]} instead of {truth[key]}"
        for key in truth
        if key in answer and not _same(answer[key], truth[key])
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return one is not None and bool(abs(one - other) <= TOLERANCE * abs(other))


def _csv(lines: Sequence[str]) -> dict[str, Any]:
    """Read a title and a row."""
    names, values = (line.replace('"', "").split(",") for line in lines[-2:])
    return {name: int(value) for name, value in zip(names, values, strict=True) if value.isdecimal()}
