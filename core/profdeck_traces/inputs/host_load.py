"""CPU contention on the host during a capture, as recorded in its manifest."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

_MIN_LOST_SHARE = 0.05
"""The machine counts as busy if the recording thread loses more than this share of the recording's time."""
_MIN_LOAD_PER_CPU = 1.25
"""Load average per CPU above which the machine counts as busy, if the thread's waiting time is unknown."""


@attrs.frozen(kw_only=True)
class HostLoad:
    """Load of the host and of one process during a recording.

    Values that the operating system does not report are None.
    """

    wall_s: float
    """Length of the recording in seconds."""
    cpu_s: float
    """CPU time of all threads of the process, in seconds."""
    cpus: int
    """Number of CPUs of the host."""
    load_at_start: float | None = None
    """Load average of the host over the last minute."""
    load_at_end: float | None = None
    thread_cpu_s: float | None = None
    """CPU time of the recording thread, in seconds (``/proc/PID/schedstat``)."""
    run_queue_s: float | None = None
    """Time the recording thread was runnable but waiting for a CPU, in seconds (``/proc/PID/schedstat``)."""
    pressure_s: float | None = None
    """Time at least one task on the host was waiting for a CPU, in seconds (``some`` in ``/proc/pressure/cpu``)."""
    throttled_periods: int | None = None
    """Number of periods in which the process's cgroup was throttled (``nr_throttled`` in ``cpu.stat``)."""
    throttled_s: float | None = None
    """Time the process's cgroup was throttled, in seconds, summed over its CPUs."""

    @property
    def cpu_wait_share(self) -> float | None:
        """Fraction of the recording that the recording thread waited for a CPU. ``None`` if it is unknown, or if a CPU
        quota also throttled the process.
        """
        if self.run_queue_s is None or self.throttled_s or self.wall_s <= 0:
            return None
        return min(1.0, self.run_queue_s / self.wall_s)

    @property
    def blocked_share(self) -> float | None:
        """Fraction of the recording that the recording thread neither ran nor waited for a CPU. ``None`` if unknown."""
        if self.thread_cpu_s is None or self.run_queue_s is None or self.throttled_s or self.wall_s <= 0:
            return None
        return min(1.0, max(0.0, 1 - (self.thread_cpu_s + self.run_queue_s) / self.wall_s))

    @property
    def others_share(self) -> float | None:
        """CPU time of the process's other threads, as a fraction of the recording. ``None`` if it is unknown."""
        if self.thread_cpu_s is None or self.wall_s <= 0:
            return None
        return max(0.0, self.cpu_s - self.thread_cpu_s) / self.wall_s

    def describe_contention(self) -> str | None:
        """Return why the machine counts as busy during the recording, or None if it does not.

        The machine counts as busy if the recording thread waited for a CPU, or its cgroup was throttled, for more than
        5 % of the recording. If the waiting time is unknown, both load averages must exceed 1.25 per CPU.
        """
        return ", ".join(self._reasons()) or None if self.wall_s > 0 else None

    @property
    def lost_fraction(self) -> float:
        """Fraction of the recording lost to contention: 0 if the machine was not busy, at most 1.

        This is the recording thread's waiting time, or the throttled time if it is longer. Without a waiting time, it
        is the share that ``load`` runnable tasks lose on ``cpus`` CPUs, ``1 - cpus / load``.
        """
        if self.describe_contention() is None:
            return 0.0
        load = min(self.load_at_start or 0.0, self.load_at_end or 0.0)
        by_load = 1 - self.cpus / load if load > self.cpus else 0.0
        waiting = by_load if self.run_queue_s is None else self.run_queue_s / self.wall_s
        return min(1.0, max(waiting, (self.throttled_s or 0.0) / self.wall_s))

    def _reasons(self) -> Iterator[str]:
        lost_s = _MIN_LOST_SHARE * self.wall_s
        load = min(self.load_at_start or 0.0, self.load_at_end or 0.0)
        average = f"load average {load:.1f} on {self.cpus} CPUs"
        if self.run_queue_s is not None:
            if self.run_queue_s > lost_s:
                yield f"the main thread waited {self.run_queue_s / self.wall_s:.0%} of the time for a CPU"
                if load > self.cpus:
                    yield average
        elif load > _MIN_LOAD_PER_CPU * self.cpus:
            yield average
        if self.throttled_s is not None and self.throttled_s > lost_s:
            periods = f" in {self.throttled_periods:,} periods" if self.throttled_periods else ""
            yield f"its CPU quota throttled the process for {self.throttled_s:.2g} s of {self.wall_s:.2g} s{periods}"
