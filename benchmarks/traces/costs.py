"""Measurement of commands: wall time from start to exit, and CPU time and memory of all processes."""

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
    """A command failed or returned a wrong result."""


@attrs.frozen(kw_only=True)
class Cost:
    """Cost and result of one run of a command."""

    wall_s: float
    cpu_s: float
    rss_mib: float
    """Peak memory of the largest process."""
    answer: dict[str, Any]


def run(command: Sequence[str]) -> Cost:
    """Run a command to completion. Its result is parsed from the last lines of its stdout.

    A child process starts with the peak memory of its parent, so this process must stay small.

    Raises:
        RunError: The command failed.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        begin_s = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=err)
        _, status, usage = os.wait4(process.pid, 0)  # includes child processes that the process has waited for
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
    """Return the command line that runs a module of this directory."""
    return [sys.executable, "-W", "ignore", "-m", f"benchmarks.traces.{module}", *map(str, arguments)]


@attrs.define(kw_only=True, eq=False)
class Entry:
    """A command to compare with others of the same task, and the costs of its runs."""

    name: str
    command: list[str]
    json_bytes: int
    """Size of the input JSON."""
    truth: dict[str, Any]
    """Expected values. A result may omit keys, but the keys that it has must match."""
    ours: bool = False
    destination: Path | None = None
    """Output file of the command, if any."""
    costs: list[Cost] = attrs.Factory(list)

    @property
    def wall_s(self) -> float:
        """Median wall time of the runs."""
        return statistics.median(cost.wall_s for cost in self.costs)

    @property
    def cpu_s(self) -> float:
        """Median CPU time of the runs."""
        return statistics.median(cost.cpu_s for cost in self.costs)

    @property
    def rss_mib(self) -> float:
        """Largest peak memory of the runs."""
        return max(cost.rss_mib for cost in self.costs)

    @property
    def file_mb(self) -> float:
        """The size of what it wrote."""
        return float(self.costs[-1].answer["file_bytes"]) / MB

    def run(self) -> None:
        """Run the command and append its cost.

        Raises:
            RunError: The command failed, or profdeck's result is wrong.
        """
        if self.destination:
            self.destination.unlink(missing_ok=True)
        cost = run(self.command)
        if self.ours and (wrong := differences(cost.answer, self.truth)):
            raise RunError(f"{self.name}: {wrong}")
        self.costs.append(cost)

    def row(self) -> Row:
        """Return the result row of the command."""
        figures = [
            f"{self.cpu_s:.3g} s CPU",
            f"{self.rss_mib:.0f} MiB",
            f"{self.json_bytes / MB / self.wall_s:.3g} MB/s",
            f"median of {len(self.costs)}" if len(self.costs) > 1 else "run once",
        ]
        if self.destination:
            figures.append(f"file of {self.file_mb:.3g} MB")
        if wrong := differences(self.costs[-1].answer, self.truth):
            figures.append(f"reports {wrong}")
        return Row(what=self.name, unit="s", measured=self.wall_s, detail=", ".join(figures))


def measure(ours: Sequence[Entry], others: Sequence[Entry], rounds: int) -> list[Entry]:
    """Run entries alternately, slow peers only once. Return the peers that can process these inputs.

    Raises:
        RunError: A command of profdeck failed or returned a wrong result.
    """
    remaining = [*ours, *others]
    for round_ in range(rounds):
        for entry in remaining[:: 1 if round_ % 2 == 0 else -1]:
            if not entry.ours and entry.costs and entry.wall_s > SLOW_S:
                continue
            try:
                entry.run()
            except RunError as error:
                if entry.ours:
                    raise
                print(f"{entry.name} is skipped: {error}", file=sys.stderr)
                remaining.remove(entry)
            else:
                print(f"{entry.name}: {entry.costs[-1].wall_s:.3g} s", file=sys.stderr)
    return [entry for entry in others if entry in remaining]


def differences(answer: dict[str, Any], truth: dict[str, Any]) -> str:
    """Return a description of the values that differ from the expected ones."""
    return ", ".join(
        f"{key} {answer[key]} instead of {truth[key]}"
        for key in truth
        if key in answer and not _is_close(answer[key], truth[key])
    )


def _is_close(value: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return len(value) == len(expected) and all(map(_is_close, value, expected))
    return value is not None and bool(abs(value - expected) <= TOLERANCE * abs(expected))


def _csv(lines: Sequence[str]) -> dict[str, Any]:
    """Parse the header and the single row of a CSV output."""
    names, values = (line.replace('"', "").split(",") for line in lines[-2:])
    return {name: int(value) for name, value in zip(names, values, strict=True) if value.isdecimal()}
