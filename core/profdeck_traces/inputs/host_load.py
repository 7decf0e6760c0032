"""CPU contention on the host during a capture, as recorded in its manifest."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import attrs

_MIN_LOST_SHARE = 0.05
"""The machine counts as busy if the recording thread loses more than this share of the recording's time."""
_MIN_LOAD_PER_CPU = 1.25
"""Load average per CPU above which the machine counts as busy, if the thread's waiting time is unknown."""
_MIN_OTHER_LOAD = 0.1
"""Other processes slow a job down only if they use at least this share of its CPUs."""
_MAX_S = 1e9
_MIN_WANTED_PER_CPU = 1.25
"""Runnable threads per CPU above which ranks count as oversubscribed."""


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
    usable_cpus: int | None = None
    """Number of CPUs on which the recording thread may run (its affinity)."""
    host_cpu_s: float | None = None
    """CPU time of all processes on the host, in seconds (``/proc/stat``)."""
    all_run_queue_s: float | None = None
    """Time all threads of the process were runnable but waiting for a CPU, in seconds."""
    other_cpus: float | None = None
    """Average number of CPUs used by processes other than the recorded ranks of this host. Not recorded, but computed
    from the loads of these ranks."""
    wanted_cpus: float | None = None
    """Average number of threads of the recorded ranks of this host that ran or waited for a CPU. Not recorded, but
    computed from the loads of these ranks."""

    @property
    def is_plausible(self) -> bool:
        """False if a number cannot have been measured, such as a negative time."""
        times = (self.wall_s, self.cpu_s, self.thread_cpu_s, self.run_queue_s, self.throttled_s, self.host_cpu_s)
        return self.cpus > 0 and all(time is None or 0 <= time < _MAX_S for time in (*times, self.all_run_queue_s))

    @property
    def cpu_wait_share(self) -> float | None:
        """Fraction of the recording that the recording thread waited for a CPU. ``None`` if it is unknown, or if a CPU
        quota also throttled the process.
        """
        if self.run_queue_s is None or self.throttled_s or self.wall_s <= 0:
            return None
        return min(1.0, self.run_queue_s / self.wall_s)

    @property
    def wait_fraction(self) -> float:
        """Fraction of the recording that the recording thread waited for a CPU, whatever used it. 0 if at most 5 %."""
        share = self.cpu_wait_share or 0.0
        return share if share > _MIN_LOST_SHARE else 0.0

    @property
    def is_oversubscribed(self) -> bool:
        """True if the recorded ranks need over 1.25 times as many CPUs as they have, and the recording thread waits."""
        if not self.wait_fraction or self.is_by_others:
            return False
        return self._wants_too_much or (self.wanted_cpus or 0.0) > _MIN_WANTED_PER_CPU * self.cpus

    @property
    def own_wanted_cpus(self) -> float | None:
        """Average number of threads of this process that ran or waited for a CPU."""
        if self.all_run_queue_s is None or self.wall_s <= 0:
            return None
        return (self.cpu_s + self.all_run_queue_s) / self.wall_s

    @property
    def _wants_too_much(self) -> bool:
        """True if this process alone has over 1.25 times as many runnable threads as CPUs that it may use."""
        return (self.own_wanted_cpus or 0.0) > _MIN_WANTED_PER_CPU * (self.usable_cpus or self.cpus)

    @property
    def is_by_others(self) -> bool:
        """True if other processes used as much CPU time as the recording thread waited, or if their use is unknown.

        False if the process alone needs more CPUs than it may use.
        """
        if self._wants_too_much:
            return False
        if self.other_cpus is None:
            return True
        waited = (self.run_queue_s or 0.0) / self.wall_s if self.wall_s > 0 else 0.0
        return self.other_cpus >= max(waited, _MIN_OTHER_LOAD * (self.usable_cpus or self.cpus))

    @property
    def blocked_share(self) -> float | None:
        """Share of the recording in which the recording thread neither ran nor waited for a CPU, if known."""
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
        """Return why the machine counts as busy during the recording, or None if it doesn't.

        The machine counts as busy if, for more than 5 % of the recording, the recording thread waited for a CPU that
        other processes used, or its cgroup was throttled. If the waiting time is unknown, both load averages must
        exceed 1.25 per CPU.
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
            if self.run_queue_s > lost_s and self.is_by_others:
                yield f"the main thread waited {self.run_queue_s / self.wall_s:.0%} of the time for a CPU"
                if self.other_cpus is not None:
                    yield f"other processes used {self.other_cpus:.1f} of {self.cpus} CPUs"
                elif load > self.cpus:
                    yield average
        elif load > _MIN_LOAD_PER_CPU * self.cpus:
            yield average
        if self.throttled_s is not None and self.throttled_s > lost_s:
            periods = f" in {self.throttled_periods:,} periods" if self.throttled_periods else ""
            yield f"its CPU quota throttled the process for {self.throttled_s:.2g} s of {self.wall_s:.2g} s{periods}"


def with_other_load(
    loads: Sequence[HostLoad | None], places: Sequence[tuple[Hashable, Hashable]]
) -> list[HostLoad | None]:
    """Add the CPU use of other processes to loads that were recorded at the same time.

    If the host's CPU time wasn't recorded, estimate it from the load average.

    Args:
        loads: Load of each trace.
        places: For each trace, the capture on one host, and the process. A process can write several traces.
    """
    processes: dict[Hashable, dict[Hashable, HostLoad]] = {}
    for load, (host, process) in zip(loads, places, strict=True):
        if load is not None:
            processes.setdefault(host, {}).setdefault(process, load)
    return [
        load if load is None else _with_other_load(load, [*processes[host].values()])
        for load, (host, _) in zip(loads, places, strict=True)
    ]


def _with_other_load(load: HostLoad, recorded: Sequence[HostLoad]) -> HostLoad:
    if any(one.wall_s <= 0 for one in (load, *recorded)):
        return load
    used = sum(one.cpu_s / one.wall_s for one in recorded)
    runnable = used + sum((one.run_queue_s or 0.0) / one.wall_s for one in recorded)
    wanted = [one.own_wanted_cpus for one in recorded]
    total = None if None in wanted else round(sum(filter(None, wanted)), 6)
    return attrs.evolve(load, other_cpus=_other_cpus(load, used, runnable), wanted_cpus=total)


def _other_cpus(load: HostLoad, used: float, runnable: float) -> float | None:
    if load.host_cpu_s is not None:
        return round(max(0.0, load.host_cpu_s / load.wall_s - used), 6)
    if load.load_at_start is None or load.load_at_end is None:
        return None
    return round(max(0.0, min(load.load_at_start, load.load_at_end) - runnable), 6)
