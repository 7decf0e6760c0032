"""Counters of CPU use and contention, read at the start and end of a recording."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

import attrs

from profdeck.base.cgroups import cgroup_directories
from profdeck_traces.inputs.host_load import HostLoad

_ROOT = Path("/")
_NS_PER_S = 1e9
_US_PER_S = 1e6


@attrs.frozen(kw_only=True)
class HostCounters:
    """Snapshot of host and process counters. A counter that can't be read is None.

    Reading the counters takes about 0.2 ms, plus 10 us per thread. It never raises ``OSError`` or ``ValueError``.
    """

    thread: int
    """Native ID of the recording thread."""
    time_s: float = attrs.field(factory=time.monotonic)
    cpu_s: float = attrs.field(factory=time.process_time)
    load: float | None
    thread_cpu_s: float | None = None
    run_queue_s: float | None
    pressure_s: float | None
    throttled_periods: int | None
    throttled_s: float | None
    host_cpu_s: float | None
    all_run_queue_s: float | None

    @classmethod
    def read(cls, thread: int | None = None, root: Path = _ROOT) -> HostCounters:
        """Read the counters.

        Args:
            thread: native ID of the recording thread. Default: the current thread.
            root: directory that contains ``proc`` and ``sys``.
        """
        thread = threading.get_native_id() if thread is None else thread
        throttled_periods, throttled_s = _throttling(root)
        return cls(
            thread=thread,
            load=_number(root / "proc/loadavg", 0),
            thread_cpu_s=_scaled(_number(root / f"proc/self/task/{thread}/schedstat", 0), _NS_PER_S),
            run_queue_s=_scaled(_number(root / f"proc/self/task/{thread}/schedstat", 1), _NS_PER_S),
            pressure_s=_scaled(_pressure_us(root), _US_PER_S),
            throttled_periods=throttled_periods,
            throttled_s=throttled_s,
            host_cpu_s=_host_cpu_s(root),
            all_run_queue_s=_all_run_queue_s(root),
        )

    def load_since(self, start: HostCounters) -> HostLoad:
        """Return the load between ``start`` and these counters."""
        return HostLoad(
            wall_s=round(self.time_s - start.time_s, 6),
            cpu_s=round(self.cpu_s - start.cpu_s, 6),
            cpus=os.cpu_count() or 1,
            load_at_start=start.load,
            load_at_end=self.load,
            thread_cpu_s=_increase(start.thread_cpu_s, self.thread_cpu_s),
            run_queue_s=_increase(start.run_queue_s, self.run_queue_s),
            pressure_s=_increase(start.pressure_s, self.pressure_s),
            throttled_periods=None
            if start.throttled_periods is None or self.throttled_periods is None
            else self.throttled_periods - start.throttled_periods,
            throttled_s=_increase(start.throttled_s, self.throttled_s),
            usable_cpus=_usable_cpus(),
            host_cpu_s=_increase(start.host_cpu_s, self.host_cpu_s),
            all_run_queue_s=_increase(start.all_run_queue_s, self.all_run_queue_s),
        )


def _increase(start: float | None, end: float | None) -> float | None:
    # Counters summed over all threads drop when a thread exits.
    return None if start is None or end is None else round(max(0.0, end - start), 6)


def _usable_cpus() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def _host_cpu_s(root: Path) -> float | None:
    """Return the CPU time of all processes in seconds, from ``/proc/stat``. Exclude idle time and waits for I/O."""
    with contextlib.suppress(OSError, ValueError):
        label, *ticks = (root / "proc/stat").read_text(encoding="ascii").partition("\n")[0].split()
        user, nice, system, _, _, irq, soft_irq = map(int, ticks[:7])
        if label == "cpu":
            return (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK")
    return None


def _all_run_queue_s(root: Path) -> float | None:
    """Return how long the process's current threads have waited for a CPU in total, in seconds."""
    try:
        threads = [thread.name for thread in (root / "proc/self/task").iterdir()]
    except OSError:
        return None
    waits = [_number(root / f"proc/self/task/{thread}/schedstat", 1) for thread in threads]
    known = [wait for wait in waits if wait is not None]
    return sum(known) / _NS_PER_S if known else None


def _scaled(value: float | None, divisor: float) -> float | None:
    return None if value is None else value / divisor


def _number(path: Path, field: int) -> float | None:
    """Return a field of a one-line file, or None if it cannot be read."""
    try:
        return float(path.read_text(encoding="ascii").split()[field])
    except (OSError, ValueError, IndexError):
        return None


def _pressure_us(root: Path) -> float | None:
    """Return the total of the ``some`` line in ``/proc/pressure/cpu``, in microseconds."""
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/pressure/cpu").read_text(encoding="ascii").splitlines():
            if line.startswith("some "):
                return float(line.rpartition("total=")[2])
    return None


def _throttling(root: Path) -> tuple[int | None, float | None]:
    """Return the number of throttled periods and the throttled time in seconds, from the innermost cgroup with both."""
    for directory, is_v1 in cgroup_directories("cpu", root):
        with contextlib.suppress(OSError, ValueError, LookupError):
            rows = (line.split() for line in (directory / "cpu.stat").read_text(encoding="ascii").splitlines())
            counters = {row[0]: int(row[1]) for row in rows}
            if "nr_throttled" in counters:
                time_s = counters["throttled_time"] / _NS_PER_S if is_v1 else counters["throttled_usec"] / _US_PER_S
                return counters["nr_throttled"], time_s
    return None, None
